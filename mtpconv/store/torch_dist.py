"""Reading Megatron-Core torch_dist checkpoints without torch.

Source: docs/torch_dist.md.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.checkpoint import Chunk, Problem
from mtpconv.store.crc import Sealed, SealedFile
from mtpconv.store.dist_folder import (
    COMMON,
    CONFIG,
    METADATA,
    Iteration,
    find_folder,
    named_iteration,
    open_file,
    read_bounded,
)
from mtpconv.store.dist_metadata import DistMetadata, Place, StoredChunk, read_metadata
from mtpconv.store.objects import as_common, read_common, read_object
from mtpconv.store.records import Located, RecordReader
from mtpconv.store.zips import Pread
from mtpconv.tensors import TensorSpec

#: The bytes entry that holds the common state where there is no `common.pt` (megatron-core 0.19).
COMMON_STATE = "common_state/shard_0_1"

#: Bytes of a `.metadata`; 60,000 chunks with their save plans take 15 MB.
MAX_METADATA = 256 << 20

#: A record, and the tensor that it must hold.
Held = tuple[Place, str, TensorSpec]


class TorchDistCheckpoint:
    """An opened torch_dist checkpoint; implements `mtpconv.store.checkpoint.Checkpoint`.

    `folder` is the `iter_*` or `release` folder, `objects` names the bytes entries, `ignored`
    counts the optimizer entries that were left out, `common` is the common state with `args`
    as a dict. Tensors of a missing or truncated file stay in `tensors`; reading their chunks
    raises.
    """

    format = "torch_dist"

    def __init__(self, path: Path, folder: Path, iteration: Iteration) -> None:
        self.path = path
        self.folder = folder
        self.iteration = iteration
        self.common: dict[str, Any] = {}
        self._metadata = DistMetadata()
        self._problems: list[Problem] = []
        self._records = RecordReader()
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._sealed: Sealed = defaultdict(SealedFile)
        self._paths: dict[str, Path] = {}

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor that is not optimizer state, by sharded key."""
        return self._metadata.tensors

    @property
    def objects(self) -> Sequence[str]:
        """The bytes entries: `_extra_state` shards, random-generator states, ..."""
        return tuple(self._metadata.objects)

    @property
    def ignored(self) -> int:
        """How many entries of the optimizer state were left out."""
        return self._metadata.ignored

    @property
    def problems(self) -> Sequence[Problem]:
        """What is wrong with the files."""
        return (*self._problems, *self._metadata.problems)

    def chunks(self, name: str) -> Sequence[Chunk]:
        """The chunks of a tensor, located when first asked for.

        Raises: UnreadableError if a record is missing or corrupt; UnsupportedError if it is not
            contiguous or not little-endian; KeyError if there is no such tensor.
        """
        found = self._chunks.get(name)
        if found is None:
            spec = self._metadata.tensors[name]
            stored = self._metadata.chunks[name]
            places: dict[Place, Located] = {}
            # By file: there may be more of them than a process may open.
            for file, there in groupby(sorted(stored, key=_place_of), key=_file_of):
                with self._opened(file) as (read, shown):
                    for box, place in there:
                        held = TensorSpec(spec.dtype, box.sizes)
                        places[place] = self._records.find(read, place, name, held, shown)
            chunks = []
            for box, place in stored:
                path = self._path(place.file)
                start, *seal = places[place]
                chunks.append(Chunk(path, start, box))
                self._sealed[path].add(name, *seal)
            found = self._chunks[name] = tuple(chunks)
        return found

    def sealed(self) -> Sealed:
        """Where the CRC-32 of which bytes is stored, for all records that can be found."""
        for name in self.tensors:
            with suppress(UnreadableError, UnsupportedError):  # whoever reads it hears of it
                self.chunks(name)
        return self._sealed

    def _path(self, file: str) -> Path:
        path = self._paths.get(file)
        if path is None:  # one for all chunks: there are tens of thousands
            path = self._paths[file] = self.folder / file
        return path

    @contextmanager
    def _opened(self, file: str) -> Iterator[tuple[Pread, str]]:
        """Reads a file; and what messages call it."""
        fd = open_file(self._path(file))
        try:
            yield partial(os.pread, fd), file
        finally:
            os.close(fd)

    def _held(self) -> dict[str, list[Held]]:
        """The records that each file must have."""
        found: dict[str, list[Held]] = defaultdict(list)
        for name, spec in self.tensors.items():
            for box, place in self._metadata.chunks[name]:
                found[place.file].append((place, name, TensorSpec(spec.dtype, box.sizes)))
        return found

    def check_records(self) -> Sequence[Problem]:
        """Problems of the records of all tensors, at most one per file."""
        found = []
        for file, records in self._held().items():
            name = records[0][1]
            try:
                with self._opened(file) as (read, shown):
                    for place, name, spec in records:
                        self._records.find(read, place, name, spec, shown)
            except (UnreadableError, UnsupportedError) as error:
                found.append(Problem("unreadable_file", str(error), file=file, tensor=name))
        return found

    def read_object(self, name: str) -> Any:
        """The value of a bytes entry as plain data (`[None]` for an empty `_extra_state`).

        Raises: UnreadableError if the record is corrupt; KeyError if there is no such entry.
        """
        place = self._metadata.objects[name]
        where = f"{place.file}: the record of {name} at byte {place.offset:,}"
        return read_object(self.folder / place.file, place.offset, place.length, where)

    def _load(self) -> None:
        """Read metadata.json, .metadata and the common state, and compare with the files."""
        has_config = self._read_config()
        try:
            self._metadata = read_metadata(read_bounded(self.folder / METADATA, MAX_METADATA))
        except UnreadableError as error:
            self._problem(str(error), METADATA)
        else:
            self._metadata.problems.extend((*self._check_files(), *self._check_strays()))
        if not has_config and "args" in self._metadata.objects:
            raise UnsupportedError(
                f"{self.folder} was saved with --ckpt-format torch_dcp or fsdp_dtensor; "
                "save it again with --ckpt-format torch_dist"
            )
        self._read_common()

    def _problem(self, message: str, file: str) -> None:
        self._problems.append(Problem("unreadable_file", message, file=file))

    def _read_config(self) -> bool:
        """Whether metadata.json is there; refuses the formats that it names."""
        try:
            config = json.loads(read_bounded(self.folder / CONFIG, 1 << 20))
            backend = config["sharded_backend"]
        except UnreadableError as error:
            self._problem(f"{error} (Megatron does not load the checkpoint without it)", CONFIG)
            return (self.folder / CONFIG).exists()
        except (ValueError, KeyError, TypeError, RecursionError):
            self._problem("metadata.json names no sharded_backend; it is corrupt", CONFIG)
            return True
        if backend != "torch_dist":
            raise UnsupportedError(
                f"{self.folder} is a checkpoint of format {str(backend)[:40]!r}; "
                "save it again with --ckpt-format torch_dist"
            )
        return True

    def _read_common(self) -> None:
        place = self._metadata.objects.get(COMMON_STATE)
        try:
            if (self.folder / COMMON).exists() or place is None:
                self.common = read_common(self.folder)
            else:
                value = self.read_object(COMMON_STATE)
                first = value[0] if isinstance(value, list) and value else None
                self.common = as_common(first, COMMON_STATE)
        except UnreadableError as error:
            self._problem(str(error), place.file if place else COMMON)

    def _check_files(self) -> list[Problem]:
        """Files that `.metadata` names and that are missing or too short; one problem each."""
        users: dict[str, set[str]] = {}
        for name, chunks in self._metadata.chunks.items():
            for chunk in chunks:
                users.setdefault(chunk.place.file, set()).add(name)
        found = []
        for file, places in groupby(self._metadata.places, key=lambda place: place.file):
            needed = max(place.offset + place.length for place in places)
            try:
                size = (self.folder / file).stat().st_size
            except OSError as error:
                message = (
                    f"{file} is named in .metadata and cannot be read: {error.strerror}; "
                    "copy the checkpoint again"
                )
            else:
                if size >= needed:
                    continue
                message = (
                    f"{file} ends at byte {size:,} and .metadata needs {needed:,}; "
                    "it is truncated, copy it again"
                )
            names = tuple(sorted(users.get(file, ())))
            found.append(Problem("unreadable_file", message, file=file, tensors=names))
        return found

    def _check_strays(self) -> list[Problem]:
        """Files that `.metadata` does not name: rests of another save, or a forgotten rank."""
        named = {place.file for place in self._metadata.places}
        strays = sorted(p.name for p in self.folder.glob("*.distcp") if p.name not in named)
        if not strays:
            return []
        more = f" and {len(strays) - 1} more are" if len(strays) > 1 else " is"
        message = f"{strays[0]!r}{more} not named in .metadata and not read"
        kind = "tensor_not_in_index"
        return [Problem(kind, message, file=strays[0], files=tuple(strays), warning=True)]


def _place_of(chunk: StoredChunk) -> Place:
    return chunk.place


def _file_of(chunk: StoredChunk) -> str:
    return chunk.place.file


def open_torch_dist(path: Path | str) -> TorchDistCheckpoint:
    """Open a torch_dist checkpoint: its parent folder, or an `iter_*` or `release` folder.

    Reads `.metadata`, `metadata.json` and the common state; nothing from them is executed.
    Raises: UnreadableError if there is no checkpoint; UnsupportedError for other formats of
        Megatron. Damage is reported in `problems`.
    """
    path = Path(path)
    folder, iteration, problem = find_folder(path)
    checkpoint = TorchDistCheckpoint(path, folder, iteration)
    if problem is not None:
        checkpoint._problems.append(problem)
        return checkpoint
    if any(folder.glob("mp_rank_*")):
        raise UnsupportedError(
            f"{folder} is a legacy checkpoint (mp_rank_* folders); load it in Megatron and save "
            "it again with --ckpt-format torch_dist"
        )
    checkpoint._load()
    if named_iteration(folder) is None:
        saved = checkpoint.common.get("iteration")
        checkpoint.iteration = saved if isinstance(saved, int) else "release"
    return checkpoint
