"""Tier L0 reads no tensor bytes, and nobody may mistake a sparse mirror's zeros for weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mtpconv.store.hf as hf_module
from mtpconv.audit.audit import audit
from mtpconv.audit.compare import SideError, side_blocks
from mtpconv.audit.finding import Report
from mtpconv.audit.options import Options
from mtpconv.audit.sides import Sides, open_sides
from mtpconv.store.content import Files
from tests.audit import sides
from tests.audit.models import base_model, shown
from tests.convert.folders import write_hf

HEADERS = Options(read_bytes=False, workers=1)


@pytest.fixture
def no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("tensor bytes were read")

    base_model("glm-5.2.json")  # is made once, and made by reading
    monkeypatch.setattr(hf_module, "_same_bytes", refuse)
    monkeypatch.setattr(Files, "read_into", refuse)


def stale(place: Path) -> tuple[Path, Path]:
    """A base, and a checkpoint whose trunk alone moved on."""
    base = base_model("glm-5.2.json")
    trained = base.copy()
    for name in base.trunk():
        trained.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    return base.write(place / "base"), trained.write(place / "after")


def not_compared(report: Report) -> list[str]:
    assert "stale_mtp" not in report.checked
    return [f.message for f in report.findings if f.kind == "not_read" and f.severity == "warning"]


def test_a_name_in_two_files_is_not_read(no_bytes: None, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    name = model.mtp()[0]
    folder = model.write(tmp_path / "hf")
    write_hf(tmp_path / "one", {name: model.tensors[name]}, {})
    (tmp_path / "one" / "model.safetensors").rename(folder / "other.safetensors")
    for before in (None, folder):
        opened = open_sides(before, folder, headers_only=True)
        report = audit(opened.before, opened.after, HEADERS)
        assert "the bytes were not compared" in shown(report)
        assert "the same bytes" not in shown(report)


def test_a_base_is_not_looked_at(no_bytes: None, tmp_path: Path) -> None:
    base, after = stale(tmp_path)
    opened = open_sides(None, after, base=base, headers_only=True)
    report = audit(None, opened.after, HEADERS, base=opened.base)
    assert "only headers were asked for" in not_compared(report)[0]
    assert report.mtp.status == "present"


@pytest.mark.parametrize("afar", ["base", "after"])
def test_a_base_elsewhere_is_not_compared(afar: str, tmp_path: Path) -> None:
    base, after = stale(tmp_path)
    opened = open_sides(None, after, base=base)
    assert opened.base is not None
    assert audit(None, opened.after, base=opened.base).verdict == "fail"
    if afar == "base":
        opened = Sides(None, opened.after, replace(opened.base, afar=True))
    else:
        opened = Sides(None, replace(opened.after, afar=True), opened.base)
    options = Options(read_bytes=afar == "base", workers=1)
    report = audit(None, opened.after, options, base=opened.base)
    assert report.verdict == "pass"
    assert "stale was not checked" in not_compared(report)[0]


def test_bytes_from_afar_are_an_error_not_zeros(tmp_path: Path) -> None:
    subject = replace(sides.hf(base_model("glm-5.2.json").write(tmp_path / "hf")), afar=True)
    with Files() as files, pytest.raises(SideError, match="only headers were fetched"):
        next(side_blocks(subject, next(iter(subject.tensors)), files, "after"))
