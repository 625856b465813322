"""Power loss: whatever was not fsynced is gone. What is left is whole, or no reader takes it.

A file has the bytes of its last fsync, none if it never had one. Names are there as of the last
fsync of their folder, or as they were at the moment: a filesystem may do either.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore, mcore2hf
from tests.convert.folders import file_hashes, make_hf, write_empty_shard
from tests.mapping.toy import config

#: What a folder holds: names with their inodes.
Names = dict[str, int]


class Disk:
    """What of a folder's tree would be there after a power loss."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._names: dict[int, Names] = {}
        self._bytes: dict[int, bytes] = {}
        self._folders: set[int] = set()
        self.moments: list[Callable[[], None]] = []
        self._remember(root)
        self._sync = os.fsync
        for name in ("fsync", "fdatasync", "rename", "replace"):
            self._hook(name, monkeypatch)
        self.check: Callable[[], None] = lambda: None
        self._one_at_a_time = threading.RLock()  # files are synced on another thread

    def _hook(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            with self._one_at_a_time:
                self.check()
                result = real(*args, **named)
                if name.endswith("sync"):
                    self._synced(args[0])
                self.check()
                return result

        monkeypatch.setattr(os, name, call)

    def _remember(self, folder: Path) -> None:
        """All that is there now is on disk."""
        for path in [folder, *folder.rglob("*")]:
            fd = os.open(path, os.O_RDONLY)
            self._synced(fd)
            os.close(fd)

    def _synced(self, fd: int) -> None:
        status = os.fstat(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if stat.S_ISDIR(status.st_mode):
            self._folders.add(status.st_ino)
            self._names[status.st_ino] = {p.name: p.lstat().st_ino for p in path.iterdir()}
        else:
            self._bytes[status.st_ino] = path.read_bytes()

    def after_loss(self, where: Path, *, latest_names: bool) -> Path:
        """The tree as it would be found, built below `where`."""
        shutil.rmtree(where, ignore_errors=True)
        self._build(self._root.stat().st_ino, self._root, where, latest_names)
        return where

    def _build(self, inode: int, now: Path, where: Path, latest_names: bool) -> None:
        where.mkdir()
        if latest_names:
            for path in now.iterdir():
                if path.is_dir():
                    self._build(path.stat().st_ino, path, where / path.name, latest_names)
                else:
                    (where / path.name).write_bytes(self._bytes.get(path.stat().st_ino, b""))
            return
        for name, number in self._names.get(inode, {}).items():
            if number in self._folders or number in self._names:
                self._build(number, now / name, where / name, latest_names)
            elif number in self._bytes:
                (where / name).write_bytes(self._bytes[number])
            else:  # a folder that was never synced is empty, and so is such a file
                (where / name).touch()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("convert", [hf2mcore, mcore2hf])
def test_power_loss_at_every_sync_and_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convert: Callable[..., Any], overwrite: bool
) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    hf2mcore(hf, tmp_path / "mcore")
    source = hf if convert is hf2mcore else tmp_path / "mcore"
    convert(source, tmp_path / "whole")
    whole = file_hashes(tmp_path / "whole")
    place = tmp_path / "place"
    place.mkdir()
    old: dict[str, str] = {}
    if overwrite:
        convert(make_old(tmp_path, convert), place / "target")
        old = file_hashes(place / "target")
        assert old.keys() == whole.keys()
        assert old != whole
    disk = Disk(place, monkeypatch)
    seen: list[str] = []

    def check() -> None:
        for latest_names in (False, True):
            left = disk.after_loss(tmp_path / "left", latest_names=latest_names) / "target"
            found = file_hashes(left) if left.exists() else None
            assert found in (None, whole, old), f"moment {len(seen)}"
            state = "new" if found == whole else "old" if found else "absent"
            seen.append(state)

    monkeypatch.setattr(disk, "check", check)
    convert(source, place / "target", overwrite=True)
    check()
    assert seen[0] == ("old" if overwrite else "absent")
    assert seen[-2:] == ["new", "new"]
    assert len(seen) > 20


def test_everything_new_is_synced_folders_above_and_empty_shards_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=2)
    write_empty_shard(hf)
    hf2mcore(hf, tmp_path / "mcore")
    real, synced = os.fsync, set()

    def fsync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    target = tmp_path / "a/b/back"
    mcore2hf(tmp_path / "mcore", target)
    for path in (tmp_path, *(tmp_path / "a").rglob("*"), tmp_path / "a"):
        assert path.stat().st_ino in synced, path


def make_old(tmp_path: Path, convert: Callable[..., Any]) -> Path:
    hf = make_hf(tmp_path / "old_hf", config(), shards=3, seed=9)
    if convert is hf2mcore:
        return hf
    hf2mcore(hf, tmp_path / "old_mcore")
    return tmp_path / "old_mcore"


def test_the_simulation_loses_what_was_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "kept").write_text("kept")
    disk = Disk(place, monkeypatch)
    (place / "lost").write_text("lost")
    (place / "kept").write_text("changed")
    left = disk.after_loss(tmp_path / "left", latest_names=False)
    assert {p.name: p.read_text() for p in left.iterdir()} == {"kept": "kept"}
    left = disk.after_loss(tmp_path / "left", latest_names=True)
    assert {p.name: p.read_text() for p in left.iterdir()} == {"kept": "kept", "lost": ""}
    with (place / "lost").open() as file:
        os.fsync(file.fileno())
    fd = os.open(place, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    left = disk.after_loss(tmp_path / "left", latest_names=False)
    assert {p.name: p.read_text() for p in left.iterdir()} == {"kept": "kept", "lost": "lost"}
