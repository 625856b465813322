"""Threads that move and digest bytes: results in order, a bounded amount of work under way.

The work is system calls, BLAKE3 and CRC on megabytes, all of which let other threads run.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Self, TypeVar

from mtpconv.store.files import BLOCK, Files, OnRead

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_jobs() -> int:
    """One per core that this process may use, at most 8: disks give no more."""
    if hasattr(os, "sched_getaffinity"):
        return min(8, len(os.sched_getaffinity(0)))
    return min(8, os.cpu_count() or 1)


class Crew:
    """`jobs` threads, each with open files of its own; with one job no thread is started.

    `on_read` is told by all of them of what is read from files.
    """

    def __init__(self, jobs: int | None = None, on_read: OnRead | None = None) -> None:
        self._on_read = on_read
        self.jobs = jobs or default_jobs()
        self._pool = ThreadPoolExecutor(self.jobs) if self.jobs > 1 else None
        self._own = threading.local()
        self._files: list[Files] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for files in self._files:
            files.close()

    def map(self, work: Callable[[Item, Files], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`work` done on every item, in the order of the items, which are made as needed."""
        if self._pool is None:
            for item in items:
                yield self._run(work, item)
            return
        under_way: deque[Future[Result]] = deque()
        try:
            for item in items:
                # More would hold memory without keeping the threads any busier.
                if len(under_way) >= 2 * self.jobs:
                    yield under_way.popleft().result()
                under_way.append(self._pool.submit(self._run, work, item))
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)  # nobody may be writing into a file that the caller now closes

    def _run(self, work: Callable[[Item, Files], Result], item: Item) -> Result:
        files = getattr(self._own, "files", None)
        if files is None:
            files = self._own.files = Files(on_read=self._on_read)
            self._files.append(files)
        return work(item, files)


def batches(
    items: Iterable[Item], size: Callable[[Item], int], limit: int = BLOCK
) -> Iterator[list[Item]]:
    """Neighbours put together up to `limit` bytes; what is larger stands alone."""
    batch: list[Item] = []
    total = 0
    for item in items:
        nbytes = size(item)
        if batch and total + nbytes > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch


def interleaved(streams: Iterable[Iterator[Item]], width: int) -> Iterator[Item]:
    """Items of `width` streams in turn; where one ends the next one begins.

    Each file that is written is such a stream: the kernel lets one thread at a time into a file.
    """
    waiting = iter(streams)
    running = deque(islice(waiting, width))
    while running:
        stream = running.popleft()
        for item in stream:
            yield item
            running.append(stream)
            break
        else:
            running.extendleft(islice(waiting, 1))
