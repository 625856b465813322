"""What names and config alone tell about completeness, for model types without a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from mtpconv.audit.codes import finding
from mtpconv.audit.excuses import is_tied, root_embedding, root_head
from mtpconv.audit.finding import Finding
from mtpconv.audit.mtp import depths_of
from mtpconv.audit.names import layer_prefix, mtp_prefix, split_expert, tail
from mtpconv.audit.promise import read_promise
from mtpconv.audit.subject import Subject
from mtpconv.geometry import EXPERT_FIELDS, text_config
from mtpconv.ranges import compress
from mtpconv.tensors import Region

#: Counts in an untrusted config beyond this are not walked through.
_MAX_COUNT = 10_000
#: Layers times experts; Kimi-K2, the largest seen, has 61 x 384 = 23,424.
_MAX_BLOCKS = 50_000
#: Absent experts for each one that is there, and in all, beyond which they are one finding a
#: group: a report must not outgrow the checkpoint. One rank of 8 that kept its 32 of 256 experts
#: in 60 layers is below.
_MAX_EACH = 64
_MAX_LISTED = 50_000


def tablefree_findings(subject: Subject, regions: Mapping[str, Region]) -> Iterator[Finding]:
    """Trunk layers and experts that are absent as a whole, vocabulary, head, half an MTP."""
    if subject.config is None or subject.blind or not subject.tensors:
        return
    known = {**subject.naming.regions(subject.unread | subject.ghosts), **regions}
    yield from _layers(subject, known)
    yield from _experts(subject, known)
    yield from _vocabulary(subject, regions)
    yield from _partial(subject, regions)


def _layers(subject: Subject, known: Mapping[str, Region]) -> Iterator[Finding]:
    layers = read_promise(subject.config).layers
    if layers is None:
        return
    if layers > _MAX_COUNT:
        yield _invented("num_hidden_layers", layers)
        return
    present = {r.index for r in known.values() if r.kind == "trunk"}
    if not present:
        return  # names that are not understood prove nothing
    prefix = layer_prefix(subject.tensors)
    for layer in sorted(set(range(layers)) - present):
        yield finding(
            "missing_tensor",
            "error",
            f"{prefix}{layer}.: the config says num_hidden_layers = {layers}, no tensor of this"
            " layer is there",
            layer=layer, prefix=f"{prefix}{layer}.", region=Region("trunk", layer),
        )  # fmt: skip


def _experts(subject: Subject, known: Mapping[str, Region]) -> Iterator[Finding]:
    text = text_config(subject.config or {})
    fields = [f for f in EXPERT_FIELDS if type(text.get(f)) is int]
    if len(fields) != 1:
        return
    count = text[fields[0]]
    if count > _MAX_COUNT:
        yield _invented(fields[0], count)
        return
    layers = read_promise(subject.config).layers or 1
    if is_invented(layers, count, len(subject.tensors)):
        yield _invented(fields[0], count, f" in {layers} layers")
        return
    left = _MAX_LISTED
    groups: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in known:
        split = split_expert(name)
        if split:
            groups[split[0], split[2]].add(split[1])
    for (before, after), present in sorted(groups.items()):
        absent = count - sum(expert < count for expert in present)
        if absent <= min(_MAX_EACH * len(present), left):
            left -= absent
            for expert in range(count):
                if expert not in present:
                    name = f"{before}{expert}{after}"
                    yield finding(
                        "missing_tensor",
                        "error",
                        f"{name}: the config says {count} experts, this one is absent",
                        tensor=name, region=subject.naming.region(name),
                    )  # fmt: skip
        else:
            there = compress((f"{before}{expert}{after}" for expert in sorted(present)), 4)
            yield finding(
                "missing_tensor",
                "error",
                f"{before}*{after}: the config says {count} experts, {absent} are absent; there"
                f" is only {there}",
                prefix=before, region=subject.naming.region(before),
            )  # fmt: skip


def is_invented(layers: int, experts: int, tensors: int) -> bool:
    """Whether a config promises more blocks than any model has, and than the checkpoint holds."""
    return layers * max(experts, 1) > max(_MAX_BLOCKS, tensors)


def _invented(field: str, count: int, more: str = "") -> Finding:
    shown = str(count) if count < 10**12 else "more than 10^12"
    return finding(
        "config_contradiction",
        "error",
        f"config.json: {field} is {shown}{more}; no model is that large",
        field=field, file="config.json",
    )  # fmt: skip


def _vocabulary(subject: Subject, regions: Mapping[str, Region]) -> Iterator[Finding]:
    config = subject.config or {}
    rows = text_config(config).get("vocab_size")
    embedding, head = root_embedding(subject, regions), root_head(subject, regions)
    for name in (embedding, head):
        spec = subject.tensors[name] if name else None
        if name and spec and type(rows) is int and spec.shape[:1] != (rows,):
            wanted = [rows, *spec.shape[1:]]
            yield finding(
                "shape_mismatch",
                "error",
                f"{name}: is {list(spec.shape)}, config says vocab_size = {rows}",
                tensor=name, region=regions[name], before=wanted, after=list(spec.shape),
            )  # fmt: skip
    elsewhere = subject.unread | subject.ghosts
    if embedding and not head and not any(n.endswith("lm_head.weight") for n in elsewhere):
        tied = is_tied(config)
        if tied is not True:
            said = "false" if tied is False else "absent"
            yield finding(
                "missing_tensor",
                "error" if tied is False else "warning",
                f"lm_head.weight: tie_word_embeddings is {said} and there is no head",
                tensor="lm_head.weight", region=Region("root"),
            )  # fmt: skip


def _partial(subject: Subject, regions: Mapping[str, Region]) -> Iterator[Finding]:
    """MTP blocks usually repeat the trunk's last layer; what one lacks is worth a warning."""
    last = max((r.index for r in regions.values() if r.kind == "trunk"), default=-1)
    block = {tail(n) for n, r in regions.items() if r == Region("trunk", last)}
    hidden = {subject.naming.region(n) for n in subject.unread | subject.ghosts}
    for depth, names in depths_of(subject.tensors, regions).items():
        own = {tail(n) for n in names}
        lacking = block - own
        # Families whose MTP block is built otherwise share few names with the trunk.
        if lacking and 2 * len(lacking & block) < len(block) and Region("mtp", depth) not in hidden:
            prefix = mtp_prefix(names[0])
            yield finding(
                "mtp_partial",
                "warning",
                f"MTP depth {depth} lacks {compress(sorted(lacking), 4)}, which the last trunk"
                " layer has; whether it should is for a mapping table to say",
                region=Region("mtp", depth), prefix=prefix, tensors=tuple(sorted(lacking)),
            )  # fmt: skip
