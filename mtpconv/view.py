"""A torch_dist checkpoint seen under HF names, tensor by tensor, without converting anything.

The audit across formats, the export and the verification all read the Megatron side through
this view; there is no other code that goes from Megatron to HF.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from mtpconv.mapping.layouts import Address, Layout, as_stored, detect_layout
from mtpconv.mapping.ops import Move, ShapeError
from mtpconv.mapping.plan import Plan, Step, padded
from mtpconv.mapping.producers import Trait, doubts, traits
from mtpconv.ranges import compress
from mtpconv.store.checkpoint import Checkpoint, Chunk, Problem
from mtpconv.store.content import Files, Piece, Run, blocks_of, pieces, stretch
from mtpconv.store.dist_folder import TRACKER
from mtpconv.tensors import DTYPE_BITS, Box, TensorSpec


class HfView:
    """The HF tensors that a torch_dist checkpoint holds under a plan.

    `tensors` has every HF name whose Megatron tensor is there with the right shape; what is
    not is in `missing`, sharded keys that no step names are in `unmapped`, and what is wrong
    otherwise is in `problems`. `carried` supplies tensors that Megatron has no place for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        layout: Layout | None = None,
        carried: Checkpoint | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.layout = layout or detect_layout(plan, checkpoint.tensors.keys())
        self.plan = as_stored(plan, self.layout)
        self.tensors: dict[str, TensorSpec] = {}
        self.problems: list[Problem] = list(checkpoint.problems)
        #: by HF name: the steps that make it or a part of it, and where
        self._steps: dict[str, tuple[tuple[Step, Address], ...]] = {}
        self._aliases: dict[str, str] = {}
        self._carried = carried
        self._chunks = _ChunkIndex(checkpoint)
        self._known_cuts: dict[tuple[int, int, int, str], _Cuts | None] = {}
        self._place_steps()
        self._place_rest()

    @property
    def path(self) -> Path:
        """The folder the user named."""
        return self.checkpoint.path

    @property
    def format(self) -> str:
        """That of the Megatron checkpoint."""
        return self.checkpoint.format

    @cached_property
    def traits(self) -> tuple[Trait, ...]:
        """Whose work it is, as far as keys and files tell."""
        folder = getattr(self.checkpoint, "folder", None)
        files = [p.name for p in folder.iterdir()] if folder is not None else []
        if folder is not None and (folder.parent / TRACKER).exists():
            files += [f"../{p.name}" for p in folder.parent.iterdir()]
        return traits(self.checkpoint.tensors.keys(), files)

    @property
    def dialect(self) -> str:
        """How the Megatron side is spelled, and by whom."""
        return "; ".join((self.layout.name, *(t.name for t in self.traits)))

    def remarks(self, *, ours: bool) -> Iterator[str]:
        """What its names say about tensors that do not fit, and, unless `ours`, do not say."""
        if self.unmapped or self.missing:
            for trait in self.traits:
                if trait.refused is not None:
                    yield f"{self.path}: {trait.name}: {trait.refused}"
        if not ours:
            # Megatron itself loads no checkpoint of the other kind.
            reordered = any(dialect.reordered for dialect in self.layout.dialects)
            judge = "audit against its HuggingFace original" if reordered else "parity"
            for line in doubts(self.plan):
                yield f"{self.path}: not told by bytes, {line}; mtpconv {judge} decides"

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Never answers: HF tensors are cut out of chunks; ask for `pieces`."""
        raise NotImplementedError(name)

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of an HF tensor lie in the Megatron checkpoint."""
        alias = self._aliases.get(name)
        if alias is not None:
            return self.pieces(alias)
        if name not in self._steps and self._carried is not None:
            return pieces(self._carried, name)
        found: list[Piece] = []
        for step, address in self._steps[name]:
            operand = step.hf.index(name)
            for move in step.op.moves([s.shape for s in step.specs]):
                if move.operand == operand:
                    found += self._move_pieces(move, address)
        return found

    def runs(self, name: str) -> Sequence[Run] | None:
        """The runs of an HF tensor that lies in one whole chunk; None: ask for its pieces.

        This is what nearly every tensor of a converted checkpoint is, at a sixth of the cost.
        """
        if name not in self._steps:
            name = self._aliases.get(name, name)
        steps = self._steps.get(name)
        if steps is None or len(steps) != 1:
            return None
        step, address = steps[0]
        chunks = self._chunks.near(address.key, address.index)
        cuts = self._cuts(step, step.hf.index(name))
        if cuts is None or len(chunks) != 1:
            return None
        file, start, box = chunks[0]
        entries = max(box.sizes[: len(address.index)], default=1)
        if entries != 1 or prod(box.sizes) != cuts[0]:  # of several entries, or a part
            return None
        return [Run(at, size, file, start + skip) for at, size, skip in cuts[1]]

    def _cuts(self, step: Step, operand: int) -> _Cuts | None:
        """Elements of a Megatron tensor, and where the stretches of an operand lie in it."""
        spec = self.tensors[step.hf[operand]]
        # The steps hold ops and specs as long as this lives, so their ids name them.
        at = (id(step.op), id(step.specs), operand, spec.dtype)
        try:
            return self._known_cuts[at]
        except KeyError:
            return self._known_cuts.setdefault(at, _cuts(step, operand, spec))

    def nonzero_padding(self) -> Iterator[tuple[str, int]]:
        """HF names whose Megatron tensor has padding rows that are not zero, with their number.

        Padding is cut on export; rows that hold numbers were trained and must not vanish.
        """
        with Files() as files:
            for step in self._padded_steps():
                address = self.layout.address(step.key, self.plan.geometry)
                spec, first = step.specs[0], step.specs[0].shape[0]
                rows = step.shape[0] - first
                box = Box((first, *(0 for _ in spec.shape[1:])), (rows, *spec.shape[1:]))
                whole = Box.whole((rows, *spec.shape[1:]))
                parts = list(self._move_pieces(Move(0, whole, box), address))
                padding = TensorSpec(spec.dtype, whole.sizes)
                if any(np.frombuffer(b, "u1").any() for b in blocks_of(padding, parts, files)):
                    yield step.hf[0], rows

    def _padded_steps(self) -> Iterator[Step]:
        seen = set()
        for entries in self._steps.values():
            for step, _ in entries:
                if step.op.name == "pad_rows" and step.key not in seen:
                    seen.add(step.key)
                    if step.shape != step.specs[0].shape:
                        yield step

    def _place_steps(self) -> None:
        stored = self.checkpoint.tensors
        used: set[str] = set()
        parts: dict[str, int] = {}
        missing: dict[str, None] = {}
        specs: dict[TensorSpec, TensorSpec] = {}  # few differ: said once each
        for planned in self.plan.steps:
            address = self.layout.address(planned.key, self.plan.geometry)
            spec = stored.get(address.key)
            if spec is None:
                missing.update(dict.fromkeys(planned.hf))
                continue
            used.add(address.key)
            step = _fitted(planned, spec, address)
            if step is None:
                self._misshaped(planned, spec, address)
                continue
            use = ((step, address),)  # the same one for all names of a step
            for operand, name in enumerate(step.hf):
                self._steps[name] = self._steps[name] + use if name in self._steps else use
                if step.op.partial:
                    moves = step.op.moves([s.shape for s in step.specs])
                    taken = sum(m.hf.elements for m in moves if m.operand == operand)
                    parts[name] = parts.get(name, 0) + taken
                of_hf = TensorSpec(spec.dtype, step.specs[operand].shape)
                self.tensors[name] = specs.setdefault(of_hf, of_hf)
        for name, count in parts.items():
            if count != self.tensors[name].elements:
                del self.tensors[name]
                missing[name] = None
        self.missing = list(missing)
        self.unmapped = [key for key in stored if key not in used]

    def _place_rest(self) -> None:
        for copy in self.plan.copies:
            if self._carried is not None and copy.hf in self._carried.tensors:
                continue
            if copy.of in self.tensors:
                self._aliases[copy.hf] = copy.of
                self.tensors[copy.hf] = self.tensors[copy.of]
            else:
                self.missing.append(copy.hf)
        if self._carried is not None:
            # Originals of what Megatron holds changed stand for nothing that it lacks.
            beside = self._carried.tensors.items()
            self.tensors.update((n, s) for n, s in beside if n not in self.plan.arithmetic)

    def _misshaped(self, step: Step, spec: TensorSpec, address: Address) -> None:
        try:
            wanted = f"config makes it {[*address.lead, *step.shape]}"
        except ShapeError as error:  # the config contradicts itself
            wanted = f"the config makes none: {error}"
        message = f"{address.key}: shape {list(spec.shape)}, {wanted}"
        for name in step.hf:
            self.problems.append(Problem("shape_mismatch", message, tensor=name))

    def _move_pieces(self, move: Move, address: Address) -> Iterator[Piece]:
        rank = len(address.index)
        whole = Box(
            (*address.index, *move.mcore.offsets), (*(1 for _ in range(rank)), *move.mcore.sizes)
        )
        for chunk in self._chunks.near(address.key, address.index):
            inside = chunk.box.intersect(whole)
            if inside is None:
                continue
            in_chunk = Box(
                tuple(a - b for a, b in zip(inside.offsets, chunk.box.offsets, strict=True)),
                inside.sizes,
            )
            box = _sub_box(move, Box(inside.offsets[rank:], inside.sizes[rank:]))
            yield Piece(box, chunk.file, chunk.start, chunk.box.sizes, in_chunk, move.swap)


_Cuts = tuple[int, list[tuple[int, int, int]]]


def _cuts(step: Step, operand: int, spec: TensorSpec) -> _Cuts | None:
    shapes = [s.shape for s in step.specs]
    stored = step.op.shape(shapes)
    width = DTYPE_BITS[spec.dtype] // 8
    found = []
    for move in step.op.moves(shapes):
        if move.operand != operand or not move.hf.elements:
            continue
        there, here = stretch(spec.shape, move.hf), stretch(stored, move.mcore)
        if move.swap or there is None or here is None or not width:
            return None
        found.append((there * width, move.hf.elements * width, here * width))
    found.sort()
    if sum(size for _, size, _ in found) != spec.nbytes:
        return None
    return prod(stored), found


class _ChunkIndex:
    """Chunks of a key by their leading offsets: 256 experts must not cost 256 x 256 steps."""

    def __init__(self, checkpoint: Checkpoint, keep: int = 4) -> None:
        self._checkpoint = checkpoint
        self._keep = keep
        self._known: OrderedDict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = (
            OrderedDict()
        )

    def near(self, key: str, index: tuple[int, ...]) -> Sequence[Chunk]:
        """Chunks that may hold entry `index` of the leading axes."""
        known = self._known.get((key, len(index)))
        if known is None:
            known = {}
            for chunk in self._checkpoint.chunks(key):
                lead = chunk.box.sizes[: len(index)]
                at = chunk.box.offsets[: len(index)]
                if max(lead, default=1) == 1:
                    known.setdefault(at, []).append(chunk)
                    continue
                # A chunk that spans several entries is filed under each of them.
                for spot in np.ndindex(*lead):
                    place = tuple(a + int(b) for a, b in zip(at, spot, strict=True))
                    known.setdefault(place, []).append(chunk)
            self._known[key, len(index)] = known
            while len(self._known) > self._keep:
                self._known.popitem(last=False)
        return known.get(index, ())


def _fitted(step: Step, spec: TensorSpec, address: Address) -> Step | None:
    """The step with its shape as stored (padding rows), None if it does not fit."""
    rank = len(address.lead)
    if spec.shape[:rank] != address.lead:
        return None
    stored = spec.shape[rank:]
    try:
        if stored == step.shape:
            return step
        if step.op.name == "pad_rows" and stored and stored[1:] == step.shape[1:]:
            grown = padded(step, stored[0])
            return grown if grown.shape == stored else None
    except ShapeError:
        return None
    return None


def _sub_box(move: Move, inside: Box) -> Box:
    """The part of the move's HF box that corresponds to a part of its Megatron box."""
    shift = [a - b for a, b in zip(inside.offsets, move.mcore.offsets, strict=True)]
    sizes = list(inside.sizes)
    if move.swap:
        shift[-2:] = shift[:-3:-1]
        sizes[-2:] = sizes[:-3:-1]
        full = [move.mcore.sizes[i] for i in range(len(shift))]
        full[-2:] = full[:-3:-1]
    else:
        full = list(move.mcore.sizes)
    # Axes of size 1 may stand on one side only; the others correspond in order.
    parts = [(s, n) for s, n, f in zip(shift, sizes, full, strict=True) if f != 1]
    offsets, lengths, at = [], [], 0
    for offset, size in zip(move.hf.offsets, move.hf.sizes, strict=True):
        if size == 1:
            offsets.append(offset)
            lengths.append(1)
        else:
            offsets.append(offset + parts[at][0])
            lengths.append(parts[at][1])
            at += 1
    return Box(tuple(offsets), tuple(lengths))


def describe_missing(view: HfView, names: Collection[str]) -> str:
    """One line that says which HF tensors the Megatron checkpoint lacks."""
    regions: Mapping[str, object] = view.plan.regions
    mtp = sum(getattr(regions.get(n), "kind", "") == "mtp" for n in names)
    text = f"{view.path}: {len(names)} HF tensors have no Megatron tensor"
    if mtp:
        text += f" ({mtp} of them MTP)"
    return f"{text}: {compress(names, 4)}"
