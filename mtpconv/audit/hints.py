"""What probably happened: renamed, exchanged, shifted, permuted, halves swapped, plus one.

A hint never changes a verdict. Candidates are found by the first bytes of each tensor and then
compared whole, within a budget of bytes; beyond it a hint says that only the start was compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from mtpconv.audit.compare import SideError, same_bytes, side_blocks
from mtpconv.audit.excuses import copy_of
from mtpconv.audit.names import layer_number, layer_prefix, split_expert, tail
from mtpconv.audit.pair import Differences
from mtpconv.audit.rows import regrouped_rows
from mtpconv.audit.subject import Subject
from mtpconv.audit.values import halves_swapped, rounded_through, shifted_by_one
from mtpconv.ranges import compress
from mtpconv.store.content import Files
from mtpconv.tensors import Region

#: Units: bytes. What is read of a tensor to find out which others it may equal.
_START = 4096
#: Units: bytes. What hints may read in all; a verdict costs far more.
_BUDGET = 4 << 30
#: Differences beyond this number are not searched for values; the first ones tell the story.
_MAX_VALUE_HINTS = 256

Key = tuple[str, tuple[int, ...], bytes]


@dataclass(slots=True)
class _Search:
    """Which tensors of the reference have the bytes of a given tensor."""

    before: Subject
    after: Subject
    budget: int
    #: the budget was used up and some tensors were taken for equal by their first bytes
    assumed: bool = False
    _starts: dict[tuple[bool, str], bytes] = field(default_factory=dict)
    _holders: dict[Key, list[str]] = field(default_factory=lambda: defaultdict(list))

    def learn(self, names: Iterable[str], files: Files) -> None:
        """Make tensors of the reference findable."""
        for name in names:
            self._holders[self._key(self.before, name, files)].append(name)

    def candidates(self, name: str, files: Files) -> Sequence[str]:
        """Tensors of the reference that start like this one."""
        return self._holders.get(self._key(self.after, name, files), ())

    def equal(self, old: str, new: str) -> bool:
        """Whether the whole tensors agree; assumed once the budget is used up."""
        size = self.after.tensors[new].nbytes
        if size <= _START:
            return True
        if self.budget < size:
            self.assumed = True
            return True
        self.budget -= size
        with Files() as left, Files() as right:
            return same_bytes(self.before, old, self.after, new, left, right)

    def _key(self, subject: Subject, name: str, files: Files) -> Key:
        spec = subject.tensors[name]
        slot = (subject is self.before, name)
        start = self._starts.get(slot)
        if start is None:
            if subject.digests is not None:
                start = subject.digests[name].encode()
            else:
                start = _start(subject, name, files)
            self._starts[slot] = start
        return spec.dtype, spec.shape, start


def _start(subject: Subject, name: str, files: Files) -> bytes:
    for block in side_blocks(subject, name, files, "hint", _START):
        return blake3(block[:_START]).digest()
    return b""


def find_hints(
    found: Differences,
    before: Subject,
    after: Subject,
    regions: Mapping[str, Region],
    budget: int = _BUDGET,
) -> dict[str, str]:
    """A hint for each difference that has an explanation; `budget` bytes are read at most."""
    if before.has_bytes != after.has_bytes:
        return {}
    try:
        hints = _moved(found, before, after, budget)
        if before.has_bytes and after.has_bytes:
            hints.update(_collapsed(found, after, regions, hints))
            _values(found, before, after, hints, budget)
            hints.update(regrouped_rows(found, before, after, frozenset(hints), budget))
    except SideError:
        return {}
    return hints


def _moved(found: Differences, before: Subject, after: Subject, budget: int) -> dict[str, str]:
    search = _Search(before, after, budget)
    wanted = [*found.extra, *found.changed]
    specs = {(after.tensors[n].dtype, after.tensors[n].shape) for n in wanted}
    pool = [n for n, s in before.tensors.items() if (s.dtype, s.shape) in specs]
    hints: dict[str, str] = {}
    with Files() as left, Files() as right:
        search.learn(pool, left)
        sources = {n: search.candidates(n, right) for n in wanted}
    hints.update(_renamed(found, search, sources))
    hints.update(_exchanged(found, search, sources))
    rest = {n: s for n, s in sources.items() if n not in hints and n in found.changed}
    hints.update(_from_other_expert(search, rest))
    rest = {n: s for n, s in rest.items() if n not in hints}
    hints.update(_from_other_layer(found, search, rest))
    if search.assumed:
        doubt = f" (of some tensors only the first {_START} bytes were compared)"
        hints = {name: text + doubt for name, text in hints.items()}
    return hints


def _renamed(
    found: Differences, search: _Search, sources: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    missing = set(found.missing)
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for new in found.extra:
        candidates = [o for o in sources[new] if o in missing]
        # Constant tensors have many twins: the one with the longest common ending is meant.
        best = max(candidates, key=lambda o: _common_end(o, new), default=None)
        if best is not None and _common_end(best, new) and search.equal(best, new):
            end = _common_end(best, new)
            pairs[best[: len(best) - end], new[: len(new) - end]].append((best, new))
    hints = {}
    for (old, new), names in pairs.items():
        text = f"renamed: {old or '(nothing)'} -> {new or '(nothing)'} (bytes equal)"
        if new.endswith(old):
            text = f"names differ by the prefix {new[: len(new) - len(old)]}; bytes equal"
        elif old.endswith(new):
            text = f"names lost the prefix {old[: len(old) - len(new)]}; bytes equal"
        for pair in names:
            hints.update(dict.fromkeys(pair, text))
    return hints


def _common_end(a: str, b: str) -> int:
    """Length of the longest common ending made of whole parts of the names."""
    common: list[str] = []
    for x, y in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if x != y:
            break
        common.append(x)
    return len(".".join(common))


def _exchanged(
    found: Differences, search: _Search, sources: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    hints = {}
    for name in found.changed:
        others = (
            o
            for o in sources[name]
            if o != name and o in found.changed and name in sources[o] and _is_neighbour(name, o)
        )
        other = next((o for o in others if search.equal(o, name)), None)
        if other is not None:
            hints[name] = f"exchanged its bytes with {other}"
    return hints


def _is_neighbour(a: str, b: str) -> bool:
    """In the same layer and the same expert: gate and up, enorm and hnorm."""
    left, right = split_expert(a), split_expert(b)
    if (left is None) != (right is None) or (left and right and left[:2] != right[:2]):
        return False
    return a.removesuffix(tail(a)) == b.removesuffix(tail(b))


def _from_other_expert(search: _Search, sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    origin: dict[tuple[str, str], dict[int, tuple[int, str]]] = defaultdict(dict)
    for name, candidates in sources.items():
        mine = split_expert(name)
        if mine is None:
            continue
        for old in candidates:
            other = split_expert(old)
            twin = other is not None and (mine[0], mine[2]) == (other[0], other[2])
            if other and twin and mine[1] != other[1] and search.equal(old, name):
                origin[mine[0], mine[2]][mine[1]] = (other[1], name)
                break
    present: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in search.after.tensors if origin else ():
        split = split_expert(name)
        if split:
            present[split[0], split[2]].append(split[1])
    hints = {}
    for group, moved in origin.items():
        order = [moved[e][0] if e in moved else e for e in sorted(present[group])]
        text = "experts permuted: " + ",".join(map(str, order[:64]))
        text += ",..." if len(order) > 64 else ""
        hints.update({name: text for _, name in moved.values()})
    return hints


def _from_other_layer(
    found: Differences, search: _Search, sources: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    origin: dict[str, int] = {}
    for name, candidates in sources.items():
        twins = (o for o in candidates if layer_number(o) is not None and tail(o) == tail(name))
        old = next((o for o in twins if o != name and search.equal(o, name)), None)
        number = layer_number(old) if old else None
        if number is not None and number != layer_number(name):
            origin[name] = number
    # Only a layer that moved as a whole is worth saying; single twins are chance (norms of 1).
    shifts: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, other in origin.items():
        shifts[layer_number(name) or 0, other].append(name)
    sizes: dict[int, int] = defaultdict(int)
    for name in found.changed:
        number = layer_number(name)
        if number is not None:
            sizes[number] += 1
    whole = {pair: names for pair, names in shifts.items() if 2 * len(names) > sizes[pair[0]]}
    if not whole:
        return {}
    prefix = layer_prefix(next(iter(whole.values())))
    here, there = (
        compress((f"{prefix}{number}." for number in numbers), 3)
        for numbers in zip(*sorted(whole), strict=True)
    )
    text = f"shifted: {here} hold the bytes of {there} in the reference"
    return {name: text for names in whole.values() for name in names}


def _collapsed(
    found: Differences, after: Subject, regions: Mapping[str, Region], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """MTP embeddings and heads of their own that became copies of the trunk's."""
    with Files() as left, Files() as right:
        for name in found.changed:
            root = None if name in known else copy_of(after, name, regions)
            fits = root is not None and after.tensors[root] == after.tensors[name]
            if root and fits and same_bytes(after, root, after, name, left, right):
                yield name, f"now identical to {root}"


def _values(
    found: Differences, before: Subject, after: Subject, hints: dict[str, str], budget: int
) -> None:
    for name in [n for n in found.changed if n not in hints][:_MAX_VALUE_HINTS]:
        budget -= after.tensors[name].nbytes
        if budget < 0:
            return
        axis = halves_swapped(before, after, name)
        if axis is not None:
            hints[name] = f"equal after swapping the halves along dim {axis}"
            continue
        offset = shifted_by_one(before, after, name)
        if offset is not None:
            hints[name] = "after == before + 1" if offset > 0 else "after == before - 1"
            continue
        narrow = rounded_through(before, after, name)
        if narrow is not None:
            hints[name] = f"every value was rounded through {narrow}"
