"""Saved inventories: name, dtype, shape and BLAKE3 digest of every tensor, one root over all.

A manifest stands for a checkpoint that is somewhere else: audits against it reach tier L1.
The file is deterministic: the same tensors, config and files always give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, NoReturn

from blake3 import blake3

from mtpconv.errors import UnreadableError, UnsupportedError, WriteError
from mtpconv.ranks import Ranks, share
from mtpconv.store.checkpoint import Checkpoint, Chunk, Problem
from mtpconv.store.content import Pieced
from mtpconv.store.crc_check import CrcCheck
from mtpconv.store.crew import Crew
from mtpconv.store.digest import Progress, digest_by
from mtpconv.store.json_text import read_json
from mtpconv.tensors import DTYPE_BITS, Shape, TensorSpec, are_dims

MANIFEST_FORMAT = "mtpconv-manifest"
MANIFEST_VERSION = 1

_ROW = frozenset({"name", "dtype", "shape", "blake3"})
_NOT_THE_SAME = "the ranks do not see the same there; every rank must read the same files"
_HEX = re.compile(r"[0-9a-f]{64}")
#: Units: bytes. 200 per tensor; the largest model seen has 100,000 tensors.
_MAX_MANIFEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Manifest:
    """An inventory with digests; a Checkpoint whose bytes are elsewhere."""

    #: the manifest file, or the folder it was taken from
    path: Path
    #: `hf`, `torch_dist` or `torch`: what kind of names it holds
    source_format: str
    tensors: Mapping[str, TensorSpec]
    #: BLAKE3 of the bytes of each tensor, hex
    digests: Mapping[str, str]
    #: config.json of the checkpoint, or None
    config: dict[str, Any] | None = None
    #: sha256 of each file by its path below the folder, as `sha256sum` prints it; may be empty
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """Always `manifest`."""
        return "manifest"

    @property
    def problems(self) -> Sequence[Problem]:
        """Always empty: only sound checkpoints get a manifest."""
        return ()

    @property
    def root(self) -> str:
        """One BLAKE3 digest over names, dtypes, shapes and digests of all tensors, hex."""
        return root_digest(self.tensors, self.digests)

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Never answers: a manifest holds digests, not bytes."""
        raise UnsupportedError(
            f"{self.path}: is a manifest and holds no bytes of {name}; give the checkpoint itself"
        )


def take_manifest(
    source: Checkpoint | Pieced,
    path: Path,
    source_format: str,
    *,
    config: dict[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    ranks: Ranks | None = None,
) -> Manifest:
    """Hashes every tensor of a checkpoint; `progress` is called with bytes done.

    Several `ranks` hash a stretch each, and all get the manifest.

    Raises: UnreadableError if a file ends early, a record does not have its CRC-32, or the ranks
    do not see the same tensors.
    """
    ranks = ranks or Ranks()
    # In the order of the checkpoint, which is mostly that of the disk.
    mine = share(list(source.tensors), lambda n: source.tensors[n].nbytes, ranks)
    sealed = getattr(source, "sealed", None)  # Megatron's formats keep a CRC-32 of each record
    crcs = CrcCheck(sealed() if sealed is not None else {})
    with Crew(workers, on_read=crcs.saw) as crew:
        taken = dict(digest_by(crew, source, mine, progress))
    if crcs.broken:
        raise UnreadableError(crcs.broken[0].fault)
    digests = _of_all(taken, ranks)
    if digests.keys() != source.tensors.keys():
        _refuse(path, _NOT_THE_SAME)
    tensors = {name: source.tensors[name] for name in digests}
    return Manifest(path, source_format, tensors, digests, config, dict(files or {}))


def root_digest(tensors: Mapping[str, TensorSpec], digests: Mapping[str, str]) -> str:
    """BLAKE3 over one JSON line `[name,dtype,shape,digest]` per tensor, sorted by name, hex.

    Law: equal if and only if names, dtypes, shapes and bytes are (up to a hash collision).
    """
    hasher = blake3()
    shapes = _Shapes()
    for name in sorted(tensors):
        spec = tensors[name]
        row = f'[{_quoted(name)},"{spec.dtype}",{shapes[spec.shape]},"{digests[name]}"]\n'
        hasher.update(row.encode())
    return hasher.hexdigest()


class _Shapes(dict[Shape, str]):
    """Shapes as JSON; a model with 60,000 tensors has a dozen."""

    def __missing__(self, shape: Shape) -> str:
        text = self[shape] = f"[{','.join(map(str, shape))}]"
        return text


def hash_files(
    folder: Path, names: Sequence[str] | None = None, ranks: Ranks | None = None
) -> dict[str, str]:
    """sha256 of the files below a folder, by path relative to it; hidden folders are left out.

    Raises: UnreadableError if a file cannot be read, or the ranks do not see the same files.
    """
    ranks = ranks or Ranks()
    if names is None:
        names = sorted(_walk(folder))
    mine = share(names, lambda n: _size(folder / n), ranks)
    found = _of_all(_hash_files(folder, mine), ranks)
    if found.keys() != set(names):
        _refuse(folder, _NOT_THE_SAME)
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # whoever reads it says what is wrong


def _of_all(mine: Mapping[str, str], ranks: Ranks) -> dict[str, str]:
    return {name: digest for part in ranks.gather("digests", mine) for name, digest in part.items()}


def _hash_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                out[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UnreadableError(f"{folder / name}: cannot be read: {error.strerror}") from error
    return out


def _walk(folder: Path) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for name in names:
            path = Path(root, name)
            if path.is_file():
                yield path.relative_to(folder).as_posix()


def manifest_text(manifest: Manifest) -> str:
    """The manifest as it is written: JSON with one tensor a line."""
    return "".join(_lines(manifest))


def _lines(manifest: Manifest) -> Iterator[str]:
    head = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "source_format": manifest.source_format,
        "root": manifest.root,
        "config": _finite(manifest.config),
        "files": dict(sorted(manifest.files.items())),
    }
    yield "{" + ",\n".join(f"{_compact(key)}:{_compact(value)}" for key, value in head.items())
    yield ',\n"tensors":['
    shapes = _Shapes()
    comma = ""
    # By hand: json.dumps for each row takes five times as long as all the rest.
    for name in sorted(manifest.tensors):
        spec, digest = manifest.tensors[name], manifest.digests[name]
        yield (
            f'{comma}\n{{"name":{_quoted(name)},"dtype":"{spec.dtype}",'
            f'"shape":{shapes[spec.shape]},"blake3":"{digest}"}}'
        )
        comma = ","
    yield "\n]}\n"


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Writes a manifest; as a file it appears whole or not at all.

    Raises: WriteError if the disk is full or the folder cannot be written.
    """
    # /dev/stdout, a pipe or a link: written through, never replaced.
    through = path.is_symlink() or (path.exists() and not path.is_file())
    part = path if through else path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(_lines(manifest))
            file.flush()
            if path.is_file() or not through:
                os.fsync(file.fileno())
        if not through:
            part.replace(path)
    except BaseException as error:
        if not through:
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(f"{path}: cannot be written: {error.strerror}") from error
        raise


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest and recomputes its root.

    Raises: UnreadableError if it is no manifest, is damaged or was edited.
    """
    path = Path(path)
    rows = _Rows(path)
    read = read_json(path, _MAX_MANIFEST_BYTES, rows.take)
    value = read.value
    if not isinstance(value, dict) or value.get("format") != MANIFEST_FORMAT:
        _refuse(path, "is no mtpconv manifest; write one with `mtpconv inventory CKPT -o FILE`")
    if value.get("version") != MANIFEST_VERSION:
        _refuse(path, f"has version {value.get('version')!r}; this reads {MANIFEST_VERSION}")
    if read.duplicate_keys:
        _refuse(path, f"has the key {read.duplicate_keys[0]!r} twice")
    config, files = value.get("config"), value.get("files")
    if config is not None and not isinstance(config, dict):
        _refuse(path, "config is not an object")
    if not isinstance(files, dict) or not all(map(_is_hex, files.values())):
        _refuse(path, "files is not a table of sha256 digests")
    if value.get("source_format") not in ("hf", "torch_dist", "torch"):
        _refuse(path, f"has the unknown source_format {value.get('source_format')!r}")
    if value.get("tensors") != list(range(len(rows.tensors))):
        _refuse(path, "tensors is not a list of names with dtype, shape and blake3")
    manifest = Manifest(path, value["source_format"], rows.tensors, rows.digests, config, files)
    if value.get("root") != manifest.root:
        _refuse(path, "root does not match its tensors: the file was edited or is damaged")
    return manifest


class _Rows:
    """The rows of a manifest, taken one by one while it is parsed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tensors: dict[str, TensorSpec] = {}
        self.digests: dict[str, str] = {}
        self._specs: dict[TensorSpec, TensorSpec] = {}  # few differ: said once each

    def take(self, row: dict[str, Any]) -> Any:
        """The number of a row, which is what its list then holds; other objects as they are."""
        if row.keys() != _ROW:
            return row
        name, dtype, shape, digest = row["name"], row["dtype"], row["shape"], row["blake3"]
        if type(name) is not str or name in self.tensors:
            _refuse(self._path, f"has the tensor {str(name)[:200]!r} twice or without a name")
        if (
            not isinstance(dtype, str)
            or dtype not in DTYPE_BITS
            or not isinstance(shape, list)
            or len(shape) > 64
            or not are_dims(shape)
            or not _is_hex(digest)
        ):
            _refuse(self._path, f"{name[:200]!r} has no valid dtype, shape or digest")
        name, spec = sys.intern(name), TensorSpec(dtype, tuple(shape))
        self.tensors[name] = self._specs.setdefault(spec, spec)
        self.digests[name] = sys.intern(digest)  # those of what is written are mostly the same
        return len(self.tensors) - 1


def _quoted(name: str) -> str:
    """A name as JSON, in ASCII."""
    return encode_basestring_ascii(name)


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    """A JSON value with NaN and infinities, which JSON does not have, as strings."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _refuse(path: Path, what: str) -> NoReturn:
    raise UnreadableError(f"{path}: {what}")
