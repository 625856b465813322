"""Which model types an engine treats in which way, as read in its source."""

from __future__ import annotations

from collections.abc import Mapping

#: The families that both engines load as DeepSeek-V3's MTP.
#: Source: vLLM vllm/config/speculative.py @ 002e77c1, hf_config_override; SGLang
#: python/sglang/srt/configs/model_config.py @ 001adf56, _config_draft_model.
DEEPSEEK = frozenset(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"))
#: Whose number of MTP depths vLLM takes from the config, with no number of its own instead.
COUNTED = DEEPSEEK | {
    "bailing_hybrid", "deepseek_v4", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "hy_v3", "mimo", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next",
}  # fmt: skip
#: Whose MTP layers keep heads of their own in vLLM.
#: Source: vLLM vllm/v1/spec_decode/step3p5.py @ 055e47c2, _maybe_share_lm_head.
OWN_HEADS = frozenset(("step3p5",))
#: What from_pretrained drops without a word, by model_type.
#: Source: transformers 5.24.0, `_keys_to_ignore_on_load_unexpected` in each modeling file.
DROPPED: Mapping[str, str] = {
    "deepseek_v3": r"model\.layers\.61.*",
    "deepseek_v32": r"model\.layers\.61.*",
    "deepseek_v4": r"(^|\.)mtp\..*",
    "glm4_moe": r"model\.layers\.(92|46).*",
    "glm4_moe_lite": r"model\.layers\.47.*",
    "glm_moe_dsa": r"model\.layers\.78.*",
    "hy_v3": r"model\.layers\.80.*",
    "qwen3_next": r"^mtp.*",
    "qwen3_5": r"^mtp.*",
    "qwen3_5_moe": r"^mtp.*",
    "exaone_moe": r"mtp.*",
    "ernie4_5_moe": r"mtp",
    "longcat_flash": r"model\.mtp.*",
    "mimo_v2_flash": r"^model\.mtp\.",
    "nemotron_h": r"mtp.*",
}
#: Families for which an absent count becomes 1.
#: Source: transformers 5.24.0, `num_mtp_layers: int = 1` in each configuration file.
DEFAULTS_TO_ONE = frozenset(("deepseek_v3", "glm4_moe", "bailing_hybrid", "deepseek_v4"))
