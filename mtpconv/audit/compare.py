"""The bytes of two sides, compared tensor by tensor; streamed, nothing is held whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from mtpconv.audit.subject import Subject
from mtpconv.audit.words import Stats, as_words
from mtpconv.errors import MtpconvError, UnreadableError
from mtpconv.store.content import BLOCK, Files, Reading, blocks, fill_all, reading
from mtpconv.store.crew import Crew, batches
from mtpconv.store.hf import HfCheckpoint

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comparing the bytes of one tensor gave."""

    name: str
    same: bool
    #: words that differ; 0 where only digests were compared
    differing: int = 0
    elements: int = 0
    before: Stats | None = None
    after: Stats | None = None
    #: (`before` or `after`, one line) if a side could not be read
    unreadable: tuple[str, str] | None = None


class SideError(Exception):
    """One side could not be read."""

    def __init__(self, side: str, error: MtpconvError) -> None:
        """Remember which side."""
        super().__init__(str(error))
        self.side = side


def compare_bytes(
    before: Subject,
    after: Subject,
    names: Sequence[str],
    *,
    watch: Collection[str] = (),
    detail: bool = True,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Iterator[Outcome]:
    """Compare tensors that have the same dtype and shape on both sides.

    Statistics are gathered for the tensors in `watch` and, with `detail`, for those that differ.
    """
    own = threading.local()
    opened: list[Files] = []

    def compare(batch: Sequence[_Pair], _: Files) -> list[Outcome]:
        if not hasattr(own, "files"):
            own.files = (before.files(), after.files())
            opened.extend(own.files)
        left, right = own.files
        known = [(p.before, p.after) for p in batch if p.before is not None and p.after is not None]
        same = _same_at_once(known, left, right)
        return [
            Outcome(p.name, True, 0, p.after.spec.elements)
            if same and p.after is not None
            else compare_tensor(before, after, p.name, left, right, p.name in watch, detail)
            for p in batch
        ]

    pairs = (_pair(before, after, name, name in watch) for name in names)
    with ExitStack() as closing, Crew(workers) as crew:
        closing.callback(_close, opened)
        # Small tensors are read and compared by the block: one by one, 30,000 of them cost more
        # than their 4.7 GB.
        for outcomes in crew.map(compare, batches(pairs, lambda p: after.tensors[p.name].nbytes)):
            for outcome in outcomes:
                yield outcome
                if progress is not None:
                    progress(after.tensors[outcome.name].nbytes)


def _close(opened: Sequence[Files]) -> None:
    for files in opened:
        files.close()


class _Pair(NamedTuple):
    """A tensor and how to read both sides, where that is known and nothing else is wanted."""

    name: str
    before: Reading | None = None
    after: Reading | None = None


def _pair(before: Subject, after: Subject, name: str, watched: bool) -> _Pair:
    if watched or not before.has_bytes or not after.has_bytes:
        return _Pair(name)
    try:
        return _Pair(name, reading(before.content, name), reading(after.content, name))
    except MtpconvError:
        return _Pair(name)  # compare_tensor says which side it is


def _same_at_once(pairs: Sequence[tuple[Reading, Reading]], left: Files, right: Files) -> bool:
    """Whether all of these are the same on both sides; False if that is not known."""
    old, new = [a for a, _ in pairs], [b for _, b in pairs]
    size = sum(what.spec.nbytes for what in old)
    if size > BLOCK or size != sum(what.spec.nbytes for what in new):
        return False
    try:
        with left.buffer(size) as one, right.buffer(size) as other:
            fill_all(old, left, one)
            fill_all(new, right, other)
            return _equal(one, other)
    except MtpconvError:
        return False


def compare_tensor(
    before: Subject,
    after: Subject,
    name: str,
    left: Files,
    right: Files,
    watch: bool,
    detail: bool,
) -> Outcome:
    """Compare one tensor by the best means both sides have."""
    spec = after.tensors[name]
    try:
        if before.has_bytes and after.has_bytes:
            outcome = _compare_streams(before, after, name, left, right, watch=False)
            if outcome.same and watch:
                # The same bytes have the same statistics: they are taken once.
                both = Stats(spec.dtype)
                for block in side_blocks(after, name, right, "after"):
                    both.add(block)
                return replace(outcome, before=both, after=both)
            if outcome.same or not (watch or detail):
                return outcome
            # It differs: a second look is rare and tells how.
            return _compare_streams(before, after, name, left, right, watch=True)
        stats = Stats(spec.dtype) if watch and after.has_bytes else None
        a = _digest(before, name, left, "before", None)
        b = _digest(after, name, right, "after", stats)
        return Outcome(name, a == b, 0, spec.elements, None, stats)
    except SideError as error:
        return Outcome(name, same=False, unreadable=(error.side, str(error)))


def read_stats(subject: Subject, names: Sequence[str]) -> Iterator[Outcome]:
    """Statistics of tensors of one side."""
    with subject.files() as files:
        for name in names:
            stats = Stats(subject.tensors[name].dtype)
            try:
                for block in side_blocks(subject, name, files, "after"):
                    stats.add(block)
                yield Outcome(name, same=True, after=stats)
            except SideError as error:
                yield Outcome(name, same=False, unreadable=(error.side, str(error)))


def side_blocks(
    subject: Subject, name: str, files: Files, side: str, size: int = BLOCK
) -> Iterator[memoryview]:
    """The bytes of a tensor. Raises: SideError if they cannot be read."""
    if subject.afar:  # the local file is sparse: its zeros must not pass for weights
        raise SideError(side, UnreadableError(f"{subject.path}: only headers were fetched"))
    try:
        yield from blocks(subject.content, name, files, size)
    except MtpconvError as error:
        raise SideError(side, error) from error


def aligned(
    left: Iterator[memoryview], right: Iterator[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Two streams cut at the same places, to the end of the shorter one."""
    a = b = memoryview(b"")
    while True:
        if not len(a):
            a = next(left, memoryview(b""))
        if not len(b):
            b = next(right, memoryview(b""))
        size = min(len(a), len(b))
        if not size:
            return
        yield a[:size], b[:size]
        a, b = a[size:], b[size:]


def same_bytes(a: Subject, name_a: str, b: Subject, name_b: str, left: Files, right: Files) -> bool:
    """Whether two tensors hold the same bytes (or have the same digest)."""
    if a.tensors[name_a].nbytes != b.tensors[name_b].nbytes:
        return False
    if a.has_bytes and b.has_bytes:
        pairs = aligned(
            side_blocks(a, name_a, left, "before"), side_blocks(b, name_b, right, "after")
        )
        return all(_equal(x, y) for x, y in pairs)
    return _digest(a, name_a, left, "before", None) == _digest(b, name_b, right, "after", None)


def _compare_streams(
    before: Subject, after: Subject, name: str, left: Files, right: Files, *, watch: bool
) -> Outcome:
    spec = after.tensors[name]
    old, new = (Stats(spec.dtype), Stats(spec.dtype)) if watch else (None, None)
    differing = 0
    pairs = aligned(
        side_blocks(before, name, left, "before"), side_blocks(after, name, right, "after")
    )
    for x, y in pairs:
        if not _equal(x, y):
            if new is None:
                return Outcome(name, same=False)
            differing += int(np.count_nonzero(as_words(spec.dtype, x) != as_words(spec.dtype, y)))
        if old is not None and new is not None:
            new.add(y)
            old.add(x)
    return Outcome(name, not differing, differing, spec.elements, old, new)


def _equal(x: memoryview, y: memoryview) -> bool:
    # uint64 views compare three times as fast as bytes (facts on speed, "Limits").
    if len(x) % 8 == 0:
        return np.array_equal(np.frombuffer(x, "<u8"), np.frombuffer(y, "<u8"))
    return np.array_equal(np.frombuffer(x, "u1"), np.frombuffer(y, "u1"))


def _digest(subject: Subject, name: str, files: Files, side: str, stats: Stats | None) -> str:
    if subject.digests is not None:
        return subject.digests[name]
    hasher = blake3()
    for block in side_blocks(subject, name, files, side):
        hasher.update(block)
        if stats is not None:
            stats.add(block)
    return hasher.hexdigest()


def disk_order(subject: Subject, names: Collection[str]) -> list[str]:
    """The names as their bytes lie on disk where that is known, else sorted."""
    content = subject.content
    if isinstance(content, HfCheckpoint):
        place = {
            name: (file, header.offsets[name][0])
            for file, header in content.shards.items()
            for name in header.tensors
            if content.where.get(name) == file
        }
        return sorted(names, key=lambda n: place.get(n, ("", 0)))
    return sorted(names)
