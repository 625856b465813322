"""The form of a mapping table: which keys it may have and what kind of value each takes.

A form is a type, a set of types, `[form]` for a list, or a mapping: of `str` for a table whose
keys are free, of its keys otherwise. `object` is looked at by whoever reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

FORMAT = 1

INCLUDED: Mapping[str, Any] = {
    "format": int,
    "blocks": {str: {str: object}},
    "shapes": {str: [{str, int}]},
    "dtypes": {str: str},
    "parts": {str: {"repeats": {str, int}, "rows": {str: {str, int}}}},
}
TABLE: Mapping[str, Any] = {
    **INCLUDED,
    "model_type": str,
    "include": [str],
    "groups": {str: [str]},
    "stacks": [{"each": str, "mcore": str, "hf": str, "use": [str]}],
    "copies": [{"each": str, "hf": str, "of": str, "ships": bool, "if": str}],
    "discards": [{"hf": str, "reason": str}],
    "carried": [str],
    "mtp_default": int,
    "local_spec": str,
    "releases": {str: {str: object}},
    "unverified": [str],
    "converts": bool,
    "needs": str,
    "untried": str,
}
#: Most axes of a tensor.
MAX_AXES = 8
#: Most characters of half a name: what a stack puts before, and what a row adds.
MAX_NAME = 400
_ATOM = r"(?:[0-9]{1,18}|[A-Za-z_][A-Za-z0-9_]{0,59})"
#: A sum of products of at most eight integers, fields and derived dims.
DIM = re.compile(rf"{_ATOM}(?: *[*+] *{_ATOM}){{0,7}}")
_MAX_DEPTH = 64
_WORDS = {str: "a string", int: "an integer", bool: "true or false"}

#: Where in a table: keys and list positions from the top.
At = tuple[str | int, ...]


def is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether a value can be shown and computed with: integers of 64 bits, not nested too deep.

    TOML asks for no more; tomllib takes hexadecimal integers that Python refuses to print.
    """
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(is_plain(v, depth - 1) for v in inner)
    return True


def fitted(value: Any, form: Any, complain: Callable[[At, str], None], at: At = ()) -> Any:
    """The value less every part that has another form, each of which is complained of.

    None if the value itself has another form: TOML has no null.
    """
    if isinstance(form, list) and type(value) is list:
        items = (fitted(v, form[0], complain, (*at, i)) for i, v in enumerate(value))
        return [item for item in items if item is not None]
    if isinstance(form, Mapping) and type(value) is dict:
        found = {}
        for key, inner in value.items():
            wanted = form.get(key, form.get(str))
            if wanted is None:
                known = ", ".join(sorted(form))
                complain((*at, key), f"unknown key {key!r}; known: {known}")
            elif (part := fitted(inner, wanted, complain, (*at, key))) is not None:
                found[key] = part
        return found
    # Exact types: to Python, true is an integer.
    if form is object or form is type(value) or (isinstance(form, set) and type(value) in form):
        return value
    name = ".".join(str(word) for word in at if isinstance(word, str))
    complain(at, f"{name}: {value!r:.60} is not {_words(form)}")
    return None


def _words(form: Any) -> str:
    if isinstance(form, list):
        return f"a list of {_plural(form[0])}"
    if isinstance(form, Mapping):
        return f"a table of {_plural(form[str])}" if str in form else "a table"
    kinds = form if isinstance(form, set) else {form}
    return " or ".join(sorted((_WORDS[kind] for kind in kinds), reverse=True))


def _plural(form: Any) -> str:
    if form is object:
        return "values"
    words = _words(form).split(" ", 1)[1] if not isinstance(form, set) else "strings or integers"
    head, of, rest = words.partition(" of ")
    return f"{head}{'' if head.endswith('s') else 's'}{of}{rest}"
