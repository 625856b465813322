"""Files written for the first time: parts in any order, from several threads."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.errors import WriteError
from mtpconv.store.new_file import NewFile


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 100_000), st.lists(st.integers(0, 1 << 20), max_size=12),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_parts_in_any_order_make_the_file(
    tmp_path_factory: pytest.TempPathFactory, size: int, places: list[int], chance: random.Random
) -> None:
    data = random.Random(size).randbytes(size)
    ends = sorted({0, size, *(p % (size + 1) for p in places)})
    parts = [(a, data[a:b]) for a, b in pairwise(ends)]
    chance.shuffle(parts)
    path = tmp_path_factory.mktemp("new") / "file"
    file = NewFile(path)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda part: file.write(*part), parts))
    file.sync()
    file.close()
    file.close()
    assert path.read_bytes() == data


@pytest.mark.parametrize("keep", [True, False])
def test_pages_are_given_back_only_when_they_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: happened.append("sync"))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: happened.append("give back"))
    file = NewFile(tmp_path / "file")
    file.write(0, b"bytes")
    file.begin_writeback(keep=keep)
    file.close()
    assert happened == (["sync"] if keep else ["sync", "give back"])
    assert (tmp_path / "file").read_bytes() == b"bytes"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        NewFile(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = NewFile(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match=r"file: cannot be written: No space.*free some space"):
        file.write(0, b"x")
    file.close()
