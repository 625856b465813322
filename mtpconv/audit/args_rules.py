"""Megatron's arguments compared: what changes the meaning of the weights must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mtpconv.audit.codes import finding
from mtpconv.audit.config_rules import ABSENT, same_json, shown
from mtpconv.audit.finding import Finding, Severity
from mtpconv.audit.promise import read_promise
from mtpconv.audit.subject import ARGS, Subject, saved_args
from mtpconv.errors import MtpconvError
from mtpconv.geometry import read_geometry
from mtpconv.megatron_args import FLAGLESS, RENAMED, SWITCHES, VALUES, megatron_args
from mtpconv.store.hf import CONFIG_NAME
from mtpconv.store.legacy import MegatronCheckpoint

Args = Mapping[str, Any]

_EMBEDDING = "embedding.word_embeddings.weight"

#: How a run trains or speeds up a model, and what its tokenizer was. Layers and MTP depths of two
#: checkpoints are compared as promises.
_FREE = frozenset((
    "num_layers", "mtp_num_layers", "mtp_loss_scaling_factor", "attention_dropout",
    "hidden_dropout", "moe_router_dtype", "moe_grouped_gemm", "apply_rope_fusion", "bf16", "fp16",
    "vocab_size", "make_vocab_size_divisible_by", "tokenizer_type", "tokenizer_model",
))  # fmt: skip
COMPARED = tuple(n for n in (*VALUES, *SWITCHES, *FLAGLESS) if n not in _FREE)
#: A training run sets its own, whatever the model's config allows.
_OF_THE_RUN = frozenset(("max_position_embeddings",))

#: No flag sets them, so they get lost whenever a run saves its args; or older versions had
#: another word.
_OFTEN_ABSENT = frozenset((*FLAGLESS, "hybrid_layer_pattern"))

_LATENT = frozenset((
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
))  # fmt: skip
_YARN = frozenset(("rotary_scaling_factor", "mscale", "mscale_all_dim", *FLAGLESS))


def args_findings(before: Subject, after: Subject) -> Iterator[Finding]:
    """What the args of one or both sides say differently, or what is lost with them."""
    if before.config is None:
        return
    if after.config is None:
        if after.megatron is not None:
            yield _lost(before, after)
    elif before.config_source == after.config_source:
        yield from compare_args(before.config, after.config, after.config_source)
    else:
        args_first = before.config_source == ARGS
        side, other = (before, after) if args_first else (after, before)
        assert side.config is not None
        assert other.config is not None
        yield from compare_with_config(
            side.config, other.config, _rows(side.megatron),
            args_first=args_first, source=after.config_source,
        )  # fmt: skip


def _lost(before: Subject, after: Subject) -> Finding:
    """No args where the reference has args or a config; an error if MTP hangs on them."""
    promise = read_promise(before.config)
    needed = before.config_source == ARGS or promise.depths or promise.by_family
    message = f"{after.path}: has no args"
    if after.told_in is not None:
        message += f"; {after.told_in} may say the same and is not read"
    else:
        message += "; Megatron then builds MTP, rope and the rest from its command line only"
    return finding(
        "config_mismatch", "error" if needed and after.told_in is None else "warning", message,
        field="args", file=after.config_source,
    )  # fmt: skip


def _rows(stored: MegatronCheckpoint | None) -> int | None:
    held = stored.tensors.get(_EMBEDDING) if stored is not None else None
    return held.shape[0] if held is not None and held.shape else None


def contradictions(stored: MegatronCheckpoint, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Args that a checkpoint holds and that make something else of its weights than a config does.

    The config is what an export of the checkpoint gets. Only errors: args that are absent or few
    contradict nothing. `before` of a finding is the args' value, `after` the config's.
    """
    args = saved_args(stored)
    if args is not None:
        for found in compare_with_config(
            args, config, _rows(stored), args_first=True, source=CONFIG_NAME
        ):
            if found.severity == "error":
                yield found


def own_args_findings(after: Subject) -> Iterator[Finding]:
    """What the config beside a Megatron checkpoint says otherwise than its own args."""
    if after.source is None or after.megatron is None:
        return
    for found in contradictions(after.megatron, after.source.config):
        message = (
            f"{found.field} is {shown(found.before)} in the args and {shown(found.after)} by "
            "config.json in hf_source; the weights then mean something else"
        )
        yield replace(found, message=message)


def compare_args(before: Args, after: Args, source: str) -> Iterator[Finding]:
    """Differences between the args of two Megatron checkpoints.

    Where one of them lacks a name, it means Megatron's default; but tools other than Megatron-LM
    write few, and then all absent names are one warning. `source` names the args.
    """
    old, new = _read(before), _read(after)
    few = 2 * min(len(old), len(new)) < max(len(old), len(new))
    absent = []
    for name in COMPARED:
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            if not (_applies(name, old) or _applies(name, new)):
                continue
            a, b = (_default(name, args) if args.get(name) is None else args[name]
                    for args in (old, new))  # fmt: skip
        if same_json(a, b):
            continue
        if (name in old) is not (name in new) and (few or name in _OFTEN_ABSENT):
            absent.append(name)
        else:
            yield _mismatch(name, a, b, "error", "was", source)
    yield from _absent(absent, source)


def compare_with_config(
    args: Args, config: Mapping[str, Any], rows: int | None, *, args_first: bool, source: str
) -> Iterator[Finding]:
    """Differences between a checkpoint's args and those that an HF config makes.

    `rows` are those of the stored embedding. Names that args lack are one warning.
    """
    try:
        made = _read(megatron_args(read_geometry(config), rows, []))
    except MtpconvError as error:
        yield finding(
            "config_mismatch", "warning", f"{error}; args were not compared with it",
            field="args", file=source,
        )  # fmt: skip
        return
    found = _read(args)
    absent = []
    for name in ("num_layers", *COMPARED):
        if name in _OF_THE_RUN or name not in made or not _applies(name, made):
            continue
        b = found.get(name)
        b = _default(name, found) if b is None else b
        if same_json(made[name], b):
            continue
        if name not in found:
            absent.append(name)
            continue
        # The embedding says how many rows there are, and a run pads as its ranks need.
        severity: Severity = "warning" if name == "padded_vocab_size" else "error"
        a, b = (b, made[name]) if args_first else (made[name], b)
        if severity == "error" or rows is not None:
            yield _mismatch(name, a, b, severity, "is in the reference", source)
    yield from _absent(absent, source)


def _absent(names: list[str], source: str) -> Iterator[Finding]:
    if names:
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield finding(
            "config_mismatch", "warning",
            f"one side's args lack {listed}; a run must be told them on its command line",
            field="args", file=source,
        )  # fmt: skip


def _mismatch(name: str, a: Any, b: Any, severity: Severity, verb: str, source: str) -> Finding:
    return finding(
        "config_mismatch", severity,
        f"{name} {verb} {shown(a)} and is {shown(b)} here; the weights then mean something else",
        field=name, before=a, after=b, file=source,
    )  # fmt: skip


def _read(args: Args) -> dict[str, Any]:
    """The compared arguments that are there, as Megatron understands them."""
    found: dict[str, Any] = {}
    for name in ("num_layers", *COMPARED):
        value = args.get(name, args.get(RENAMED.get(name, name), ABSENT))
        if value is not ABSENT:
            found[name] = list(value) if isinstance(value, tuple) else value
    if not found.get("group_query_attention"):
        found.pop("num_query_groups", None)
    if not found.get("num_experts"):
        found.pop("num_experts", None)
    frequency, layers = found.get("moe_layer_freq"), args.get("num_layers")
    if type(frequency) is int and frequency > 0 and type(layers) is int and layers < 10_000:
        found["moe_layer_freq"] = [int(i % frequency == 0) for i in range(layers)]
    return found


def _default(name: str, args: Args) -> Any:
    """What Megatron takes where nothing is said.

    Source: megatron-core 0.19.2 megatron/training/arguments.py, validate_args and the help of
    --rope-type, read 2026-11-29.
    """
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    if name == "kv_channels" and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    if name == "moe_ffn_hidden_size":
        return args.get("ffn_hidden_size")
    if name == "rope_type":
        return "yarn" if args.get("multi_latent_attention") else "rope"
    if name == "moe_layer_freq":
        return [1] * len(args["moe_layer_freq"]) if args.get("moe_layer_freq") else 1
    if name in SWITCHES:
        return not SWITCHES[name][1]
    if name == "num_query_groups":
        return None
    return VALUES.get(name, FLAGLESS.get(name))


def _applies(name: str, args: Args) -> bool:
    """Whether an argument means anything beside the others."""
    latent = bool(args.get("multi_latent_attention"))
    if name in _LATENT:
        return latent
    if name in _YARN:
        return latent and (args.get("rope_type") or "yarn") == "yarn"
    if name == "kv_channels":
        return not latent
    if name == "rope_scaling_factor":
        return bool(args.get("use_rope_scaling"))
    variant = args.get("experimental_attention_variant")
    for start, does in (
        ("moe_", args.get("num_experts")),
        ("dsa_", variant == "dsa"),
        ("linear_", variant == "gated_delta_net"),
        ("mamba_", args.get("hybrid_layer_pattern")),
    ):
        if name.startswith(start):
            return bool(does)
    return True
