"""Reading a mapping table: TOML in, a `Table` out, every fault with file and line.

TOML because `tomllib` refuses a duplicate key: in JSON, YAML or a Python dict a row written
twice would silently lose a tensor inside the anti-loss tool.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtpconv.errors import UsageError
from mtpconv.geometry import FACTS
from mtpconv.mapping.ops import BUILDERS
from mtpconv.mapping.table import (
    EACH,
    MAX_DEPTHS,
    CopyRule,
    Discard,
    Fault,
    Parts,
    Row,
    Stack,
    Table,
    Use,
)
from mtpconv.mapping.table_form import (
    DIM,
    FORMAT,
    INCLUDED,
    MAX_AXES,
    MAX_NAME,
    TABLE,
    At,
    fitted,
    is_plain,
)
from mtpconv.tensors import DTYPE_BITS

_INCLUDE = re.compile(r"blocks/[\w-]+\.toml")
_BRACES = re.compile(r"\{(\w+)\}|[{}]")


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

    def load(self, path: Path, form: Mapping[str, Any]) -> dict[str, Any]:
        """A TOML file, less what has another form."""
        try:
            text = path.read_text(encoding="utf-8")
            parsed = tomllib.loads(text)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not a mapping table: {error}") from error
        if not is_plain(parsed):
            raise UsageError(
                f"{path}: not a mapping table: an integer beyond 64 bits, or nested too deep"
            )
        section = ""
        for number, line in enumerate(text.splitlines(), 1):
            if header := re.match(r"\s*\[+\s*(.+?)\s*\]+\s*(#.*)?$", line):
                section = header[1].replace('"', "")
                self.lines.setdefault((path, "", section), number)
            elif row := re.match(r"""\s*(?:"([^"]+)"|'([^']+)'|([\w.-]+))\s*=""", line):
                key = _unescaped(row[1]) if row[1] else row[2] or row[3]
                self.lines.setdefault((path, section, key), number)

        def complain(at: At, message: str) -> None:
            self.fault("M01", self.where(path, *at), message)

        found: dict[str, Any] = fitted(parsed, form, complain)
        return found

    def where(self, path: Path, *at: str | int) -> str:
        """File and line of the innermost of the keys `at` that has a line of its own."""
        words = [str(word) for word in at if isinstance(word, str)]
        for end in range(len(words), 0, -1):
            for cut in range(end):
                key = (path, ".".join(words[:cut]), ".".join(words[cut:end]))
                if key in self.lines:
                    return f"{path.name}:{self.lines[key]}"
        return f"{path.name}:1"

    def fault(self, code: str, where: str, message: str) -> None:
        self.faults.append(Fault(code, where, message))

    def table(self) -> Table:
        path = self.path
        raw = self.load(path, TABLE)
        if raw.get("format") != FORMAT:
            self.fault("M01", self.where(path, "format"), f"format is not {FORMAT}")
        model_type = raw.get("model_type")
        if model_type is None:
            self.fault("M01", f"{path.name}:1", "model_type is missing")
            model_type = path.stem
        blocks: dict[str, tuple[Row, ...]] = {}
        shapes: dict[str, tuple[str, ...]] = {}
        dtypes: dict[str, str] = {}
        parts: dict[str, Parts] = {}
        for name in raw.get("include", []):
            if not _INCLUDE.fullmatch(name):
                self.fault("M16", self.where(path, "include"), f"{name!r} is not in blocks/")
                continue
            part = path.parent / name
            if not part.is_file():  # a user's own table may share the shipped blocks
                part = mappings_folder() / name
            included = self.load(part, INCLUDED)
            self.sections(part, included, blocks, shapes, dtypes)
            parts |= self.parts(part, included)
        self.sections(path, raw, blocks, shapes, dtypes)
        parts |= self.parts(path, raw)
        for row in (r for rows in blocks.values() for r in rows if r.op == "part"):
            cut = parts.get(row.hf[0]) if len(row.hf) == 1 else None
            if cut is None or cut.index(row.key) is None:
                self.fault("M02", row.where, f"[parts] has no part of {row.hf} for {row.key}")
        groups = {
            name: tuple(use for u in uses for use in self.uses(self.where(path, "groups", name), u))
            for name, uses in raw.get("groups", {}).items()
        }
        default = raw.get("mtp_default")
        if default is not None and not 0 <= default <= MAX_DEPTHS:
            message = f"mtp_default = {default} is not from 0 to {MAX_DEPTHS}"
            self.fault("M01", self.where(path, "mtp_default"), message)
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
            carried=tuple(raw.get("carried", [])),
            mtp_default=default,
            local_spec=raw.get("local_spec"),
            releases=raw.get("releases", {}),
            unverified=tuple(raw.get("unverified", [])),
            converts=raw.get("converts", True),
            needs=raw.get("needs"),
            untried=raw.get("untried"),
            faults=tuple(self.faults),
        )

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
            where, shape = self.where(path, "shapes", name), tuple(str(d) for d in dims)
            if len(shape) > MAX_AXES:
                self.fault("M01", where, f"{name} has {len(shape)} axes, more than {MAX_AXES}")
            self.dims(where, shape)
            # A table may give its own dims; two includes that disagree would be decided by order.
            if path != self.path and shapes.get(name, shape) != shape:
                self.fault("M16", where, f"{name} has other dims before")
            shapes[name] = shape
        for name, dtype in raw.get("dtypes", {}).items():
            if dtype in DTYPE_BITS:
                dtypes[name] = dtype
            else:
                message = f"{name}: unknown dtype {dtype!r:.60}; known: {', '.join(DTYPE_BITS)}"
                self.fault("M01", self.where(path, "dtypes", name), message)

    def parts(self, path: Path, raw: Mapping[str, Any]) -> dict[str, Parts]:
        found = {}
        for name, given in raw.get("parts", {}).items():
            where = self.where(path, "parts", name, "rows")
            if not given.get("rows"):
                self.fault("M01", where, f"[parts] {name} has no rows")
                continue
            cut = tuple((part, str(dim)) for part, dim in given["rows"].items())
            found[name] = Parts(str(given.get("repeats", 1)), cut)
            self.dims(where, [found[name].repeats, *(dim for _, dim in cut)])
        return found

    def dims(self, where: str, dims: Iterable[str]) -> None:
        for dim in dims:
            if not DIM.fullmatch(dim):
                message = f"{dim!r:.60} is not a sum of products of at most eight dims"
                self.fault("M01", where, message)

    def names(self, where: str, *names: str) -> None:
        """Complain of what no checkpoint can be read back with."""
        for name in names:
            if not name.isprintable():
                self.fault("M01", where, f"{name!a:.60} has a character that cannot be printed")
            elif len(name) > MAX_NAME:
                self.fault("M01", where, f"{name!a:.60} is longer than {MAX_NAME} characters")

    def row(self, path: Path, block: str, key: str, value: Any) -> Row:
        where = self.where(path, "blocks", block, key)
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
        self.names(where, key, *hf)
        return Row(block, key, op, tuple(hf), where)

    def uses(self, where: str, text: str) -> Iterator[Use]:
        blocks, _, condition = text.partition(" if ")
        facts = self.facts(where, condition)
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
        where = self.where(path, "stacks")
        each = self.each(where, raw, ("mcore", "hf"))
        uses = tuple(use for u in raw.get("use", []) for use in self.uses(where, u))
        mcore, hf = raw.get("mcore", ""), raw.get("hf", "")
        self.names(where, mcore, hf)
        return Stack(each, mcore, hf, uses, where)

    def copy(self, path: Path, raw: Mapping[str, Any]) -> CopyRule:
        where = self.where(path, "copies")
        each = self.each(where, raw, ("hf",))
        hf, of = raw.get("hf", ""), raw.get("of", "")
        self.names(where, hf, of)
        return CopyRule(
            each, hf, of, raw.get("ships", True), where,
            self.facts(where, raw.get("if", "")),
        )  # fmt: skip

    def discard(self, path: Path, raw: Mapping[str, Any]) -> Discard:
        where = self.where(path, "discards")
        if not raw.get("reason"):
            self.fault("M12", where, f"discard of {raw.get('hf')!r} has no reason")
        return Discard(raw.get("hf", ""), raw.get("reason", ""), where)

    def each(self, where: str, raw: Mapping[str, Any], patterns: Iterable[str]) -> str:
        """Where an entry is instantiated; its patterns may name what has a value there."""
        each: str = raw.get("each", "")
        if each not in EACH:
            self.fault("M01", where, f"each = {each!r}; known: {', '.join(EACH)}")
            return each
        for pattern in (raw.get(key, "") for key in patterns):
            for found in _BRACES.finditer(pattern):
                if found[1] not in EACH[each]:
                    self.fault("M04", where, f"{pattern!r}: {found[0]} has no value in {each!r}")
        return each


def _unescaped(key: str) -> str:
    """What stands between double quotes, as TOML reads it."""
    if "\\" in key:
        with suppress(tomllib.TOMLDecodeError):
            return str(tomllib.loads(f'x = "{key}"')["x"])
    return key
