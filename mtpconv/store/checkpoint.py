"""What every checkpoint on disk looks like to the rest of mtpconv.

A stored tensor is a set of chunks; a chunk is a C-contiguous byte range of one file that
holds a box of the tensor. A safetensors tensor has one chunk, a torch_dist tensor has one
per rank, layer or expert. Converting, hashing and comparing all work on chunks, so that no
reader needs code for any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from mtpconv.errors import RefusedError, UnreadableError
from mtpconv.tensors import Box, TensorSpec

#: Problems that mean some bytes could not be read at all.
_UNREADABLE = frozenset({"unreadable_file", "index_missing_file"})


class Chunk(NamedTuple):
    """A box of a tensor, stored C-contiguous at byte `start` of `file`, little-endian."""

    file: Path
    start: int
    box: Box


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the checkpoint itself, found while opening it.

    `kind` is one of the finding kinds (`unreadable_file`, `index_missing_file`,
    `index_entry_not_in_file`, `tensor_not_in_index`, `duplicate_key_in_index`,
    `duplicate_tensor`, `duplicate_tensor_conflict`, `index_total_size`, ...).
    """

    kind: str
    message: str
    file: str | None = None
    tensor: str | None = None
    tensors: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    warning: bool = False


class Checkpoint(Protocol):
    """An opened checkpoint: what it holds, where the bytes are, what is wrong with it.

    Opening reads headers and metadata only and never executes code from the files.
    `tensors` holds everything readable even if `problems` is not empty; callers that need a
    whole checkpoint call `mtpconv.store.require_sound`.
    """

    @property
    def path(self) -> Path:
        """The folder the user named."""

    @property
    def format(self) -> str:
        """`hf`, `torch_dist`, `torch` (legacy Megatron) or `manifest`."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every stored tensor; names are HF names or sharded keys."""

    @property
    def problems(self) -> Sequence[Problem]:
        """What is wrong with the files; empty for a sound checkpoint."""

    def chunks(self, name: str) -> Sequence[Chunk]:
        """The chunks of a tensor; together they tile it.

        Raises: UnreadableError if a record is corrupt; KeyError if there is no such tensor.
        """


def require_sound(checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint that has problems; warnings pass.

    Raises: UnreadableError or RefusedError that names the first problem and how many follow.
    """
    faults = [p for p in checkpoint.problems if not p.warning]
    if not faults:
        return
    faults.sort(key=lambda p: p.kind not in _UNREADABLE)
    first = faults[0]
    more = f" (and {len(faults) - 1} more problems)" if len(faults) > 1 else ""
    error = UnreadableError if first.kind in _UNREADABLE else RefusedError
    raise error(f"{first.message}{more}; `mtpconv audit {checkpoint.path}` lists every problem")
