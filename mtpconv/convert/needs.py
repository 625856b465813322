"""What a conversion needs: disk and memory, as bounds that are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from mtpconv.ranks import Ranks
from mtpconv.store.crew import default_jobs

#: Units: bytes. What filesystems give out at once.
_BLOCK = 4096
#: Units: bytes. A tensor's rows in header, manifest and journal, besides its name in each.
_ROWS = 120 + 140 + 80

#: Units: bytes. Resident memory, measured 2026-11-29 with Python 3.11 on GLM-5.2's 59,585 names,
#: DeepSeek-R1's 91,991 with scales, and tensors of 311 MB: 52 MB without any work, 9 MB for each
#: thread, 2.8 KB a tensor to Megatron, 5.0 KB back, 0.9 KB more where ranks exchange digests.
_BASE, _THREAD, _RANKS = 56_000_000, 12_000_000, 1_000
TO_MCORE, TO_HF = 3_000, 5_200


def files_need(folder: Path, names: Iterable[str]) -> int:
    """Disk for copies of these files, in bytes."""
    return sum(-(-(folder / name).stat().st_size // _BLOCK) * _BLOCK for name in names)


def names_need(names: Collection[str]) -> int:
    """Disk to describe these tensors, the journal included, in bytes."""
    return sum(3 * len(name.encode()) + _ROWS for name in names)


def memory_need(tensors: int, each: int, jobs: int | None, ranks: Ranks) -> int:
    """Resident memory at its peak, in bytes; `each` is `TO_MCORE` or `TO_HF`."""
    more = _RANKS if ranks.size > 1 else 0
    return _BASE + _THREAD * (jobs or default_jobs()) + (each + more) * tensors
