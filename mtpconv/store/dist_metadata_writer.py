"""Writing the small files of a torch_dist checkpoint: `.metadata`, `common.pt` and their like.

Source: torch 2.14.1 torch/distributed/checkpoint/metadata.py, filesystem.py; megatron-core
0.16.1 megatron/core/dist_checkpointing/core.py; read 2026-11-29.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtpconv.errors import WriteError
from mtpconv.store.dist_folder import COMMON, CONFIG, METADATA, TRACKER, Iteration
from mtpconv.store.pickle_writer import PickleWriter, integer
from mtpconv.store.pickles import Global, Instance
from mtpconv.store.record_writer import object_record
from mtpconv.store.torch_dist_writer import Written, sync_folder, write_file
from mtpconv.store.torch_names import TORCH_DTYPES
from mtpconv.tensors import Box
from mtpconv.tiling import tiling_flaw

_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA = Global(f"{_CHECKPOINT}.metadata", "Metadata")
_TENSOR = Global(f"{_CHECKPOINT}.metadata", "TensorStorageMetadata")
_CHUNK = Global(f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata")
_BYTES = Global(f"{_CHECKPOINT}.metadata", "BytesStorageMetadata")
_INDEX = Global(f"{_CHECKPOINT}.metadata", "MetadataIndex")
_PROPERTIES = Global(f"{_CHECKPOINT}.metadata", "TensorProperties")
_FORMAT = Global(f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING")
_INFO = Global(f"{_CHECKPOINT}.filesystem", "_StorageInfo")
_LAYOUT = Global("torch.serialization", "_get_layout")
_SIZE = Global("torch", "Size")

#: Pairs of a dict added at once, as `pickle` does it: a reader holds no more on its stack.
_BATCH = 1000

_TORCH_NAMES = {name: torch_name for torch_name, (name, _) in TORCH_DTYPES.items()}


def write_metadata(folder: Path, written: Iterable[Written]) -> None:
    """Write `.metadata` for the records of all ranks.

    Law: the same records in any order give the same bytes.
    Raises: WriteError if the records of a tensor contradict each other or do not cover it.
    """
    write_file(folder / METADATA, metadata_pickle(written))
    sync_folder(folder)


def metadata_pickle(written: Iterable[Written]) -> bytes:
    """The bytes of `.metadata`; see `write_metadata`."""
    tensors: dict[str, list[Written]] = {}
    for record in sorted(written, key=lambda r: (r.key, r.offsets)):
        tensors.setdefault(record.key, []).append(record)
    for key, records in tensors.items():
        _check(key, records)
    out = _MetadataWriter()
    out.begin(_METADATA)
    out.raw(out.text("state_dict_metadata") + b"}(")
    for key, records in tensors.items():
        out.raw(out.text(key))
        out.entry(records)
    out.raw(b"u")
    out.raw(out.text("planner_data") + b"N")
    out.raw(out.text("storage_data") + b"}(")
    count = 0
    for key, records in tensors.items():
        for index, record in enumerate(records):
            out.place(key, index, record)
            count += 1
            if count % _BATCH == 0:
                out.raw(b"u(")
    out.raw(b"u")
    out.raw(out.text("storage_meta") + b"N")
    out.raw(out.text("version"))
    out.raw(out.text("1.0.0"))
    out.raw(b"ub")
    return out.finish()


def _check(key: str, records: list[Written]) -> None:
    first = records[0]
    if first.dtype is None:
        flaw = "were written twice" if len(records) > 1 else None
    elif any((r.dtype, r.shape) != (first.dtype, first.shape) for r in records):
        flaw = "have different dtypes or shapes"
    else:
        flaw = tiling_flaw(first.shape, [Box(r.offsets, r.sizes) for r in records])
    if flaw:
        raise WriteError(f"{key}: its chunks {flaw}; is the output of a rank missing?")


class _MetadataWriter(PickleWriter):
    """Pickles the classes of torch's checkpoint metadata.

    Those that there are tens of thousands of are written as calls of their classes, with a third
    of the opcodes that state by name would take: every reader spends most of its time on these.
    """

    def begin(self, cls: Global) -> None:
        """An object whose state follows; to be closed with `ub`."""
        self.raw(self.name(cls) + b")\x81}(")

    def size(self, values: tuple[int, ...]) -> None:
        """A `torch.Size`."""
        self.raw(self.numbers(values, _SIZE))

    def entry(self, records: list[Written]) -> None:
        """What `state_dict_metadata` says about a key."""
        first = records[0]
        if first.dtype is None:
            self.raw(self.name(_BYTES) + b")\x81")
            return
        self.begin(_TENSOR)
        self.raw(self.text("properties"))
        self.save(_properties(first.dtype))
        self.raw(self.text("size"))
        self.size(first.shape)
        self.raw(self.text("chunks") + b"](")
        for record in records:
            self.raw(self.name(_CHUNK))
            self.size(record.offsets)
            self.size(record.sizes)
            self.raw(b"\x86R")
        self.raw(b"eub")

    def place(self, key: str, index: int, record: Written) -> None:
        """One pair of `storage_data`; `index` is a hint where to look in the list of chunks."""
        raw = self.raw
        raw(self.name(_INDEX))
        raw(self.text(key))
        if record.dtype is None:
            raw(b"\x85R")
        else:
            self.size(record.offsets)
            raw(integer(index) + b"\x87R")
        raw(self.name(_INFO))
        raw(self.text(record.file))
        raw(integer(record.offset) + integer(record.length) + b"\x87R")


def _properties(dtype: str) -> Instance:
    """`TensorProperties`: dtype, layout, requires_grad, memory format, pin_memory."""
    layout = Instance(_LAYOUT, ("torch.strided",))
    state = (Global("torch", _TORCH_NAMES[dtype]), layout, False, Instance(_FORMAT, (0,)), False)
    return Instance(_PROPERTIES, state=state, new=True)


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """Write `common.pt`; `args`, a mapping here, becomes an `argparse.Namespace`.

    Raises: WriteError; TypeError for values that `PickleWriter.save` does not know.
    """
    state = dict(common)
    if "args" in state:
        namespace = Global("argparse", "Namespace")
        state["args"] = Instance(namespace, state=dict(state["args"]), new=True)
    write_file(folder / COMMON, object_record(state))


def write_config(folder: Path) -> None:
    """Write `metadata.json`, which tells Megatron the format.

    Raises: WriteError.
    """
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    write_file(folder / CONFIG, json.dumps(config).encode())


def write_tracker(parent: Path, iteration: Iteration) -> None:
    """Write `latest_checkpointed_iteration.txt`, which makes the checkpoint the latest one.

    Raises: WriteError.
    """
    write_file(parent / TRACKER, str(iteration).encode())
    sync_folder(parent)
