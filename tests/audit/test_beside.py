"""Files beside the weights against the digests of a manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.options import Options
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.errors import UnreadableError
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import hash_files, take_manifest, write_manifest
from tests.convert.folders import make_hf
from tests.mapping.toy import config


def notes(before: Path, after: Path, *allow: str) -> tuple[str, ...]:
    sides = open_sides(before, after)
    report = audit(sides.before, sides.after, Options(allow=frozenset(allow)))
    assert report.verdict == "pass"
    return report.compared.notes


def taken(folder: Path, file: Path, **more: str) -> Path:
    opened = open_hf(folder)
    files = hash_files(folder) | more
    write_manifest(take_manifest(opened, folder, "hf", config=opened.config, files=files), file)
    return file


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    folder = make_hf(tmp_path / "hf", config())
    (folder / "code").mkdir()
    (folder / "code/model.py").write_text("1")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.bin").write_text("weights of others")
    return folder


def test_files_beside_the_weights_are_compared(hf: Path, tmp_path: Path) -> None:
    saved = taken(hf, tmp_path / "m.json")
    # Not among them: shards, their index, weights in other formats.
    (hf / "old.bin").unlink()
    index = next(hf.glob("*.index.json"))
    index.write_text(json.dumps(json.loads(index.read_text()), indent=7))
    same = f"all 5 files beside the weights have the sha256 of {saved}"
    assert notes(saved, hf) == notes(hf, saved) == (same,)
    assert notes(saved, hf, "index-authoritative") == (same,)
    (hf / "tokenizer.json").write_text("{ }")
    (hf / "code/model.py").unlink()
    for said in (notes(saved, hf), notes(hf, saved), notes(saved, hf, "index-authoritative")):
        differing, missing = said
        assert differing.startswith("warning: 1 of 5 files beside the weights differ from")
        assert f"{saved}: tokenizer.json; " in differing
        assert missing.startswith("warning: 1 of 5 files beside the weights are missing")
        assert f"{saved}: code/model.py; " in missing


def test_a_side_that_has_no_such_files_is_said_not_to_be_compared(hf: Path, tmp_path: Path) -> None:
    saved = taken(hf, tmp_path / "m.json")
    hf2mcore(hf, tmp_path / "mcore")
    assert [
        n for n in notes(saved, tmp_path / "mcore") if "of 5 files" in n and "not compared" in n
    ]
    sides = open_sides(saved, hf)
    afar = replace(sides.after, afar=True, path="hub")
    report = audit(sides.before, afar, Options(read_bytes=False))
    assert [n for n in report.compared.notes if "not compared, hub is no" in n]


def test_nothing_is_said_without_digests_of_files(hf: Path, tmp_path: Path) -> None:
    opened = open_hf(hf)
    write_manifest(take_manifest(opened, hf, "hf", config=opened.config), tmp_path / "m.json")
    assert notes(tmp_path / "m.json", hf) == notes(hf, hf) == ()


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a" * 5000, "\ud800", "a\0b", "", "code", "tokenizer.json/x"],
)
def test_a_name_that_leads_out_of_the_folder_is_missing(
    name: str, hf: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("s")
    saved = taken(hf, tmp_path / "m.json", **{name: "0" * 64})
    (said,) = notes(saved, hf)
    assert said.startswith("warning: 1 of 6 files beside the weights are missing")


def test_a_file_that_cannot_be_read_differs(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = taken(hf, tmp_path / "m.json")

    def refuse(folder: Path, names: list[str]) -> dict[str, str]:
        if names == ["tokenizer.json"]:
            raise UnreadableError(f"{folder}: cannot be read")
        return hash_files(folder, names)

    monkeypatch.setattr("mtpconv.audit.beside.hash_files", refuse)
    (said,) = notes(saved, hf)
    assert "differ from" in said
    assert "tokenizer.json" in said
