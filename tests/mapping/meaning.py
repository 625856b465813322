"""What each row of a table must mean, written by hand: names of Megatron's modules and of HF's.

The tables are held against this, so that no exchange of two rows gets into one of ours. Read from
Megatron-Core's modules (0.16.1 and 0.19.2: attention.py, multi_latent_attention.py, dsa.py, mlp.py,
experts.py, router.py, multi_token_prediction.py, gated_delta_net.py, mamba_mixer.py) and from
transformers 5.24's modelling code, never from `mappings/`.
"""

from __future__ import annotations

import re

from mtpconv.mapping.table import Row, Table

#: Key of Megatron: what the names of its HF tensors say, in their order; where there are several
#: such lists, the one of that length. `{1}` is the key's first group.
_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    r"\Aembedding\.word_embeddings\.weight": ((r"embed.*\.weight",),),
    r"\Aoutput_layer\.weight": ((r"\Alm_head\.weight",),),
    r"\Adecoder\.final_(layer)?norm\.weight": (
        (r"\A(model\.norm|backbone\.norm_f|norm)\.weight",),
    ),
    # MTP: the embedding of the next token comes first, then the hidden state.
    r"\Aenorm\.weight": ((r"\A(enorm|pre_fc_norm_embedding|token_layernorm)\.",),),
    r"\Ahnorm\.weight": ((r"\A(hnorm|pre_fc_norm_hidden|hidden_layernorm)\.",),),
    r"\Aeh_proj\.weight": ((r"\A(eh_proj|fc|input_proj)\.",),),
    r"\Afinal_layernorm\.weight": ((r"\A(.*shared_head\.norm|final_layernorm|norm)\.",),),
    # The norm that a projection is fused with is the one before it.
    r"linear_qkv\.layer_norm|in_proj\.layer_norm|\Ainput_layernorm": (
        (r"\A(input_layer)?norm\.",),
    ),
    r"\A(pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm)": (
        (r"\A(post_attention_layernorm|pre_mlp_layernorm|norm)\.",),
    ),
    r"linear_qkv\.(weight|bias)": (
        (r"\.q_proj\.{1}", r"\.k_proj\.{1}", r"\.v_proj\.{1}"),
        (r"\.q_proj\.{1}", r"\.k_proj\.{1}", r"\.v_proj\.{1}", r"\.g_proj\.{1}"),
        (r"\.query_key_value\.{1}",),
    ),
    r"linear_proj\.weight": ((r"\.(o_proj|dense)\.weight",),),
    r"linear_q_proj\.weight": ((r"\.q_proj\.weight",),),
    r"linear_(q|kv)_down_proj\.weight": ((r"\.{1}_a_proj",),),
    r"linear_(q|kv)_up_proj\.weight": ((r"\.{1}_b_proj",),),
    r"linear_(q|kv)_up_proj\.layer_norm": ((r"\.{1}_a_layernorm",),),
    r"self_attention\.q_layernorm": ((r"\.(q_norm|query_layernorm|q_a_layernorm)\.",),),
    r"self_attention\.k_layernorm": ((r"\.(k_norm|key_layernorm)\.",),),
    r"self_attention\.kv_layernorm": ((r"\.kv_a_layernorm\.",),),
    r"softmax_offset": ((r"attention_sink_bias",),),
    r"indexer\.linear_(wq_b|wk|weights_proj)\.weight": ((r"indexer\.{1}\.weight",),),
    r"indexer\.k_norm\.(weight|bias)": ((r"indexer\.k_norm\.{1}",),),
    # Feed-forward: gate comes before up; w1 is gate, w3 is up, w2 is down.
    r"shared_experts\.linear_fc1": ((r"share.*gate_proj", r"share.*up_proj"), (r"share.*up_proj",)),
    r"shared_experts\.linear_fc2": ((r"share.*down_proj",),),
    r"shared_experts\.gate_weight": ((r"shared_expert_gate\.",),),
    r"experts\.\{expert\}\.linear_fc1": (
        (r"(experts\.\{expert\}|moe)\.(gate_proj|w1)", r"(experts\.\{expert\}|moe)\.(up_proj|w3)"),
        (r"experts\.(\{expert\}\.|gate_)up_proj",),
    ),
    r"experts\.\{expert\}\.linear_fc2": ((r"(experts(\.\{expert\})?|moe)\.(down_proj|w2)",),),
    r"\Amlp\.linear_fc1\.weight": ((r"\Amlp\.gate_proj", r"\Amlp\.up_proj"), (r"mixer\.up_proj",)),
    r"\Amlp\.linear_fc2\.weight": ((r"\A(mlp|mixer)\.down_proj",),),
    r"\Amlp\.fc([12])_latent_proj": ((r"fc{1}_latent_proj",),),
    r"router\.weight": ((r"(mlp|mixer|moe|router)\.gate\.weight",),),
    r"router\.expert_bias": ((r"(e_score_correction|expert|router)_bias\Z",),),
    # Gated delta nets and Mamba; which rows a part is, is said below.
    r"self_attention\.in_proj\.weight\.(query|key|value)": ((r"\.in_proj_qkvz?\.",),),
    r"self_attention\.in_proj\.weight\.z": ((r"\.in_proj_(qkv)?z\.",),),
    r"self_attention\.in_proj\.weight\.beta": ((r"\.in_proj_ba?\.",),),
    r"self_attention\.in_proj\.weight\.alpha": ((r"\.in_proj_b?a\.",),),
    r"mixer\.in_proj\.weight\.(z|x|B|C|dt)\Z": ((r"mixer\.in_proj\.weight",),),
    r"conv1d\.(weight|bias)": ((r"conv1d\.{1}",),),
    r"\.(A_log|D|dt_bias)\Z": ((r"\.{1}\Z",),),
    r"\.out_proj\.weight": ((r"\.out_proj\.weight",),),
    r"self_attention\.out_norm\.weight": ((r"linear_attn\.norm\.weight",),),
    r"mixer\.norm\.weight": ((r"mixer\.norm\.weight",),),
}

#: The order of rows within one HF tensor that Megatron keeps in parts.
_PARTS = {
    "linear_attn.conv1d.weight": "query key value",
    "linear_attn.in_proj_qkv.weight": "query key value",
    "linear_attn.in_proj_qkvz.weight": "query key value z",
    "linear_attn.in_proj_ba.weight": "beta alpha",
    "mixer.in_proj.weight": "z x B C dt",
    "mixer.conv1d.weight": "x B C",
    "mixer.conv1d.bias": "x B C",
}


def is_meant(row: Row) -> bool:
    """Whether both sides of a row mean the same; the first word that the key has decides."""
    for key, alternatives in _WORDS.items():
        found = re.search(key, row.key)
        if found is None:
            continue
        first = found[1] if found.groups() and found[1] else ""
        return any(
            len(words) == len(row.hf)
            and all(
                re.search(w.replace("{1}", first), n) for w, n in zip(words, row.hf, strict=True)
            )
            for words in alternatives
        )
    return False


def are_parts_meant(table: Table) -> bool:
    """Whether HF tensors that are cut are cut in the right order."""
    return all(
        " ".join(part for part, _ in parts.rows) == _PARTS.get(name)
        for name, parts in table.parts.items()
    )
