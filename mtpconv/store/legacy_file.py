"""One `model_optim_rng.pt`: where the tensors of one rank's model lie, read without torch.

The file is one `torch.save` archive: a pickle with everything, and a file for each storage. Only
`model` (or `model0`, `model1`, ... with virtual pipeline stages), `args` and two numbers are
looked at; optimizer, random states and schedulers are counted or skipped.

Source: megatron-core 0.16.1 and 0.19.2 megatron/training/checkpointing.py `generate_state_dict`,
read 2026-11-29.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.dist_folder import open_file
from mtpconv.store.objects import plain
from mtpconv.store.pickles import Instance, load_pickle
from mtpconv.store.records import StoredTensor, stored_tensor
from mtpconv.store.torch_names import allow_object
from mtpconv.store.zips import Archive

NAME = "model_optim_rng.pt"
#: Bytes of the pickle: 150 for a tensor, three tensors with their optimizer state.
_MAX_HEAD = 256 << 20
_MAX_ENTRIES = 1_000_000
_MODEL = re.compile(r"model(\d*)")


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of one rank: `stored` describes it, its bytes begin at `start` of `file`.

    They are in the storage that begins at `storage_start` and has the CRC-32 `crc`.
    """

    file: Path
    start: int
    stored: StoredTensor
    storage_start: int
    crc: int


@dataclass(frozen=True, slots=True)
class RankFile:
    """What one rank saved."""

    #: module names of each virtual pipeline stage, in order
    stages: tuple[Mapping[str, Placed], ...]
    args: Mapping[str, Any]
    iteration: int | None
    #: tensors of the optimizer state, left out
    ignored: int


def read_rank(file: Path) -> RankFile:
    """Read one rank's file.

    Raises: UnreadableError if it is damaged or names code that would run in torch;
    UnsupportedError if its model is not Megatron-Core's.
    """
    where = f"{file.parent.name}/{file.name}"
    fd = open_file(file)
    try:
        archive = Archive(partial(os.pread, fd), 0, os.fstat(fd).st_size, where, _MAX_ENTRIES)
        data = archive.content("data.pkl", _MAX_HEAD)
        order = archive.content("byteorder", 16)
    finally:
        os.close(fd)
    if data is None:
        raise UnreadableError(f"{where} has no data.pkl; the file is corrupt, copy it again")
    if order not in (None, b"little"):
        raise UnsupportedError(f"{where} is not little-endian; save it again on another machine")
    state = load_pickle(data, where, allow_object, persistent=True)
    if not isinstance(state, dict):
        raise UnreadableError(f"{where} holds no dict; it is not a Megatron checkpoint")
    named = {int(m[1] or 0): k for k in state if type(k) is str and (m := _MODEL.fullmatch(k))}
    if not named:
        raise UnreadableError(f"{where} holds no model; it is not a Megatron checkpoint")
    args = plain(state.get("args"), where)
    iteration = state.get("iteration")
    return RankFile(
        tuple(_placed(state[named[i]], archive, file, where) for i in sorted(named)),
        args if isinstance(args, dict) else {},
        iteration if isinstance(iteration, int) else None,
        _count_tensors(state.get("optimizer")),
    )


def _placed(model: Any, archive: Archive, file: Path, where: str) -> dict[str, Placed]:
    items = _items(model)
    if items is None:
        raise UnreadableError(f"{where} holds a model that is no dict; it is damaged")
    if any(k in ("language_model", "model") and _items(v) is not None for k, v in items.items()):
        raise UnsupportedError(
            f"{where} was made by Megatron-LM before Megatron-Core (--use-legacy-models); "
            "convert it with Megatron's own tools first"
        )
    found = {}
    for key, value in items.items():
        name = key.removeprefix("module.")
        if name.endswith("_extra_state") or not _is_tensor(value):
            continue
        stored = stored_tensor(value, f"{where}: {name[:200]}")
        entry = archive.entries.get(f"data/{stored.storage}")
        if entry is None or entry.size != stored.storage_bytes:
            raise UnreadableError(
                f"{where}: {name[:200]} should have {stored.storage_bytes:,} bytes of data and "
                f"has {entry.size if entry else 0:,}; the file is corrupt, copy it again"
            )
        found[name] = Placed(file, entry.start + stored.view_start, stored, entry.start, entry.crc)
    return found


def _items(value: Any) -> dict[str, Any] | None:
    """A dict or OrderedDict with names as keys, None for anything else."""
    if type(value) is Instance and str(value.of) == "collections.OrderedDict":
        value = dict(value.items or [])
    if isinstance(value, dict) and all(type(k) is str for k in value):
        return value
    return None


def _is_tensor(value: Any) -> bool:
    return type(value) is Instance and value.of.name.startswith("_rebuild_")


def _count_tensors(value: Any) -> int:
    """Tensors anywhere in a value; parts that the pickle shares are counted once."""
    count, seen, todo = 0, set(), [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict | list | tuple | Instance):
            if id(part) in seen:
                continue
            seen.add(id(part))
        if _is_tensor(part):
            count += 1
        elif type(part) is Instance:
            todo += [part.args, part.state, *(part.items or ())]
        elif isinstance(part, dict):
            todo += part.values()
        elif isinstance(part, list | tuple):
            todo += part
    return count
