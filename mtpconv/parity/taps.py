"""Hidden states at the same points of both sides, in the order in which they are computed.

A point is a module whose output means the same on both sides: a norm, the attention, the
router, a layer. Points that one side does not have as a module of its own (Transformer Engine
fuses norms into linears) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from mtpconv.parity.hf import HfModel
from mtpconv.parity.mcore import McoreModel
from mtpconv.parity.modules import mtp_attribute

#: Positions whose states are kept, of all rows together; a picture needs no more, and a large
#: model has room for no more.
KEPT_POSITIONS = 64

#: Output of a module, length of the row -> states [s, n].
Take = Callable[[Any, int], Any]


@dataclass(frozen=True)
class Point:
    """A module to look at: the block it belongs to and its place there."""

    block: str  # "trunk" | "layer 3" | "depth 0"
    place: str
    module: Any
    take: Take

    @property
    def shorter(self) -> int:
        """How many of a row's last positions mean nothing here: a depth has no token for them."""
        kind, _, number = self.block.partition(" ")
        return int(number) + 1 if kind == "depth" else 0

    @property
    def name(self) -> str:
        """Name of the point on both sides."""
        return f"{self.block}: {self.place}"


States = Mapping[str, Any]


def hf_points(model: HfModel) -> list[Point]:
    """Points of the HuggingFace side."""
    decoder = model.decoder
    points = [Point("trunk", "embedding", decoder.embed_tokens, _hf)]
    for number, layer in enumerate(decoder.layers):
        points += _hf_layer(f"layer {number}", layer)
    points.append(Point("trunk", "final norm", decoder.norm, _hf))
    for number, depth in enumerate(model.depths):
        block = f"depth {number}"
        points += [
            Point(block, "enorm", depth.enorm, _hf),
            Point(block, "hnorm", depth.hnorm, _hf),
            Point(block, "eh_proj", depth.eh_proj, _hf),
            *_hf_layer(block, depth.block),
            Point(block, "final norm", depth.final_norm, _hf),
        ]
    return points


def mcore_points(model: McoreModel) -> list[Point]:
    """Points of the Megatron side."""
    module = model.module
    points = [Point("trunk", "embedding", module.embedding.word_embeddings, _hf)]
    for number, layer in enumerate(module.decoder.layers):
        points += _mcore_layer(f"layer {number}", layer)
    points.append(Point("trunk", "final norm", module.decoder.final_layernorm, _mcore))
    for number, depth in enumerate(module.mtp.layers if model.depths else ()):
        block = f"depth {number}"
        points += [
            Point(block, "enorm", depth.enorm, _mcore),
            Point(block, "hnorm", depth.hnorm, _mcore),
            Point(block, "eh_proj", depth.eh_proj, _mcore),
            *_mcore_layer(block, getattr(depth, mtp_attribute())),
            Point(block, "final norm", depth.final_layernorm, _mcore),
        ]
    return points


#: place -> attribute path in transformers, attribute path in Megatron; in order of execution.
_PLACES = (
    ("input norm", "input_layernorm", "input_layernorm"),
    ("query latent norm", "self_attn.q_a_layernorm", "self_attention.q_layernorm"),
    ("key/value latent norm", "self_attn.kv_a_layernorm", "self_attention.kv_layernorm"),
    ("query norm", "self_attn.q_norm", "self_attention.q_layernorm"),
    ("key norm", "self_attn.k_norm", "self_attention.k_layernorm"),
    ("attention", "self_attn", "self_attention"),
    ("post-attention norm", "post_attention_layernorm", "pre_mlp_layernorm"),
    ("router", "mlp.gate", "mlp.router"),
    ("shared experts", "mlp.shared_experts", "mlp.shared_experts"),
    ("MLP", "mlp", "mlp"),
    ("output", "", ""),
)


def _hf_layer(block: str, layer: Any) -> Iterator[Point]:
    for place, path, _ in _PLACES:
        if place == "attention" and hasattr(layer, "linear_attn"):
            path = "linear_attn"
        module = _inner(layer, path)
        if module is not None and _has_weights(module):
            yield Point(block, place, module, _hf_router if place == "router" else _hf)


def _mcore_layer(block: str, layer: Any) -> Iterator[Point]:
    latent = hasattr(layer.self_attention, "kv_layernorm")
    for place, _, path in _PLACES:
        module = _inner(layer, path)
        if place in ("query norm", "key norm") and latent:
            continue
        if place == "query latent norm" and not latent:
            continue
        if module is not None and _has_weights(module):
            yield Point(block, place, module, _mcore_router if place == "router" else _mcore)


def _inner(module: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
        if module is None:
            return None
    return module


def _has_weights(module: Any) -> bool:
    """False for Megatron's IdentityOp, which stands where a norm is fused elsewhere."""
    return next(iter(module.parameters()), None) is not None


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _hf(output: Any, length: int) -> Any:
    """[1, s, ...] -> [s, n]; norms of single heads see [1, s, heads, d] or [1, heads, s, d]."""
    states = _first(output)
    if states.ndim == 4 and states.shape[1] != length:
        states = states.transpose(1, 2)
    return states[0].flatten(1) if states.ndim > 2 else states


def _mcore(output: Any, _length: int) -> Any:
    """[s, 1, ...] -> [s, n]."""
    states = _first(output)
    return states[:, 0].flatten(1)


def _hf_router(output: Any, _length: int) -> Any:
    """Weight of every expert at every position, 0 where it was not chosen."""
    logits, weights, chosen = output
    return logits.float().new_zeros(logits.shape).scatter(1, chosen, weights.float())


def _mcore_router(output: Any, _length: int) -> Any:
    """The same from Megatron's sparse probabilities."""
    return output[0].float()


def kept_positions(length: int, rows: int) -> Any:
    """Positions of a row whose states are kept, spread over its length."""
    import torch

    count = min(length, max(8, KEPT_POSITIONS // rows))
    return torch.linspace(0, length - 1, count).long().unique()


@contextmanager
def tapped(points: Sequence[Point], kept: Any) -> Iterator[dict[str, Any]]:
    """States of every point at some positions, as CPU float32, of the row that the body runs."""
    states: dict[str, Any] = {}
    with ExitStack() as stack:
        for point in points:
            hook = point.module.register_forward_hook(_store(states, point, kept))
            stack.callback(hook.remove)
        yield states


def _store(states: dict[str, Any], point: Point, kept: Any) -> Callable[..., None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        # The embedding runs once more for each depth; the trunk's run comes first.
        if point.name in states:
            return
        length = int(kept[-1]) + 1 - point.shorter
        found = point.take(output, length).detach()
        places = kept[kept < length]
        states[point.name] = found[places.to(found.device)].float().cpu()

    return hook


@dataclass(frozen=True)
class PointResult:
    """How far apart the two sides are at a point, relative to the size of the states."""

    name: str
    block: str
    place: str
    difference: float
    noise: float | None


def compare_points(
    points: Sequence[Point],
    reference: States,
    megatron: States,
    repeats: Sequence[tuple[States, States]] = (),
) -> list[PointResult]:
    """Compare all points that both sides have, in order.

    `repeats` are pairs of runs of one side against itself: the noise.
    """
    results = []
    for point in points:
        name = point.name
        if name not in reference or name not in megatron:
            continue
        noise = [relative(a[name], b[name]) for a, b in repeats if name in a and name in b]
        results.append(
            PointResult(
                name,
                point.block,
                point.place,
                relative(reference[name], megatron[name]),
                max(noise) if noise else None,
            )
        )
    return results


def relative(left: Any, right: Any) -> float:
    """Size of the difference over size of the left, both as root of the sum of squares."""
    left, right = left.double(), right.double()
    if left.shape != right.shape:
        return float("inf")
    return float((left - right).norm() / left.norm().clamp_min(1e-30))
