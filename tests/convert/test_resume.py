"""--resume takes over what is done and right, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore, mcore2hf, output, record_files
from mtpconv.convert.journal import Done, Journal, read_journals
from mtpconv.convert.output import Output
from mtpconv.errors import UnreadableError, WriteError
from mtpconv.progress import Progress
from mtpconv.ranks import Ranks
from mtpconv.store.places import places_read
from mtpconv.store.torch_dist import open_torch_dist
from tests.convert.folders import exchanged_table, file_hashes, make_hf
from tests.mapping.toy import config

Convert = Callable[..., Any]
COMMAND = """
import os, signal, sys
from mtpconv.convert.journal import Journal
left = int(sys.argv.pop(1))
real = Journal.add
def add(self, *rest):
    global left
    if left < 1:  # nothing is ever finished
        os.kill(os.getpid(), signal.SIGINT)
        return
    real(self, *rest)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGINT)
Journal.add = add
from mtpconv.cli import main
sys.argv[1:] = ["mcore2hf", *sys.argv[1:], "--jobs", "1"]
main()
"""
BOTH = pytest.mark.parametrize("convert", [hf2mcore, mcore2hf])


class Stop(Progress):
    """Ends a conversion when some bytes are done, and sees what is taken over."""

    def __init__(self, after: int | None = None, error: type[BaseException] = WriteError) -> None:
        self._after = after
        self._error = error
        self.done = 0
        self.taken = 0

    def advance(self, nbytes: int, what: str = "") -> None:
        self.done += nbytes
        if what == "taken over":
            self.taken += nbytes
        if self._after is not None and self.done > self._after:
            raise self._error("enough")


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr(record_files, "FILE_LIMIT", 2000)
    hf = make_hf(tmp_path / "hf", config(), shards=5)
    hf2mcore(hf, tmp_path / "mcore")
    return {"hf2mcore": hf, "mcore2hf": tmp_path / "mcore"}


def parts(folder: Path) -> dict[str, Path]:
    """Finished and unfinished data files below a folder."""
    return {p.name: p for p in sorted([*folder.rglob("*.distcp"), *folder.rglob("*.safetensors")])}


def stopped(convert: Convert, sides: dict[str, Path], error: type[BaseException]) -> Path:
    """A conversion that ended in the middle; gives its working folder."""
    source = sides[convert.__name__]
    size = sum(p.stat().st_size for p in sides["hf2mcore"].glob("*.safetensors"))
    with pytest.raises(error) as caught:
        convert(source, source.parent / "target", resume=True, progress=Stop(size // 2, error))
    work = source.parent / ".target.partial"
    done = read_journals(work)
    assert len(done) >= 2
    if error is WriteError:
        assert f"{len(done)} finished files are kept for --resume" in str(caught.value)
    else:
        assert caught.value.__notes__ == [f"{len(done)} finished files are kept for --resume"]
    assert not (source.parent / "target").exists()
    return work


def finish(convert: Convert, sides: dict[str, Path], **options: Any) -> Stop:
    """Go on; the result is what one run gives, with nothing beside it."""
    source = sides[convert.__name__]
    root = source.parent
    for name in ("target", "alone"):
        shutil.rmtree(root / name, ignore_errors=True)
    seen = Stop()
    work = root / ".target.partial"
    there = parts(work / "target")
    earlier = sum(name in there for name in read_journals(work))
    told = convert(source, root / "target", progress=seen, **{"resume": True, **options})
    assert (told.taken_over > 0) is (seen.taken > 0)
    unfit = earlier - told.taken_over if options.get("resume", True) else 0
    said = [n for n in told.notes if "of an earlier run did not fit" in n]
    assert [n.split()[0] for n in said] == ([str(unfit)] if unfit else [])
    plain = {k: v for k, v in options.items() if k != "resume"}
    convert(source, root / "alone", **plain)
    assert file_hashes(root / "target") == file_hashes(root / "alone")
    assert not [p.name for p in root.iterdir() if p.name.startswith(".")]
    return seen


@BOTH
@pytest.mark.parametrize("error", [WriteError, KeyboardInterrupt])
def test_finished_files_are_taken_over(
    sides: dict[str, Path], convert: Convert, error: type[BaseException]
) -> None:
    work = stopped(convert, sides, error)
    there = parts(work / "target")
    kept = {n: there[n].stat().st_ino for n in read_journals(work)}
    assert finish(convert, sides).taken > 0
    now = parts(sides[convert.__name__].parent / "target")
    assert {n: now[n].stat().st_ino for n in kept} == kept


@BOTH
def test_stopped_again_and_again(sides: dict[str, Path], convert: Convert) -> None:
    source = sides[convert.__name__]
    before = 0
    for after in (3000, 6000, 9000):
        with pytest.raises(WriteError):
            convert(source, source.parent / "target", resume=True, progress=Stop(after))
        done = len(read_journals(source.parent / ".target.partial"))
        assert done >= before
        before = done
    finish(convert, sides)


@BOTH
@pytest.mark.parametrize("damage", ["flip", "shorten", "lengthen", "remove", "journal"])
def test_damaged_files_are_written_again(
    tmp_path: Path, sides: dict[str, Path], convert: Convert, damage: str
) -> None:
    work = stopped(convert, sides, WriteError)
    shutil.copytree(work, tmp_path / "copy")
    taken = finish(convert, sides).taken
    (tmp_path / "copy").rename(work)
    name = sorted(read_journals(work))[0]
    path = parts(work / "target")[name]
    data = path.read_bytes()
    middle = len(data) // 2
    if damage == "flip":
        # Some byte of the payload: no reader would notice.
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    elif damage == "shorten":
        path.write_bytes(data[:-1])
    elif damage == "lengthen":
        path.write_bytes(data + b"\0")
    elif damage == "remove":
        path.unlink()
    else:
        (work / "journal.0.jsonl").write_bytes(b"\x00\xff{]\n" + b"[" * 100_000 + b"\n{}\n[]\n")
    now = finish(convert, sides).taken
    assert now < taken
    assert (now == 0) is (damage == "journal")


@BOTH
def test_another_source_is_not_the_same_conversion(
    sides: dict[str, Path], convert: Convert
) -> None:
    stopped(convert, sides, WriteError)
    shard = next(iter(parts(sides[convert.__name__]).values()))
    os.utime(shard, ns=(5, 5))
    assert finish(convert, sides).taken == 0


def test_other_options_are_not_the_same_conversion(sides: dict[str, Path]) -> None:
    stopped(hf2mcore, sides, WriteError)
    assert finish(hf2mcore, sides, layout="canonical").taken == 0


@BOTH
def test_without_resume_all_is_written_anew(sides: dict[str, Path], convert: Convert) -> None:
    stopped(convert, sides, WriteError)
    assert finish(convert, sides, resume=False).taken == 0


def test_a_shard_that_nobody_looked_at_is_not_taken_over(sides: dict[str, Path]) -> None:
    """Without verification there are no digests that could tell a right shard from a wrong one."""
    source = sides["mcore2hf"]
    with pytest.raises(WriteError):
        mcore2hf(source, source.parent / "target", resume=True, verify=False, progress=Stop(9000))
    assert finish(mcore2hf, sides).taken == 0


def test_a_line_cut_short_does_not_hide_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add("a", Done("x", {f"t{i}": "0" for i in range(2500)}))
    journal.close()
    path = tmp_path / "journal.0.jsonl"
    whole = path.read_bytes()
    assert json.loads(whole)["digests"]["t2499"] == "0"
    path.write_bytes(whole + whole[: len(whole) // 2])
    again = Journal(tmp_path)
    again.add("b", Done("y", {}))
    again.close()
    found = read_journals(tmp_path)
    assert {n: (d.holds, len(d.digests)) for n, d in found.items()} == {
        "a": ("x", 2500), "b": ("y", 0),
    }  # fmt: skip


@pytest.mark.parametrize("after", [0, 4], ids=["none is finished", "some are"])
def test_ctrl_c_says_what_is_kept(sides: dict[str, Path], after: int) -> None:
    """As a command: the count on standard error is that of the journal."""
    source = sides["mcore2hf"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(after), source, source.parent / "target", "--resume"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    kept = read_journals(source.parent / ".target.partial")
    said = "no file was finished, so nothing was left behind"
    if after:
        assert len(kept) == after
        said = f"{after} finished files are kept for --resume"
    assert f"interrupted; no half-written target was left; {said}\n" in done.stderr


@pytest.mark.parametrize("rank", [0, 2])
def test_no_rank_denies_that_files_are_kept(tmp_path: Path, rank: int) -> None:
    out = Output(
        tmp_path / "target",
        places_read(),
        overwrite=False,
        need=0,
        resume=True,
        ranks=Ranks(rank, 3),
    )
    said = out._what_is_left(0)
    assert said == (
        "what is finished is kept for --resume" if rank else
        "no file was finished, so nothing was left behind"
    )  # fmt: skip


def test_shards_of_another_table_are_not_taken_over(sides: dict[str, Path], tmp_path: Path) -> None:
    """They are whole, and what their journal says of them is true."""
    table, hf = exchanged_table(tmp_path / "tables"), sides["hf2mcore"]
    trained = shutil.copytree(sides["mcore2hf"] / "release", tmp_path / "trained")  # whoever did
    with pytest.raises(WriteError):
        mcore2hf(
            trained, tmp_path / "back", like=hf, mapping=table, resume=True, jobs=1,
            progress=Stop(10_000),
        )  # fmt: skip
    kept = read_journals(tmp_path / ".back.partial")
    done = mcore2hf(trained, tmp_path / "back", like=hf, resume=True)
    assert len(kept) > done.taken_over
    assert file_hashes(tmp_path / "back") == file_hashes(sides["hf2mcore"])


def test_shards_with_a_flipped_bit_are_not_taken_over(
    sides: dict[str, Path], tmp_path: Path
) -> None:
    """The source was damaged, and then replaced by a good copy of the same size and time."""
    mcore = open_torch_dist(sides["mcore2hf"])
    (chunk,) = mcore.chunks("decoder.layers.1.self_attention.linear_proj.weight")
    assert isinstance(chunk.file, Path)
    good, times = chunk.file.read_bytes(), chunk.file.stat()
    bad = bytearray(good)
    bad[chunk.start] ^= 1
    for data, works in ((bytes(bad), False), (good, True)):
        chunk.file.write_bytes(data)
        os.utime(chunk.file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if works:
            assert mcore2hf(sides["mcore2hf"], tmp_path / "back", resume=True).taken_over > 0
            continue
        with pytest.raises(UnreadableError, match="CRC-32"):
            mcore2hf(sides["mcore2hf"], tmp_path / "back", resume=True)
        assert read_journals(tmp_path / ".back.partial")
    assert file_hashes(tmp_path / "back") == file_hashes(sides["hf2mcore"])


def test_a_source_replaced_with_the_same_size_and_time_is_another_one(
    sides: dict[str, Path], tmp_path: Path
) -> None:
    stopped(hf2mcore, sides, WriteError)
    other = make_hf(tmp_path / "other", config(), seed=1, shards=5)
    for path in sides["hf2mcore"].glob("*.safetensors"):
        times = path.stat()
        path.write_bytes((other / path.name).read_bytes())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert finish(hf2mcore, sides).taken == 0


def test_what_nobody_takes_over_is_no_disk_that_is_free(
    sides: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = stopped(mcore2hf, sides, WriteError)
    (work / "target/unfinished.safetensors").write_bytes(bytes(1 << 22))
    asked: list[int] = []
    monkeypatch.setattr(output, "check_space", lambda _, need: asked.append(need))
    done = mcore2hf(sides["mcore2hf"], tmp_path / "target", resume=True)
    assert 0 < asked[0] < done.disk
