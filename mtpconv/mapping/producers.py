"""Who wrote a Megatron checkpoint, as far as its keys and files tell, and what they cannot tell.

The same model is not the same checkpoint everywhere: converters and training frameworks name
some modules otherwise, which is seen here, or order rows inside a tensor otherwise, which nobody
can see.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mtpconv.mapping.plan import Plan


@dataclass(frozen=True, slots=True)
class Trait:
    """Something that only some tools write: its name, and why it is not converted (or None)."""

    name: str
    refused: str | None = None


_SLIME = Trait("slime")
#: Pattern of a key, and the trait that it shows.
#: Source: slime slime_plugins/models/{qwen3_next,qwen3_5,hf_attention,glm5/glm5}.py at 04e67434,
#: 3999028c and 08a9dcdc, slime_plugins/mbridge/qwen3_next.py at 3999028c; mcore-bridge
#: model/gpts/qwen3_next.py at 130f7a9d and model/modules/gated_delta_net.py at 164675c8, read
#: 2026-11-29; NeMo's `module.` prefix is documented in its checkpoint guide.
_KEYS = (
    (re.compile(r"\.self_attention\.linear_attn\."), _SLIME),
    (re.compile(r"\.self_attention\.(wq_b|wk|weights_proj)\.weight$"), _SLIME),
    (
        re.compile(r"\.self_attention\.(linear_qgkv|self_attn)\."),
        Trait(
            "slime, gated attention of its first versions",
            "rows in an order that later ones do not have; export with that version of slime",
        ),
    ),
    (
        re.compile(r"\.self_attention\.in_proj_\w+\."),
        Trait(
            "mcore-bridge",
            "of its two kinds of linear attention only HuggingFace's module is read; export with "
            "mcore-bridge",
        ),
    ),
    (
        re.compile(r"\.self_attention\.in_proj\.weight$"),
        Trait(
            "linear attention in one piece",
            "its rows are in blocks (Megatron's legacy format) or by key head (mcore-bridge), and "
            "keys do not tell which; save it with Megatron-Core and --ckpt-format torch_dist",
        ),
    ),
    (re.compile(r"^module\."), Trait("NeMo, module. before every key", "strip the prefix first")),
    (re.compile(r"^decoder\.final_norm\.|\.mtp_model_layer\.layers\."), Trait("HybridModel")),
)
#: Names in the checkpoint's folder, `../` before those beside it.
#: Source: ms-swift swift/megatron/pipelines `save_args`, read 2026-11-29.
_FILES = {
    "run_config.yaml": Trait("Megatron-Bridge"),
    "modelopt_state": Trait("ModelOpt"),
    "../args.json": Trait("ms-swift"),
}

#: Vision towers, which no table translates: Megatron-Bridge and LLaVA; mcore-bridge.
_VISION = re.compile(r"(vision_model|vision_projection|visual)\.")


def is_vision(key: str) -> bool:
    """True for Megatron keys of a vision tower."""
    return _VISION.match(key) is not None


def traits(keys: Collection[str], files: Collection[str] = ()) -> tuple[Trait, ...]:
    """What keys and file names show, each trait once."""
    found = [trait for pattern, trait in _KEYS if any(map(pattern.search, keys))]
    found += [trait for name, trait in _FILES.items() if name in files]
    return tuple(dict.fromkeys(found))


def doubts(plan: Plan) -> Iterator[str]:
    """What names and shapes leave open for this model, one line each, and how it is read.

    `plan` is that of the checkpoint, `as_stored`. Source: families.md sections 3 and 4,
    disagreements 1 and 16; docs/dialects.md.
    """
    ops = {step.op.name for step in plan.steps}
    keys = {step.row.key for step in plan.steps}
    own = {step.op.name for step in plan.steps if step.row.op == "gated_qkv"}
    if own == {"qkv"}:
        yield (
            "rows of linear_qkv: mcore-bridge has query and gate of each head in turn, and so they "
            "are read, others the queries of a group before its gates"
        )
    elif "gated_qkv" in ops or "qkv_gate" in ops:
        yield (
            "rows of linear_qkv: Megatron-Core, Megatron-Bridge and slime put the queries of a "
            "group before its gates, mcore-bridge has query and gate of each head in turn"
        )
    if any(key.startswith("self_attention.in_proj.weight") for key in keys):
        yield (
            "rows of in_proj and conv1d: Megatron-Core and Megatron-Bridge have query, key, value, "
            "z, beta, alpha one after another, mcore-bridge interleaves them per key head, Pai "
            "orders them otherwise"
        )
        yield (
            "out_norm: Megatron-Core and Megatron-Bridge hold gamma less 1, mcore-bridge has gamma"
        )
    if "rope_last" in ops:
        yield (
            "rows of the indexer: slime has those with rotary embedding last in every head, and so "
            "they are read; AReaL and Relax use its names and keep the order, and so do some of "
            "slime's importers where config.json has no indexer_rope_interleave"
        )
    if plan.geometry.model_type == "qwen3_next" and plan.geometry.depths:
        yield (
            "halves of eh_proj: slime exchanges them for Qwen3-Next, Megatron-Bridge and "
            "mcore-bridge do not; "
            + ("this is slime's, and read so" if "swap_halves" in ops else "read as not exchanged")
        )
    elif plan.geometry.depths and any(k.startswith("self_attention.linear_attn.") for k in keys):
        yield (
            "halves of eh_proj: slime exchanged them for Qwen3.5 too before its pull request 1702; "
            "read as not exchanged"
        )
