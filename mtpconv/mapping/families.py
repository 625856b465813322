"""What the shipped tables cover, as rows and as the page docs/families.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtpconv.mapping.table import Table
from mtpconv.mapping.table_reader import find_table, table_names


@dataclass(frozen=True, slots=True)
class Release:
    """A release that a table is pinned to, with the totals that were published.

    `computed` names those totals that nobody published and that follow from the others.
    """

    name: str
    tensors: int | None
    elements: int | None
    mtp_tensors: int | None
    computed: tuple[str, ...]

    @property
    def is_published(self) -> bool:
        """True if its size is pinned to a number that somebody else counted."""
        return self.elements is not None and "elements" not in self.computed


@dataclass(frozen=True, slots=True)
class Family:
    """One model type."""

    model_type: str
    #: depths of multi-token prediction: "none", "by config", "by checkpoint, else N"
    mtp: str
    #: HF tensors that releases store twice and Megatron once
    copies: tuple[str, ...]
    converts: bool
    #: why the forward of trunk and depths cannot be compared; None if it can
    no_parity: str | None
    #: what Megatron-Core alone lacks
    needs: str | None
    #: why no test loads a converted checkpoint into Megatron; None if one does
    untried: str | None
    releases: tuple[Release, ...]
    unverified: tuple[str, ...]

    @property
    def directions(self) -> str:
        """What mtpconv does with it."""
        return "both ways, audit" if self.converts else "inventory, audit"

    @property
    def parity(self) -> bool:
        """Whether the forward of trunk and depths can be compared."""
        return self.no_parity is None

    @property
    def loads(self) -> bool:
        """Whether a test loads a converted checkpoint into Megatron."""
        return self.converts and self.untried is None


def families(no_parity: Mapping[str, str]) -> list[Family]:
    """One row for each shipped table, by model type.

    `no_parity` says of families whose forward cannot be compared why not.
    """
    return [family_of(find_table(name), no_parity.get(name)) for name in table_names()]


def family_of(table: Table, no_parity: str | None) -> Family:
    """The row of a table."""
    return Family(
        table.model_type,
        _mtp(table),
        tuple(dict.fromkeys(c.hf for c in table.copies if c.ships)),
        table.converts,
        no_parity,
        table.needs,
        table.untried,
        tuple(_release(name, entry) for name, entry in table.releases.items()),
        table.unverified,
    )


def _mtp(table: Table) -> str:
    if not any(stack.each.endswith("in mtp") for stack in table.stacks):
        return "none"
    if table.mtp_default is None:
        return "by config"
    return f"by checkpoint, else {table.mtp_default}"


def _release(name: str, entry: Mapping[str, Any]) -> Release:
    return Release(
        name,
        entry.get("tensors"),
        entry.get("elements"),
        entry.get("mtp_tensors"),
        tuple(entry.get("computed", ())),
    )


_HEAD = """# Families

Made by `mtpconv families --format markdown` from `mappings/*.toml`; do not edit.

- MTP "by config": a field such as `num_nextn_predict_layers` promises the depths. "by checkpoint":
  the family's configs are silent, so the depths are counted where tensors are at hand.
- A family that is not converted gets its inventory and its audit; `hf2mcore` says what is missing.
- Loads: a test has Megatron's own `dist_checkpointing.load` read what `hf2mcore` wrote and compares
  every tensor of the live model. Parity: `mtpconv parity` runs trunk and MTP in both libraries.
- Sizes are totals that somebody else published and that the table reproduces to the last tensor and
  element; numbers in italics follow from them.
"""


def page(rows: Iterable[Family]) -> str:
    """The rows as Markdown."""
    rows = list(rows)
    return "\n".join([_HEAD, *_overview(rows), "", *_sizes(rows), "", *_notes(rows), ""])


def _overview(rows: list[Family]) -> Iterator[str]:
    yield "| model_type | MTP depths | copies in MTP | mtpconv does | loads | parity |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        copies = "yes, as the checkpoint has them" if row.copies else "-"
        loads = "yes" if row.loads else "-"
        parity = "yes" if row.parity else "-"
        yield (
            f"| `{row.model_type}` | {row.mtp} | {copies} | {row.directions} | {loads} | {parity} |"
        )


def _sizes(rows: list[Family]) -> Iterator[str]:
    yield "## Releases the tables are pinned to"
    yield ""
    yield "| model_type | release | tensors | elements | of them MTP tensors |"
    yield "|---|---|---:|---:|---:|"
    for row in rows:
        for release in row.releases:
            cells = (
                _number(release, "tensors", release.tensors),
                _number(release, "elements", release.elements),
                _number(release, "mtp_tensors", release.mtp_tensors),
            )
            yield f"| `{row.model_type}` | {release.name} | " + " | ".join(cells) + " |"


def _number(release: Release, what: str, value: int | None) -> str:
    if value is None:
        return "-"
    return f"*{value:,}*" if what in release.computed else f"{value:,}"


def _notes(rows: list[Family]) -> Iterator[str]:
    yield "## What Megatron-Core alone cannot do, and what is not proven or verified"
    for row in rows:
        if not any((row.needs, row.untried, row.no_parity, row.unverified)):
            continue
        yield ""
        yield f"### {row.model_type}"
        yield ""
        if row.needs:
            yield f"- {'loading it' if row.converts else 'not converted: it'} needs {row.needs}"
        if row.untried:
            yield f"- no test loads it into Megatron: {row.untried}"
        if row.no_parity:
            yield f"- no parity: {row.no_parity}"
        for text in row.unverified:
            yield f"- not verified: {text}"
