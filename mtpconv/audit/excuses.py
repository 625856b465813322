"""Differences that are allowed, each under a rule with a name.

Tied heads are allowed when the config says so; everything else only under its switch. An
excuse never takes anyone's word: the bytes that make it true are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtpconv.audit.compare import SideError, same_bytes
from mtpconv.audit.expert_layout import same_experts
from mtpconv.audit.names import tail
from mtpconv.audit.options import Options
from mtpconv.audit.pair import Differences
from mtpconv.audit.quantised import is_quantised
from mtpconv.audit.subject import Subject
from mtpconv.audit.values import padded_with_zeros, upcast_equal
from mtpconv.store.content import Files
from mtpconv.tensors import DTYPE_BITS, Region

#: Ways families write the root embedding and head.
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "word_embeddings.weight", "wte.weight")
_HEADS = ("lm_head.weight", "output_layer.weight")
#: Tails of MTP tensors that some releases ship as second copies, and of which root tensor.
#: Source: facts on MTP families, section 1, "duplicates on disk".
_COPIES: Mapping[str, str] = {
    "embed_tokens.weight": "embedding",
    "emb.tok_emb.weight": "embedding",
    "shared_head.head.weight": "head",
    "head.weight": "head",
    "transformer.shared_head.output.weight": "head",
}


def find_excuses(
    found: Differences,
    before: Subject,
    after: Subject,
    options: Options,
    regions: dict[str, Region],
) -> dict[str, str]:
    """Names whose difference is allowed, with the reason.

    `found` is not changed; callers turn the findings of these names into notes.
    """
    out: dict[str, str] = {}
    try:
        out.update(_tied_heads(found, before, after, options, regions))
        if "copies" in options.allow:
            out.update(_copies(found, before, after, options, regions))
        if not options.read_bytes:
            return out
        if "upcast" in options.allow:
            out.update(_upcasts(found, before, after))
        if "expert-layout" in options.allow:
            out.update(same_experts(found, before, after))
        if "vocab-padding" in options.allow:
            out.update(_padding(found, before, after, regions))
    except SideError:
        # The unreadable file is an error of its own; what depends on it stays strict.
        return out
    return out


def root_embedding(subject: Subject, regions: Mapping[str, Region]) -> str | None:
    """Name of the token embedding."""
    return _root(subject, regions, _EMBEDDINGS)


def root_head(subject: Subject, regions: Mapping[str, Region]) -> str | None:
    """Name of the LM head; None for tied models that do not store it."""
    return _root(subject, regions, _HEADS)


def is_tied(config: Mapping[str, Any] | None) -> bool | None:
    """What the config says about tied embeddings; None if nothing does."""
    if config is None:
        return None
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, Mapping) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None


def copy_of(subject: Subject, name: str, regions: Mapping[str, Region]) -> str | None:
    """The root tensor that an MTP copy repeats, by name; None if the name is no copy's."""
    if regions[name].kind != "mtp":
        return None
    kind = _COPIES.get(tail(name))
    if kind == "embedding":
        return root_embedding(subject, regions)
    if kind == "head":
        return root_head(subject, regions) or root_embedding(subject, regions)
    return None


def _root(subject: Subject, regions: Mapping[str, Region], tails: tuple[str, ...]) -> str | None:
    names = [
        n
        for n in subject.tensors
        if n.endswith(tails) and regions[n].kind == "root" and "vis" not in n and "audio" not in n
    ]
    return min(names, key=lambda n: (n.count("."), n)) if names else None


def _one_sided(
    found: Differences, before: Subject, after: Subject
) -> Iterator[tuple[str, Subject, str]]:
    for name in found.missing:
        yield name, before, "not stored"
    for name in found.extra:
        yield name, after, "added"


def _tied_heads(
    found: Differences,
    before: Subject,
    after: Subject,
    options: Options,
    regions: dict[str, Region],
) -> Iterator[tuple[str, str]]:
    for name, holder, what in _one_sided(found, before, after):
        if not name.endswith(_HEADS) or regions[name].kind != "root":
            continue
        other = after if holder is before else before
        said = is_tied(other.config if other.config is not None else holder.config)
        if not said and "tied-heads" not in options.allow:
            continue
        embedding = root_embedding(holder, regions)
        if embedding and _repeats(found, holder, name, embedding, options):
            how = "identical to" if options.read_bytes else "shaped like (bytes not read)"
            yield name, f"{what}; {how} tied {embedding}"


def _copies(
    found: Differences,
    before: Subject,
    after: Subject,
    options: Options,
    regions: dict[str, Region],
) -> Iterator[tuple[str, str]]:
    for name, holder, what in _one_sided(found, before, after):
        root = copy_of(holder, name, regions)
        if root and _repeats(found, holder, name, root, options):
            how = "identical to" if options.read_bytes else "shaped like (bytes not read)"
            yield name, f"{what}; {how} {root}, allowed by the switch copies"


def _repeats(found: Differences, holder: Subject, name: str, root: str, options: Options) -> bool:
    """Whether `name` repeats `root`, and `root` itself is on both sides, the same if it must be.

    At tier L0 the bytes are not looked at, here as everywhere.
    """
    if holder.tensors[name] != holder.tensors[root]:
        return False
    if not options.read_bytes:
        return root in found.not_read
    # After training every tensor is new: what counts is that one side has the two equal.
    if root not in found.same and not (options.expect == "structure" and root in found.changed):
        return False
    with Files() as left, Files() as right:
        return same_bytes(holder, name, holder, root, left, right)


def _upcasts(found: Differences, before: Subject, after: Subject) -> Iterator[tuple[str, str]]:
    if not (before.has_bytes and after.has_bytes):
        return
    for name in found.dtype:
        old, new = before.tensors[name], after.tensors[name]
        wider = DTYPE_BITS[new.dtype] > DTYPE_BITS[old.dtype]
        # The value of a code is the code times its scale, which no cast multiplies.
        if old.shape != new.shape or not wider or is_quantised(before, name):
            continue
        if upcast_equal(before, after, name):
            reason = f"every value is equal in {new.dtype}, allowed by the switch upcast"
            yield name, reason


def _padding(
    found: Differences, before: Subject, after: Subject, regions: dict[str, Region]
) -> Iterator[tuple[str, str]]:
    if not (before.has_bytes and after.has_bytes):
        return
    for name in found.shape:
        is_vocab = name.endswith((*_EMBEDDINGS, *_HEADS)) or copy_of(before, name, regions)
        old, new = before.tensors[name], after.tensors[name]
        same_rows = len(old.shape) == len(new.shape) and old.shape[1:] == new.shape[1:]
        if is_vocab and old.dtype == new.dtype and same_rows:
            rows = padded_with_zeros(before, after, name)
            if rows is not None:
                yield name, f"{rows} all-zero rows, allowed by the switch vocab-padding"
