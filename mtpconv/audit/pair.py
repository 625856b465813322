"""Two sides against each other: which tensors are missing, extra, different, or not read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from mtpconv.audit.codes import finding
from mtpconv.audit.compare import Outcome, Progress, compare_bytes, disk_order
from mtpconv.audit.finding import Finding, Severity
from mtpconv.audit.options import Options, Sample
from mtpconv.audit.shares import shared_outcomes
from mtpconv.audit.subject import Subject
from mtpconv.ranks import Ranks
from mtpconv.tensors import Region, TensorSpec


@dataclass(slots=True)
class Differences:
    """All that comparing two sides gave, before anyone says what it means."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    shape: list[str] = field(default_factory=list)
    changed: dict[str, Outcome] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)
    #: not compared because only headers were asked for, or by `--sample`
    not_read: list[str] = field(default_factory=list)
    #: in a file that could not be opened, or whose bytes could not be read
    unread: list[str] = field(default_factory=list)
    #: a side has it in a shape that does not fit, which that side's problems say
    misshapen: list[str] = field(default_factory=list)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    nbytes: int = 0

    def states(self) -> dict[str, str]:
        """State of every tensor of either side."""
        out: dict[str, str] = {}
        for state, names in (
            ("identical", self.same),
            ("not_read", self.not_read),
            ("unreadable", self.unread),
            ("changed", self.changed),
            ("dtype", self.dtype),
            ("shape", self.shape),
            ("shape", self.misshapen),
            ("missing", self.missing),
            ("extra", self.extra),
        ):
            out.update(dict.fromkeys(names, state))
        return dict(sorted(out.items()))


def find_differences(
    before: Subject,
    after: Subject,
    options: Options,
    regions: dict[str, Region],
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> Differences:
    """Compare names, dtypes, shapes and, as asked, bytes; each rank reads a stretch of them."""
    found = Differences()
    old, new = before.tensors, after.tensors
    out_of_reach = before.unread | after.unread
    misshapen = before.misshapen | after.misshapen
    comparable: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        if name in old and name in new:
            if not _same_form(found, name, old[name], new[name]):
                continue
            (found.unread if name in out_of_reach else comparable).append(name)
        elif name in out_of_reach:
            found.unread.append(name)
        elif name in misshapen:
            found.misshapen.append(name)
        elif name in old:
            # Nothing is known about the content of a file that no index describes.
            (found.unread if after.blind else found.missing).append(name)
        else:
            (found.unread if before.blind else found.extra).append(name)
    if not options.read_bytes:
        found.not_read = comparable
        return found
    chosen = [n for n in comparable if _is_sampled(n, options.sample, regions)]
    picked = set(chosen)
    found.not_read = [n for n in comparable if n not in picked]
    _compare(found, before, after, chosen, options, regions, progress, ranks or Ranks())
    return found


def _same_form(found: Differences, name: str, old: TensorSpec, new: TensorSpec) -> bool:
    if old.dtype != new.dtype:
        found.dtype.append(name)
    if old.shape != new.shape:
        found.shape.append(name)
    return old == new


def _compare(
    found: Differences,
    before: Subject,
    after: Subject,
    names: Collection[str],
    options: Options,
    regions: dict[str, Region],
    progress: Progress | None,
    ranks: Ranks,
) -> None:
    watch = frozenset(n for n in names if regions[n].kind == "mtp" or is_router_bias(n))
    ordered = disk_order(after if after.has_bytes else before, names)

    def look(some: Sequence[str]) -> Iterator[Outcome]:
        return compare_bytes(
            before, after, some, watch=watch, detail=options.expect == "bytes",
            progress=progress, workers=options.workers,
        )  # fmt: skip

    for outcome in shared_outcomes(look, ordered, after, ranks):
        if outcome.unreadable is not None:
            side, message = outcome.unreadable
            found.failures.append((outcome.name, side, message))
            found.unread.append(outcome.name)
            continue
        found.nbytes += after.tensors[outcome.name].nbytes
        found.outcomes[outcome.name] = outcome
        if outcome.same:
            found.same.add(outcome.name)
        else:
            found.changed[outcome.name] = outcome


def _is_sampled(name: str, sample: Sample | None, regions: dict[str, Region]) -> bool:
    if sample is None or regions[name].kind != "trunk":
        return True
    # By name, so that the same tensors are read on every machine and run.
    return int.from_bytes(sha256(name.encode()).digest()[:8], "big") % sample.of < sample.take


#: Ways families and Megatron write the bias of a router: DeepSeek and most others; Megatron,
#: Ling and Hunyuan; Step-3.5; DeepSeek-V4.
_ROUTER_BIASES = ("e_score_correction_bias", ".expert_bias", ".router_bias", "ffn.gate.bias")


def is_router_bias(name: str) -> bool:
    """Whether the tensor is the F32 bias of a router, in any family's spelling."""
    return name.endswith(_ROUTER_BIASES)


def difference_findings(
    found: Differences,
    before: Subject,
    after: Subject,
    regions: dict[str, Region],
    excused: dict[str, str],
    hints: dict[str, str],
) -> Iterator[Finding]:
    """One finding per difference; excused ones become notes."""

    def make(kind: str, severity: Severity, name: str, message: str, **more: object) -> Finding:
        reason = excused.get(name)
        return finding(
            kind,
            "note" if reason else severity,
            f"{name}: {message}" + (f"; {reason}" if reason else ""),
            tensor=name,
            region=regions[name],
            hint=hints.get(name),
            **more,
        )

    for name in found.missing:
        yield make("missing_tensor", "error", name, "is in the reference and not in the checkpoint")
    for name in found.extra:
        yield make("extra_tensor", "error", name, "is not in the reference")
    for name in found.dtype:
        a, b = before.tensors[name].dtype, after.tensors[name].dtype
        yield make("dtype_mismatch", "error", name, f"was {a} and is {b}", before=a, after=b)
    for name in found.shape:
        old, new = (list(s.tensors[name].shape) for s in (before, after))
        yield make(
            "shape_mismatch", "error", name, f"was {old} and is {new}", before=old, after=new
        )
    for name, outcome in sorted(found.changed.items()):
        how = "the bytes differ"
        if outcome.differing:
            how = f"{outcome.differing} of {outcome.elements} elements differ"
        yield make("value_mismatch", "error", name, how)


def failure_findings(
    failures: Iterable[tuple[str, str, str]], before: Subject | None, after: Subject
) -> Iterator[tuple[str, Finding]]:
    """Tensors whose bytes could not be read: (side, finding), one per message and side.

    `failures` are (name, side, message).
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, side, message in failures:
        grouped.setdefault((side, message), []).append(name)
    for (side, message), names in sorted(grouped.items()):
        subject = before if side == "before" and before is not None else after
        text = f"reference: {message}" if subject is before else message
        names.sort()
        yield (
            side,
            finding(
                "unreadable_file",
                "error",
                text,
                file=subject.where.get(names[0]),
                tensors=tuple(names),
            ),
        )
