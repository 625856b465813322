"""Who wrote a checkpoint: told from keys and files, and what they cannot tell is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.mapping.layouts import addresses, training_layout
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.producers import doubts, traits
from mtpconv.mapping.table_reader import find_table, table_names
from tests.mapping.toy import config

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"


@pytest.mark.parametrize(
    ("keys", "files", "names"),
    [
        (["decoder.layers.0.self_attention.linear_qkv.weight"], [".metadata"], []),
        (["decoder.layers.self_attention.linear_qkv.weight"], ["run_config.yaml"],
         ["Megatron-Bridge"]),
        (["decoder.layers.3.self_attention.linear_attn.in_proj_qkvz.weight"], [],
         ["slime"]),
        (["mtp.layers.0.transformer_layer.self_attention.wq_b.weight"], [],
         ["slime"]),
        (["decoder.layers.3.self_attention.linear_qgkv.weight",
          "decoder.layers.0.self_attention.linear_attn.A_log"], [],
         ["slime", "slime, gated attention of its first versions"]),
        (["decoder.layers.0.self_attention.in_proj_ba.weight"], ["../args.json"],
         ["mcore-bridge", "ms-swift"]),
        (["decoder.final_norm.weight"], [], ["HybridModel"]),
        (["mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight"], [], ["HybridModel"]),
        (["module.decoder.final_layernorm.weight"], [], ["NeMo, module. before every key"]),
    ],
)  # fmt: skip
def test_traits(keys: list[str], files: list[str], names: list[str]) -> None:
    assert [t.name for t in traits(keys, files)] == names


@pytest.mark.parametrize("name", table_names())
def test_no_table_is_taken_for_somebody_elses(name: str) -> None:
    """Tables spell checkpoints as Megatron-Core does; only Nemotron-H is a HybridModel."""
    table = find_table(name)
    files = {e["config"] for e in table.releases.values() if "config" in e}
    for file in sorted(files):
        raw: dict[str, Any] = json.loads((CONFIGS / file).read_text())
        plan = make_plan(raw, table)
        keys = {a.key for a in addresses(plan, training_layout(plan))}
        assert [t.name for t in traits(keys)] == (["HybridModel"] if name == "nemotron_h" else [])


def test_doubts_are_about_content_that_names_do_not_show() -> None:
    raw = json.loads((CONFIGS / "qwen3-next-80b-a3b.json").read_text())
    plan = make_plan({**raw, "num_experts": 2}, find_table("qwen3_next"))
    found = list(doubts(plan))
    assert [line.split(":")[0] for line in found] == [
        "rows of linear_qkv", "rows of in_proj and conv1d", "out_norm", "halves of eh_proj",
    ]  # fmt: skip
    without = make_plan({**raw, "num_experts": 2}, find_table("qwen3_next"), depths=0)
    assert [line.split(":")[0] for line in doubts(without)] == [
        "rows of linear_qkv", "rows of in_proj and conv1d", "out_norm",
    ]  # fmt: skip
    assert list(doubts(make_plan(config("deepseek_v3"), find_table("deepseek_v3")))) == []
