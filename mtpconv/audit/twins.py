"""MTP tensors that have the bytes of a trunk tensor which training never leaves equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from mtpconv.audit.codes import finding
from mtpconv.audit.companions import is_part
from mtpconv.audit.compare import Outcome, SideError, same_bytes, side_blocks
from mtpconv.audit.excuses import root_head
from mtpconv.audit.finding import Finding
from mtpconv.audit.names import is_own_head, split_expert, tail
from mtpconv.audit.subject import Subject
from mtpconv.store.content import Files
from mtpconv.tensors import Region

_MTP_NORM_TAILS = (
    "shared_head.norm.weight", "transformer.shared_head.norm.weight", "final_layernorm.weight",
    "norm.weight",
)  # fmt: skip
_ROOT_NORM_TAILS = ("model.norm.weight", "norm.weight", "final_layernorm.weight", "norm_f.weight")
#: What Megatron puts around the block of a depth.
_WRAPPERS = ("transformer_layer.", "mtp_model_layer.")

#: Units: bytes. What is read of a tensor before it is compared whole.
_START = 4096
#: Tensors of other layers than the last one that are looked at; 80 MB of starts.
_MAX_STARTS = 20_000
#: Units: bytes. What comparing tensors with those of other layers may read in all.
_BUDGET = 4 << 30


@dataclass(slots=True)
class _Twins:
    """Which trunk tensors have the bytes of an MTP tensor."""

    subject: Subject
    left: Files
    right: Files
    budget: int = _BUDGET
    looks: int = _MAX_STARTS
    _starts: dict[str, bytes] = field(default_factory=dict)

    def same(self, a: str, b: str) -> bool:
        """Whether two tensors are the same. Raises: SideError."""
        return same_bytes(self.subject, a, self.subject, b, self.left, self.right)

    def elsewhere(self, name: str, others: Iterable[str]) -> list[str]:
        """Of the namesakes in other layers those with the same bytes, as far as the budget goes."""
        found = []
        for other in others:
            if other not in self._starts:
                if not self.looks:
                    continue
                self.looks -= 1
            size = self.subject.tensors[name].nbytes
            if self._start(other) != self._start(name) or size > self.budget:
                continue
            self.budget -= size
            if self.same(name, other):
                found.append(other)
        return found

    def _start(self, name: str) -> bytes:
        if name not in self._starts:
            blocks = side_blocks(self.subject, name, self.left, "after", _START)
            self._starts[name] = blake3(next(blocks, b"")[:_START]).digest()
        return self._starts[name]


def twin_findings(
    subject: Subject,
    regions: Mapping[str, Region],
    outcomes: Mapping[str, Outcome],
    before: Subject | None = None,
) -> Iterator[Finding]:
    """MTP tensors that have the bytes of the trunk tensor they must not equal.

    Looked at are those in `outcomes` with statistics. What the reference shows too is no news.
    """
    names = [n for n in sorted(outcomes) if _can_tell(subject, regions, n, outcomes[n])]
    with Files() as left, Files() as right:
        for name, twin in _equal(_Twins(subject, left, right), regions, names):
            if before is None or not _shown(before, name, twin):
                yield finding(
                    "same_as_trunk", "warning",
                    f"{name}: has exactly the bytes of {twin}; MTP was copied from the trunk,"
                    " not trained",
                    tensor=name, region=regions[name], hint=f"identical to {twin}",
                )  # fmt: skip


def _can_tell(subject: Subject, regions: Mapping[str, Region], name: str, outcome: Outcome) -> bool:
    """Constant tensors equal each other and have findings of their own.

    So do maps, shapes and the like of quantised weights, whose codes tell.
    """
    stats = outcome.after
    is_mtp = regions[name].kind == "mtp" and name in subject.tensors and not is_part(name)
    return is_mtp and stats is not None and stats.elements > 0 and not stats.constant


def _equal(
    twins: _Twins, regions: Mapping[str, Region], names: list[str]
) -> Iterator[tuple[str, str]]:
    subject = twins.subject
    last = max((r.index for r in regions.values() if r.kind == "trunk"), default=-1)
    namesakes = _namesakes(subject, regions)
    rest: list[tuple[str, list[str]]] = []
    for name in names:
        layers = namesakes.get(_tail(name), {})
        twin = layers.get(last) if layers else _root_twin(subject, regions, name)
        fits = twin is not None and subject.tensors[twin] == subject.tensors[name]
        if twin is not None and fits and _safely(twins, name, [twin]):
            yield name, twin
            continue
        others = [layers[n] for n in sorted(layers, reverse=True) if n != last]
        rest.append((name, [o for o in others if subject.tensors[o] == subject.tensors[name]]))
    # Experts last: they are many, and a block that was copied shows in everything else too.
    for name, others in sorted(rest, key=lambda entry: split_expert(entry[0]) is not None):
        found = _safely_elsewhere(twins, name, others)
        # What several layers share is a buffer and no weight.
        if len(found) == 1:
            yield name, found[0]


def _safely(twins: _Twins, name: str, candidates: list[str]) -> bool:
    try:
        return any(twins.same(name, other) for other in candidates)
    except SideError:
        return False  # the unreadable file is a finding of its own


def _safely_elsewhere(twins: _Twins, name: str, others: list[str]) -> list[str]:
    try:
        return twins.elsewhere(name, others)
    except SideError:
        return []


def _namesakes(subject: Subject, regions: Mapping[str, Region]) -> dict[str, dict[int, str]]:
    """Trunk tensors by what is left of a name without its layer, then by layer."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in subject.tensors:
        if regions[name].kind == "trunk":
            found[_tail(name)][regions[name].index] = name
    return found


def _tail(name: str) -> str:
    rest = tail(name)
    for wrapper in _WRAPPERS:
        rest = rest.removeprefix(wrapper)
    return rest


def _root_twin(subject: Subject, regions: Mapping[str, Region], name: str) -> str | None:
    rest = tail(name)
    if is_own_head(name):
        return root_head(subject, regions)
    if rest not in _MTP_NORM_TAILS:
        return None
    return next(
        (n for t in _ROOT_NORM_TAILS for n in sorted(subject.tensors)
         if n.endswith(t) and regions[n].kind == "root" and "vis" not in n), None,
    )  # fmt: skip


def _shown(before: Subject, name: str, twin: str) -> bool:
    """Whether the reference has these two equal as well."""
    if name not in before.tensors or twin not in before.tensors:
        return False
    try:
        with Files() as left, Files() as right:
            return same_bytes(before, name, before, twin, left, right)
    except SideError:
        return False
