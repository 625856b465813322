"""A model of real proportions to measure with: MTP, 30,000 tensors, 4.7 GB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.synth import shrink, synth

CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "configs"

#: DeepSeek-V3 with 41 layers of 240 experts: 29,000 of its tensors are expert weights, of
#: 155 KB each. Small tensors are the hard case: the real ones have 29 MB.
WIDTHS: Mapping[str, Any] = {
    "num_hidden_layers": 41, "n_routed_experts": 240, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 1, "hidden_size": 512, "moe_intermediate_size": 152,
    "intermediate_size": 2048, "vocab_size": 32768, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    """A published config."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    config.pop("quantization_config", None)
    return config


def make_model(folder: Path, config: Mapping[str, Any], shards: int) -> Path:
    """A seeded HF folder; what is there already is kept."""
    if not (folder / "config.json").is_file():
        plan = make_plan(config, find_table(str(config["model_type"])))
        synth(plan, folder, shards=shards)
    return folder


def large(folder: Path, hidden: int = 512) -> Path:
    """The model that is measured; a quarter of the `hidden` size is a quarter of the bytes."""
    return make_model(folder, {**published("deepseek-v3"), **WIDTHS, "hidden_size": hidden}, 8)


def coarse(folder: Path) -> Path:
    """About the same bytes in a tenth of the tensors, ten times as large."""
    config = {**published("deepseek-v3"), **WIDTHS, "n_routed_experts": 24, "n_group": 8}
    return make_model(folder, {**config, "moe_intermediate_size": 1520}, 8)


def tiny(folder: Path, name: str, **changes: Any) -> Path:
    """All tensors of a published model with hardly a byte in them."""
    return make_model(folder, {**shrink(published(name)), **changes}, 8)
