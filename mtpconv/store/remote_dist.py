"""The small files of a torch_dist checkpoint that is not on this machine, and its `hf_source`.

They are fetched into a folder; `.distcp` files are sparse ones there that have the size of the
originals. Everything that reads local folders then works on it, apart from tensor bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from mtpconv.errors import UnreadableError, UnsupportedError, UsageError
from mtpconv.store.afar import AfarCheckpoint, open_afar, stamp
from mtpconv.store.dist_folder import COMMON, CONFIG, METADATA, TRACKER, folder_name, tracked
from mtpconv.store.dist_metadata import DistMetadata, read_metadata
from mtpconv.store.hf_index import INDEX_NAME, outside
from mtpconv.store.remote import (
    WORKERS,
    Below,
    Remote,
    fetch_file,
    mirror_headers,
    open_remote,
    require_ranges,
    write_sparse,
)
from mtpconv.store.source import CARRIED, FOLDER, HEADERS, MANIFEST, QUANTISED
from mtpconv.store.torch_dist import COMMON_STATE

#: Units: bytes. The record of a common state, its pickle among it.
_MAX_RECORD = 32 << 20


@dataclass(frozen=True, slots=True)
class DistMirror:
    """A mirrored checkpoint; what is not mirrored is below `url` and read through `remote`."""

    #: stands for the URL that was named: the parent folder, or that of an iteration
    path: Path
    #: where it is read: the URL that was named comes first
    reads: tuple[str, ...]
    #: that of the iteration
    url: str
    remote: Remote
    #: `.distcp` files that are there, with their sizes
    sizes: Mapping[str, int]
    marks: Mapping[str, str]
    #: tensors in `hf_source`, by the name of their folder
    beside: Mapping[str, AfarCheckpoint]


def holds_dist(remote: Remote) -> bool:
    """Whether a remote folder is a torch_dist checkpoint or the parent of one.

    One with shards is HF whatever else it holds.
    """
    listed = remote.names()
    if listed is None:
        return any(remote.read(name, 0, 1) is not None for name in (METADATA, TRACKER))
    shards = any(name.endswith(".safetensors") and "/" not in name for name in listed)
    return not shards and (METADATA in listed or TRACKER in listed)


def mirror_any(url: str, place: Path) -> Path:
    """The mirror of the headers of a remote checkpoint, of whichever format, below `place`.

    Raises: as `mirror_dist` and `mirror_headers`.
    """
    remote = open_remote(url)
    if holds_dist(remote):
        return mirror_dist(url, place).path
    folder = stand_in(url, place)
    folder.mkdir()
    return mirror_headers(url, folder, remote)


def mirror_dist(url: str, place: Path, *, source: bool = True) -> DistMirror:
    """Mirror a torch_dist checkpoint below `place`, with `source` its `hf_source` too.

    Law: `place` stands for the folder in which the URL lies, `stand_in` for the URL.

    Raises: UnreadableError if there is none or it cannot be reached; UsageError for an HF folder;
    UnsupportedError if the server sends whole files only, or has an `hf_source` and no listing.
    """
    url = url.rstrip("/")
    top = open_remote(url)
    path = stand_in(url, place)
    if top.read(METADATA, 0, 1) is not None:
        remote, where, folder = top, url, path
    else:
        latest = _latest(top, url, path)
        remote, where, folder = Below(top, latest), f"{url}/{latest}", path / latest
    sizes, marks = _mirror_iteration(remote, where, folder)
    above = _above(url) if folder is path else None
    reads = (url,) if above is None else (url, f"{above}/{FOLDER}")
    beside = None
    if source:
        beside = mirror_source(Below(top, FOLDER), f"{url}/{FOLDER}", path / FOLDER)
        if beside is None and above is not None:
            near = Below(open_remote(above), FOLDER)
            beside = mirror_source(near, f"{above}/{FOLDER}", place / FOLDER)
    return DistMirror(path, reads, where, remote, sizes, marks, beside or {})


def stand_in(url: str, place: Path) -> Path:
    """The path below `place` that stands for a URL; a folder's name may say its iteration."""
    name = PurePosixPath(urlsplit(url).path).name
    return place / (name if name not in ("", "..") else "checkpoint")


def _above(url: str) -> str | None:
    """The folder in which a URL lies; None for a whole bucket, host or model."""
    parts = urlsplit(url)
    return url.rpartition("/")[0] if parts.path and parts.scheme != "hf" else None


def _latest(top: Remote, url: str, path: Path) -> str:
    """The folder that the tracker file names."""
    data = fetch_file(top, url, TRACKER, path)
    if data is None:
        if any(top.read(name, 0, 1) for name in (INDEX_NAME, "model.safetensors")):
            raise UsageError(f"{url}: is a HuggingFace folder; hf2mcore converts it to Megatron")
        raise UnreadableError(
            f"{url}: neither {METADATA} nor {TRACKER} is there; name a torch_dist checkpoint, or "
            "its iter_* or release folder"
        )
    text, latest = tracked(data)
    if latest is None or top.read(f"{folder_name(latest)}/{METADATA}", 0, 1) is None:
        raise UnreadableError(
            f"{url}: {TRACKER} says {text[:40]!r}, and there is no {METADATA} in such a folder; "
            "only torch_dist checkpoints are read from afar"
        )
    return folder_name(latest)


def _mirror_iteration(
    remote: Remote, url: str, folder: Path
) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes of the `.distcp` files, and marks of all that is mirrored."""
    listed = remote.names()
    if listed is not None:
        listed = [name for name in listed if not outside(name)]
    sizes: dict[str, int] = {}
    marks: dict[str, str] = {}
    for name in (METADATA, CONFIG, COMMON):
        there = name in listed if listed is not None else remote.read(name, 0, 1) is not None
        if there:
            marks[name] = remote.mark(name)  # first: a change while it is fetched is one, too
            fetch_file(remote, url, name, folder)
    said = DistMetadata()
    if listed is None or COMMON not in marks:  # else nobody asks, and it takes seconds
        with suppress(UnreadableError):  # the reader of local folders says what is wrong with it
            said = read_metadata((folder / METADATA).read_bytes())
    files = {place.file for place in said.places}
    if listed is not None:
        files = {n for n in listed if n.endswith(".distcp") and "/" not in n}
        _show_others(listed, folder)

    def mirror(name: str) -> None:
        found = remote.read(name, 0, 1)
        if found is not None:  # else it is a problem of the checkpoint
            sizes[name] = found[1]
            marks[name] = remote.mark(name)
            write_sparse(folder / name, b"", found[1])

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(mirror, sorted(files)))
    for name in sorted(sizes)[:1]:
        require_ranges(remote, url, name)
    _mirror_common(said, remote, url, folder, sizes)
    for name, mark in marks.items():
        stamp(folder / name, mark)
    return sizes, dict(sorted(marks.items()))


def _show_others(listed: Sequence[str], folder: Path) -> None:
    """What else lies there tells who saved it, by its name."""
    for name in listed:
        first, slash, _ = name.partition("/")
        if (folder / first).exists() or first.endswith(".distcp"):
            continue
        if slash:
            (folder / first).mkdir()
        else:
            write_sparse(folder / first, b"", 0)


def _mirror_common(
    said: DistMetadata, remote: Remote, url: str, folder: Path, sizes: Mapping[str, int]
) -> None:
    """The record of the common state, where there is no file of its own for it."""
    place = said.objects.get(COMMON_STATE)
    if place is None or (folder / COMMON).exists() or not place.length:
        return
    if place.offset + place.length > sizes.get(place.file, 0):
        return  # missing or truncated, which is a problem of the checkpoint
    if place.length > _MAX_RECORD:
        raise UnreadableError(
            f"{url}/{place.file}: {COMMON_STATE} has {place.length:,} bytes, more than "
            f"{_MAX_RECORD:,}; not read"
        )
    found = remote.read(place.file, place.offset, place.length)
    write_sparse(folder / place.file, found[0] if found else b"", sizes[place.file], place.offset)


def mirror_source(remote: Remote, url: str, folder: Path) -> dict[str, AfarCheckpoint] | None:
    """Mirror an `hf_source`, and open the tensors in it; None if there is none.

    Raises: UnsupportedError if there is one and no listing; as `open_afar`.
    """
    listed = remote.below("")
    if listed is None:
        if remote.read(MANIFEST, 0, 1) is None:
            return None
        raise UnsupportedError(
            f"{url}: the server gives no listing, so which files are there cannot be told; "
            "download it (mcore2hf takes the copy with --like)"
        )
    if not any(name.startswith(f"{HEADERS}/") for name in listed):
        return None
    tensors = (CARRIED, QUANTISED)
    small = [name for name in listed if name.partition("/")[0] not in tensors]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda name: fetch_file(remote, url, name, folder), small))
    return {
        part: open_afar(f"{url}/{part}", folder / part, Below(remote, part))
        for part in tensors
        if any(name.startswith(f"{part}/") for name in listed)
    }
