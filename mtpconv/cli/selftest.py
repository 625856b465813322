"""selftest as a command."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from mtpconv.selftest import run_selftest

#: The built-in checkpoint: GLM-5's names with few layers and experts.
_BUILT_IN = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "hidden_size": 16, "intermediate_size": 24,
    "moe_intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "vocab_size": 64,
    "tie_word_embeddings": False, "dtype": "bfloat16", "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "n_group": 1, "topk_group": 1,
}  # fmt: skip


def run(folder: Path | None, *, quiet: bool) -> None:
    """Try every fault; exit 1 if one does not turn the audit red."""
    failed = tried = skipped = 0
    with tempfile.TemporaryDirectory(prefix="mtpconv-selftest-") as place:
        for trial in run_selftest(folder, Path(place), _BUILT_IN):
            tried += trial.skipped is None
            skipped += trial.skipped is not None
            failed += not trial.red
            if quiet and trial.red:
                continue
            if trial.skipped is not None:
                said = f"not applicable: {trial.skipped}"
            elif trial.red:
                said = ", ".join(trial.found) or "green, as it must be"
            else:
                said = f"NOT CAUGHT (found: {', '.join(trial.found) or 'nothing'})"
            typer.echo(f"{trial.fault:<45} {said}")
    if failed:
        typer.echo(f"selftest: {failed} of {tried} trials went wrong; do not trust this gate")
        raise typer.Exit(1)
    if not quiet:
        rest = f", {skipped} not applicable" if skipped else ""
        typer.echo(f"selftest: the clean copy is green and all {tried - 1} faults are red{rest}")
