"""Reading a mapping table: TOML in, a `Table` out, every fault with file and line.

TOML because `tomllib` refuses a duplicate key: in JSON, YAML or a Python dict a row written
twice would silently lose a tensor inside the anti-loss tool.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtpconv.errors import UsageError
from mtpconv.geometry import FACTS
from mtpconv.mapping.ops import BUILDERS

FORMAT = 1
PLACEHOLDERS = frozenset({"layer", "depth", "expert"})
EACH = {
    "once": frozenset[str](),
    "layer in trunk": frozenset({"layer"}),
    "depth in mtp": frozenset({"layer", "depth"}),
    # A depth that is itself a small stack: `inner` counts within it, `flat` through all depths.
    "inner layer in mtp": frozenset({"depth", "inner", "flat"}),
}
_TOP = {
    "format", "model_type", "include", "groups", "stacks", "blocks", "shapes", "dtypes", "copies",
    "discards", "carried", "mtp_default", "local_spec", "releases", "unverified", "converts",
    "parts", "needs", "untried",
}  # fmt: skip
_INCLUDED = {"format", "blocks", "shapes", "dtypes", "parts"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken static rule: stable code, where, what."""

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.code} {self.message}"


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


def mappings_folder() -> Path:
    """Where the shipped tables are: in the package, or beside it in a checkout."""
    packaged = Path(str(files("mtpconv"))) / "_mappings"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "mappings"


def table_names() -> list[str]:
    """Model types that have a shipped table."""
    return sorted(p.stem for p in mappings_folder().glob("*.toml"))


def find_table(model_type: str) -> Table:
    """The shipped table of a model type.

    Raises: UsageError if there is none.
    """
    path = mappings_folder() / f"{model_type}.toml"
    if not re.fullmatch(r"\w+", model_type) or not path.is_file():
        raise UsageError(
            f"model_type {model_type!r}: no mapping table; known: {', '.join(table_names())}. "
            "Write one (docs/mapping.md) and pass it with --mapping"
        )
    return read_table(path)


def read_table(path: Path) -> Table:
    """Read a table and what it includes.

    Raises: UsageError if the file is unreadable, no TOML or breaks a rule of form.
    """
    table = parse_table(path)
    if table.faults:
        raise UsageError(str(table.faults[0]))
    return table


def parse_table(path: Path) -> Table:
    """Read a table; rules of form that it breaks are in `faults`.

    Raises: UsageError if a file cannot be read or is no TOML.
    """
    return _Parser(path).table()


class _Parser:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[Fault] = []
        self.lines: dict[tuple[Path, str, str], int] = {}

    def load(self, path: Path) -> dict[str, Any]:
        try:
            text = path.read_text(encoding="utf-8")
            parsed = tomllib.loads(text)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path}: not a mapping table: {error}") from error
        section = ""
        for number, line in enumerate(text.splitlines(), 1):
            if header := re.match(r"\s*\[+\s*(.+?)\s*\]+\s*(#.*)?$", line):
                section = header[1]
            elif row := re.match(r"""\s*(?:"([^"]+)"|'([^']+)'|([\w.-]+))\s*=""", line):
                self.lines.setdefault((path, section, row[1] or row[2] or row[3]), number)
        return parsed

    def where(self, path: Path, section: str, key: str) -> str:
        line = self.lines.get((path, section, key)) or self.lines.get((path, "", section))
        return f"{path.name}:{line or 1}"

    def fault(self, code: str, where: str, message: str) -> None:
        self.faults.append(Fault(code, where, message))

    def table(self) -> Table:
        path = self.path
        raw = self.load(path)
        self.keys(path, raw, _TOP)
        if raw.get("format") != FORMAT:
            self.fault("M01", self.where(path, "", "format"), f"format is not {FORMAT}")
        model_type = raw.get("model_type")
        if not isinstance(model_type, str):
            self.fault("M01", f"{path.name}:1", "model_type is missing")
            model_type = path.stem
        blocks: dict[str, tuple[Row, ...]] = {}
        shapes: dict[str, tuple[str, ...]] = {}
        dtypes: dict[str, str] = {}
        parts: dict[str, Parts] = {}
        for name in self.strings(path, raw, "include"):
            part = path.parent / name
            if part.parent.resolve() != (path.parent / "blocks").resolve():
                self.fault("M16", self.where(path, "", "include"), f"{name} is not in blocks/")
                continue
            if not part.is_file():  # a user's own table may share the shipped blocks
                part = mappings_folder() / name
            included = self.load(part)
            self.keys(part, included, _INCLUDED)
            self.sections(part, included, blocks, shapes, dtypes)
            parts |= self.parts(part, included)
        self.sections(path, raw, blocks, shapes, dtypes)
        parts |= self.parts(path, raw)
        for row in (r for rows in blocks.values() for r in rows if r.op == "part"):
            cut = parts.get(row.hf[0]) if len(row.hf) == 1 else None
            if cut is None or cut.index(row.key) is None:
                self.fault("M02", row.where, f"[parts] has no part of {row.hf} for {row.key}")
        groups = {
            name: tuple(use for u in uses for use in self.uses(path, f"groups.{name}", u))
            for name, uses in raw.get("groups", {}).items()
        }
        default = raw.get("mtp_default")
        return Table(
            path=path,
            model_type=model_type,
            blocks=blocks,
            groups=groups,
            stacks=tuple(self.stack(path, s) for s in raw.get("stacks", [])),
            shapes=shapes,
            dtypes=dtypes,
            copies=tuple(self.copy(path, c) for c in raw.get("copies", [])),
            discards=tuple(self.discard(path, d) for d in raw.get("discards", [])),
            parts=parts,
            carried=self.strings(path, raw, "carried"),
            mtp_default=default if isinstance(default, int) else None,
            local_spec=raw.get("local_spec"),
            releases=raw.get("releases", {}),
            unverified=self.strings(path, raw, "unverified"),
            converts=raw.get("converts", True) is True,
            needs=raw.get("needs"),
            untried=raw.get("untried"),
            faults=tuple(self.faults),
        )

    def keys(self, path: Path, raw: Mapping[str, Any], known: set[str]) -> None:
        for key in raw:
            if key not in known:
                hint = ", ".join(sorted(known))
                self.fault("M01", self.where(path, "", key), f"unknown key {key!r}; known: {hint}")

    def strings(self, path: Path, raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
        value = raw.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self.fault("M01", self.where(path, "", key), f"{key} is not a list of strings")
            return ()
        return tuple(value)

    def sections(
        self,
        path: Path,
        raw: Mapping[str, Any],
        blocks: dict[str, tuple[Row, ...]],
        shapes: dict[str, tuple[str, ...]],
        dtypes: dict[str, str],
    ) -> None:
        for block, rows in raw.get("blocks", {}).items():
            if block in blocks:
                self.fault("M16", f"{path.name}:1", f"block {block} is defined twice")
            blocks[block] = tuple(self.row(path, block, k, v) for k, v in rows.items())
        for name, dims in raw.get("shapes", {}).items():
            shape = tuple(str(d) for d in dims)
            # A table may give its own dims; two includes that disagree would be decided by order.
            if path != self.path and shapes.get(name, shape) != shape:
                self.fault("M16", self.where(path, "shapes", name), f"{name} has other dims before")
            shapes[name] = shape
        dtypes.update(raw.get("dtypes", {}))

    def parts(self, path: Path, raw: Mapping[str, Any]) -> dict[str, Parts]:
        found = {}
        for name, given in raw.get("parts", {}).items():
            where = self.where(path, f'parts."{name}"', "rows")
            rows = given.get("rows") if isinstance(given, dict) else None
            if not isinstance(rows, dict) or not rows or set(given) - {"repeats", "rows"}:
                self.fault("M01", where, f"[parts] {name} takes rows and, optionally, repeats")
                continue
            cut = tuple((part, str(dim)) for part, dim in rows.items())
            found[name] = Parts(str(given.get("repeats", 1)), cut)
        return found

    def row(self, path: Path, block: str, key: str, value: Any) -> Row:
        where = self.where(path, f"blocks.{block}", key)
        op, operands = "copy", value
        if isinstance(value, dict):
            if len(value) != 1:
                self.fault("M01", where, f"{key} needs exactly one op, has {list(value)}")
            op, operands = next(iter(value.items()), ("copy", ""))
        if op not in BUILDERS:
            self.fault("M02", where, f"unknown op {op!r}; known: {', '.join(BUILDERS)}")
        hf = (operands,) if isinstance(operands, str) else operands
        if not isinstance(hf, tuple | list) or not hf or not all(isinstance(n, str) for n in hf):
            self.fault("M01", where, f"{key} is not paired with HF names")
            hf = ()
        return Row(block, key, op, tuple(hf), where)

    def uses(self, path: Path, section: str, text: str) -> Iterator[Use]:
        blocks, _, condition = text.partition(" if ")
        facts = self.facts(self.where(path, section.split(".")[0], section), condition)
        names = tuple(name.strip() for name in blocks.split(" or "))
        for name in names:
            yield Use(name, facts, names if len(names) > 1 else ())

    def facts(self, where: str, condition: str) -> tuple[tuple[str, bool], ...]:
        facts = []
        for fact in condition.split(" and ") if condition else []:
            wanted = not fact.startswith("not ")
            fact = fact.removeprefix("not ").strip()
            if fact not in FACTS:
                self.fault("M03", where, f"unknown fact {fact!r}; known: {', '.join(FACTS)}")
                continue
            facts.append((fact, wanted))
        return tuple(facts)

    def stack(self, path: Path, raw: Mapping[str, Any]) -> Stack:
        where = self.where(path, "", "stacks")
        self.entry(where, raw, {"each", "mcore", "hf", "use"}, raw.get("each"))
        return Stack(
            raw.get("each", "once"),
            raw.get("mcore", ""),
            raw.get("hf", ""),
            tuple(use for u in raw.get("use", []) for use in self.uses(path, "stacks", u)),
            where,
        )

    def copy(self, path: Path, raw: Mapping[str, Any]) -> CopyRule:
        where = self.where(path, "", "copies")
        self.entry(where, raw, {"each", "hf", "of", "ships", "if"}, raw.get("each"))
        return CopyRule(
            raw.get("each", "once"), raw.get("hf", ""), raw.get("of", ""),
            raw.get("ships", True) is True, where, self.facts(where, str(raw.get("if", ""))),
        )  # fmt: skip

    def discard(self, path: Path, raw: Mapping[str, Any]) -> Discard:
        where = self.where(path, "", "discards")
        self.entry(where, raw, {"hf", "reason"}, "once")
        if not raw.get("reason"):
            self.fault("M12", where, f"discard of {raw.get('hf')!r} has no reason")
        return Discard(raw.get("hf", ""), raw.get("reason", ""), where)

    def entry(self, where: str, raw: Mapping[str, Any], known: set[str], each: Any) -> None:
        for key in raw:
            if key not in known:
                self.fault("M01", where, f"unknown key {key!r}; known: {', '.join(sorted(known))}")
        if each not in EACH:
            self.fault("M01", where, f"each = {each!r}; known: {', '.join(EACH)}")
