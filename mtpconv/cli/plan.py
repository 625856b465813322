"""plan, check, families and synth as commands: everything that needs no weights."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from mtpconv.audit.promise import unkept_promise
from mtpconv.cli.afar import headers_of
from mtpconv.cli.terminal import human, one_line, say
from mtpconv.errors import UnreadableError, UsageError
from mtpconv.mapping.check import check, own_table
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table import Table
from mtpconv.mapping.table_reader import find_table, parse_table
from mtpconv.tensors import TensorSpec


def run_plan(model: str, *, rows: bool, mapping: Path | None) -> None:
    """Print the expansion of a table for a model."""
    with headers_of(model) as path:
        plan = load_plan(path, mapping)
    if rows:
        for name, spec in plan.hf.items():
            typer.echo(f"{plan.regions[name]}\t{one_line(name)}\t{spec.dtype}\t{list(spec.shape)}")
        return
    geometry = plan.geometry
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, spec in plan.hf.items():
        region = plan.regions[name]
        label = f"mtp depth {region.index}" if region.kind == "mtp" else region.kind
        for total in (counts[label], counts["total"]):
            total[0] += 1
            total[1] += spec.elements
            total[2] += spec.nbytes
    order = sorted(counts, key=lambda k: (k == "total", k.startswith("mtp"), k != "root", k))
    say(
        f"{geometry.model_type}: {geometry.layers} trunk layers, {geometry.depths} MTP depths, "
        f"{geometry.experts} experts"
    )
    say(f"{'region':<14}{'tensors':>10}{'parameters':>20}{'bytes':>24}")
    for label in order:
        tensors, elements, nbytes = counts[label]
        say(f"{label:<14}{tensors:>10,}{elements:>20,}{nbytes:>24,}")
    if not geometry.depths:
        field = geometry.mtp_field
        why = f"{field} is {geometry.text[field]}" if field else "no field promises it"
        why = unkept_promise(geometry.config) or why
        say(f"MTP: none ({why})")


def run_check(table: Path, *, config: Path | None, inventory: Path | None) -> None:
    """Run the static rules; exit 1 if one is broken."""
    if inventory is not None and config is None:
        raise UsageError("--inventory needs --config: which tensors there must be depends on it")
    parsed = load_table(table)
    faults = check(
        parsed,
        read_config(config) if config else None,
        read_inventory(inventory) if inventory else None,
    )
    for fault in faults:
        say(str(fault))
    if faults:
        raise typer.Exit(1)
    given = "" if config is None else " for this config"
    given += "" if inventory is None else ", and it covers the inventory"
    say(f"{parsed.path.name}: no rule is broken{given}")


def run_families(form: str) -> None:
    """Print what the shipped tables cover."""
    from mtpconv.mapping.families import families, page
    from mtpconv.parity.families import NOT_RUN

    rows = families(NOT_RUN)
    if form == "markdown":
        typer.echo(page(rows), nl=False)
    elif form == "json":
        said = ("directions", "loads", "parity")
        listed = [asdict(row) | {name: getattr(row, name) for name in said} for row in rows]
        typer.echo(json.dumps(listed, indent=2))
    elif form == "text":
        lines = [("model_type", "MTP depths", "mtpconv does", "proofs", "releases")]
        for row in rows:
            proofs = [w for w, yes in (("loads", row.loads), ("parity", row.parity)) if yes]
            pinned = [r.name for r in row.releases if r.elements is not None]
            lines.append(
                (row.model_type, row.mtp, row.directions, ", ".join(proofs), ", ".join(pinned))
            )
        for line in lines:
            name, mtp, does, proved, releases = (word or "-" for word in line)
            say(f"{name:<18}{mtp:<24}{does:<18}{proved:<14}{releases}")
    else:
        raise UsageError(f"--format {form}: must be text, json or markdown")


def run_synth(
    config: Path,
    dst: Path,
    *,
    seed: int,
    shards: int,
    full_width: bool,
    layers: int | None,
    experts: int | None,
    mapping: Path | None,
) -> None:
    """Write a small checkpoint."""
    from mtpconv.convert.output import Output
    from mtpconv.store.places import places_read
    from mtpconv.synth import fewer, released, shrink, synth

    raw = read_config(config)
    small = fewer(raw if full_width else shrink(raw), layers=layers, experts=experts)
    if dst.is_dir() and any(dst.iterdir()):
        raise UsageError(f"{dst}: exists and is not empty; name another folder")
    table = own_table(mapping) if mapping else find_table(str(small.get("model_type")))
    plan = make_plan(small, table)
    written = released(plan)
    total = sum(s.nbytes for s in written.values())
    with Output(dst, places_read(config, mapping), overwrite=False, need=total) as out:
        synth(plan, out.folder, seed=seed, shards=shards)
        out.commit()
    mtp = sum(r.kind == "mtp" for r in plan.regions.values())
    say(f"synth: wrote {len(written):,} tensors ({mtp:,} MTP), {human(total)} to {dst}")


def load_plan(model: Path, mapping: Path | None) -> Plan:
    """The plan of a config.json or of a checkpoint folder (copies as its headers show)."""
    present: Collection[str] | None = None
    if model.is_dir() and not (model / "config.json").is_file():
        from mtpconv.store.source import find_source

        source = find_source(model)
        if source is None:
            raise UnreadableError(f"{model}: has neither config.json nor hf_source/")
        config: Mapping[str, Any] = source.config
        present = source.names or None
    elif model.is_dir():
        config = read_config(model / "config.json")
        if any(model.glob("*.safetensors")):
            from mtpconv.store.hf import open_hf

            present = open_hf(model, compare_duplicates=False).tensors
    else:
        config = read_config(model)
    table = own_table(mapping) if mapping else find_table(str(config.get("model_type")))
    return make_plan(config, table, present)


def load_table(table: Path) -> Table:
    """A table by path, or by model_type."""
    return parse_table(table) if table.is_file() else find_table(str(table))


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as raw JSON. Raises: UnreadableError."""
    from mtpconv.store.json_text import read_json

    value = read_json(path).value
    if not isinstance(value, dict):
        raise UnreadableError(f"{path}: is not a JSON object")
    return value


def read_inventory(path: Path) -> Mapping[str, TensorSpec | None]:
    """Names (and shapes where known) of an index, a manifest or a folder."""
    if path.is_dir():
        from mtpconv.store.hf import open_hf

        return dict(open_hf(path, compare_duplicates=False).tensors)
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path}: cannot be read: {error}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if isinstance(weight_map, dict):
        return dict.fromkeys(weight_map)
    from mtpconv.store.manifest import read_manifest

    return dict(read_manifest(path).tensors)
