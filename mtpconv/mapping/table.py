"""A mapping table: rows in blocks, stacks that use them, and what is special about a family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: More MTP depths than any release has; where a checkpoint is counted, counting stops here.
MAX_DEPTHS = 16
PLACEHOLDERS = frozenset({"layer", "depth", "expert"})
EACH = {
    "once": frozenset[str](),
    "layer in trunk": frozenset({"layer"}),
    "depth in mtp": frozenset({"layer", "depth"}),
    # A depth that is itself a small stack: `inner` counts within it, `flat` through all depths.
    "inner layer in mtp": frozenset({"depth", "inner", "flat"}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken static rule: stable code, where, what."""

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        text = f"{self.where}: {self.code} {self.message}"
        return text if text.isprintable() else ascii(text)[1:-1]  # one line, whatever is named


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a block: a sharded key tail, an op word and the HF name tails it takes."""

    block: str
    key: str
    op: str
    hf: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Use:
    """A block or group, instantiated only where all the facts hold (`not` negates).

    `rivals`, where not empty, are the blocks of one `a or b`, this one among them: spellings of
    the same tensors, of which a checkpoint has one. The first is what releases ship.
    """

    name: str
    facts: tuple[tuple[str, bool], ...] = ()
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """Where blocks are instantiated: once, per trunk layer or per MTP depth."""

    each: str
    mcore: str
    hf: str
    use: tuple[Use, ...]
    where: str


@dataclass(frozen=True, slots=True)
class CopyRule:
    """An HF tensor stored twice; Megatron keeps only `of`.

    `ships`: without an inventory, assume that it is there. It is a copy only where the facts
    hold: an untied head has a row, and must not become one because that row was lost.
    """

    each: str
    hf: str
    of: str
    ships: bool
    where: str
    facts: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """How the rows of one HF tensor are cut: named parts of so many rows, all that `repeats` times.

    Numbers are dims, as in [shapes]. A row takes the part that the last word of its key names.
    """

    repeats: str
    rows: tuple[tuple[str, str], ...]

    def index(self, key: str) -> int | None:
        """Number of the part that a Megatron key names, None if none."""
        word = key.rsplit(".", 1)[-1]
        return next((i for i, (name, _) in enumerate(self.rows) if name == word), None)


@dataclass(frozen=True, slots=True)
class Discard:
    """HF names that are left out on purpose, with the reason."""

    hf: str
    reason: str
    where: str


@dataclass(frozen=True)
class Table:
    """A mapping table as written, checked for form but not for meaning (`check` does that).

    `needs` says what Megatron-Core alone lacks for this family: with `converts = false` it keeps
    the family from being converted, else it names what can load the result. `untried` says why
    no test loads a converted checkpoint into Megatron.
    """

    path: Path
    model_type: str
    blocks: Mapping[str, tuple[Row, ...]]
    groups: Mapping[str, tuple[Use, ...]]
    stacks: tuple[Stack, ...]
    shapes: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, str]
    copies: tuple[CopyRule, ...] = ()
    discards: tuple[Discard, ...] = ()
    parts: Mapping[str, Parts] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    mtp_default: int | None = None
    local_spec: str | None = None
    releases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    converts: bool = True
    needs: str | None = None
    untried: str | None = None
    faults: tuple[Fault, ...] = ()

    def uses(self, stack: Stack) -> Iterator[Use]:
        """Blocks of a stack with the facts they need, groups expanded."""
        for use in stack.use:
            inner = self.groups.get(use.name)
            if inner is None:
                yield use
            else:
                yield from (Use(u.name, use.facts + u.facts, u.rivals) for u in inner)
