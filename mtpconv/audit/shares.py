"""The tensors of an audit dealt out to the ranks of a launcher; all get the outcomes of all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from mtpconv.audit.compare import Outcome
from mtpconv.audit.subject import Subject
from mtpconv.audit.words import Stats
from mtpconv.errors import UnreadableError
from mtpconv.ranks import Ranks, share

_STATS = tuple(f.name for f in fields(Stats) if f.init)


def shared_outcomes(
    look: Callable[[Sequence[str]], Iterator[Outcome]],
    names: Sequence[str],
    subject: Subject,
    ranks: Ranks,
) -> Iterator[Outcome]:
    """What `look` gives for all names, in their order; each rank looks at a stretch of them.

    Raises: UnreadableError if the ranks do not see the same tensors, or one of them is lost.
    """
    if ranks.size == 1:
        yield from look(names)
        return
    mine = share(names, lambda n: subject.tensors[n].nbytes, ranks)
    equal: list[str] = []
    others: list[list[Any]] = []
    for outcome in look(mine):
        if outcome == _equal(outcome.name, subject):
            equal.append(outcome.name)
        else:
            others.append(_as_json(outcome))
    seen = hashlib.sha256("\n".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    known: dict[str, Any] = {"seen": seen, "equal": equal, "others": others}
    parts = ranks.gather("outcomes", known)
    if any(part["seen"] != seen for part in parts):
        raise UnreadableError(
            f"{subject.path}: the ranks do not see the same tensors; every rank must read the same "
            "files"
        )
    found = {name: _equal(name, subject) for part in parts for name in part["equal"]}
    found |= {one[0]: _from_json(one) for part in parts for one in part["others"]}
    yield from (found[name] for name in names)


def _equal(name: str, subject: Subject) -> Outcome:
    """What is found of most tensors, and told by their names alone."""
    return Outcome(name, same=True, elements=subject.tensors[name].elements)


def _as_json(outcome: Outcome) -> list[Any]:
    """All of it; JSON keeps integers as they are and floats by their shortest exact digits."""
    stats = [
        None if one is None else [getattr(one, field) for field in _STATS]
        for one in (outcome.before, outcome.after)
    ]
    return [
        outcome.name, outcome.same, outcome.differing, outcome.elements, *stats,
        outcome.unreadable,
    ]  # fmt: skip


def _from_json(value: list[Any]) -> Outcome:
    name, same, differing, elements, before, after, unreadable = value
    old, new = (
        None if one is None else Stats(**dict(zip(_STATS, one, strict=True)))
        for one in (before, after)
    )
    return Outcome(
        name, same, differing, elements, old, new, None if unreadable is None else tuple(unreadable)
    )
