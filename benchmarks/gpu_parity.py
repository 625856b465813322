"""Forward parity of a model of a few billion parameters, in float32 and bfloat16.

    python benchmarks/gpu_parity.py /scratch             # on a GPU, about five minutes
    python benchmarks/gpu_parity.py /tmp/x --tiny --device cpu   # the same steps, seconds

Makes a seeded DeepSeek-V3-shaped and, where megatron-core has sparse attention, a GLM-5-shaped
model with MTP, converts each with mtpconv, and compares both sides: whole, and streamed. Needs
no network. Prints a table for docs/parity.md and writes parity-*.json and parity-*.html.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from mtpconv.convert import hf2mcore
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.parity import runtime
from mtpconv.parity.picture import render_html
from mtpconv.parity.render import render_json, render_text
from mtpconv.parity.report import ParityOptions
from mtpconv.parity.run import run_parity
from mtpconv.parity.settings import DSA_NEEDS
from mtpconv.synth import synth

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"

#: (config, widths of the large model, widths of the tiny one): about 3 billion parameters.
_LARGE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 12, "n_routed_experts": 48, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 32768, "q_lora_rank": 768, "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "n_routed_experts": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "index_topk": 16,
    "index_head_dim": 32, "index_n_heads": 4, "max_position_embeddings": 512,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "qk_head_dim": 32, "head_dim": 16,
}  # fmt: skip
MODELS = {
    "deepseek_v3": ("deepseek-v3.json", {"index_topk": None}),
    "glm_moe_dsa": ("glm-5.2.json", {"index_topk": 256, "n_group": 1, "topk_group": 1}),
}


def make(name: str, folder: Path, *, tiny: bool) -> tuple[Path, Path]:
    """An HF folder with seeded weights, and its torch_dist folder."""
    file, own = MODELS[name]
    config: dict[str, Any] = json.loads((CONFIGS / file).read_text())
    widths = _TINY if tiny else _LARGE | own
    for key, value in widths.items():
        if key in config and value is not None:
            config[key] = value
    config.pop("quantization_config", None)
    config |= {"first_k_dense_replace": 1, "pad_token_id": None}
    if name == "glm_moe_dsa":
        config |= {"n_group": 1, "topk_group": 1}
        for listed in ("mlp_layer_types", "indexer_types", "layer_types"):
            config.pop(listed, None)
    plan = make_plan(config, find_table(name))
    hf, mcore = folder / name / "hf", folder / name / "mcore"
    synth(plan, hf)
    hf2mcore(hf, mcore, verify=False)
    return hf, mcore


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    rows = []
    for name in MODELS:
        if name == "glm_moe_dsa" and runtime.megatron_version() < DSA_NEEDS:
            continue
        began = time.monotonic()
        hf, mcore = make(name, chosen.folder, tiny=chosen.tiny)
        print(f"{name}: made in {time.monotonic() - began:.0f} s", flush=True)
        for dtype in ("float32", "bfloat16"):
            for stream in (False, True):
                options = ParityOptions(device=chosen.device, dtype=dtype, stream=stream)
                report = run_parity(hf, mcore, options)
                print(render_text(report), flush=True)
                label = f"{name}-{dtype}{'-stream' if stream else ''}"
                (chosen.folder / f"parity-{label}.json").write_text(render_json(report))
                (chosen.folder / f"parity-{label}.html").write_text(render_html(report))
                heads = ", ".join(f"{h.mean_abs:.1e} / {h.max_abs:.1e}" for h in report.heads)
                rows.append(
                    f"| {name} | {dtype}{', streamed' if stream else ''} | {report.modules} | "
                    f"{heads} | {report.verdict} | {report.seconds:.0f} s |"
                )
    print(
        "\n| model | run | modules | mean / largest difference: trunk, depth 0 | verdict | time |"
    )
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
