"""Files of an HF folder that are no tensors: they all travel, or they are named."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from mtpconv.cli import main
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import UnreadableError
from mtpconv.store.other_files import other_files
from mtpconv.store.source import read_source
from tests.convert.folders import file_hashes, make_hf, tensors_of
from tests.mapping.toy import config

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
#: What must be named, and what a name in a note is next to.
LEFT = {
    "consolidated.pth": "weights in another format",
    "imatrix.npz": "weights in another format",
    "empty/": "an empty folder",
    ".cache/": "kept by tools",
    "tokenizer.json": "a link to what is not there",
    "pipe": "not an ordinary file",
    "loop/": "a link to a folder that holds it",
}


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """An HF folder with everything that people leave in one."""
    hf = make_hf(tmp_path / "hf", config())
    (hf / "consolidated.pth").write_bytes(b"pickled")
    (hf / "imatrix.npz").write_bytes(b"numbers")
    (hf / "empty").mkdir()
    (hf / ".cache").mkdir()
    (hf / ".cache/lock").write_text("")
    (hf / "tokenizer.json").symlink_to("nowhere")
    (hf / "loop").symlink_to(".")
    os.mkfifo(hf / "pipe")
    (hf / "tokenizer.model").write_bytes(POINTER)
    (hf / "run.sh").write_text("#!/bin/sh\n")
    (hf / "run.sh").chmod(0o755)
    (hf / "sub/original").mkdir(parents=True)
    shutil.copy(next(hf.glob("*.safetensors")), hf / "sub/original/draft.safetensors")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "code.py").write_text("pass\n")
    (hf / "linked").symlink_to(elsewhere)
    (hf / "code.py").symlink_to(elsewhere / "code.py")
    return hf


def test_every_file_travels_or_is_named(crowded: Path, tmp_path: Path) -> None:
    there = hf2mcore(crowded, tmp_path / "mcore")
    assert set(there.left_behind) == set(LEFT)
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    like = mcore2hf(tmp_path / "mcore/release", tmp_path / "like", like=crowded)
    for done in (there, back, like):
        for name, why in LEFT.items():
            assert [n for n in done.notes if name in n and why in n], name
        assert [n for n in done.notes if "warning" in n and "tokenizer.json" in n]
        assert [n for n in done.notes if "git-lfs pointer" in n and "tokenizer.model" in n]
    came = file_hashes(tmp_path / "back")
    assert came == file_hashes(tmp_path / "like")
    wanted = {
        n: h for n, h in file_hashes(crowded).items()
        if n not in LEFT and not n.startswith(("loop/", ".cache/"))
    }  # fmt: skip
    assert came.items() >= wanted.items()
    assert sorted(came.keys() - wanted.keys()) == ["linked/code.py"]  # rglob follows no links
    for name, runs in (("run.sh", True), ("config.json", False)):
        assert bool((tmp_path / "back" / name).stat().st_mode & stat.S_IXUSR) == runs


def test_a_plain_folder_has_nothing_to_say(tmp_path: Path) -> None:
    done = hf2mcore(make_hf(tmp_path / "hf", config()), tmp_path / "mcore")
    assert (done.left_behind, done.notes) == ((), ())
    assert not (tmp_path / "mcore/hf_source/left_behind.json").exists()


def test_files_that_travel_are_counted_before_anything_is_written(
    crowded: Path, tmp_path: Path
) -> None:
    before = hf2mcore(crowded, tmp_path / "mcore", dry_run=True)
    assert set(before.left_behind) == set(LEFT)
    (crowded / "large.txt").write_bytes(bytes(1 << 20))
    after = hf2mcore(crowded, tmp_path / "mcore", dry_run=True)
    assert after.disk - before.disk == 1 << 20


def test_a_link_to_a_whole_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpconv.store.other_files._MAX_FILES", 50)
    for number in range(50):
        (tmp_path / "disk" / str(number)).mkdir(parents=True)
    hf = make_hf(tmp_path / "hf", config())
    (hf / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(UnreadableError, match="more than 50 files, link/"):
        hf2mcore(hf, tmp_path / "mcore")


def test_links_that_fan_out_end(tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / f"{number}").mkdir()
        for side in "ab":
            (tmp_path / f"{number}" / side).symlink_to(tmp_path / f"{number + 1}")
    (tmp_path / "64").mkdir()
    found = other_files(tmp_path / "0", ())
    assert "nested or linked too deep" in found.left.values()
    assert len(found.left) < 2000


def roundtrip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: Path
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["mtpconv", "roundtrip", str(source)])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    return stop.value.code or 0, said.out, said.err  # type: ignore[return-value]


def test_roundtrip_certifies_what_came_back_and_names_the_rest(
    crowded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = roundtrip(monkeypatch, capsys, crowded)
    assert code == 0
    came = len(other_files(crowded, ()).travel)
    assert f"round trip: {came} files, sha256 of every one equals the original's" in out
    without = next(line for line in out.splitlines() if line.startswith("  without"))
    assert "7 that were left behind" in without


@pytest.mark.parametrize("damage", ["lost", "changed", "new"])
def test_roundtrip_asks_for_every_file_of_the_source(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    (hf / "notes").mkdir()
    (hf / "notes/a.txt").write_text("a")

    def convert(source: Path, target: Path, **options: object) -> object:
        done = mcore2hf(source, target, **options)  # type: ignore[arg-type]
        file = target / "notes/a.txt"
        file.unlink() if damage == "lost" else file.write_text("b")
        if damage == "new":
            file.with_name("b.txt").write_text("b")
            file.write_text("a")
        return done

    monkeypatch.setattr("mtpconv.cli.convert.mcore2hf", convert)
    code, out, err = roundtrip(monkeypatch, capsys, hf)
    assert code == 1
    assert "sha256 of every one" not in out
    assert "notes/" in err


@pytest.mark.parametrize("quantised", [False, True])
def test_a_shard_in_a_subfolder(tmp_path: Path, quantised: bool) -> None:
    raw = config("deepseek_v3")
    if quantised:
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 3]}
    hf = make_hf(tmp_path / "hf", raw)
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    moved = sorted(set(index["weight_map"].values()))[1:]
    for number, file in enumerate(moved):
        new = f"mtp/{number}/model.safetensors"
        (hf / new).parent.mkdir(parents=True)
        (hf / file).rename(hf / new)
        where = index["weight_map"]
        index["weight_map"] = {n: new if f == file else f for n, f in where.items()}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hf2mcore(hf, tmp_path / "mcore").left_behind == ()
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert back.unchanged == back.tensors == len(tensors_of(hf))
    mcore2hf(tmp_path / "mcore", tmp_path / "like", like=hf)
    assert file_hashes(tmp_path / "back") == file_hashes(tmp_path / "like") == file_hashes(hf)


def test_like_finds_shards_that_are_all_in_subfolders(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=1)
    (hf / "weights").mkdir()
    (hf / "model.safetensors").rename(hf / "weights/a.safetensors")
    where = dict.fromkeys(tensors_of_file(hf / "weights/a.safetensors"), "weights/a.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert set(read_source(hf).headers) == {"weights/a.safetensors"}
    hf2mcore(hf, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "back", like=hf)
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def tensors_of_file(path: Path) -> list[str]:
    from mtpconv.store.safetensors_header import read_header

    return list(read_header(path).tensors)


def test_shards_without_an_index_come_back_without_one(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    (hf / "model.safetensors.index.json").unlink()
    hf2mcore(hf, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_the_index_that_was_read_is_the_one_that_comes_back(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    other = hf / "model.fp32.safetensors.index.json"
    other.write_text('{"weight_map": {"a": "nowhere.safetensors"}}')
    hf2mcore(hf, tmp_path / "mcore")
    assert read_source(tmp_path / "mcore").index_name == "model.safetensors.index.json"
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_an_index_without_shards_is_not_copied_beside_new_ones(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(hf / name, bare)
    mcore2hf(tmp_path / "mcore", tmp_path / "back", like=bare)
    assert not (tmp_path / "back/model.safetensors.index.json").exists()
    assert tensors_of(tmp_path / "back") == tensors_of(hf)
