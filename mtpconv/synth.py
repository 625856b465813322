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
from mtpconv.errors import UnsupportedError
from mtpconv.mapping.plan import Plan
from mtpconv.store.fp8 import Grid
from mtpconv.store.fp8_tensors import SCALE, Quantised, quantisation, with_scales
from mtpconv.store.hf_writer import index_bytes, make_header, write_shard
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.store.source import write_bytes
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
    excepted = {*(stated.get("modules_to_not_convert") or ())}
    return with_scales(
        plan.hf,
        {
            name: Quantised(name, name + SCALE, Grid(spec.shape, (block[0], block[1])), "F32")
            for name, spec in plan.hf.items()
            if ".layers." in name
            and "proj" in name
            and "eh_proj" not in name
            and name.removesuffix(".weight") not in excepted
            and len(spec.shape) > 1
        },
    )


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
    if spec.dtype in ("I64", "I32", "U8", "I8", "I16", "U16", "U32", "U64", "F8_E8M0"):
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
