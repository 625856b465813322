"""Files beside the weights, held against the sha256 that a manifest has of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mtpconv.audit.subject import Subject
from mtpconv.errors import UnreadableError
from mtpconv.ranges import compress
from mtpconv.store.hf_index import has_file, outside
from mtpconv.store.manifest import Manifest, hash_files
from mtpconv.store.other_files import OTHER_WEIGHTS
from mtpconv.store.safetensors_header import plain

#: What the audit looks at itself: tensors, whatever shards they lie in, and the index, which
#: differs wherever shards do. Weights in other formats are as large, and nobody's concern.
_LOOKED_AT = (".safetensors", ".safetensors.index.json", *OTHER_WEIGHTS)
#: Names that a note spells out.
_SHOWN = 6


class Beside(NamedTuple):
    """How many files beside the weights a manifest knows, and the names of those that are wrong."""

    known: int
    differing: tuple[str, ...]
    missing: tuple[str, ...]


def beside_notes(before: Subject, after: Subject) -> Iterator[str]:
    """What became of the files beside the weights, where one side is a manifest with digests."""
    for side, other in ((before, after), (after, before)):
        known = _known(side)
        if not known:
            continue
        found = compare_beside(side, other)
        if found is None:
            yield (
                f"{side.path} has the sha256 of {len(known)} files beside the weights; they were "
                f"not compared, {other.path} is no HuggingFace folder on this machine"
            )
            continue
        for names, what in (
            (found.differing, "differ from"), (found.missing, "are missing and are in"),
        ):  # fmt: skip
            if names:
                yield (
                    f"warning: {len(names)} of {found.known} files beside the weights {what} "
                    f"{side.path}: {compress(names, _SHOWN)}; copy them again"
                )
        if not found.differing and not found.missing:
            yield f"all {found.known} files beside the weights have the sha256 of {side.path}"


def compare_beside(side: Subject, other: Subject) -> Beside | None:
    """Files of an HF folder against the digests of a manifest; None if there are not both."""
    known = _known(side)
    if not known or other.format != "hf" or other.afar:
        return None
    folder = Path(other.path)
    missing, differing = [], []
    for name, digest in sorted(known.items()):
        if not _is_there(folder, name):
            missing.append(plain(name))
        elif _digest(folder, name) != digest:
            differing.append(plain(name))
    return Beside(len(known), tuple(differing), tuple(missing))


def _known(side: Subject) -> Mapping[str, str]:
    files = side.content.files if isinstance(side.content, Manifest) else {}
    return {n: d for n, d in files.items() if not n.endswith(_LOOKED_AT)}


def _is_there(folder: Path, name: str) -> bool:
    """A manifest is anybody's: no name in it may lead out of the folder, or be no name at all."""
    try:
        return not outside(name) and has_file(folder, name)
    except (OSError, ValueError):
        return False


def _digest(folder: Path, name: str) -> str | None:
    """The sha256 of a file; None if it cannot be read, which is no digest of anything."""
    try:
        return hash_files(folder, [name])[name]
    except UnreadableError:
        return None
