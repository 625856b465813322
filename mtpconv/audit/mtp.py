"""The state of MTP: what the config promises, what is there, and what became of it per depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from mtpconv.audit.codes import finding
from mtpconv.audit.companions import is_stored
from mtpconv.audit.finding import Finding, MtpDepth, MtpStatus, Severity
from mtpconv.audit.names import expected_mtp_prefix, layer_number, mtp_prefix
from mtpconv.audit.promise import Promise, read_promise
from mtpconv.audit.subject import ARGS, Subject
from mtpconv.ranges import compress
from mtpconv.tensors import Region

#: From best to worst; the module is as good as its worst depth.
_ORDER = (
    "none", "preserved", "present", "changed", "constant", "narrowed", "same_as_trunk",
    "fresh", "stale", "not_finite", "zero", "orphan", "unreadable", "partial", "dropped",
    "absent",
)  # fmt: skip


def depths_of(names: Collection[str], regions: Mapping[str, Region]) -> dict[int, list[str]]:
    """The MTP tensors of each depth."""
    out: dict[int, list[str]] = defaultdict(list)
    for name in names:
        region = regions[name]
        if region.kind == "mtp":
            out[region.index].append(name)
    return dict(sorted(out.items()))


def promise_findings(
    subject: Subject, regions: Mapping[str, Region], severity: Severity
) -> Iterator[Finding]:
    """Config and tensors contradict each other about MTP, in either direction.

    Uses names and config only, so it needs no table. Tensors in files that could not be read
    count as present.
    """
    promise = read_promise(subject.config)
    for path, message in promise.contradictions:
        yield finding(
            "config_contradiction", severity, f"{subject.config_source}: {message}", field=path,
            file=subject.config_source,
        )  # fmt: skip
    if subject.config is None and subject.megatron is None:
        return
    present = depths_of(subject.tensors, regions)
    hidden = {subject.naming.region(n) for n in subject.unread}
    yield from _missing(subject, promise, present, hidden, severity)
    yield from _orphans(subject, promise, present, severity)


def _place(subject: Subject, promise: Promise, depth: int) -> tuple[str, int | None]:
    """Prefix and layer number under which an absent depth should be."""
    known = subject.expected.regions if subject.expected else subject.regions
    name = next((n for n, r in known.items() if r == Region("mtp", depth)), None)
    if name is not None:
        return mtp_prefix(name), layer_number(name)
    if subject.config_source == ARGS:
        return f"mtp.layers.{depth}.", None
    layer = None if promise.layers is None else promise.layers + depth
    prefix = expected_mtp_prefix(promise.model_type, subject.tensors, layer)
    return prefix, layer if layer is not None and prefix.endswith(f".{layer}.") else None


def _missing(
    subject: Subject,
    promise: Promise,
    present: Mapping[int, list[str]],
    hidden: Collection[Region],
    severity: Severity,
) -> Iterator[Finding]:
    if subject.blind:
        return
    planned = (
        depths_of(subject.expected.tensors, subject.expected.regions) if subject.expected else {}
    )
    for depth in sorted({*range(promise.depths or 0), *planned}):
        if depth in present or Region("mtp", depth) in hidden:
            continue
        prefix, layer = _place(subject, promise, depth)
        field = promise.fields[0][0] if promise.fields else None
        said = f"{subject.config_source} says {field} = {promise.depths}"
        if not promise.depths:
            said = f"{promise.model_type or 'this model'} always has MTP, says the mapping table"
        names = tuple(sorted(planned.get(depth, ())))
        total = f"{len(names)} tensors of " if names else ""
        cure = "Restore them or set the field to 0"
        if promise.never_shipped:
            cure = f"No release of {promise.model_type} ships them; set the field to 0"
        yield finding(
            "mtp_missing", "warning" if promise.never_shipped else severity,
            f"{total}{prefix} (MTP depth {depth}) are absent; {said}. {cure}",
            layer=layer, prefix=prefix, field=field, region=Region("mtp", depth), tensors=names,
        )  # fmt: skip
    if promise.by_family and not (present or hidden or planned):
        prefix, _ = _place(subject, promise, 0)
        yield finding(
            "mtp_missing", "warning",
            f"no tensor of {prefix}: {promise.model_type} releases ship MTP without saying so in"
            " the config; this checkpoint has none",
            prefix=prefix, region=Region("mtp", 0),
        )  # fmt: skip


def _orphans(
    subject: Subject, promise: Promise, present: Mapping[int, list[str]], severity: Severity
) -> Iterator[Finding]:
    if promise.by_family:
        return
    said = _unpromised(subject, promise)
    for depth, names in present.items():
        if depth < (promise.depths or 0):
            continue
        prefix = mtp_prefix(names[0])
        if subject.config_source == ARGS and prefix == "mtp.":
            prefix = f"mtp.layers.{depth}."  # sharded keys always number the depth
        yield finding(
            "mtp_orphan", "warning" if subject.told_in and not promise.fields else severity,
            f"{len(names)} tensors of {prefix} (MTP depth {depth}) but {said}; loaders ignore them",
            layer=layer_number(names[0]), prefix=prefix, region=Region("mtp", depth),
            tensors=tuple(sorted(names)),
        )  # fmt: skip


def _unpromised(subject: Subject, promise: Promise) -> str:
    """Who does not promise MTP, or not so many depths."""
    source = subject.config_source
    if promise.fields:
        field, value = promise.fields[0]
        return f"{source} says {field} = {value}"
    if subject.told_in is not None:
        return f"there are no args that say so ({subject.told_in} is not read)"
    if subject.config is None:
        return "there are no args that say so"
    return f"{source} has no {'mtp_num_layers' if source == ARGS else 'number of MTP depths'}"


def compare_promises(
    before: Subject, after: Subject, regions: Mapping[str, Region], missing: Collection[str]
) -> Iterator[Finding]:
    """Where one side has Megatron's args instead of a config: do both promise the same MTP?

    If MTP tensors are missing, their findings say so already and this is a warning.
    """
    if before.config is None or after.config is None:
        return
    old, new = read_promise(before.config), read_promise(after.config)
    lost = any(before.naming.region(n).kind == "mtp" for n in missing)
    depths = [_depths(s, p, regions) for s, p in ((before, old), (after, new))]
    # A promise that the family's releases never kept is none.
    kept = (old.never_shipped and not depths[1]) or (new.never_shipped and not depths[0])
    if depths[0] != depths[1] and not kept:
        a, b = (p.fields[0] if p.fields else ("mtp_num_layers", None) for p in (old, new))
        yield finding(
            "config_mismatch", "warning" if lost else "error",
            f"{before.config_source} of the reference {_says(old, depths[0])},"
            f" {after.config_source} {_says(new, depths[1])}; loaders then ignore MTP or ask for"
            " more",
            field=b[0], before=a[1], after=b[1], file=after.config_source,
        )  # fmt: skip
    same_words = before.config_source == after.config_source
    if same_words and None not in (old.layers, new.layers) and old.layers != new.layers:
        yield finding(
            "config_mismatch", "error",
            f"num_layers was {old.layers} and is {new.layers} in {after.config_source}",
            field="num_layers", before=old.layers, after=new.layers, file=after.config_source,
        )  # fmt: skip


def _depths(subject: Subject, promise: Promise, regions: Mapping[str, Region]) -> int:
    """Promised depths; where the family promises without a number, those that are there."""
    if promise.by_family:
        return len(depths_of(subject.tensors, regions))
    return promise.depths or 0


def _says(promise: Promise, depths: int) -> str:
    if promise.fields:
        return "says {} = {}".format(*promise.fields[0])
    return f"promises {depths} MTP depths by its family" if promise.by_family else (
        "has no mtp_num_layers"
    )  # fmt: skip


def single_status(
    subject: Subject,
    regions: Mapping[str, Region],
    missing: Collection[str],
    content: Mapping[int, str],
    parts: Mapping[str, Region],
) -> MtpStatus:
    """State per depth of one checkpoint alone.

    `missing`: names the table wants and are absent; `parts`: what else is, of quantised weights.
    """
    promise = read_promise(subject.config)
    present = depths_of(subject.tensors, regions)
    expected = subject.expected
    wanted = depths_of(expected.tensors, expected.regions) if expected else {}
    lost = set(missing)
    lost_parts = depths_of(parts, parts)
    hidden = depths_of(subject.unread, subject.naming.regions(subject.unread))
    depths = []
    numbers = sorted({*present, *wanted, *hidden, *range(promise.depths or 0)})
    for depth in numbers:
        names = present.get(depth, [])
        parts_gone = lost_parts.get(depth, [])
        gone = sorted([*(n for n in wanted.get(depth, ()) if n in lost), *parts_gone])
        status, detail = "present", None
        if not names:
            status = "unreadable" if depth in hidden or subject.blind else "absent"
        elif gone:
            status, detail = "partial", f"absent: {compress(gone, 5)}"
        elif depth in hidden:
            status, detail = "unreadable", f"{len(hidden[depth])} tensors in unreadable files"
        elif promise.none_promised or (promise.depths is not None and depth >= promise.depths):
            nobody = subject.config is None and subject.megatron is None
            status = "present" if promise.by_family or nobody else "orphan"
        elif depth in content:
            status, detail = content[depth], None
        count = len(wanted[depth]) if depth in wanted else None
        # Of what is wanted: junk beside it must not make up for what is gone.
        held = (
            len(names)
            if count is None
            else sum(is_stored(subject.tensors, n) for n in wanted[depth])
        )
        total = None if count is None else count + len(parts_gone)
        depths.append(MtpDepth(depth, status, held, total, detail))
    return _whole(promise, depths)


def pair_status(
    before: Subject,
    after: Subject,
    regions: Mapping[str, Region],
    states: Mapping[str, str],
    excused: Collection[str],
    content: Mapping[int, str],
    copies: Collection[str],
) -> MtpStatus:
    """State per depth of a checkpoint against its reference.

    `copies`: MTP names that repeat a root tensor, there as long as that one is.
    """
    old, new = depths_of(before.tensors, regions), depths_of(after.tensors, regions)
    depths = []
    for depth in sorted({*old, *new}):
        had, has = old.get(depth, []), new.get(depth, [])
        if set(copies).issuperset(has) and not set(copies).issuperset(had):
            has = []  # of the depth itself nothing is left
        depths.append(_pair_depth(depth, had, has, states, excused, content.get(depth)))
    promised = read_promise(after.config if after.config is not None else before.config)
    return _whole(promised, depths)


def _pair_depth(
    depth: int,
    had: list[str],
    has: list[str],
    states: Mapping[str, str],
    excused: Collection[str],
    content: str | None,
) -> MtpDepth:
    by_state: dict[str, list[str]] = defaultdict(list)
    for name in {*had, *has}:
        if name not in excused:
            by_state[states[name]].append(name)
    detail = None
    if not had:
        status, detail = "orphan", "not in the reference"
    elif not has:
        status = "unreadable" if by_state["unreadable"] else "dropped"
    elif by_state["missing"]:
        status, detail = "partial", f"absent: {compress(sorted(by_state['missing']), 5)}"
    elif by_state["unreadable"]:
        status, detail = "unreadable", compress(sorted(by_state["unreadable"]), 5)
    elif content:
        status = content
    elif changed := [n for s in ("changed", "dtype", "shape") for n in by_state[s]]:
        status, detail = "changed", compress(sorted(changed), 5)
    else:
        status = "present" if by_state["not_read"] else "preserved"
    if not had:
        return MtpDepth(depth, status, len(has), None, detail)
    # Of what the reference had; a difference that is allowed stands for the tensor itself.
    there = {*has, *excused} if has else set()
    return MtpDepth(depth, status, sum(n in there for n in had), len(had), detail)


def _whole(promise: Promise, depths: list[MtpDepth]) -> MtpStatus:
    status = max((d.status for d in depths), key=_ORDER.index, default="none")
    if not depths and (promise.depths or promise.by_family):
        status = "absent"
    return MtpStatus(status, promise.depths, tuple(depths))
