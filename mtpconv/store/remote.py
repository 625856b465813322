"""Headers from afar: what an audit at tier L0 needs of a checkpoint that is not on this machine.

config.json, the index and the header of every shard are fetched, two ranged requests a shard,
into a folder of sparse files that have the size of the originals. Everything that reads local
folders then works on it; there are just no tensor bytes, and nobody may ask for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import quote, urlsplit

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.hf import QUANT_CONFIG_NAME
from mtpconv.store.hf_index import INDEX_NAME, outside
from mtpconv.store.http import HttpFolder
from mtpconv.store.json_text import parse_json
from mtpconv.store.object_store import asking, open_store
from mtpconv.store.safetensors_header import plain

#: Units: bytes. As the safetensors library limits a header.
_HEADER_LIMIT = 100_000_000
_SMALL_LIMIT = 256 << 20
#: Units: bytes. No file system holds a larger file; a server that says so makes it up.
_FILE_LIMIT = 1 << 50
#: Requests for small things that are made at once.
WORKERS = 8


class Remote(Protocol):
    """Read access to the files of one checkpoint somewhere else."""

    def read(self, name: str, start: int, length: int) -> tuple[bytes, int] | None:
        """Up to `length` bytes from `start` and the size of the whole file; None if absent."""

    def names(self) -> Sequence[str] | None:
        """Names of all files; None where there is no listing."""

    def below(self, folder: str) -> Sequence[str] | None:
        """Names of all files below a folder, counted from there; None where there is no listing.

        Without a name: below the one that this is.
        """

    def has_ranges(self, name: str) -> bool:
        """Whether the part of a file comes that is asked for, not all of it."""

    def mark(self, name: str) -> str:
        """Something that differs when a file has changed: its size and entity tag or time."""


class Below:
    """The files of a folder of a remote, as a remote of their own."""

    def __init__(self, remote: Remote, folder: str) -> None:
        self._remote = remote
        self._folder = folder

    def read(self, name: str, start: int, length: int) -> tuple[bytes, int] | None:
        """See `Remote.read`."""
        return self._remote.read(f"{self._folder}/{name}", start, length)

    def names(self) -> Sequence[str] | None:
        """Names of all files, those in folders too; None where there is no listing."""
        return self._remote.below(self._folder)

    def below(self, folder: str) -> Sequence[str] | None:
        """See `Remote.below`."""
        return self._remote.below(f"{self._folder}/{folder}".rstrip("/"))

    def has_ranges(self, name: str) -> bool:
        """See `Remote.has_ranges`."""
        return self._remote.has_ranges(f"{self._folder}/{name}")

    def mark(self, name: str) -> str:
        """See `Remote.mark`."""
        return self._remote.mark(f"{self._folder}/{name}")


def open_remote(url: str) -> Remote:
    """The files below a URL: hf://, http(s)://, or any other scheme that fsspec knows.

    Raises: UnreadableError if it is no URL; UnsupportedError if the scheme needs a package that
    is not installed.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise UnreadableError(f"{url}: is no URL: {error}") from error
    if scheme in ("http", "https"):
        return HttpFolder(url.rstrip("/"))
    if scheme == "hf":
        found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?", url)
        if found is None:
            raise UnreadableError(
                f"{url}: must look like hf://ORG/MODEL or hf://ORG/MODEL@REVISION"
            )
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        if "@" in urlsplit(hub).netloc:  # not shown: it may hold a password
            raise UnreadableError("HF_ENDPOINT: must hold no user or password; set HF_TOKEN")
        if urlsplit(hub).scheme not in ("http", "https"):
            raise UnreadableError(f"HF_ENDPOINT={hub}: must begin with https:// or http://")
        revision = quote(found[2] or "main", safe="")
        return _HubFolder(hub, found[1], revision)
    return _Fsspec(url)


def require_ranges(remote: Remote, url: str, name: str) -> None:
    """Refuse a server that would send a whole file for each of its parts.

    Raises: UnsupportedError.
    """
    if not remote.has_ranges(name):
        raise UnsupportedError(f"{url}: the server sends whole files only; download them")


def mirror_headers(
    url: str,
    folder: Path,
    remote: Remote | None = None,
    marks: dict[str, str] | None = None,
) -> Path:
    """Fetch config, index and headers of a checkpoint into `folder`, shards as sparse files.

    `remote` is what lies at the URL, if it is known. `marks` gets those of the shards, each taken
    before its header is fetched.

    Raises: UnreadableError if it cannot be reached or holds no safetensors checkpoint.
    """
    remote = remote or open_remote(url)
    index = fetch_file(remote, url, INDEX_NAME, folder)
    fetch_file(remote, url, "config.json", folder)
    listed = remote.names()
    if listed is None or QUANT_CONFIG_NAME in listed:
        fetch_file(remote, url, QUANT_CONFIG_NAME, folder)
    shards = {n for n in listed or () if n.endswith(".safetensors") and "/" not in n}
    if index is not None:
        value = parse_json(index, folder / INDEX_NAME).value
        weights = value.get("weight_map") if isinstance(value, Mapping) else None
        named = weights.values() if isinstance(weights, Mapping) else ()
        shards |= {n for n in named if isinstance(n, str) and not outside(n)}
    elif not shards:
        shards = {"model.safetensors"}
    with ThreadPoolExecutor(WORKERS) as pool:
        there = list(
            pool.map(lambda n: _mirror_shard(remote, url, n, folder, marks), sorted(shards))
        )
    if index is None and not any(there):
        raise UnreadableError(f"{url}: neither {INDEX_NAME} nor model.safetensors is there")
    return folder


def fetch_file(remote: Remote, url: str, name: str, folder: Path) -> bytes | None:
    """Fetch one small file into a folder; None if there is none.

    Raises: UnreadableError if it cannot be fetched, or is too large to be no weights.
    """
    found = remote.read(name, 0, _SMALL_LIMIT + 1)
    if found is None:
        return None
    data, size = found
    if size > _SMALL_LIMIT or len(data) != size:
        raise UnreadableError(f"{url}/{name}: {len(data):,} of {size:,} bytes came; try again")
    write_sparse(folder / name, data, size)
    return data


def _mirror_shard(
    remote: Remote, url: str, name: str, folder: Path, marks: dict[str, str] | None
) -> bool:
    if marks is not None:
        if remote.read(name, 0, 1) is None:
            return False
        marks[str(PurePosixPath(name))] = remote.mark(name)
    first = remote.read(name, 0, 8)
    if first is None:
        return False
    start, size = first
    length = int.from_bytes(start, "little") if len(start) == 8 else 0
    # A length that cannot be is left to the reader of local files, which says what is wrong.
    rest = b""
    if length <= min(_HEADER_LIMIT, size - 8) and length:
        found = remote.read(name, 8, length)
        rest = found[0] if found is not None else b""
        if len(rest) != length:
            raise UnreadableError(f"{url}/{name}: the header came short; try again")
    write_sparse(folder / name, start + rest, size)
    return True


def write_sparse(path: Path, data: bytes, size: int, at: int = 0) -> None:
    """A new file of `size` bytes with `data` at byte `at`; the rest takes no room.

    Raises: UnreadableError if it cannot be written, or no file has that size.
    """
    if size > _FILE_LIMIT:
        raise UnreadableError(f"{path.name}: the server claims a size that no file has")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.seek(at)
            file.write(data)
            file.truncate(size)
    except OSError as error:
        raise UnreadableError(
            f"{path.name}: cannot be mirrored in {path.parent}: {error.strerror}"
        ) from error


class _HubFolder(HttpFolder):
    """One revision of a model on the hub."""

    def __init__(self, hub: str, model: str, revision: str) -> None:
        token = os.environ.get("HF_TOKEN")
        super().__init__(f"{hub}/{model}/resolve/{revision}", token)
        self._about = HttpFolder(f"{hub}/api/models/{model}/revision", token)
        self._revision = revision

    def names(self) -> Sequence[str] | None:
        """Names of all files, None if the hub does not say."""
        try:
            found = self._about.read(self._revision, 0, _SMALL_LIMIT)
        except UnreadableError:  # a mirror may have the files and no such page
            return None
        value = parse_json(found[0], Path(self._revision)).value if found is not None else None
        files = value.get("siblings") if isinstance(value, Mapping) else None
        if not isinstance(files, list):
            return None
        names = [f.get("rfilename") for f in files if isinstance(f, Mapping)]
        return [n for n in names if isinstance(n, str) and not outside(n)]

    def below(self, folder: str) -> Sequence[str] | None:
        """See `Remote.below`."""
        names, start = self.names(), f"{folder}/" if folder else ""
        return None if names is None else [n[len(start) :] for n in names if n.startswith(start)]


class _Fsspec:
    """Files below a URL that fsspec opens."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        #: of files that were read: asking again would double the requests
        self._sizes: dict[str, int] = {}
        self._fs, self._root = open_store(
            url, lambda apart: self._asking("cannot be opened", apart)
        )

    def names(self) -> Sequence[str]:
        """Names of the files in the folder."""
        try:
            with self._asking("cannot be listed"):
                entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError as error:
            raise UnreadableError(f"{self._url}: is not there") from error
        return [PurePosixPath(e["name"]).name for e in entries if e["type"] == "file"]

    def below(self, folder: str) -> Sequence[str]:
        """See `Remote.below`."""
        root = f"{self._root}/{folder}".rstrip("/")
        try:
            with self._asking(f"{folder or 'it'} cannot be listed"):
                found = self._fs.find(root)
        except FileNotFoundError:
            return []
        names = [path.removeprefix(root).lstrip("/") for path in found]
        return [n for n in names if n and not outside(n)]

    def has_ranges(self, name: str) -> bool:  # noqa: ARG002
        """All of them have."""
        return True

    def read(self, name: str, start: int, length: int) -> tuple[bytes, int] | None:
        """See `Remote.read`."""
        path = f"{self._root}/{name}"
        try:
            with self._asking(f"{name} cannot be read"):
                size = self._sizes.get(name)
                if size is None:
                    size = self._sizes[name] = int(self._fs.info(path)["size"])
                if start >= size:
                    return b"", size
                return self._fs.cat_file(path, start=start, end=min(start + length, size)), size
        except FileNotFoundError:
            return None

    def mark(self, name: str) -> str:
        """See `Remote.mark`."""
        path = f"{self._root}/{name}"
        try:
            with self._asking(f"{name} cannot be read"):
                self._fs.invalidate_cache(path.rpartition("/")[0])
                info = self._fs.info(path)
        except FileNotFoundError as error:
            raise UnreadableError(f"{self._url}: {name} is not there") from error
        keys = ("ETag", "etag", "LastModified", "mtime", "updated", "created")
        known = (info.get(key) for key in keys)
        return f"{info['size']} {next((k for k in known if k is not None), '')}"

    def _asking(
        self, what: str, told_apart: tuple[type[Exception], ...] = (FileNotFoundError,)
    ) -> AbstractContextManager[None]:
        def fail(error: Exception) -> UnreadableError:
            why = plain(str(error).partition("\n")[0])
            return UnreadableError(f"{self._url}: {what}: {type(error).__name__}: {why}")

        return asking(fail, told_apart)
