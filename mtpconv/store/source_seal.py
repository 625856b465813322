"""The manifest that seals a saved `hf_source`, and what was lost or damaged since.

It has the digests of all tensors and the sha256 of the files beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mtpconv.errors import UnreadableError
from mtpconv.store.digest import digest_tensors
from mtpconv.store.durable import write_bytes
from mtpconv.store.fp8_tensors import SCALE
from mtpconv.store.hf_index import has_file, outside
from mtpconv.store.json_text import read_json
from mtpconv.store.manifest import Manifest, hash_files, read_manifest, write_manifest
from mtpconv.store.safetensors_header import is_unicode, plain
from mtpconv.store.source import MANIFEST, QUANTISED, HfSource

#: Files of FP8 codes and scales with their sizes in bytes.
_KEPT = "quantised.json"
_MISSING = "is missing, hf2mcore saved it"


def seal_source(folder: Path, manifest: Manifest) -> None:
    """Save the manifest, with the sha256 of every file of the folder but FP8 codes and scales.

    These may be as large as the model: they have digests by tensor, and a list with their sizes.

    Raises: WriteError, UnreadableError.
    """
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    kept = {n: (folder / n).stat().st_size for n in names if n.startswith(f"{QUANTISED}/")}
    if kept:
        write_bytes(folder / _KEPT, json.dumps(kept, indent=1).encode() + b"\n")
        names.append(_KEPT)
    sealed = sorted(n for n in names if not n.startswith(f"{QUANTISED}/") and _can_be_sealed(n))
    write_manifest(replace(manifest, files=hash_files(folder, sealed)), folder / MANIFEST)


def check_source(source: HfSource, *, whole: bool) -> Manifest | None:
    """The digests that travelled; a source that is here `whole` is held against them.

    Raises: UnreadableError naming what was lost, changed or damaged since it was saved.
    """
    if not source.is_saved:
        return None  # an HF folder: a file of that name is its own
    manifest = saved_manifest(source)
    for fault in source_faults(source, manifest) if whole else ():
        raise UnreadableError(
            f"{fault.file}: {fault.what}; copy {source.path} again, or name a HuggingFace folder "
            "with --like"
        )
    return manifest


def saved_manifest(source: HfSource) -> Manifest | None:
    """The manifest of a saved source. Raises: UnreadableError if it is damaged."""
    path = source.path / MANIFEST
    return read_manifest(path) if os.path.lexists(path) else None


class SourceFault(NamedTuple):
    """A file of a saved source, and what became of it."""

    file: Path
    what: str


def source_faults(source: HfSource, manifest: Manifest | None) -> Iterator[SourceFault]:
    """What of a saved source was lost, changed or damaged since; the first fault of each file.

    FP8 codes are not looked at: wrong ones are made anew from Megatron's weights, but wrong scales
    would pass for training.

    Raises: UnreadableError if a file cannot be read.
    """
    if manifest is None:
        yield SourceFault(source.path / MANIFEST, _MISSING)
        return
    for name, digest in manifest.files.items():
        path = source.path / name
        if not _can_be_sealed(name):
            yield SourceFault(source.path / MANIFEST, f"names {plain(name)}")
        elif not has_file(source.path, name):
            yield SourceFault(path, _MISSING)
        elif hash_files(source.path, [name])[name] != digest:
            yield SourceFault(path, "is not what hf2mcore saved")
    yield from _lost_codes(source, manifest)
    if source.quantised is None:
        return
    scales = [n for n in source.quantised.tensors if n.endswith(SCALE)]
    for name, digest in digest_tensors(source.quantised, scales):
        if manifest.digests.get(name, digest) != digest:
            yield SourceFault(source.path / QUANTISED, f"{name} is not what hf2mcore saved")


def _lost_codes(source: HfSource, manifest: Manifest) -> Iterator[SourceFault]:
    """Files of FP8 codes and scales that are not there whole; a bad list is a fault already."""
    path = source.path / _KEPT
    if _KEPT not in manifest.files or not path.is_file():
        return
    kept = read_json(path).value
    for name, size in kept.items() if isinstance(kept, dict) else ():
        file = source.path / name
        if outside(name) or not has_file(source.path, name):
            yield SourceFault(file, _MISSING)
        elif file.stat().st_size != size:
            yield SourceFault(file, "does not have the size that hf2mcore saved")


def _can_be_sealed(name: str) -> bool:
    """Whether JSON can hold the name of a file, and it leads nowhere else."""
    return is_unicode(name) and not outside(name)
