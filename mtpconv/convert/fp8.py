"""What a conversion does with block FP8: which way was asked for, what travels, what it can claim.

Levels (docs/fp8.md): `bytes`: codes and scales are those of the source; `values`: every BF16
number is code times scale, rounded once; `structure`: names, dtypes and shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from mtpconv.convert.outcome import NamedStep
from mtpconv.convert.shards import Shard, write_shards
from mtpconv.errors import RefusedError, UsageError
from mtpconv.mapping.check import is_carried
from mtpconv.mapping.table import Table
from mtpconv.ranges import compress
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.content import Pieced
from mtpconv.store.crew import Crew
from mtpconv.store.dequant import Dequantised, HfTensors
from mtpconv.store.durable import write_bytes
from mtpconv.store.fp8_tensors import Quantised, find_fp8, quantisation
from mtpconv.store.hf import HfCheckpoint
from mtpconv.store.hf_index import INDEX_NAME
from mtpconv.store.hf_writer import index_bytes, make_header
from mtpconv.store.requant import Requantised
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.store.source import HfSource
from mtpconv.tensors import TensorSpec

Fp8 = Literal["keep", "requantise", "bf16"]


def fp8_mode(word: str) -> Fp8:
    """The way that a word names. Raises: UsageError."""
    for mode in get_args(Fp8):
        if word == mode:
            found: Fp8 = mode
            return found
    raise UsageError(f"--fp8 {word}: must be {', '.join(get_args(Fp8))}")


def as_bf16(hf: HfCheckpoint, table: Table) -> HfTensors:
    """The HF side as Megatron gets it: as stored, or its block FP8 weights as BF16.

    What the table carries beside stays as it is.

    Raises: UnsupportedError for other quantised formats; RefusedError for damaged ones.
    """
    found = find_fp8(
        hf.tensors, hf.config or {}, str(hf.path), lambda n: is_carried(table, n),
        quant_config=hf.quant_config,
    )  # fmt: skip
    return Dequantised(hf, found) if found else hf


def fp8_weights(content: HfTensors) -> Mapping[str, Quantised]:
    """The FP8 weights behind a view of an HF folder, by name."""
    return content.quantised if isinstance(content, Dequantised) else {}


def source_fp8(origin: HfSource, table: Table) -> dict[str, Quantised]:
    """The block FP8 weights of the folder that an export is made like.

    Raises: UsageError if its config says that it is quantised and no headers say which.
    """
    stored = {n: s for h in origin.headers.values() for n, s in h.tensors.items()}
    if stored:
        return find_fp8(stored, origin.config, str(origin.path), lambda n: is_carried(table, n))
    if quantisation(origin.config):
        raise UsageError(
            f"{origin.path}: config.json has a quantization_config and there are no weights or "
            "headers that say which tensors are quantised; pass the original folder with --like, "
            "or --fp8 bf16"
        )
    return {}


def exported(
    view: Pieced, fp8: Mapping[str, Quantised], origin: HfSource, mode: Fp8, where: Path
) -> Pieced:
    """The tensors to export: Megatron's as they are, or seen as the source's FP8.

    Raises: UsageError if the kept codes that were asked for are not there; RefusedError if they
    do not fit, or Megatron's weights are not BF16.
    """
    present = {n: q for n, q in fp8.items() if n in view.tensors}
    if mode == "bf16" or not present:
        return view
    kept: Checkpoint | None = origin.quantised
    if kept is None and mode == "keep":
        raise UsageError(
            f"{where}: the FP8 codes of {len(present)} weights did not travel with it; pass the "
            "original folder with --like, or --fp8 requantise or --fp8 bf16"
        )
    for owner in present.values():
        spec = view.tensors[owner.name]
        if spec != owner.values:
            raise RefusedError(
                f"{where}: {owner.name} is {spec.dtype} {list(spec.shape)}, and FP8 is made of "
                f"BF16 {list(owner.grid.shape)}; mtpconv does not cast"
            )
        absent = [n for n, s in owner.specs.items() if kept and kept.tensors.get(n) != s]
        if absent:
            raise RefusedError(
                f"{origin.path}: kept FP8 tensors are missing or of another shape: "
                f"{compress(absent, 4)}; pass the original folder with --like"
            )
    return Requantised(view, present, kept, fresh=mode == "requantise")


def bf16_inventory(
    stored: Mapping[str, TensorSpec], fp8: Mapping[str, Quantised]
) -> dict[str, TensorSpec]:
    """What a release holds once its FP8 weights are BF16."""
    scales = {q.scale for q in fp8.values()}
    return {n: fp8[n].values if n in fp8 else s for n, s in stored.items() if n not in scales}


def write_kept(
    hf: HfCheckpoint,
    specs: Mapping[str, TensorSpec],
    folder: Path,
    crew: Crew,
    advance: Callable[[int, str], None],
) -> dict[str, str]:
    """Codes and scales as they are, in files named like their shards; gives their digests."""
    folder.mkdir()
    digests: dict[str, str] = {}
    shards = {f: h for f, h in shards_of(hf.shards, specs).items() if h.tensors}
    todo = []
    for file, header in shards.items():
        made = make_header(folder / file, header.tensors, {"format": "pt"})
        made.file.parent.mkdir(parents=True, exist_ok=True)
        todo.append(Shard(made.file, made))
    write_shards(todo, hf, crew, advance, lambda shard: digests.update(shard.digests))
    if any("/" in file for file in shards):  # found through an index only
        write_bytes(folder / INDEX_NAME, index_bytes(shards))
    return digests


def shards_of(
    headers: Mapping[str, ShardHeader], specs: Mapping[str, TensorSpec]
) -> dict[str, ShardHeader]:
    """The same shards with these tensors only, in these dtypes; those left empty are left out."""
    found = {}
    for file, old in headers.items():
        kept = {n: specs[n] for n in old.payload_order if n in specs}
        same = len(kept) == len(old.tensors) and all(old.tensors[n] == s for n, s in kept.items())
        if kept or same:
            found[file] = old if same else make_header(old.file, kept, old.metadata)
    return found


def remade_names(content: Pieced) -> Collection[str]:
    """Codes and scales that are made anew because none were kept."""
    return content.owned if isinstance(content, Requantised) and content.kept is None else ()


def idle_notes(mode: Fp8, fp8: Collection[str], origin: Path) -> Iterator[str]:
    """That `--fp8` was asked for and there is nothing that it could apply to."""
    if mode != "keep" and not fp8:
        yield f"--fp8 {mode} had nothing to do: {origin} has no block FP8 weights"


def import_steps(content: HfTensors, mode: Fp8, dropped: Collection[str]) -> tuple[NamedStep, ...]:
    """What hf2mcore does to FP8 that is not dropped."""
    count = len(fp8_weights(content).keys() - set(dropped))
    if not count:
        return ()
    what = "FP8 weights become BF16: code times scale in fp32, rounded once"
    beside = {
        "keep": ("keep", "bytes", "codes and scales travel in hf_source"),
        "requantise": ("forget", "structure", "codes and scales do not travel, their headers do"),
        "bf16": ("forget", "values", "codes and scales do not travel; hf_source says BF16"),
    }
    name, level, rest = beside[mode]
    return (
        NamedStep("dequantise", "values", count, what),
        NamedStep(name, level, 2 * count, rest),
    )


def export_steps(content: Pieced, fp8: Collection[str]) -> tuple[NamedStep, ...]:
    """What mcore2hf did to the FP8 weights that it wrote, told after the tensors were read."""
    if not fp8:
        return ()
    if not isinstance(content, Requantised):
        what = "weights of an FP8 source written as the BF16 that Megatron holds"
        return (NamedStep("write_bf16", "values", len(fp8), what),)
    changed = {n: c for n, c in content.seen.items() if c[0]}
    steps = []
    if len(content.seen) > len(changed):
        what = "FP8 weights restored: Megatron holds exactly what the kept codes stand for"
        steps.append(NamedStep("restore", "bytes", len(content.seen) - len(changed), what))
    if changed:
        new = sum(c[0] for c in changed.values())
        fresh = sum(c[1] for c in changed.values())
        what = (
            f"FP8 weights quantised anew in {new:,} blocks that changed: {fresh:,} under a fresh "
            f"scale, {new - fresh:,} under the kept one"
        )
        steps.append(NamedStep("requantise", "structure", len(changed), what))
    return tuple(steps)
