"""What parity must know of a family beyond its Megatron arguments: names on disk, and who runs it.

A family joins parity with one line here, and a config in `tests/parity/configs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mtpconv.geometry import Config, Geometry, read_geometry

#: Fragments of a name and what stands there instead.
Spelling = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Family:
    """HF names of a depth, and where the family's names on disk differ from DeepSeek's.

    `prefix` of a depth may hold `{layer}`, which counts on from the trunk, and `{depth}`, which
    counts from 0; its norms and its projection lie under `glue`, if that is another prefix.
    `hidden_first`: eh_proj takes [hidden, embedding] instead of [embedding, hidden]. `spelled`
    respells DeepSeek's names, `loaded` those of transformers' modules, both into names on disk.
    `runs_as` is the model type of transformers that computes the same. `unpromised`: depths
    that the checkpoint has though no field of its config says so. `by_key_head`: the input
    projections of delta nets have the rows of each key head together.
    """

    trunk: str = "model."
    prefix: str = "model.layers.{layer}."
    glue: str | None = None
    enorm: str = "enorm"
    hnorm: str = "hnorm"
    eh_proj: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    hidden_first: bool = False
    spelled: Spelling = ()
    loaded: Spelling = ()
    runs_as: str | None = None
    unpromised: int = 0
    by_key_head: bool = False

    def at(self, geometry: Geometry, depth: int) -> str:
        """The prefix of the block of one depth."""
        return self.prefix.format(layer=geometry.layers + depth, depth=depth)

    def glue_at(self, geometry: Geometry, depth: int) -> str:
        """The prefix of the norms and the projection of one depth."""
        return self.at(geometry, depth) if self.glue is None else self.glue


_PLAIN = Family()
_QWEN = Family(
    prefix="mtp.layers.{depth}.",
    glue="mtp.",
    enorm="pre_fc_norm_embedding",
    hnorm="pre_fc_norm_hidden",
    eh_proj="fc",
    final_norm="norm",
    spelled=(("mlp.shared_experts.", "mlp.shared_expert."),),
)
_QWEN_WRAPPED = replace(_QWEN, trunk="model.language_model.")

#: Source: facts/families.md section 1; transformers 5.24 conversion_mapping.py, read 2026-11-29.
FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": _PLAIN,
    "deepseek_v32": _PLAIN,
    "exaone_moe": Family(
        spelled=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),),
        loaded=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),),
    ),
    "glm_moe_dsa": _PLAIN,
    "glm4_moe": _PLAIN,
    "glm4_moe_lite": _PLAIN,
    "hy_v3": Family(
        final_norm="final_layernorm",
        spelled=(
            ("mlp.gate.weight", "mlp.router.gate.weight"),
            ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.shared_experts.", "mlp.shared_mlp."),
        ),
        loaded=(
            ("mlp.gate.weight", "mlp.router.gate.weight"),
            ("mlp.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.shared_experts.", "mlp.shared_mlp."),
        ),
    ),
    "kimi_k2": Family(runs_as="deepseek_v3"),
    "llama": _PLAIN,
    "mimo": Family(
        prefix="model.mtp_layers.{depth}.",
        enorm="token_layernorm",
        hnorm="hidden_layernorm",
        eh_proj="input_proj",
        final_norm="final_layernorm",
        hidden_first=True,
        runs_as="qwen2",
    ),
    "mixtral": Family(
        spelled=(
            ("mlp.gate.", "block_sparse_moe.gate."),
            ("mlp.experts.", "block_sparse_moe.experts."),
            (".gate_proj.", ".w1."),
            (".up_proj.", ".w3."),
            (".down_proj.", ".w2."),
        ),
        loaded=(
            ("mlp.gate.", "block_sparse_moe.gate."),
            ("mlp.experts.", "block_sparse_moe.experts."),
        ),
    ),
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_5": replace(_QWEN_WRAPPED, runs_as="qwen3_5_text"),
    "qwen3_5_moe": replace(_QWEN_WRAPPED, runs_as="qwen3_5_moe_text"),
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_moe": _PLAIN,
    "qwen3_next": replace(_QWEN, unpromised=1, by_key_head=True),
}

#: Families that parity does not run, and why; one that is listed above too is run without MTP.
#: Source: transformers 5.24, megatron-core 0.16.1 and 0.19.2, tried 2026-11-29; vLLM 8d21b1cc
#: exaone_moe.py (window and rope of layer 0), Megatron-Bridge exaone_moe_bridge.py (neither,
#: unless `mtp_layer_types` says so), read 2026-11-29.
NOT_RUN: Mapping[str, str] = {
    "bailing_moe_v2": "transformers has no such model",
    "deepseek_v4": "megatron-core's GPTModel has no hyper-connections",
    "ernie4_5_moe": "Megatron's MTP has a final norm that the checkpoint does not",
    "exaone_moe": (
        "published code disagrees on the attention of its MTP block, window (vLLM) or not "
        "(Megatron-Bridge); its trunk alone is run"
    ),
    "longcat_flash": "megatron-core has no two attentions in a layer",
    "mimo_v2_flash": "megatron-core has values narrower than keys with latent attention only",
    "minimax_m2": "its query and key norms span all heads, Megatron's one",
    "nemotron_h": "Megatron runs it as HybridModel, whose Mamba kernels need CUDA",
    "step3p5": "transformers has no such model",
}


def family_of(geometry: Geometry) -> Family:
    """The family of a model; an unknown one is taken to spell as DeepSeek does."""
    return FAMILIES.get(geometry.model_type, _PLAIN)


def geometry_of(config: Config, names: Iterable[str]) -> Geometry:
    """The geometry of a config beside these tensors, depths that no field promises included.

    Raises: RefusedError if the config lacks a field.
    """
    family = FAMILIES.get(str(config.get("model_type")), _PLAIN)
    unpromised = family.unpromised
    if unpromised:
        glue = f"{family.glue}{family.eh_proj}.weight"
        unpromised = unpromised if glue in names else 0
    return read_geometry(config, unpromised)


def respelled(name: str, spelling: Spelling) -> str:
    """The name with every fragment replaced, in order."""
    for ours, theirs in spelling:
        name = name.replace(ours, theirs)
    return name
