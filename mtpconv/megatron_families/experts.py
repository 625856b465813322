"""Mixtures of experts and their routers."""

from __future__ import annotations

from mtpconv.megatron_families.draft import Draft, number

#: How configs call the router's score function, and the factor on the chosen scores.
_SCORES = ("scoring_func", "score_function", "moe_router_activation")
_FACTORS = ("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor")


def moe(d: Draft) -> None:
    """Numbers and widths of experts, and which layers have them."""
    g = d.geometry
    layers = [g.fact("is_moe", layer) for layer in range(g.layers)]
    if not any(layers) and not (g.depths and g.fact("is_moe", g.layers)):
        return
    width = "moe_intermediate_size" if "moe_intermediate_size" in g.text else "intermediate_size"
    shared = None
    if g.fact("has_shared_experts", 0) or "share_expert_dim" in g.text:
        shared = d.dim("shared_experts_width")
    d.args |= {
        "num_experts": g.experts,
        "moe_ffn_hidden_size": d.dim(width),
        "moe_shared_expert_intermediate_size": shared,
        # The int 1 makes Megatron stack layers that are alike, a list keeps them apart.
        "moe_layer_freq": 1 if all(layers) else [int(is_moe) for is_moe in layers],
        "moe_router_topk": d.dim(d.named("num_experts_per_tok", "moe_top_k")),
        "moe_grouped_gemm": True,  # as training runs do; torch_dist keys are the same without
    }


def sigmoid_router(d: Draft) -> None:
    """Scores by sigmoid, a bias on the choice, groups of experts."""
    if d.args["num_experts"] is None:
        return
    d.only(d.named(*_SCORES), "sigmoid")
    d.only("topk_method", "noaux_tc")
    d.only("norm_topk_prob", True)
    factor = d.named(*_FACTORS)
    d.args |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": (
            1.0 if d.config.get(factor) is None else number(d.config, factor)
        ),
        "moe_router_dtype": "fp32",
    }
    if d.config.get("n_group") and d.dim("n_group") > 1:
        d.args["moe_router_num_groups"] = d.dim("n_group")
        d.args["moe_router_group_topk"] = d.dim("topk_group")


def softmax_router(d: Draft) -> None:
    """Scores by softmax."""
    # Softmax over the chosen experts is softmax over all, made to sum to one again.
    if d.args["num_experts"] is not None:
        again = d.config.get("norm_topk_prob", d.geometry.model_type == "mixtral")
        d.args["moe_router_pre_softmax"] = not again
