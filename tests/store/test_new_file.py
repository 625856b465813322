"""Files written once, in any order: the same bytes through the page cache and past it."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.errors import WriteError
from mtpconv.store import new_file
from mtpconv.store.new_file import STRIDE, NewFile

Open = Callable[[Path], NewFile]


@pytest.fixture
def past_the_cache(tmp_path: Path) -> Open:
    """Opens files that pass the page cache."""
    probe = NewFile(tmp_path / "probe", direct=True)
    probe.close()
    if not probe.direct:
        pytest.skip("the temporary folder is on no disk of its own, or on one that cannot")
    return lambda path: NewFile(path, direct=True)


def cuts_of(data: bytes, places: list[int]) -> list[tuple[int, bytes]]:
    ends = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [(a, data[a:b]) for a, b in pairwise(ends)]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3 * STRIDE + 5), st.lists(st.integers(0, 1 << 40), max_size=12),
    st.randoms(use_true_random=False), st.booleans(),
)  # fmt: skip
def test_parts_in_any_order_make_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    places: list[int],
    chance: random.Random,
    direct: bool,
) -> None:
    data = random.Random(size).randbytes(size)
    parts = cuts_of(data, places)
    chance.shuffle(parts)
    path = tmp_path_factory.mktemp("new") / "file"
    file = NewFile(path, direct=direct)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda part: file.write(*part), parts))
    file.sync()
    file.close()
    assert path.read_bytes() == data
    # What was taken in advance and not needed is given back.
    assert path.stat().st_blocks * 512 <= size + (1 << 16)


def test_rooms_are_filled_in_place(tmp_path: Path, past_the_cache: Open) -> None:
    file = past_the_cache(tmp_path / "file")
    data = os.urandom(STRIDE + 1000)
    done = 0
    for room in file.rooms(0, len(data)):
        room[:] = data[done : done + len(room)]
        done += len(room)
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == data


def test_it_passes_the_page_cache(tmp_path: Path, past_the_cache: Open) -> None:
    sizes: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        import fcntl

        sizes.append(len(data) if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else -len(data))
        return real(fd, data, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        file = past_the_cache(tmp_path / "file")
        for at in range(0, 2 * STRIDE + 10, 10):
            file.write(at, b"0123456789"[: 2 * STRIDE + 10 - at])
        file.sync()
        file.close()
    assert sorted(sizes) == [-10, STRIDE, STRIDE]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, past_the_cache: Open) -> None:
    file = past_the_cache(tmp_path / "file")
    most = 0
    block = bytes(STRIDE // 2)
    for n in range(40):
        file.write(n * len(block), block)
        most = max(most, len(file._blocks) + len(file._free) + len(file._under_way))
    file.sync()
    file.close()
    assert most <= 2 * new_file._DEPTH + 2


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_write_is_told_and_the_file_is_closed(
    tmp_path: Path, past_the_cache: Open, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = past_the_cache(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match=r"file: cannot be written: No space.*free some space"):  # noqa: PT012
        for n in range(at + 1):
            file.write(n * STRIDE, bytes(STRIDE))
        file.write((at + 1) * STRIDE, b"end")
        file.sync()
    file.close()
    file.close()


def test_a_disk_that_wants_other_blocks_gets_them_through_the_cache(
    tmp_path: Path, past_the_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real = os.pwrite

    def picky(fd: int, data: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", picky)
    data = os.urandom(3 * STRIDE + 77)
    file = past_the_cache(tmp_path / "file")
    file.write(0, data)
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == data


def test_a_filesystem_that_takes_nothing_in_advance(
    tmp_path: Path, past_the_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = past_the_cache(tmp_path / "file")
    file.write(0, b"x" * (STRIDE + 1))
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"x" * (STRIDE + 1)


def test_a_filesystem_without_a_device_is_written_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_file, "_on_own_disk", lambda _: False)
    file = NewFile(tmp_path / "file", direct=True)
    assert not file.direct
    file.write(0, b"abc")
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_gaps_are_a_fault_of_ours(tmp_path: Path, past_the_cache: Open) -> None:
    file = past_the_cache(tmp_path / "file")
    file.write(10, b"abc")
    with pytest.raises(AssertionError, match="gaps"):
        file.sync()
    file.close()


def test_closing_waits_for_what_is_on_its_way(
    tmp_path: Path, past_the_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a number that is given anew would be written to."""
    go, real = threading.Event(), os.pwrite

    def slow(fd: int, data: Any, at: int) -> int:
        assert go.wait(10)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    file = past_the_cache(tmp_path / "file")
    file.write(0, b"x" * STRIDE)
    closing = threading.Thread(target=file.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go.set()
    closing.join(10)
    assert (tmp_path / "file").read_bytes()[:STRIDE] == b"x" * STRIDE
