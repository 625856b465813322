from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.audit.finding import Finding, MtpDepth, MtpStatus
from mtpconv.report import grid, html_page
from mtpconv.report.escape import plain
from mtpconv.tensors import ROOT, Region
from tests.report.reports import ALL, HOSTILE, mtp_dropped, passing, scattered


def decode(data: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """What page.js makes of the data: state by name, and the names in order of their numbers."""
    states: dict[str, str] = {}
    order: list[str] = []
    for template, _, first, _, runs in data["blocks"]:
        pieces = data["templates"][template]
        for at in range(0, len(runs), 3):
            for second in range(runs[at], runs[at] + runs[at + 1]):
                name = pieces[0]
                if len(pieces) > 1:
                    name += f"{first}{pieces[1]}"
                if len(pieces) > 2:
                    name += f"{second}{pieces[2]}"
                states[name] = data["states"][runs[at + 2]]
                order.append(name)
    return states, order


def _tensors(finding: dict[str, Any], order: list[str]) -> set[str]:
    runs = finding["ids"]
    return {
        name for at in range(0, len(runs), 2) for name in order[runs[at] : runs[at] + runs[at + 1]]
    }


@pytest.mark.parametrize("name", ["passing", "mtp_dropped", "scattered"])
def test_no_tensor_and_no_state_is_lost(name: str) -> None:
    report = ALL[name]()
    made = grid.make_grid(report)
    states, order = decode(json.loads(grid.encode(made)))
    assert states == report.states
    assert len(order) == len(states)
    assert made.hidden_tensors == made.hidden_findings == 0
    counts = dict(zip(made.data["states"], made.data["counts"], strict=True))
    assert counts == Counter(report.states.values())


def test_findings_belong_to_their_tensors() -> None:
    for report in (mtp_dropped(), scattered()):
        data = grid.make_grid(report).data
        _, order = decode(data)
        found: dict[tuple[str, str], set[str]] = {}
        for finding in data["findings"]:
            key = (finding["rule"], finding["label"])
            found.setdefault(key, set()).update(_tensors(finding, order))
        wanted: dict[tuple[str, str], set[str]] = {}
        for one in report.findings:
            label = "waived" if one.waived else one.severity
            names = {one.tensor} if one.tensor else set()
            wanted.setdefault((f"{one.code} {one.kind}", label), set()).update(names)
        assert found == wanted


def test_findings_that_say_the_same_are_one() -> None:
    data = grid.make_grid(mtp_dropped()).data
    rules = Counter(finding["rule"] for finding in data["findings"])
    assert rules["T01 missing_tensor"] == 1


def test_the_worst_state_comes_last_and_mtp_only_rows_come_first() -> None:
    data = grid.make_grid(mtp_dropped()).data
    assert data["states"] == ["identical", "missing"]
    layered = [row for row in data["rows"] if not row.startswith(("model.", "lm_head"))]
    assert set(layered[:4]) == {
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
    }  # fmt: skip
    assert "mlp.experts.*.gate_proj.weight" in layered


def test_trunk_and_mtp_share_their_rows() -> None:
    data = grid.make_grid(passing()).data
    row = data["rows"].index("self_attn.o_proj.weight")
    regions = {tuple(data["regions"][b[1]]) for b in data["blocks"] if b[3] == row}
    assert ("mtp", 0) in regions
    assert ("trunk", 77) in regions
    assert len(regions) == 79


@pytest.mark.parametrize("seed", range(2))
def test_the_page_stays_under_2_mb_whatever_the_states(seed: int) -> None:
    whole = passing()
    dice = random.Random(seed)
    kinds = ["identical", "changed", "missing", "dtype", "zero"]
    states = {name: dice.choice(kinds) for name in whole.states}
    findings = tuple(
        Finding(
            "T05", "value_mismatch", "error",
            f"{name}: {dice.getrandbits(64)} of 4,096 elements differ", name,
            region=whole.regions[name], hint="look at it",
        )
        for name, state in states.items() if state != "identical"
    )  # fmt: skip
    report = replace(whole, verdict="fail", states=states, findings=findings)
    made = grid.make_grid(report)
    found, _ = decode(made.data)
    # Every state is kept; texts of findings give way.
    assert found == states
    assert made.hidden_findings > 1000
    page = html_page.render(report)
    assert len(page.encode()) < 2_000_000
    assert "the text of" in page


def test_names_without_any_pattern_give_way_harmless_ones_first() -> None:
    dice = random.Random(0)
    names = [f"{dice.getrandbits(400):x}.weight" for _ in range(40_000)]
    bad = set(names[-100:])
    report = replace(
        passing(),
        states={name: "changed" if name in bad else "identical" for name in names},
        regions=dict.fromkeys(names, ROOT),
    )
    made = grid.make_grid(report)
    found, _ = decode(made.data)
    assert bad <= set(found)
    assert made.hidden_tensors == len(names) - len(found) > 0
    page = html_page.render(report)
    assert len(page.encode()) < 2_000_000
    assert f"{made.hidden_tensors:,} tensors" in page


def test_no_table_is_too_large_for_a_browser() -> None:
    names = {f"layers.{n}.w{n}": Region("trunk", n) for n in range(1200)}
    report = replace(passing(), states=dict.fromkeys(names, "changed"), regions=names)
    data = grid.make_grid(report).data
    assert len(data["rows"]) * len(data["regions"]) <= grid.MAX_CELLS + len(data["regions"])
    assert data["rows"][-1] == "(other names)"
    assert decode(data)[0] == report.states


def test_a_tensor_that_only_a_finding_names_is_shown() -> None:
    ghost = Finding("F03", "index_entry_not_in_file", "error", "x", "model.layers.78.ghost.weight",
                    region=Region("mtp", 0))  # fmt: skip
    data = grid.make_grid(replace(passing(), findings=(ghost,))).data
    assert decode(data)[0]["model.layers.78.ghost.weight"] == "index_entry_not_in_file"


def test_a_tensor_with_a_fault_is_not_drawn_as_sound() -> None:
    name = "model.layers.78.eh_proj.weight"

    def state(**changes: Any) -> str:
        fault = Finding("V01", "zero_tensor", "warning", "all zero", name)
        report = replace(passing(), findings=(replace(fault, **changes),))
        return decode(grid.make_grid(report).data)[0][name]

    assert state() == "zero_tensor"
    assert state(severity="error") == "zero_tensor"
    assert state(waived="known") == "identical"
    assert state(severity="note") == "identical"
    assert state(code="E01", kind="engine_ignores") == "identical"


def test_hostile_names_cannot_leave_the_script_element() -> None:
    made = grid.make_grid(ALL["hostile"]())
    text = grid.encode(made)
    assert not set(text) & set("<>&")
    assert text.isascii()
    states, _ = decode(json.loads(text))
    assert len(HOSTILE) < len(states) + made.hidden_tensors
    assert all(name == plain(name) for name in states)


NAMES = st.lists(
    st.sampled_from(["model", "layers", "mtp", "experts", "0", "1", "007", "12", "999999999",
                     "9999999999", "weight", "w1", "", "*"]),
    min_size=1, max_size=7,
).map(".".join)  # fmt: skip


@given(st.dictionaries(NAMES, st.sampled_from(["identical", "changed", "odd"]), max_size=40))
def test_any_names_come_back(states: dict[str, str]) -> None:
    regions = {name: Region("trunk", 0) for name in states if "layers" in name}
    report = replace(passing(), states=states, regions=regions)
    assert decode(json.loads(grid.encode(grid.make_grid(report))))[0] == states


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make",
    [
        lambda i: f"{'<' * 40}{i}.x",
        lambda i: f"{i}{'<' * 900}.x",
        lambda i: f"model.layers.{i}.q{i % 7}",
        lambda i: f"model.layers.{i % 9}.q{i}z.1.2",
        lambda i: f"a.{i}.{'&' * 300}{i}",
        lambda i: f"{chr(0xF0000) * 300}{i}",
    ],
    ids=["markup", "long", "regions", "labels", "entities", "unprintable"],
)
def test_the_page_stays_under_2_mb_whatever_the_names(make: Callable[[int], str]) -> None:
    names = {make(i): Region("mtp", i) for i in range(5000)}
    findings = tuple(
        Finding("T02", "extra_tensor", "error", f"{n}: {'<&>' * 50}{i}", n, region=Region("mtp", i))
        for i, n in enumerate(names)
    )
    depths = tuple(MtpDepth(i, "absent", 1, None, "<" * 500) for i in range(len(names)))
    noted = replace(passing().compared, notes=("<" * 5000,) * 60)
    report = replace(
        passing(), verdict="fail", findings=findings, mtp=MtpStatus("partial", 1, depths),
        compared=noted, states=dict.fromkeys(names, "extra"), regions=names,
    )  # fmt: skip
    page = html_page.render(report)
    assert 400_000 < len(page.encode()) < 2_000_000
