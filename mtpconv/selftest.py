"""Does the gate still close? Every kind of fault is put into a copy, and the audit must turn red.

The copy is small: a small checkpoint is copied as it is, of a large one a twin is made with the
same names, layers and config and small widths. Nothing is written outside the given folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.geometry import MTP_FIELDS, text_config
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table import find_table
from mtpconv.store.content import Files, blocks
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_writer import index_bytes, make_header, write_shard
from mtpconv.synth import shrink, synth
from mtpconv.tensors import TensorSpec

#: Units: bytes. Larger checkpoints get a twin.
COPY_LIMIT = 64 << 20

_INDEX = "model.safetensors.index.json"


@dataclass
class Copy:
    """A checkpoint in memory, to be damaged and written."""

    tensors: dict[str, tuple[TensorSpec, bytes]]
    shard: dict[str, str]
    config: dict[str, Any]
    mtp: tuple[str, ...]
    #: damage done to the files after they are written
    then: list[Callable[[Path], None]] = field(default_factory=list)

    def named(self, end: str) -> str:
        """The first tensor, MTP before trunk, whose name ends so. Raises: NotApplicable."""
        for name in (*self.mtp, *self.tensors):
            if name.endswith(end):
                return name
        raise NotApplicable(f"no tensor ends with {end}")

    def one(self) -> str:
        """Any tensor that has bytes, MTP before trunk."""
        return next(n for n in (*self.mtp, *self.tensors) if self.tensors[n][1])

    def edit(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Replace the bytes of a tensor."""
        spec, data = self.tensors[name]
        self.tensors[name] = (spec, change(data))

    def drop(self, *names: str) -> None:
        """Remove tensors. Raises: NotApplicable if there are none."""
        if not names:
            raise NotApplicable("nothing of this kind in the checkpoint")
        for name in names:
            del self.tensors[name]

    def rename(self, old: str, new: str) -> None:
        """Move a tensor to another name."""
        self.tensors[new] = self.tensors.pop(old)
        self.shard[new] = self.shard.pop(old)

    def swap(self, a: str, b: str) -> None:
        """Exchange two tensors."""
        self.tensors[a], self.tensors[b] = self.tensors[b], self.tensors[a]


class NotApplicable(Exception):
    """The checkpoint has nothing that this fault could happen to."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of damage and the finding kinds that must name it (any of them)."""

    name: str
    kinds: frozenset[str]
    damage: Callable[[Copy], None]
    #: hf: audit the damaged folder; cross: the Megatron checkpoint made from it
    side: str = "hf"


@dataclass(frozen=True, slots=True)
class Trial:
    """What the audit said about one fault; `red` is what must be true."""

    fault: str
    red: bool
    found: tuple[str, ...]
    skipped: str | None = None


def run_selftest(folder: Path | None, place: Path, config: Mapping[str, Any]) -> Iterator[Trial]:
    """Try the undamaged copy, which must be green, and then every fault.

    `folder` is the user's checkpoint, None for the built-in one made from `config`.
    """
    original = _original(folder, place, config)
    clean = _write(_read(original), place / "clean")
    control = audit(*_sides(original, clean))
    yield Trial("(no fault: must be green)", control.verdict == "pass", _kinds(control))
    for number, fault in enumerate(FAULTS):
        copy = _read(original)
        target = place / f"fault{number}"
        try:
            fault.damage(copy)
        except NotApplicable as why:
            yield Trial(fault.name, True, (), str(why))
            continue
        _write(copy, target)
        if fault.side == "cross":
            damaged = place / f"mcore{number}"
            hf2mcore(target, damaged, drop_mtp=not _promises(copy.config))
            target = damaged
        found = _kinds(audit(*_sides(original, target)))
        yield Trial(fault.name, bool(fault.kinds & set(found)), found)


def _sides(before: Path, after: Path) -> tuple[Any, Any]:
    sides = open_sides(before, after)
    return sides.before, sides.after


def _kinds(report: Report) -> tuple[str, ...]:
    return tuple(sorted({f.kind for f in report.findings if f.severity == "error"}))


def _original(folder: Path | None, place: Path, config: Mapping[str, Any]) -> Path:
    if folder is not None:
        hf = open_hf(folder, compare_duplicates=False)
        if sum(s.nbytes for s in hf.tensors.values()) <= COPY_LIMIT:
            return folder
        config = hf.config or {}
    small = shrink(config)
    small.pop("quantization_config", None)
    plan = make_plan(small, find_table(str(small.get("model_type"))))
    synth(plan, place / "original", shards=3)
    return place / "original"


def _read(folder: Path) -> Copy:
    hf = open_hf(folder)
    with Files() as files:
        tensors = {
            n: (s, b"".join(bytes(b) for b in blocks(hf, n, files))) for n, s in hf.tensors.items()
        }
    config = dict(hf.config or {})
    sides = open_sides(None, folder)
    expected = sides.after.expected
    regions = expected.regions if expected else sides.after.naming.regions(hf.tensors)
    mtp = tuple(n for n in tensors if n in regions and regions[n].kind == "mtp")
    return Copy(tensors, dict(hf.where), config, mtp)


def _write(copy: Copy, folder: Path) -> Path:
    folder.mkdir()
    groups: dict[str, dict[str, TensorSpec]] = {}
    for name, (spec, _) in copy.tensors.items():
        groups.setdefault(copy.shard[name], {})[name] = spec
    headers = {f: make_header(folder / f, g, {"format": "pt"}) for f, g in groups.items()}
    for file, header in headers.items():
        write_shard(folder / file, header, lambda n: iter([memoryview(copy.tensors[n][1])]))
    (folder / _INDEX).write_bytes(index_bytes(headers))
    (folder / "config.json").write_text(json.dumps(copy.config, indent=2))
    for damage in copy.then:
        damage(folder)
    return folder


def _promises(config: Mapping[str, Any]) -> bool:
    return any(text_config(config).get(f) for f in MTP_FIELDS)


# The faults. Each is a thing that exporters, converters or copies were seen to do.


def _halves(data: bytes, spec: TensorSpec) -> bytes:
    words = np.frombuffer(data, "u1").reshape(spec.shape[0], 2, -1)
    return words[:, ::-1].tobytes()


def _swap_halves(copy: Copy) -> None:
    name = copy.named("eh_proj.weight")
    copy.edit(name, lambda data: _halves(data, copy.tensors[name][0]))


def _flip(copy: Copy) -> None:
    copy.edit(copy.one(), lambda data: bytes([data[0] ^ 1]) + data[1:])


def _to_bf16(copy: Copy) -> None:
    name = next((n for n, (s, _) in copy.tensors.items() if s.dtype == "F32"), None)
    if name is None:
        raise NotApplicable("no F32 tensor")
    spec, data = copy.tensors[name]
    upper = np.frombuffer(data, "<u2")[1::2].tobytes()
    copy.tensors[name] = (TensorSpec("BF16", spec.shape), upper)


def _reshape(copy: Copy) -> None:
    name = copy.one()
    spec, data = copy.tensors[name]
    copy.tensors[name] = (TensorSpec(spec.dtype, (*spec.shape, 1)), data)


def _fresh(copy: Copy) -> None:
    if not copy.mtp:
        raise NotApplicable("no MTP")
    noise = np.random.default_rng(0)
    for name in copy.mtp:
        spec, _ = copy.tensors[name]
        values = noise.normal(0, 0.02, spec.elements).astype("<f4")
        if len(spec.shape) == 1:
            values[:] = 1
        data = values.tobytes() if spec.dtype == "F32" else values.view("<u2")[1::2].tobytes()
        copy.tensors[name] = (spec, data[: spec.nbytes])


def _fill(word: bytes) -> Callable[[Copy], None]:
    def damage(copy: Copy) -> None:
        name = copy.named("eh_proj.weight")
        copy.edit(name, lambda data: (word * len(data))[: len(data)])

    return damage


def _permute_experts(copy: Copy) -> None:
    a, b = copy.named("experts.0.down_proj.weight"), copy.named("experts.1.down_proj.weight")
    copy.swap(a, b)


def _exchange(left: str, right: str) -> Callable[[Copy], None]:
    def damage(copy: Copy) -> None:
        name = copy.named(left)
        other = name.removesuffix(left) + right
        if other not in copy.tensors:
            raise NotApplicable(f"no {other}")
        copy.swap(name, other)

    return damage


def _rename_layer(copy: Copy) -> None:
    if not copy.mtp:
        raise NotApplicable("no MTP")
    for name in copy.mtp:
        head, dot, rest = name.partition(".layers.")
        if not dot:
            raise NotApplicable("MTP is not numbered like a layer")
        number, _, tail = rest.partition(".")
        copy.rename(name, f"{head}.layers.{int(number) + 1}.{tail}")


def _prefix(copy: Copy) -> None:
    for name in list(copy.tensors):
        copy.rename(name, f"_orig_mod.{name}")


def _extra(copy: Copy) -> None:
    name = "model.layers.0.self_attn.o_proj._extra_state"
    copy.tensors[name] = (TensorSpec("U8", (0,)), b"")
    copy.shard[name] = next(iter(copy.shard.values()))


def _configured(**changes: Any) -> Callable[[Copy], None]:
    def damage(copy: Copy) -> None:
        copy.config = {**copy.config, **changes}

    return damage


def _promise(value: Any) -> Callable[[Copy], None]:
    def damage(copy: Copy) -> None:
        inner = dict(text_config(copy.config))
        field_name = next((f for f in MTP_FIELDS if inner.get(f)), None)
        if field_name is None:
            raise NotApplicable("config promises no MTP")
        wrapped = next((k for k, v in copy.config.items() if v is text_config(copy.config)), None)
        if value is None:
            del inner[field_name]
        else:
            inner[field_name] = value
        copy.config = inner if wrapped is None else {**copy.config, wrapped: inner}

    return damage


def _file(damage: Callable[[Path], None]) -> Callable[[Copy], None]:
    def later(copy: Copy) -> None:
        file = copy.shard[copy.one()]
        copy.then.append(lambda folder: damage(folder / file))

    return later


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def _pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _trail(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 8)


def _indexed(change: Callable[[dict[str, Any], Copy], None]) -> Callable[[Copy], None]:
    def later(copy: Copy) -> None:
        def edit(folder: Path) -> None:
            index = json.loads((folder / _INDEX).read_text())
            change(index, copy)
            (folder / _INDEX).write_text(json.dumps(index))

        copy.then.append(edit)

    return later


def _ghost(index: dict[str, Any], copy: Copy) -> None:
    index["weight_map"]["model.ghost.weight"] = copy.shard[copy.one()]


def _unlist(index: dict[str, Any], copy: Copy) -> None:
    del index["weight_map"][copy.one()]


def _second_file(copy: Copy) -> None:
    name = copy.one()
    spec, data = copy.tensors[name]

    def add(folder: Path) -> None:
        path = folder / "left-over.safetensors"
        other = bytes([data[0] ^ 1]) + data[1:]
        header = make_header(path, {name: spec}, None)
        write_shard(path, header, lambda _: iter([memoryview(other)]))

    copy.then.append(add)


def _double_key(copy: Copy) -> None:
    def edit(folder: Path) -> None:
        text = (folder / _INDEX).read_text()
        start = text.index('"weight_map": {') + len('"weight_map": {')
        name = next(iter(json.loads(text)["weight_map"]))
        text = f'{text[:start]}"{name}": "other.safetensors",{text[start:]}'
        (folder / _INDEX).write_text(text)

    copy.then.append(edit)


def _fault(name: str, kinds: str, damage: Callable[[Copy], None], side: str = "hf") -> Fault:
    return Fault(name, frozenset(kinds.split()), damage, side)


def _no_mtp(copy: Copy) -> None:
    copy.drop(*copy.mtp)


def _no_mtp_experts(copy: Copy) -> None:
    copy.drop(*(n for n in copy.mtp if ".experts." in n))


FAULTS: tuple[Fault, ...] = (
    _fault("MTP dropped, as save_pretrained does", "missing_tensor", _no_mtp),
    _fault("MTP experts dropped", "missing_tensor", _no_mtp_experts),
    _fault("one MTP norm dropped", "missing_tensor", lambda c: c.drop(c.named("norm.weight"))),
    _fault("MTP written under the next layer number", "missing_tensor", _rename_layer),
    _fault("MTP freshly initialised", "value_mismatch", _fresh),
    _fault("eh_proj all zero", "value_mismatch", _fill(b"\0")),
    _fault("eh_proj all NaN", "value_mismatch", _fill(b"\xff")),
    _fault("halves of eh_proj swapped", "value_mismatch", _swap_halves),
    _fault(
        "enorm and hnorm exchanged", "value_mismatch", _exchange("enorm.weight", "hnorm.weight")
    ),
    _fault(
        "gate and up exchanged", "value_mismatch",
        _exchange("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ),
    _fault("two experts exchanged", "value_mismatch", _permute_experts),
    _fault("one bit flipped", "value_mismatch", _flip),
    _fault("router bias rounded to BF16", "dtype_mismatch", _to_bf16),
    _fault("one axis added", "shape_mismatch", _reshape),
    _fault("prefix before every name", "missing_tensor", _prefix),
    _fault("_extra_state leaked into the export", "extra_tensor", _extra),
    _fault("LM head omitted", "missing_tensor", lambda c: c.drop(c.named("lm_head.weight"))),
    _fault("config says 0 MTP depths", "config_mismatch", _promise(0)),
    _fault("config says nothing about MTP", "config_mismatch", _promise(None)),
    _fault("rope_theta changed", "config_mismatch", _configured(rope_theta=1.5)),
    _fault("vocab_size changed", "config_mismatch", _configured(vocab_size=7)),
    _fault("tie_word_embeddings changed", "config_mismatch",
           _configured(tie_word_embeddings=True)),
    _fault("shard truncated", "unreadable_file", _file(_truncate)),
    _fault("shard empty", "unreadable_file", _file(lambda p: os.truncate(p, 0))),
    _fault("shard missing", "index_missing_file", _file(Path.unlink)),
    _fault("shard is a dangling symlink", "index_missing_file", _file(_dangle)),
    _fault("shard is a git-lfs pointer", "unreadable_file", _file(_pointer)),
    _fault("bytes after the last tensor", "unreadable_file", _file(_trail)),
    _fault("index lists a tensor that is not there", "index_entry_not_in_file", _indexed(_ghost)),
    _fault("index forgets a tensor", "tensor_not_in_index", _indexed(_unlist)),
    _fault("index with a key twice", "duplicate_key_in_index", _double_key),
    _fault("a second file with other bytes", "duplicate_tensor_conflict", _second_file),
    _fault("Megatron: halves of eh_proj swapped", "value_mismatch", _swap_halves, "cross"),
    _fault("Megatron: one bit flipped", "value_mismatch", _flip, "cross"),
    _fault("Megatron: MTP dropped", "missing_tensor", _promise(0), "cross"),
)  # fmt: skip
