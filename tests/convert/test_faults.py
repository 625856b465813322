"""Whatever happens while converting: the target is whole or absent, the source untouched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import MtpconvError, RefusedError, UnreadableError, UsageError, WriteError
from mtpconv.progress import Progress
from mtpconv.store import new_file
from tests.convert.folders import file_hashes, make_hf
from tests.mapping.toy import config

Convert = Callable[..., Any]


class At(Progress):
    """Does something once, when the first bytes of a stage are done."""

    def __init__(self, stage: str, what: Callable[[], Any]) -> None:
        self._stage = stage
        self._what: Callable[[], Any] | None = what
        self._now = ""

    def begin(self, stage: str, total: int) -> None:
        self._now = stage

    def advance(self, nbytes: int, what: str = "") -> None:
        if self._now == self._stage and self._what is not None:
            todo, self._what = self._what, None
            todo()


@pytest.fixture
def sides(tmp_path: Path) -> dict[str, Path]:
    """A source for each direction."""
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    hf2mcore(hf, tmp_path / "mcore")
    return {"hf2mcore": hf, "mcore2hf": tmp_path / "mcore"}


BOTH = pytest.mark.parametrize("convert", [hf2mcore, mcore2hf])


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def fails(
    convert: Convert,
    sides: dict[str, Path],
    kind: type[BaseException],
    match: str | None,
    **options: Any,
) -> None:
    """It fails, leaves nothing, and the same command without the fault succeeds."""
    source = sides[convert.__name__]
    root = source.parent
    before, there = file_hashes(source), names(root)
    with pytest.raises(kind, match=match) as caught:
        convert(source, root / "target", **options)
    if isinstance(caught.value, MtpconvError):
        assert "\n" not in str(caught.value)
    assert names(root) == there
    assert file_hashes(source) == before or kind is UnreadableError
    convert(source, root / "target")
    convert(source, root / "again")
    assert file_hashes(root / "target") == file_hashes(root / "again")


@BOTH
@pytest.mark.parametrize("stage", ["convert", "verify"])
def test_interrupted_in_either_stage(sides: dict[str, Path], convert: Convert, stage: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fails(convert, sides, KeyboardInterrupt, None, progress=At(stage, interrupt))


@BOTH
@pytest.mark.parametrize("change", ["touch", "grow", "shrink", "vanish", "appear"])
def test_a_source_that_changes_while_it_is_read(
    sides: dict[str, Path], convert: Convert, change: str
) -> None:
    source = sides[convert.__name__]
    shard = sorted([*source.rglob("*.distcp"), *source.glob("*.safetensors")])[0]

    def happens() -> None:
        if change == "touch":
            os.utime(shard, ns=(1, 1))
        elif change == "grow":
            with shard.open("ab") as file:
                file.write(b"\0")
        elif change == "shrink":
            os.truncate(shard, shard.stat().st_size - 1)
        elif change == "vanish":
            shard.rename(shard.with_suffix(".gone"))
        else:
            Path(shutil.copy(shard, shard.with_suffix(".new"))).replace(shard)

    data = shard.read_bytes()
    root = source.parent
    there = names(root)
    with pytest.raises(UnreadableError, match=rf"{shard.name}: .*while it was read"):
        convert(source, root / "target", progress=At("verify", happens))
    assert names(root) == there
    shard.write_bytes(data)
    convert(source, root / "target")


@BOTH
def test_two_converters_into_one_target(sides: dict[str, Path], convert: Convert) -> None:
    source = sides[convert.__name__]
    target = source.parent / "target"
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(UsageError, match="another mtpconv is writing it") as caught:
            convert(source, target)
        refused.append(str(caught.value))

    convert(source, target, progress=At("convert", second))
    assert len(refused) == 1
    convert(source, source.parent / "alone")
    assert file_hashes(target) == file_hashes(source.parent / "alone")


@BOTH
@pytest.mark.parametrize(
    ("call", "number"),
    [("fsync", errno.EIO), ("fsync", errno.ENOSPC), ("open", errno.EACCES), ("open", errno.ENOSPC),
     ("rename", errno.EIO), ("mkdir", errno.EACCES)],
)  # fmt: skip
def test_the_operating_system_refuses(
    sides: dict[str, Path], convert: Convert, call: str, number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Permission lost, disk full or broken, at every single call of each kind."""
    source = sides[convert.__name__]
    root = source.parent
    there = names(root)
    convert(source, root / "whole")
    whole = file_hashes(root / "whole")
    shutil.rmtree(root / "whole")
    real = getattr(os, call)
    for nth in range(1000):
        left = nth

        def refuse(first: Any, *rest: Any, **named: Any) -> Any:
            nonlocal left
            writes = call != "open" or (rest and rest[0] & (os.O_WRONLY | os.O_RDWR))
            # A folder that is there already need not be made.
            known = call == "mkdir" and Path(first).is_dir()
            if writes and not known and not _is_cleaning():
                left -= 1
                if left == -1:
                    raise OSError(number, os.strerror(number))
            return real(first, *rest, **named)

        monkeypatch.setattr(os, call, refuse)
        said = ""
        try:
            convert(source, root / "target")
        except WriteError as error:
            said = str(error)
        monkeypatch.setattr(os, call, real)
        assert (os.strerror(number) in said) is (left < 0)
        assert names(root) in (there, sorted([*there, "target"]))
        if (root / "target").exists():
            assert file_hashes(root / "target") == whole
            shutil.rmtree(root / "target")
        if left >= 0:
            assert nth > 0
            return
    pytest.fail("never finished")


def _is_cleaning() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in ("rmtree", "release", "_leave"):
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("verify", [True, False])
def test_bits_flipped_on_their_way_into_a_shard(
    sides: dict[str, Path], verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = new_file.write_at
    flipped: list[int] = []

    def flip(fd: int, path: Path, at: int, data: Any) -> None:
        if at > 0 and not flipped:
            flipped.append(at)
            data = bytes([data[0] ^ 1]) + bytes(data[1:])
        real(fd, path, at, data)

    monkeypatch.setattr(new_file, "write_at", flip)
    if verify:
        with pytest.raises(RefusedError, match="verification: 1 tensors read back differ"):
            mcore2hf(sides["mcore2hf"], sides["mcore2hf"].parent / "back")
        assert not (sides["mcore2hf"].parent / "back").exists()
        assert flipped
    else:  # nobody looks, and nobody claims to have looked
        done = mcore2hf(sides["mcore2hf"], sides["mcore2hf"].parent / "back", verify=False)
        assert (done.verified, done.unchanged) == (False, None)


@BOTH
def test_without_verification_the_bytes_are_the_same(
    sides: dict[str, Path], convert: Convert
) -> None:
    """Copied inside the kernel where it can, by hand where it cannot."""
    source = sides[convert.__name__]
    choices: list[dict[str, Any]] = [{}, {"verify": False}, {"jobs": 1}, {"jobs": 3}]
    for number, options in enumerate(choices):
        convert(source, source.parent / f"out{number}", **options)
        assert file_hashes(source.parent / f"out{number}") == file_hashes(source.parent / "out0")


def test_what_a_killed_run_left_is_removed(sides: dict[str, Path]) -> None:
    source = sides["hf2mcore"]
    root = source.parent
    there = names(root)
    (root / ".target.partial/target/release").mkdir(parents=True)
    (root / ".target.partial/target/release/__0_0.distcp").write_bytes(b"half")
    (root / ".target.partial/mtpconv").touch()
    (root / ".target.lock").write_text('{"pid": 1, "host": "elsewhere"}')
    hf2mcore(source, root / "target")
    assert names(root) == sorted([*there, "target"])


COMMAND = """
import os, signal, sys
from mtpconv.store.torch_dist_writer import TorchDistWriter
name = sys.argv.pop()
real = TorchDistWriter.reserve
def reserve(self, *rest):
    os.kill(os.getpid(), getattr(signal, name))
    return real(self, *rest)
TorchDistWriter.reserve = reserve
from mtpconv.cli import main
sys.argv[1:] = ["hf2mcore", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_ctrl_c_and_a_scheduler_that_ends_the_job(
    sides: dict[str, Path], signal: str, code: int
) -> None:
    source = sides["hf2mcore"]
    there = names(source.parent)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, source, source.parent / "target", signal],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "interrupted; no half-written target was left" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(source.parent) == there


def test_log_lines_for_programs(sides: dict[str, Path]) -> None:
    source = sides["hf2mcore"]
    target = source.parent / "target"
    command = [sys.executable, "-m", "mtpconv", "hf2mcore", str(source), str(target),
               "--log-format", "json"]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [e["event"] for e in events] == ["begin", "begin", "done"]
    assert [e.get("stage") for e in events[:2]] == ["convert", "verify"]
    assert events[-1]["verified"] is True
    assert events[-1]["target"] == str(target)
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    (event,) = map(json.loads, again.stderr.splitlines())
    assert (again.returncode, event["event"], event["exit_code"]) == (2, "error", 2)
    assert "--overwrite" in event["message"]
    odd = subprocess.run([*command[:-1], "xml"], check=False, capture_output=True, text=True)
    assert odd.returncode == 2
    assert "--log-format xml: must be auto, text or json" in odd.stderr
