"""Reading stretches of files: all of them at once, in the order of the disk."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.errors import UnreadableError
from mtpconv.store.files import Files, Wanted

SIZE = 60_000
DATA = random.Random(1).randbytes(SIZE)
_STRETCH = st.tuples(st.integers(0, 1), st.integers(0, SIZE), st.integers(0, 9_000))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    found = [folder / "one", folder / "other"]
    for path, data in zip(found, (DATA, DATA[::-1]), strict=True):
        path.write_bytes(data)
    return found


def wanted(paths: list[Path], stretches: list[tuple[int, int, int]]) -> list[Wanted]:
    return [
        Wanted(paths[number], start, memoryview(bytearray(min(size, SIZE - start))))
        for number, start, size in stretches
    ]


@settings(max_examples=80, deadline=None)
@given(st.lists(_STRETCH, max_size=30), st.sampled_from([1, 700, 1 << 30]))
def test_every_view_has_its_bytes_and_is_told_of_once(
    paths: list[Path], stretches: list[tuple[int, int, int]], most: int
) -> None:
    """Whatever lies between and overlaps, and however few bytes the kernel gives at a time."""
    told: list[tuple[Any, int, bytes]] = []
    real = os.preadv

    def some(fd: int, views: list[memoryview], start: int) -> int:
        rest, chosen = most, []
        for view in views:
            chosen.append(view[:rest])
            rest -= len(chosen[-1])
        return real(fd, chosen, start)

    all_of_them = wanted(paths, stretches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", some)
        with Files(on_read=lambda f, at, view: told.append((f, at, bytes(view)))) as files:
            files.read_all(all_of_them)
    for path, start, view in all_of_them:
        whole = DATA if path is paths[0] else DATA[::-1]
        assert view == whole[start : start + len(view)]
    expected = [(w.file, w.start, bytes(w.view)) for w in all_of_them]
    assert sorted(told, key=str) == sorted(expected, key=str)


def test_neighbours_are_read_in_one_call(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, with what lies between them if that is little."""
    calls: list[int] = []
    real = os.preadv

    def counted(fd: int, views: list[memoryview], start: int) -> int:
        calls.append(start)
        return real(fd, views, start)

    monkeypatch.setattr(os, "preadv", counted)
    stretches = [(0, 30_000, 9_000), (0, 0, 9_000), (0, 10_000, 9_000), (0, 19_000, 7_000)]
    with Files() as files:
        files.read_all(wanted(paths, stretches))
        assert calls == [0]
        files.read_all(wanted(paths, [(0, 0, 100), (0, 5_000, 100), (1, 5_100, 100)]))
    assert len(calls) == 4


def test_a_file_that_ends_early_is_named(paths: list[Path]) -> None:
    views = [memoryview(bytearray(100)), memoryview(bytearray(100))]
    asked = [Wanted(paths[0], SIZE - 150, views[0]), Wanted(paths[0], SIZE - 50, views[1])]
    with Files() as files, pytest.raises(UnreadableError, match=r"one: ends at byte 60000, 50 by"):
        files.read_all(asked)
