"""Small seeded checkpoints written from a plan, MTP included, never through save_pretrained.

Layer and expert numbers stay those of the real model; only widths shrink. Every tensor has
its own data, no two halves and no two rows are alike, so that every swap is visible.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mtpconv.audit.names import is_own_head
from mtpconv.errors import UnsupportedError, UsageError
from mtpconv.geometry import EXPERT_FIELDS, MTP_FIELDS, read_geometry, text_config
from mtpconv.geometry.config import MTP_PATTERN_FIELDS
from mtpconv.mapping.plan import Plan
from mtpconv.store.durable import write_bytes
from mtpconv.store.fp8 import Grid
from mtpconv.store.fp8_tensors import SCALE, Quantised, quantisation, with_scales
from mtpconv.store.hf_writer import index_bytes, make_header, write_shard
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.tensors import TensorSpec

#: Widths of a shrunken model; fields a config does not have stay absent.
TINY: Mapping[str, int] = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "vocab_size": 64,
    "num_attention_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "index_n_heads": 2, "index_head_dim": 8,
    "qk_head_dim": 8, "num_key_value_heads": 2, "head_dim": 4,
    "moe_shared_expert_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "share_expert_dim": 8, "expert_ffn_hidden_size": 8, "ffn_hidden_size": 24,
    "moe_latent_size": 8, "num_attention_groups": 2, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4, "swa_head_dim": 4, "swa_v_head_dim": 2,
    "mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "o_groups": 2, "o_lora_rank": 4, "hc_mult": 2,
}  # fmt: skip


def shrink(config: Mapping[str, Any], widths: Mapping[str, int] = TINY) -> dict[str, Any]:
    """The config with small widths; layers, experts, depths and all switches stay."""
    small: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            small[key] = shrink(value, widths)
        elif isinstance(value, int) and not isinstance(value, bool) and key in widths:
            small[key] = min(value, widths[key])
        else:
            small[key] = value
    if "kv_lora_rank" in config and "num_key_value_heads" in config:
        small["num_key_value_heads"] = small["num_attention_heads"]  # MLA has no groups
    return small


#: LongCat has the second one, other families the first.
_LAYER_FIELDS = ("num_hidden_layers", "num_layers")
#: Words in the names of fields that hold an entry for each layer.
_BY_LAYER = ("layer", "type", "pattern", "ratio", "freq")
#: How many experts see a token, in the spellings of the families.
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k")


def fewer(
    config: Mapping[str, Any], *, layers: int | None = None, experts: int | None = None
) -> dict[str, Any]:
    """The config with that many trunk layers and routed experts; MTP depths stay.

    Raises: UsageError if the model has fewer layers; RefusedError if it does not say how many.
    """
    whole = text_config(config)
    text = dict(whole)
    if layers is not None:
        _cut_layers(text, layers)
    if experts is not None:
        for field in EXPERT_FIELDS:
            if text.get(field) is not None:
                text[field] = experts
        for field in _TOP_K:
            if isinstance(text.get(field), int):
                text[field] = min(text[field], experts)
        groups = text.get("n_group")
        if isinstance(groups, int) and groups > 0 and experts % groups:
            text.update(n_group=1, topk_group=1)
    if whole is config:
        return text
    return {key: text if value is whole else value for key, value in config.items()}


def _cut_layers(text: dict[str, Any], layers: int) -> None:
    """Cut every field that has an entry for each layer; entries of MTP depths follow the trunk's.

    Lists that name layers by number may name ones that are gone.
    """
    old = read_geometry({"model_type": "any", **text}).layers
    if layers > old:
        raise UsageError(f"--layers {layers}: the config has {old} trunk layers; name fewer")
    depths = sum(text[f] for f in MTP_FIELDS if isinstance(text.get(f), int))
    for field, value in text.items():
        if field in _LAYER_FIELDS:
            text[field] = layers
        elif _is_by_layer(field, value) and old <= len(value) <= old + depths:
            kept = [*value[:layers], *value[old:]]
            text[field] = "".join(kept) if isinstance(value, str) else kept


def _is_by_layer(field: str, value: object) -> bool:
    named = any(word in field for word in _BY_LAYER) and field not in MTP_PATTERN_FIELDS
    return named and isinstance(value, str | list)


def synth(
    plan: Plan,
    folder: Path,
    *,
    seed: int = 0,
    shards: int = 4,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Write an HF folder that holds exactly what the plan promises, in FP8 if the config says so.

    The same plan and seed give the same bytes. `dtypes` overrides single tensors.

    Raises: FileExistsError if the folder has shards already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    promised = released(plan).items()
    specs = {n: TensorSpec((dtypes or {}).get(n, s.dtype), s.shape) for n, s in promised}
    originals = {c.hf: c.of for c in plan.copies if not is_own_head(c.hf)}
    headers = _headers(folder, specs, shards)
    for name, header in headers.items():
        write_shard(
            folder / name,
            header,
            lambda n: iter([memoryview(tensor_bytes(originals.get(n, n), specs[n], seed))]),
        )
    config = json.dumps(dict(plan.geometry.config), indent=2) + "\n"
    write_bytes(folder / "config.json", config.encode())
    write_bytes(folder / "generation_config.json", b'{\n  "do_sample": true\n}\n')
    write_bytes(folder / "tokenizer_config.json", b'{\n  "model_max_length": 4096\n}\n')
    if len(headers) > 1:
        write_bytes(folder / "model.safetensors.index.json", index_bytes(headers))


def released(plan: Plan) -> dict[str, TensorSpec]:
    """The inventory of a release: the plan's, with codes and scales where the config says fp8.

    Quantised are the projections inside layers, but for the modules that the config excepts.
    Source: the headers of DeepSeek-R1 and GLM-5.2-FP8 (families.md section 5).
    """
    stated = quantisation(plan.geometry.config)
    if stated.get("quant_method") != "fp8":
        return dict(plan.hf)
    block = stated.get("weight_block_size") or (128, 128)
    if plan.geometry.model_type == "deepseek_v4":
        return _deepseek_v4(plan.hf, (block[0], block[1]))
    excepted = {*(stated.get("modules_to_not_convert") or ())}
    return with_scales(
        plan.hf,
        {
            name: Quantised(name, name + SCALE, Grid(spec.shape, (block[0], block[1])), "F32")
            for name, spec in plan.hf.items()
            if ".layers." in name
            and _is_projection(name)
            and name.removesuffix(".weight") not in excepted
            and len(spec.shape) > 1
        },
    )


def _is_projection(name: str) -> bool:
    if name.endswith((".w1.weight", ".w2.weight", ".w3.weight")):  # MiniMax, Mixtral
        return True
    return "proj" in name and "eh_proj" not in name


#: What DeepSeek-V4 keeps in block FP8; with one scale for each of them and for each matrix of an
#: expert it has the 34,167 scales of the published listing (mappings/deepseek_v4.toml).
_V4_FP8 = tuple(
    f"{module}.weight"
    for module in (
        "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "attn.indexer.wq_b",
        "shared_experts.w1", "shared_experts.w2", "shared_experts.w3", "e_proj", "h_proj",
    )
)  # fmt: skip
#: Values of MXFP4 that share a scale. Source: OCP MX specification 1.0, section 5.
_MX_BLOCK = 32


def _deepseek_v4(
    weights: Mapping[str, TensorSpec], block: tuple[int, int]
) -> dict[str, TensorSpec]:
    """Experts as MXFP4, two values a byte, other projections as FP8, scales of E8M0 beside."""
    found: dict[str, TensorSpec] = {}
    for name, spec in weights.items():
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            rows, columns = spec.shape
            found[name] = TensorSpec("I8", (rows, -(-columns // 2)))
            found[scale] = TensorSpec("F8_E8M0", (rows, -(-columns // _MX_BLOCK)))
        elif name.endswith(_V4_FP8):
            found[name] = TensorSpec("F8_E4M3", spec.shape)
            found[scale] = TensorSpec("F8_E8M0", Grid(spec.shape, block).scale_shape)
        else:
            found[name] = spec
    return found


def tensor_bytes(name: str, spec: TensorSpec, seed: int) -> bytes:
    """Bytes of one tensor: finite values, a function of name, dtype, shape and seed alone."""
    raw = blake3(f"{seed} {name} {spec.dtype} {spec.shape}".encode()).digest(spec.nbytes)
    if name.endswith(SCALE):  # positive, and so small that weights are about 0.01
        return _finite(raw, spec.dtype, norm=True, bias=-12).tobytes()
    if spec.dtype in ("BF16", "F32", "F16"):
        return _finite(raw, spec.dtype, norm="norm" in name.rsplit(".", 2)[-2:][0]).tobytes()
    if spec.dtype == "F8_E4M3":
        words = np.frombuffer(raw, "u1")
        return np.where(words & 0x7F == 0x7F, words ^ 1, words).astype("u1").tobytes()
    if spec.dtype == "F8_E8M0":  # 2^-15 to 2^-8: weights are about 0.01
        return (np.frombuffer(raw, "u1") % 8 + 112).astype("u1").tobytes()
    if spec.dtype in ("I64", "I32", "U8", "I8", "I16", "U16", "U32", "U64"):
        return raw
    if spec.dtype == "BOOL":
        return (np.frombuffer(raw, "u1") & 1).tobytes()
    raise UnsupportedError(f"{name}: synth does not make {spec.dtype}")


def _finite(raw: bytes, dtype: str, *, norm: bool, bias: int = 0) -> NDArray[Any]:
    """Random sign and mantissa; exponents near 1 for norms, from 2^-9 to 2^-2 otherwise."""
    bits, mantissa, zero = {"BF16": (16, 7, 127), "F16": (16, 10, 15), "F32": (32, 23, 127)}[dtype]
    bias += zero
    words = np.frombuffer(raw, f"<u{bits // 8}")
    kind = words.dtype.type
    random = words & kind((1 << mantissa) - 1)
    pick = (words >> kind(mantissa)) & kind(7)
    sign = words & kind(1 << (bits - 1))
    exponent = (kind(bias) - (pick & kind(1))) if norm else (kind(bias - 9) + pick)
    signed: NDArray[Any] = random | (exponent << kind(mantissa))
    return signed if norm else signed | sign


def _headers(
    folder: Path, specs: Mapping[str, TensorSpec], shards: int
) -> Mapping[str, ShardHeader]:
    total = sum(s.nbytes for s in specs.values())
    groups: list[dict[str, TensorSpec]] = [{} for _ in range(max(1, min(shards, len(specs))))]
    done = 0
    for name, spec in specs.items():
        groups[min(done * len(groups) // max(total, 1), len(groups) - 1)][name] = spec
        done += spec.nbytes
    groups = [g for g in groups if g]
    count = len(groups)

    def named() -> Iterator[str]:
        if count == 1:
            yield "model.safetensors"
        else:
            yield from (f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1))

    metadata = {"format": "pt"}
    return {n: make_header(folder / n, g, metadata) for n, g in zip(named(), groups, strict=True)}
