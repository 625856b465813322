"""The faults of the self-test: things that exporters, converters or copies were seen to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtpconv.audit.excuses import is_tied
from mtpconv.audit.pair import is_router_bias
from mtpconv.geometry import MTP_FIELDS, text_config
from mtpconv.selftest.copies import INDEX, Copy, NotApplicable
from mtpconv.store.hf_writer import make_header, write_shard
from mtpconv.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of damage and the finding kinds that must name it (any of them)."""

    name: str
    kinds: frozenset[str]
    damage: Callable[[Copy], None]
    #: hf: audit the damaged folder; cross: the Megatron checkpoint made from it
    side: str = "hf"


#: The projection that takes embedding and hidden state in, as families name it.
#: Source: facts on MTP families, section 1.
_EH_PROJ = ("eh_proj.weight", "mtp.fc.weight", ".input_proj.weight")
#: The norms before it, in the same order of families.
_NORMS = (
    ("enorm.weight", "hnorm.weight"),
    ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"),
    ("token_layernorm.weight", "hidden_layernorm.weight"),
)


def _halves(data: bytes, spec: TensorSpec) -> bytes:
    words = np.frombuffer(data, "u1").reshape(spec.shape[0], 2, -1)
    return words[:, ::-1].tobytes()


def _swap_halves(copy: Copy) -> None:
    name = copy.named(*_EH_PROJ)
    copy.edit(name, lambda data: _halves(data, copy.tensors[name][0]))


def _flip(copy: Copy) -> None:
    copy.edit(copy.one(), lambda data: bytes([data[0] ^ 1]) + data[1:])


def _to_bf16(copy: Copy) -> None:
    names = [n for n, (s, _) in copy.tensors.items() if s.dtype == "F32"]
    name = min(names, key=lambda n: not is_router_bias(n), default=None)
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
        name = copy.named(*_EH_PROJ)
        copy.edit(name, lambda data: (word * len(data))[: len(data)])

    return damage


def _permute_experts(copy: Copy) -> None:
    a, b = copy.named("experts.0.down_proj.weight"), copy.named("experts.1.down_proj.weight")
    copy.swap(a, b)


def _exchange(*pairs: tuple[str, str]) -> Callable[[Copy], None]:
    def damage(copy: Copy) -> None:
        name = copy.named(*(left for left, _ in pairs))
        left, right = next(pair for pair in pairs if name.endswith(pair[0]))
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


def _with_text(config: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The config with another description of the decoder, wherever that stands."""
    text = text_config(config)
    if text is config:
        return changed
    return {key: changed if value is text else value for key, value in config.items()}


def _configured(**changes: Any) -> Callable[[Copy], None]:
    def damage(copy: Copy) -> None:
        text = {**text_config(copy.config), **changes}
        for bag in ("rope_parameters", "rope_scaling"):
            if isinstance(text.get(bag), Mapping):  # what stands in there counts
                inner = {k: v for k, v in changes.items() if k in text[bag]}
                text[bag] = {**text[bag], **inner}
        copy.config = _with_text(copy.config, text)

    return damage


def _tie(copy: Copy) -> None:
    now = not is_tied(copy.config)
    if "tie_word_embeddings" in copy.config:
        copy.config = {**copy.config, "tie_word_embeddings": now}
    else:
        _configured(tie_word_embeddings=now)(copy)


def _drop_head(copy: Copy) -> None:
    name = copy.named("lm_head.weight")
    if is_tied(copy.config):
        raise NotApplicable("the config says it is tied, so it may be left out")
    copy.drop(name)


def _promise(value: Any) -> Callable[[Copy], None]:
    def damage(copy: Copy) -> None:
        inner = dict(text_config(copy.config))
        field_name = next((f for f in MTP_FIELDS if inner.get(f)), None)
        if field_name is None:
            raise NotApplicable("config promises no MTP")
        if value is None:
            del inner[field_name]
        else:
            inner[field_name] = value
        copy.config = _with_text(copy.config, inner)

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
            index = json.loads((folder / INDEX).read_text())
            change(index, copy)
            (folder / INDEX).write_text(json.dumps(index))

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
        text = (folder / INDEX).read_text()
        start = text.index('"weight_map": {') + len('"weight_map": {')
        name = next(iter(json.loads(text)["weight_map"]))
        text = f'{text[:start]}"{name}": "other.safetensors",{text[start:]}'
        (folder / INDEX).write_text(text)

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
        "enorm and hnorm exchanged", "value_mismatch", _exchange(*_NORMS)
    ),
    _fault(
        "gate and up exchanged", "value_mismatch",
        _exchange(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ),
    _fault("two experts exchanged", "value_mismatch", _permute_experts),
    _fault("one bit flipped", "value_mismatch", _flip),
    _fault("router bias rounded to BF16", "dtype_mismatch", _to_bf16),
    _fault("one axis added", "shape_mismatch", _reshape),
    _fault("prefix before every name", "missing_tensor", _prefix),
    _fault("_extra_state leaked into the export", "extra_tensor", _extra),
    _fault("LM head omitted", "missing_tensor", _drop_head),
    _fault("config says 0 MTP depths", "config_mismatch", _promise(0)),
    _fault("config says nothing about MTP", "config_mismatch", _promise(None)),
    _fault("rope_theta changed", "config_mismatch", _configured(rope_theta=1.5)),
    _fault("vocab_size changed", "config_mismatch", _configured(vocab_size=7)),
    _fault("tie_word_embeddings changed", "config_mismatch", _tie),
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
