"""Threads that move bytes: results in order, bounded work under way, errors not swallowed."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.store.crc import crc32
from mtpconv.store.crew import Crew, batches, default_jobs, interleaved
from mtpconv.store.files import Files


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_results_come_in_order_and_few_are_under_way(jobs: int) -> None:
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        for i in range(50):
            made = i + 1
            yield i

    def work(item: int, files: Files) -> int:
        time.sleep(0.002 if item % 7 == 0 else 0)
        return item

    with Crew(jobs) as crew:
        for count, result in enumerate(crew.map(work, items())):
            assert result == count
            assert made - count <= 2 * jobs + 1


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_first_error_ends_it(jobs: int) -> None:
    seen: list[int] = []

    def work(item: int, files: Files) -> int:
        seen.append(item)
        if item == 5:
            raise ValueError("five")
        return item

    with Crew(jobs) as crew, pytest.raises(ValueError, match="five"):
        list(crew.map(work, range(1000)))
    assert len(seen) < 20


def test_each_thread_has_files_of_its_own_and_they_are_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    owners: dict[int, set[int]] = {}
    pools: list[Files] = []
    gate = threading.Barrier(3)

    def work(item: int, files: Files) -> None:
        if item < 3:
            gate.wait(timeout=10)  # three threads at once
        files.fd(tmp_path / "file")
        owners.setdefault(id(files), set()).add(threading.get_ident())
        pools.append(files)

    with Crew(3) as crew:
        list(crew.map(work, range(30)))
    assert len(owners) == 3
    assert all(len(threads) == 1 for threads in owners.values())
    assert not any(pool._open for pool in pools)


def test_default_jobs_are_the_cores_that_may_be_used() -> None:
    assert 1 <= default_jobs() <= 8


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 15))
def test_batches_keep_order_and_the_limit(sizes: list[int], limit: int) -> None:
    found = list(batches(sizes, lambda n: n, limit))
    assert [n for batch in found for n in batch] == sizes
    for batch in found:
        assert batch
        assert sum(batch) <= limit or len(batch) == 1
    for one, following in pairwise(found):
        assert sum(one) + following[0] > limit


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_whichever_crc_is_installed_is_that_of_zip(one: bytes, two: bytes) -> None:
    assert crc32(one) == zlib.crc32(one)
    assert crc32(two, crc32(one)) == zlib.crc32(one + two)
    assert crc32(memoryview(one)) == zlib.crc32(one)


@given(st.lists(st.lists(st.integers(), max_size=5), max_size=6), st.integers(1, 4))
def test_law_streams_are_merged_in_their_own_order(lists: list[list[int]], width: int) -> None:
    begun: set[int] = set()
    ended: set[int] = set()

    def stream(number: int) -> Iterator[tuple[int, int]]:
        begun.add(number)
        assert len(begun - ended) <= width
        yield from ((number, item) for item in lists[number])
        ended.add(number)

    merged = list(interleaved((stream(i) for i in range(len(lists))), width))
    for number, items in enumerate(lists):
        assert [item for n, item in merged if n == number] == items
    assert len(merged) == sum(map(len, lists))


def test_streams_take_turns() -> None:
    streams = (iter(word) for word in ("abc", "de", "fg"))
    assert "".join(interleaved(streams, 2)) == "adbecfg"


def test_nobody_works_any_more_when_a_map_has_failed() -> None:
    at_work = threading.Event()
    finished = []

    def work(item: int, files: Files) -> int:
        if item == 0:
            at_work.wait(5)
            raise ValueError("no")
        at_work.set()
        time.sleep(0.2)
        finished.append(item)
        return item

    with Crew(2) as crew:
        with pytest.raises(ValueError, match="no"):
            list(crew.map(work, range(2)))
        assert finished == [1]
