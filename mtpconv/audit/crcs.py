"""CRC-32 of the records of a Megatron side, checked along with the bytes that an audit reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mtpconv.audit.codes import finding
from mtpconv.audit.finding import Finding
from mtpconv.audit.subject import Subject
from mtpconv.ranks import Ranks, share
from mtpconv.store.content import pieces
from mtpconv.store.crc_check import CrcCheck, Range


def with_crcs(subject: Subject) -> Subject:
    """The side with a check of all its records; whatever is read of it comes by there."""
    stored = subject.megatron
    if stored is None or not subject.has_bytes:
        return subject
    return replace(subject, crcs=CrcCheck(stored.sealed()))


def pool_crcs(subject: Subject, ranks: Ranks) -> None:
    """Every rank knows what all of them have read."""
    if subject.crcs is not None and ranks.size > 1:
        subject.crcs.pool(ranks.gather("crcs", subject.crcs.known()))


def crc_findings(
    subject: Subject,
    *,
    whole: bool,
    prefix: str = "",
    workers: int | None = None,
    ranks: Ranks | None = None,
) -> Iterator[Finding]:
    """Records that do not have their CRC-32; with `whole`, what was not read yet is read here.

    Several `ranks` must know the same of what was read; what was not, each reads a stretch of.
    """
    check = subject.crcs
    if check is None:
        return
    if whole:
        known = {p.file for p in subject.problems}
        rest = [n for n in check.rest if check.range(n).file.name not in known]
        ranks = ranks or Ranks()
        check.read(share(rest, check.nbytes, ranks), workers)
        pool_crcs(subject, ranks)
    broken = check.broken
    names = _names(subject, broken)
    for one in broken:
        yield finding(
            "unreadable_file", "error", prefix + one.fault,
            file=one.file.name, tensors=tuple(sorted(names.get(one, ()))),
        )  # fmt: skip


def crc_notes(subject: Subject) -> tuple[str, ...]:
    """Records of which nobody can tell whether they are whole."""
    count = subject.crcs.unsealed if subject.crcs is not None else 0
    if not count:
        return ()
    return (f"{subject.path}: {count} records have no CRC-32; bits that flipped are not seen",)


def _names(subject: Subject, broken: Sequence[Range]) -> dict[Range, set[str]]:
    """The names under which the audit knows what lies in broken records."""
    found: dict[Range, set[str]] = {one: set() for one in broken}
    by_file: dict[Path, list[Range]] = {}
    for one in broken:  # in the order of files and places
        by_file.setdefault(one.file, []).append(one)
    for name in subject.tensors if broken else ():
        for piece in pieces(subject.stored, name):
            ranges = by_file.get(piece.file, []) if isinstance(piece.file, Path) else []
            at = bisect_right(ranges, piece.start, key=lambda r: r.start) - 1
            if at >= 0 and piece.start < ranges[at].start + ranges[at].nbytes:
                found[ranges[at]].add(name)
    return found
