"""Where a command reads, so that nothing it writes can destroy that.

A checkpoint need not lie where its folder is: the shards of a hub cache are links to blobs, and
`hf_source` lies beside the iteration that was named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mtpconv.errors import UsageError
from mtpconv.store.source import FOLDER

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://.")
_WEIGHTS = (".safetensors", ".distcp", ".pt")
_TOOL_FOLDERS = frozenset({".git", ".cache", "__pycache__"})


def is_remote(text: str) -> bool:
    """Whether a word of the command line names something that is not on this machine."""
    return _SCHEME.match(text) is not None


@dataclass(frozen=True)
class Places:
    """Real paths that are read, each with words for messages."""

    #: nothing may be written into these, or instead of them
    folders: dict[Path, str] = field(default_factory=dict)
    #: single files and folders, named or found behind a link
    others: dict[Path, str] = field(default_factory=dict)

    def require_apart(self, target: Path, shown: Path | str) -> None:
        """Refuse a folder to write that is, holds or lies inside what is read.

        `target` is a real path; messages say `shown`. Raises: UsageError.
        """
        for place, words in self.folders.items():
            if target == place or place in target.parents:
                raise UsageError(f"{shown}: lies inside {words}; name another folder")
        for place, words in (*self.folders.items(), *self.others.items()):
            if target == place or target in place.parents:
                raise UsageError(f"{shown}: holds {words}; name another folder")

    def require_new(self, file: Path, option: str) -> None:
        """Refuse a file to write if it exists and belongs to what is read. Raises: UsageError."""
        if not os.path.lexists(file):
            return
        for real in (real_path(file), real_path(file.parent) / file.name):
            for place in (real, *real.parents):
                words = self.folders.get(place) or (place == real and self.others.get(place))
                if words:
                    raise UsageError(
                        f"{option} {file}: belongs to {words} and would be overwritten; "
                        "name another file"
                    )


def places_read(*paths: Path | None, links: bool = True) -> Places:
    """What lies behind a source, which comes first, and other paths: real folders, `hf_source`.

    Without `links` it is not looked for links in the folders. Raises: UsageError.
    """
    found = Places()
    for path in (p for p in paths if p is not None):
        words = f"the source {path}" if path is paths[0] else str(path)
        if path.is_file():
            found.others.setdefault(real_path(path), words)
            continue
        beside = path.parent / FOLDER
        for folder, said in ((path, words), (beside, str(beside))):
            if folder is path or folder.is_dir():
                found.folders.setdefault(real_path(folder), said)
                for link in _links(folder) if links else ():
                    _add_link(found, link)
    return found


def check_apart(target: str, *reads: str | Path | None) -> None:
    """Refuse a path or URL to write below that is, holds or lies inside what is read.

    The source comes first; URLs of one place can be spelled in several ways. Raises: UsageError.
    """
    here = local_path(target)
    if here is not None:
        paths = (None if read is None else local_path(str(read)) for read in reads)
        places_read(*paths).require_apart(real_path(here), target)
        return
    from mtpconv.store.object_store import place_in_store

    store, place = place_in_store(target)
    for read in reads:
        if read is None or local_path(str(read)) is not None:
            continue
        other, there = place_in_store(str(read))
        if store is None or store != other:
            continue
        words = f"the source {read}" if read is reads[0] else str(read)
        if place == there or place in there.parents:
            raise UsageError(f"{target}: holds {words}; name another place")
        if there in place.parents:
            raise UsageError(f"{target}: lies inside {words}; name another place")


def local_path(text: str) -> Path | None:
    """What a path or URL names on this machine; None if it leads elsewhere."""
    last = text.rpartition("::")[2] if "://" in text else text  # fsspec's chains end at a store
    scheme, found, rest = last.partition("://")
    if not found:
        return Path(last)
    return Path(rest).expanduser() if scheme in ("file", "local") else None


def real_path(path: Path) -> Path:
    """The path without links. Raises: UsageError for a link that leads to itself."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        raise UsageError(f"{path}: is a link that leads to itself; name another") from None


def _add_link(found: Places, link: Path) -> None:
    try:
        real = link.resolve()
    except (OSError, RuntimeError):
        return  # leads nowhere
    words = f"{real}, where {link} leads"
    if real.is_dir():
        if real not in link.parent.resolve().parents:  # else nobody follows it
            found.folders.setdefault(real, words)
    elif link.name.endswith(_WEIGHTS):
        found.folders.setdefault(real.parent, f"{real.parent}, where {link} leads")
    else:
        found.others.setdefault(real, words)


def _links(folder: Path) -> Iterator[Path]:
    """Links below a folder, those in linked folders too."""
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        try:
            status = Path(root).stat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder that holds it
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [f for f in folders if f not in _TOOL_FOLDERS]
        for name in (*folders, *names):
            path = Path(root, name)
            if path.is_symlink():
                yield path
