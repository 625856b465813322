"""Why two sides differ at a point: the weights behind it, and what was done to them.

The weights of the live Megatron module are compared with what `correspond` says they should
hold, bit for bit, and where they differ the known permutations are tried. Only an exact match
is named; anything else is described by its size. If the weights are right, the arithmetic is
not: an epsilon, a rope, a routing rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtpconv.parity.correspond import Expected, expected
from mtpconv.parity.permuted import Read, permuted
from mtpconv.parity.settings import Settings

Tensors = Mapping[str, Any]

#: Tensors behind the first difference at a place, as tails under the block's prefix.
_LATENT = ("self_attention.linear_{0}_down_proj", "self_attention.{0}_layernorm")
BEHIND: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embedding.word_embeddings",),
    "enorm": ("enorm",),
    "hnorm": ("hnorm",),
    "eh_proj": ("eh_proj",),
    "final norm": ("final_layernorm",),
    "input norm": ("input_layernorm",),
    "query latent norm": tuple(t.format("q") for t in _LATENT),
    "key/value latent norm": tuple(t.format("kv") for t in _LATENT),
    "query norm": ("self_attention.linear_qkv", "self_attention.q_layernorm"),
    "key norm": ("self_attention.linear_qkv", "self_attention.k_layernorm"),
    "attention": ("self_attention",),
    "post-attention norm": ("pre_mlp_layernorm",),
    "router": ("mlp.router",),
    "shared experts": ("mlp.shared_experts",),
    "MLP": ("mlp",),
    "output": ("",),
    "logits": ("output_layer",),
}


@dataclass(frozen=True)
class Fault:
    """The first place where the sides part, the tensors behind it, and why if that is known."""

    block: str
    place: str
    difference: float
    tensors: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def message(self) -> str:
        """One line: where, what, why."""
        why = "; ".join(self.reasons)
        return f"{self.block}, after {self.place}: {why}"


def explain(
    settings: Settings, live: Tensors, read: Read, block: str, place: str, difference: float
) -> Fault:
    """What is wrong with the weights behind a place.

    `live` are the Megatron tensors by the names of `mcore.module_tensors`, at least those of
    the block; `read` gives an HF tensor by name.
    """
    names = [name for name in live if _behind(name, block, place)]
    wrong: list[str] = []
    reasons: list[str] = []
    seen: set[str] = set()
    for name in names:
        found = expected(settings, name)
        if found is None:
            continue
        value = found.join([read(hf) for hf in found.hf])
        if same(live[name], value):
            continue
        wrong.append(name)
        reason = _reason(settings, live, read, found, value)
        if reason not in seen:
            seen.add(reason)
            reasons.append(reason)
    if not wrong:
        reasons.append(_arithmetic(place))
    return Fault(block, place, difference, tuple(wrong), tuple(_condensed(reasons)))


def same(left: Any, right: Any) -> bool:
    """Same values; a Megatron model holds the stored values in a wider or an equal dtype."""
    if left.shape != right.shape:
        return False
    return bool((left.double() == right.to(left.dtype).double()).all())


def _behind(name: str, block: str, place: str) -> bool:
    kind, _, number = block.partition(" ")
    prefix = {
        "trunk": "decoder." if place == "final norm" else "",
        "layer": f"decoder.layers.{number}.",
        "depth": f"mtp.layers.{number}.",
    }[kind]
    if not name.startswith(prefix):
        return False
    tail = name.removeprefix(prefix)
    inner = tail.removeprefix("transformer_layer.")
    glue = place in ("enorm", "hnorm", "eh_proj", "final norm")
    if kind == "depth" and glue == (inner != tail):
        return False
    return any(inner == part or inner.startswith(f"{part}.") or not part for part in BEHIND[place])


def _arithmetic(place: str) -> str:
    if "norm" in place:
        return (
            "the weights are right, so the epsilon of the norm differs, or whether its gamma is "
            "stored around 1 or around 0"
        )
    if place == "attention":
        return (
            "the weights are right, so the attention differs: rope, scale, mask or choice of keys"
        )
    if place == "router":
        return "the weights are right, so the routing rule differs: score function, groups, scaling"
    return "the weights are right, so the arithmetic differs"


def _reason(settings: Settings, live: Tensors, read: Read, found: Expected, value: Any) -> str:
    """What was done to one tensor, in words; the tensor's short name comes first."""
    actual = live[found.name]
    short = _short(found.name)
    if actual.shape != value.shape:
        return f"{short} has shape {list(actual.shape)} instead of {list(value.shape)}"
    for text, candidate in permuted(settings, read, found, value):
        if candidate.shape == actual.shape and same(actual, candidate):
            return text.format(short)
    other = _held_elsewhere(settings, live, read, found, actual)
    return other or _described(short, actual, value)


def _held_elsewhere(
    settings: Settings, live: Tensors, read: Read, found: Expected, actual: Any
) -> str | None:
    """Another tensor of the same block whose right content this one holds."""
    if "experts.local_experts." in found.name or "mlp.experts.linear_fc" in found.name:
        return _expert_order(settings, live, read, found, actual)
    if actual.ndim > 1 and "layernorm" not in found.name:
        return None
    for name in live:
        if name == found.name or live[name].shape != actual.shape:
            continue
        if _block_of(name) != _block_of(found.name):
            continue
        other = expected(settings, name)
        if other is None:
            continue
        if same(actual, other.join([read(hf) for hf in other.hf])):
            back = same(live[name], found.join([read(hf) for hf in found.hf]))
            pair = " and ".join(sorted((_short(found.name), _short(name))))
            if back:
                return f"{pair} are swapped"
            return f"{_short(found.name)} holds what belongs to {_short(name)}"
    return None


def _expert_order(
    settings: Settings, live: Tensors, read: Read, found: Expected, actual: Any
) -> str | None:
    """Whether an expert holds another expert's weights."""
    siblings = [n for n in live if _expert_kind(n) == _expert_kind(found.name)]
    for name in siblings:
        other = expected(settings, name)
        if other is not None and same(actual, other.join([read(hf) for hf in other.hf])):
            here, there = _expert_number(found.name), _expert_number(name)
            return f"experts are in another order: expert {here} holds expert {there}'s weights"
    return None


def _expert_number(name: str) -> str:
    if ".local_experts." in name:
        return name.split(".local_experts.")[1].split(".")[0]
    return name.rsplit("weight", 1)[1]


def _expert_kind(name: str) -> str:
    """The name with the expert's number left out."""
    if ".local_experts." in name:
        head, _, tail = name.partition(".local_experts.")
        return head + tail[tail.index(".") :]
    return name.rsplit("weight", 1)[0] if "mlp.experts." in name else name


def _described(short: str, actual: Any, value: Any) -> str:
    import torch

    a, b = actual.double().flatten(), value.double().flatten()
    if not bool(torch.isfinite(a).all()):
        return f"{short} holds {int((~torch.isfinite(a)).sum())} values that are not numbers"
    share = float((a == b).double().mean())
    a, b = a - a.mean(), b - b.mean()
    correlation = float((a @ b) / (a.norm() * b.norm()).clamp_min(1e-30))
    if abs(correlation) < 0.5 and share < 0.5:
        return f"{short} is unrelated to its HF tensor (correlation {correlation:.2f}): random?"
    return f"{short} differs in {1 - share:.0%} of its values (correlation {correlation:.4f})"


def _block_of(name: str) -> str:
    """`decoder.layers.3.`, `mtp.layers.0.`, or nothing for what stands outside layers."""
    found = re.match(r"(decoder|mtp)\.layers\.\d+\.", name)
    return found.group() if found else ""


def _short(name: str) -> str:
    """The name without block and without `.weight`."""
    tail = name.removeprefix(_block_of(name))
    tail = tail.removeprefix("transformer_layer.").removesuffix(".weight")
    for part in ("self_attention.core_attention.", "self_attention.", "local_experts."):
        tail = tail.replace(part, "expert " if part == "local_experts." else "")
    return tail


def _condensed(reasons: Sequence[str], limit: int = 4) -> list[str]:
    """The first few reasons, with a count of the rest: 256 experts need one line, not 256."""
    experts = [r for r in reasons if r.startswith("experts are in another order")]
    unique = [r for r in reasons if r not in experts[1:]]
    if len(experts) > 1:
        at = unique.index(experts[0])
        unique[at] = f"{experts[0]} (and {len(experts) - 1} more)"
    if len(unique) > limit:
        unique = [*unique[:limit], f"{len(unique) - limit} more tensors differ"]
    return unique
