"""What an engine does with a checkpoint, above all what it does without a word.

Every rule was read in the engine's source; docs/profiles.md lists them with file and version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from mtpconv.audit.codes import finding
from mtpconv.audit.compare import SideError, same_bytes
from mtpconv.audit.engines import COUNTED, DEEPSEEK, DEFAULTS_TO_ONE, DROPPED, OWN_HEADS
from mtpconv.audit.excuses import copy_of
from mtpconv.audit.finding import Finding
from mtpconv.audit.mtp import depths_of
from mtpconv.audit.options import Profile
from mtpconv.audit.promise import Promise, read_promise
from mtpconv.audit.quantised import stated
from mtpconv.audit.subject import Subject
from mtpconv.ranges import compress
from mtpconv.store.content import Files
from mtpconv.tensors import Region


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rules look at."""

    subject: Subject
    regions: Mapping[str, Region]
    promise: Promise
    #: MTP tensors by depth
    depths: Mapping[int, list[str]]
    #: MTP tensors that should be there and are not, by depth, where that is known
    absent: Mapping[int, list[str]]
    read_bytes: bool


Check = Callable[[Seen, "Rule"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing an engine does."""

    name: str
    engine: Profile
    source: str
    check: Check
    #: the model types that the source is about; None: all
    types: frozenset[str] | None = None


def profile_findings(
    subject: Subject,
    regions: Mapping[str, Region],
    absent: Collection[str],
    profile: Profile,
    *,
    read_bytes: bool,
) -> Iterator[Finding]:
    """What the engine would do; `absent` are names known to be missing."""
    if subject.format != "hf":
        yield finding(
            "engine_note", "note",
            f"{profile}: reads HuggingFace folders only; what it would do with {subject.path}"
            f" ({subject.format}) was not looked at",
        )  # fmt: skip
        return
    known = {**(subject.expected.regions if subject.expected else {}), **regions}
    lacking = {n: known.get(n) or subject.naming.region(n) for n in absent}
    seen = Seen(
        subject,
        regions,
        read_promise(subject.config),
        depths_of(subject.tensors, regions),
        depths_of(absent, lacking),
        read_bytes,
    )
    kind = seen.promise.model_type
    about = [r for r in RULES if r.engine == profile and (r.types is None or kind in r.types)]
    for rule in about:
        yield from rule.check(seen, rule)
    if seen.depths and all(rule.check is _unindexed for rule in about):
        yield finding(
            "engine_note", "note",
            f"{profile}: how it loads the MTP of {kind} was not read in its source; only whether"
            " the index names every file was looked at",
        )  # fmt: skip


def _ignores(rule: Rule, what: str, names: Collection[str] = ()) -> Finding:
    return finding(
        "engine_ignores", "warning", f"{rule.engine}: {what}",
        tensors=tuple(sorted(names)), hint=f"{rule.name}: {rule.source}",
    )  # fmt: skip


def _refuses(rule: Rule, what: str) -> Finding:
    return finding(
        "engine_refuses", "error", f"{rule.engine}: {what}",
        hint=f"{rule.name}: {rule.source}",
    )  # fmt: skip


def _note(rule: Rule, what: str) -> Finding:
    return finding(
        "engine_note", "note", f"{rule.engine}: {what}", hint=f"{rule.name}: {rule.source}"
    )


def _whole_depths_absent(seen: Seen) -> list[int]:
    return [d for d in range(seen.promise.depths or 0) if d not in seen.depths]


def _half_depths(seen: Seen) -> list[str]:
    return [n for d, names in seen.absent.items() if d in seen.depths for n in names]


def _vllm_absent(seen: Seen, rule: Rule) -> Iterator[Finding]:
    gone = _whole_depths_absent(seen)
    if gone and not seen.subject.blind:
        yield _refuses(
            rule,
            f"raises ValueError for MTP depth {gone[0]} once speculative decoding with MTP is"
            " on; without it, it serves and says nothing",
        )


def _vllm_partial(seen: Seen, rule: Rule) -> Iterator[Finding]:
    names = _half_depths(seen)
    shown = compress(sorted(names), 3)
    gone = _whole_depths_absent(seen)
    if gone and seen.promise.model_type not in DEEPSEEK and not seen.subject.blind:
        shown = ", ".join(filter(None, (f"all of MTP depth {gone[0]}", shown)))
    if not shown:
        return
    if stated(seen.subject) is None:
        yield _refuses(rule, f"raises ValueError, not initialised from checkpoint: {shown}")
    else:
        yield _ignores(
            rule,
            f"does not check completeness of quantised models; it runs MTP with uninitialised"
            f" memory for {shown}",
            names,
        )


def _count_absent(seen: Seen, rule: Rule) -> Iterator[Finding]:
    field = any(value is not None for _, value in seen.promise.fields)
    if seen.depths and not field and not seen.promise.by_family:
        yield _ignores(
            rule,
            "finds no number of MTP depths in the config; MTP cannot be used and nothing says so",
            [n for names in seen.depths.values() for n in names],
        )


def _copies(seen: Seen, rule: Rule) -> Iterator[Finding]:
    own_heads = rule.engine == "vllm" and seen.promise.model_type in OWN_HEADS
    copies = {
        n: root
        for names in seen.depths.values()
        for n in names
        if (root := copy_of(seen.subject, n, seen.regions)) is not None
        and not (own_heads and "shared_head" in n)
    }
    if not copies:
        return
    differing = sorted(n for n, root in copies.items() if not _equal(seen, n, root))
    if differing:
        yield _ignores(
            rule,
            f"uses the trunk's embedding and head instead of {compress(differing, 3)}, which"
            " differ from them",
            differing,
        )
    else:
        shown = compress(sorted(copies), 3)
        yield _note(rule, f"does not read {shown}; it shares the trunk's embedding and head")


def _equal(seen: Seen, name: str, root: str) -> bool:
    subject = seen.subject
    if subject.tensors[name] != subject.tensors[root]:
        return False
    if not (seen.read_bytes and subject.has_bytes):
        return True
    try:
        with Files() as left, Files() as right:
            return same_bytes(subject, name, subject, root, left, right)
    except SideError:
        return True


def _unindexed(seen: Seen, rule: Rule) -> Iterator[Finding]:
    indexed = seen.subject.indexed_files
    if indexed is None:
        return
    where = seen.subject.where
    names = [n for n in seen.subject.tensors if where.get(n) not in indexed]
    if names:
        yield _ignores(
            rule,
            f"does not open files that the index does not name: {compress(sorted(names), 3)}",
            names,
        )


def _sglang_count(seen: Seen, rule: Rule) -> Iterator[Finding]:
    if not (seen.depths or seen.promise.depths):
        return
    value = dict(seen.promise.fields).get("num_nextn_predict_layers")
    if value is None:
        yield _refuses(rule, "raises ValueError: num_nextn_predict_layers is not in the config")
    elif value != 1:
        yield _refuses(rule, f"asserts num_nextn_predict_layers == 1 and the config says {value}")


def _sglang_unchecked(seen: Seen, rule: Rule) -> Iterator[Finding]:
    names = [n for names in seen.absent.values() for n in names]
    gone = _whole_depths_absent(seen)
    if (names or gone) and not seen.subject.blind:
        what = compress(sorted(names), 3) if names else f"all of MTP depth {gone[0]}"
        yield _ignores(
            rule,
            f"does not check that every parameter was loaded; it drafts with uninitialised"
            f" memory for {what}",
            names,
        )


def _transformers_drops(seen: Seen, rule: Rule) -> Iterator[Finding]:
    pattern = DROPPED.get(seen.promise.model_type or "")
    names = [n for names in seen.depths.values() for n in names]
    silent = [n for n in names if pattern and re.search(pattern, n)]
    loud = len(names) - len(silent)
    if silent:
        yield _ignores(
            rule,
            f"from_pretrained drops {len(silent)} MTP tensors without a word, and save_pretrained"
            " writes a checkpoint without them whose config still promises MTP",
            silent,
        )
    if loud:
        yield _note(rule, f"from_pretrained lists {loud} MTP tensors as unexpected and drops them")


def _transformers_invents(seen: Seen, rule: Rule) -> Iterator[Finding]:
    if not seen.promise.fields:
        yield _ignores(
            rule,
            "the absent MTP count becomes 1 in the loaded config and in every config saved from it",
        )


_VLLM = "vllm-project/vllm"
_SGLANG = "sgl-project/sglang"
_SG_LOADER = "python/sglang/srt/models/deepseek_common/deepseek_weight_loader.py @ 0201c04e"

RULES: tuple[Rule, ...] = (
    Rule(
        "vllm-absent-depth", "vllm",
        f"{_VLLM} PR 35548 (merged 2026-02): deepseek_mtp.py load_weights", _vllm_absent,
        DEEPSEEK,
    ),
    Rule(
        "vllm-partial-depth", "vllm",
        f"{_VLLM} vllm/model_executor/model_loader/default_loader.py @ 00b5ad07, load_weights",
        _vllm_partial,
    ),
    Rule(
        "vllm-count", "vllm",
        f"{_VLLM} vllm/config/speculative.py @ 002e77c1, hf_config_override", _count_absent,
        COUNTED,
    ),
    Rule(
        "vllm-copies", "vllm",
        f"{_VLLM} vllm/v1/spec_decode/llm_base_proposer.py @ 00c4f22d, _maybe_share_lm_head",
        _copies,
    ),
    Rule(
        "vllm-index", "vllm",
        f"{_VLLM} vllm/model_executor/model_loader/default_loader.py @ 00b5ad07, _prepare_weights",
        _unindexed,
    ),
    Rule(
        "sglang-count", "sglang",
        f"{_SGLANG} {_SG_LOADER}, _initialize_nextn_conf", _sglang_count, DEEPSEEK,
    ),
    Rule(
        "sglang-unchecked", "sglang",
        f"{_SGLANG} {_SG_LOADER}, do_load_weights", _sglang_unchecked, DEEPSEEK,
    ),
    Rule(
        "sglang-copies", "sglang",
        f"{_SGLANG} {_SG_LOADER}, do_load_weights", _copies, DEEPSEEK,
    ),
    Rule(
        "sglang-index", "sglang",
        f"{_SGLANG} python/sglang/srt/model_loader/weight_utils.py @ 00b08c49,"
        " filter_duplicate_safetensors_files",
        _unindexed,
    ),
    Rule(
        "transformers-drops", "transformers",
        "huggingface/transformers 5.24.0, _keys_to_ignore_on_load_unexpected",
        _transformers_drops,
    ),
    Rule(
        "transformers-count", "transformers",
        "huggingface/transformers 5.24.0, configuration_deepseek_v3.py num_mtp_layers",
        _transformers_invents, DEFAULTS_TO_ONE,
    ),
)  # fmt: skip
