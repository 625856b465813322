"""Reading legacy Megatron checkpoints: one file per rank, put together by names and shapes.

`--ckpt-format torch` writes `iter_*/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`: what each rank's
modules hold, under module names, with layers and experts counted from 0 on every rank. Here the
ranks are merged under the sharded keys of torch_dist, one layer and one expert each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.checkpoint import Chunk, Problem
from mtpconv.store.content import Files
from mtpconv.store.crc import Sealed, SealedFile
from mtpconv.store.dist_folder import Iteration, find_folder
from mtpconv.store.legacy_experts import experts_apart
from mtpconv.store.legacy_file import NAME, Placed, RankFile, read_rank
from mtpconv.store.legacy_names import Cut, Place, cut_of, place_of
from mtpconv.store.torch_dist import TorchDistCheckpoint, open_torch_dist
from mtpconv.tensors import Box, Shape, TensorSpec

_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MAX_RANKS = 65_536
_COMPARE = 4 << 20


@dataclass(frozen=True, slots=True)
class Rank:
    """Tensor-, pipeline- and expert-parallel rank of one folder."""

    tensor: int
    pipeline: int
    expert: int
    folder: str


class LegacyCheckpoint:
    """A legacy checkpoint with all ranks merged; see `mtpconv.store.checkpoint.Checkpoint`."""

    format = "torch"

    def __init__(self, path: Path, folder: Path, iteration: Iteration) -> None:
        self.path = path
        self.folder = folder
        self.iteration = iteration
        self.tensors: dict[str, TensorSpec] = {}
        self.problems: list[Problem] = []
        #: `args` as a dict, under that name as in torch_dist
        self.common: dict[str, Any] = {}
        #: tensors of the optimizer state that were left out
        self.ignored = 0
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._sealed: Sealed = {}

    def chunks(self, name: str) -> Sequence[Chunk]:
        """One chunk per rank that holds a part; two where gate and up are cut apart."""
        return self._chunks[name]

    def sealed(self) -> Sealed:
        """Where the CRC-32 of which bytes is stored."""
        return self._sealed


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has of a tensor."""

    rank: Rank
    placed: Placed
    cut: Cut
    #: how many ranks share it
    ways: int


#: A Megatron checkpoint of either format.
MegatronCheckpoint = TorchDistCheckpoint | LegacyCheckpoint


def open_megatron(path: Path) -> MegatronCheckpoint:
    """Open a Megatron checkpoint of either format, by what lies in its folder.

    Raises: as `open_torch_dist` and `open_legacy`.
    """
    folder, _, problem = find_folder(path)
    if problem is None and any(folder.glob("mp_rank_*")):
        return open_legacy(path)
    return open_torch_dist(path)


def open_legacy(path: Path) -> LegacyCheckpoint:
    """Open a legacy checkpoint and compare what several ranks hold alike.

    Raises: UnreadableError if a rank is missing or damaged; UnsupportedError if a tensor is cut
    in a way that is not known.
    """
    folder, iteration, _ = find_folder(path)
    names = sorted(p.name for p in folder.glob("mp_rank_*"))
    if not names or len(names) > _MAX_RANKS:
        raise UnreadableError(f"{folder}: holds {len(names)} mp_rank_* folders; name a checkpoint")
    first = read_rank(folder / names[0] / NAME)
    sizes = _sizes(first.args)
    ranks = [_rank(name, sizes, folder) for name in names]
    _require_all(ranks, sizes, folder)
    files = {r: first if i == 0 else read_rank(folder / r.folder / NAME)
             for i, r in enumerate(ranks)}  # fmt: skip
    files = {rank: _apart(file, rank, sizes["expert"], first.args) for rank, file in files.items()}
    found = LegacyCheckpoint(path, folder, iteration)
    found.common = {"args": dict(first.args), "iteration": first.iteration}
    found.ignored = sum(file.ignored for file in files.values())
    parts = _parts(files, sizes, first.args)
    with Files() as reading:
        for key, held in sorted(parts.items()):
            _merge(found, key, held, reading)
        _drop_tied_head(found, first.args, reading)
    return found


def _apart(file: RankFile, rank: Rank, ranks: int, args: Mapping[str, Any]) -> RankFile:
    where = f"{rank.folder}/{NAME}"
    stages = (experts_apart(stage, ranks, args, where) for stage in file.stages)
    return replace(file, stages=tuple(stages))


def _sizes(args: Mapping[str, Any]) -> dict[str, int]:
    def size(name: str, otherwise: int = 1) -> int:
        value = args.get(name)
        return value if type(value) is int and 0 < value <= _MAX_RANKS else otherwise

    tensor = size("tensor_model_parallel_size")
    experts = size("expert_tensor_parallel_size", tensor)
    if experts not in (1, tensor):
        raise UnsupportedError(
            f"expert_tensor_parallel_size {experts} with tensor_model_parallel_size {tensor} is "
            "not merged; save the checkpoint again with --ckpt-format torch_dist"
        )
    return {
        "tensor": tensor,
        "pipeline": size("pipeline_model_parallel_size"),
        "expert": size("expert_model_parallel_size"),
        "expert_tensor": experts,
    }


def _rank(name: str, sizes: Mapping[str, int], folder: Path) -> Rank:
    found = _RANK.fullmatch(name)
    numbers = [int(n) for n in found.groups() if n is not None] if found else []
    wanted = 1 + (sizes["pipeline"] > 1) + (sizes["expert"] > 1)
    if len(numbers) != wanted:
        raise UnreadableError(
            f"{folder / name}: its name and the parallel sizes in args do not fit together"
        )
    tensor, *others = numbers
    pipeline = others.pop(0) if sizes["pipeline"] > 1 else 0
    return Rank(tensor, pipeline, others.pop(0) if others else 0, name)


def _require_all(ranks: Sequence[Rank], sizes: Mapping[str, int], folder: Path) -> None:
    """Every tensor-parallel rank of every stage, and every expert-parallel one."""
    for stage in range(sizes["pipeline"]):
        here = [r for r in ranks if r.pipeline == stage]
        for kind, have in (
            ("tensor", {r.tensor for r in here}),
            ("expert", {r.expert for r in here}),
        ):
            absent = sorted(set(range(sizes[kind])) - have)
            if absent:
                raise UnreadableError(
                    f"{folder}: {kind}-parallel rank {absent[0]} of pipeline stage {stage} is "
                    f"missing ({len(absent)} of {sizes[kind]}); copy all mp_rank_* folders"
                )


def _parts(
    files: Mapping[Rank, RankFile], sizes: Mapping[str, int], args: Mapping[str, Any]
) -> dict[str, list[_Part]]:
    """What the ranks hold, by sharded key."""
    found: dict[str, list[_Part]] = {}
    for rank, stage, first_layer in _layer_offsets(files):
        where = f"{rank.folder}/{NAME}"
        tensors = {n: place_of(n) for n in files[rank].stages[stage]}
        local = _local_experts(tensors.values())
        for name, place in tensors.items():
            placed = files[rank].stages[stage][name]
            key = place.sharded_key(first_layer, rank.expert * local)
            ways = sizes["tensor" if place.expert is None else "expert_tensor"]
            rows = placed.stored.shape[0] if placed.stored.shape else 0
            cut = cut_of(key, rows, ways, args, where)
            found.setdefault(key, []).append(_Part(rank, placed, cut, ways))
    return found


def _layer_offsets(files: Mapping[Rank, RankFile]) -> Iterator[tuple[Rank, int, int]]:
    """Each rank and virtual stage with the number of its first layer.

    The first virtual stage of every pipeline rank comes before the second of any.
    """
    stages = max(len(file.stages) for file in files.values())
    done = 0
    for stage in range(stages):
        for pipeline in sorted({r.pipeline for r in files}):
            here = [r for r in files if r.pipeline == pipeline and stage < len(files[r].stages)]
            layers = 0
            for rank in here:
                yield rank, stage, done
                numbers = [place_of(n).layer for n in files[rank].stages[stage]]
                layers = max(layers, *(n + 1 for n in numbers if n is not None), 0)
            done += layers


def _local_experts(places: Iterable[Place]) -> int:
    return max((p.expert + 1 for p in places if p.expert is not None), default=0)


def _merge(found: LegacyCheckpoint, key: str, parts: list[_Part], files: Files) -> None:
    """Make one tensor of what the ranks hold; what they hold alike must be the same bytes."""
    by_rank: dict[int, _Part] = {}
    for part in parts:
        at = 0 if part.cut == "whole" else part.rank.tensor
        known = by_rank.setdefault(at, part)
        if known is not part and not _same(known.placed, part.placed, files):
            found.problems.append(
                Problem(
                    "duplicate_tensor_conflict",
                    f"{key} differs between {known.rank.folder} and {part.rank.folder}, which "
                    "must hold the same; the checkpoint is damaged or of several saves",
                    tensor=key,
                    files=(known.rank.folder, part.rank.folder),
                )
            )
    ordered = [by_rank[at] for at in sorted(by_rank)]
    for part in ordered:
        placed = part.placed
        found._sealed.setdefault(placed.file, SealedFile()).add(
            key, placed.storage_start, placed.stored.storage_bytes, placed.crc
        )
    wanted = 1 if ordered[0].cut == "whole" else ordered[0].ways
    if len(ordered) != wanted:
        raise UnreadableError(
            f"{found.folder}: {len(ordered)} of the {wanted} ranks that share {key} have it; "
            "copy all mp_rank_* folders"
        )
    first = ordered[0].placed.stored
    if any((p.placed.stored.dtype, p.placed.stored.shape) != (first.dtype, first.shape)
           for p in ordered):  # fmt: skip
        raise UnreadableError(f"{found.folder}: {key} has other shapes on other ranks")
    shape = list(first.shape)
    if ordered[0].cut != "whole":
        shape[ordered[0].cut == "columns"] *= len(ordered)
    found.tensors[key] = TensorSpec(first.dtype, tuple(shape))
    found._chunks[key] = tuple(
        chunk
        for number, part in enumerate(ordered)
        for chunk in _chunks(part, number, len(ordered))
    )


def _chunks(part: _Part, number: int, ranks: int) -> Iterator[Chunk]:
    stored, start = part.placed.stored, part.placed.start
    if part.cut in ("whole", "rows"):
        first = number * stored.shape[0] if part.cut == "rows" else 0
        yield Chunk(part.placed.file, start, _box(stored.shape, 0, first))
    elif part.cut == "columns":
        yield Chunk(part.placed.file, start, _box(stored.shape, 1, number * stored.shape[1]))
    else:
        half = (stored.shape[0] // 2, *stored.shape[1:])
        for side in (0, 1):
            at = start + side * stored.view_bytes // 2
            yield Chunk(part.placed.file, at, _box(half, 0, (side * ranks + number) * half[0]))


def _box(sizes: Shape, axis: int, first: int) -> Box:
    return Box(tuple(first if a == axis else 0 for a in range(len(sizes))), sizes)


def _drop_tied_head(found: LegacyCheckpoint, args: Mapping[str, Any], files: Files) -> None:
    """The last pipeline stage has an embedding of its own under the head's name, if tied."""
    head, embedding = "output_layer.weight", "embedding.word_embeddings.weight"
    untied = args.get("untie_embeddings_and_output_weights")
    if untied is not False or head not in found.tensors or embedding not in found.tensors:
        return
    pairs = zip(found._chunks[head], found._chunks[embedding], strict=True)
    size = found.tensors[head].nbytes // max(len(found._chunks[head]), 1)
    if found.tensors[head] == found.tensors[embedding] and all(
        _same_bytes((a.file, a.start), (b.file, b.start), size, files) for a, b in pairs
    ):
        del found.tensors[head], found._chunks[head]


def _same(a: Placed, b: Placed, files: Files) -> bool:
    if (a.stored.dtype, a.stored.shape) != (b.stored.dtype, b.stored.shape):
        return False
    return _same_bytes((a.file, a.start), (b.file, b.start), a.stored.view_bytes, files)


def _same_bytes(a: tuple[Path, int], b: tuple[Path, int], size: int, files: Files) -> bool:
    for at in range(0, size, _COMPARE):
        here = min(_COMPARE, size - at)
        left, right = bytearray(here), bytearray(here)
        files.read_into(a[0], a[1] + at, memoryview(left))
        files.read_into(b[0], b[1] + at, memoryview(right))
        if left != right:
            return False
    return True
