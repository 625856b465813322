from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mtpconv.report import html_page
from tests.report.browser import Browser, Page
from tests.report.reports import ALL, mtp_dropped, scattered


class _Reader(HTMLParser):
    """What a browser would see: tags with attributes, text outside scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def _read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    return reader


@pytest.mark.parametrize("name", ALL)
def test_the_page_loads_nothing_and_runs_only_its_own_script(name: str) -> None:
    page = html_page.render(ALL[name]())
    reader = _read(page)
    for tag, attributes in reader.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "style", "action"}, tag
        assert not any(attribute.startswith("on") for attribute in attributes)
    assert {tag for tag, _ in reader.tags}.isdisjoint({"link", "img", "iframe", "object", "base"})
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    policy = next(a["content"] for _, a in reader.tags if "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")
    assert "url(" not in page


def test_verdict_mtp_and_findings_can_be_read_without_javascript() -> None:
    reader = _read(html_page.render(mtp_dropped()))
    for said in (
        "FAIL",
        "absent; config promises 1 depth; depth 0: absent, 0 of 791 tensors",
        "do: restore the MTP tensors",
        "model.layers.78.mlp.experts.{0..255}.gate_proj.weight",
        "The picture needs JavaScript",
    ):
        assert said in reader.text


def test_glm_5_2_fits_into_a_tenth_of_the_limit() -> None:
    assert len(html_page.render(mtp_dropped()).encode()) < 200_000


def test_same_report_same_bytes() -> None:
    for name, make in ALL.items():
        assert html_page.render(make()) == html_page.render(make()), name


# --- in a real browser -------------------------------------------------------------------

SHOWN = "document.getElementById('count').textContent"
DETAILS = "document.getElementById('details').textContent"
CELL = "document.activeElement.getAttribute('aria-label')"


def _cell(row: str, part: str) -> str:
    return (
        "[...document.querySelectorAll('table.grid td')].find("
        f"t => (t.getAttribute('aria-label') || '').startsWith('{row}, {part}:'))"
    )


Open = Callable[..., Page]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens the page of a report by name; one browser for all tests."""
    folder = tmp_path_factory.mktemp("pages")
    with Browser(folder / "profile") as browser:

        def open_page(name: str, *, dark: bool = False) -> Page:
            path = folder / f"{name}.html"
            path.write_text(html_page.render(ALL[name]()), "utf-8")
            return Page(browser, path.as_uri(), dark=dark)

        yield open_page


@pytest.fixture
def dropped(opened: Open) -> Iterator[Page]:
    """The page of a model that lost its MTP module."""
    with opened("mtp_dropped") as page:
        yield page
        assert page.errors == []
        assert len(page.requests) == 1  # the file itself


def test_click_a_cell_and_read_its_tensors_and_findings(dropped: Page) -> None:
    assert dropped.value(SHOWN) == "59,585 tensors of 59,585 shown"
    dropped.click(_cell("mlp.experts.*.up_proj.weight", "MTP depth 0"))
    details = dropped.value(DETAILS)
    assert "256 tensors" in details
    assert "model.layers.78.mlp.experts.{0..255}.up_proj.weight missing" in details
    assert "error T01 missing_tensor: is not in after" in details
    assert "do: export again" in details
    dropped.click(_cell("self_attn.o_proj.weight", "trunk layer 12"))
    details = dropped.value(DETAILS)
    assert "model.layers.12.self_attn.o_proj.weight identical" in details
    assert "T01" not in details


def test_filter_by_state(dropped: Page) -> None:
    dropped.click("document.querySelector('button[data-state=identical]')")
    assert dropped.value(SHOWN) == "791 tensors of 59,585 shown"
    trunk = dropped.value(f"{_cell('self_attn.o_proj.weight', 'trunk layer 12')}.className")
    assert trunk == "off"
    assert dropped.value("document.querySelector('button').getAttribute('aria-pressed')") == "false"
    dropped.click("document.querySelector('button[data-state=identical]')")
    assert dropped.value(SHOWN) == "59,585 tensors of 59,585 shown"


def test_filter_by_name_with_the_keyboard_alone(dropped: Page) -> None:
    dropped.press("/")
    assert dropped.value("document.activeElement.id") == "search"
    dropped.type("layers.7*experts.1*up_")
    wanted = sum(
        re.search(r"layers\.7.*experts\.1.*up_", name) is not None for name in mtp_dropped().states
    )
    dropped.wait(f"{SHOWN} === '{wanted:,} tensors of 59,585 shown'")
    dropped.click(_cell("mlp.experts.*.up_proj.weight", "trunk layer 7"))
    assert "111 tensors" in dropped.value(DETAILS)
    assert "experts.{100..199}.up_proj" in dropped.value(DETAILS)
    assert "experts.2.up_proj" not in dropped.value(DETAILS)


def test_the_grid_is_one_tab_stop_and_arrows_move_in_it(dropped: Page) -> None:
    stops = "document.querySelectorAll('td[tabindex=\"0\"]').length"
    assert dropped.value(stops) == 1
    dropped.value("document.querySelector('td[tabindex=\"0\"]').focus()")
    assert dropped.value(CELL) == "eh_proj.weight, MTP depth 0: 1 missing"
    for _ in range(4):
        dropped.press("ArrowDown")
    assert dropped.value(CELL) == "input_layernorm.weight, MTP depth 0: 1 missing"
    dropped.press("Enter")
    assert "input_layernorm.weight in MTP depth 0" in dropped.value(DETAILS)
    assert dropped.value("document.activeElement.getAttribute('aria-selected')") == "true"
    assert dropped.value(stops) == 1


def test_mtp_is_in_sight_without_scrolling(dropped: Page) -> None:
    box = dropped.value(
        f"(() => {{ const b = {_cell('eh_proj.weight', 'MTP depth 0')}.getBoundingClientRect();"
        "return [b.left, b.right, innerWidth]; })()"
    )
    assert 0 < box[0] < box[1] <= box[2]
    trunk = dropped.value(f"{_cell('self_attn.o_proj.weight', 'trunk layer 0')}.className")
    mtp = dropped.value(f"{_cell('self_attn.o_proj.weight', 'MTP depth 0')}.className")
    assert "mtp" in mtp
    assert "mtp" not in trunk


def test_states_differ_by_symbol_and_texture_not_only_by_colour(opened: Open) -> None:
    with opened("scattered") as page:
        symbols = page.value(
            "[...document.querySelectorAll('#states .chip')].map(c => c.textContent)"
        )
        assert symbols == ["\u00b7", "D", "\u2260"]
        textures = page.value(
            "[...document.querySelectorAll('#states .chip')]"
            ".map(c => getComputedStyle(c).backgroundImage)"
        )
        assert textures[0] == "none"
        assert textures[2] != "none"
        cell = _cell("mlp.experts.*.up_proj.weight", "MTP depth 0")
        assert page.value(f"{cell}.textContent") == "\u2260"
        assert "mixed" in page.value(f"{cell}.className")
        label = page.value(f"{cell}.getAttribute('aria-label')")
        mtp = [s for n, s in scattered().states.items() if "layers.78.mlp.experts" in n
               and n.endswith(".up_proj.weight")]  # fmt: skip
        assert label.endswith(
            f": {mtp.count('changed')} changed, {mtp.count('identical')} identical"
        )


def test_dark_and_light(opened: Open, tmp_path: Path) -> None:
    shots = []
    for dark in (False, True):
        with opened("mtp_dropped", dark=dark) as page:
            shots.append(page.screenshot(tmp_path / "page.png"))
            back = page.value("getComputedStyle(document.body).backgroundColor")
            red, green, blue = map(int, re.findall(r"\d+", back))
            assert (red + green + blue < 128) == dark
    for shot in shots:
        assert shot.startswith(b"\x89PNG")
        assert len(shot) > 50_000  # an empty page of this size takes a tenth of that
    assert shots[0] != shots[1]


def test_hostile_names_run_nothing_and_load_nothing(opened: Open) -> None:
    with opened("hostile") as page:
        assert page.value("window.owned") is None
        cells = page.value("document.querySelectorAll('table.grid td:not(.none)').length")
        assert cells > 10
        for number in range(0, cells, 3):
            page.click(f"document.querySelectorAll('table.grid td:not(.none)')[{number}]")
        assert page.value(f"{DETAILS}.length") > 10
        page.press("/")
        page.type("</script>")
        page.wait(f"{SHOWN} !== '36 tensors of 36 shown'")
        assert page.value("document.querySelectorAll('img, b, x').length") == 0
        assert page.value("document.querySelectorAll('script').length") == 2
        assert page.value("window.owned") is None
        assert len(page.requests) == 1
        assert page.errors == []


def test_a_report_without_tensors_is_a_page(opened: Open) -> None:
    with opened("not_checked") as page:
        assert page.value(SHOWN) == "0 tensors of 0 shown"
        assert "No tensor was looked at" in page.value("document.body.textContent")
        assert page.errors == []
