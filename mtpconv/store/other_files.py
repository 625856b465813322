"""The files of an HF folder that are no shards: which travel with it, and which stay behind.

Everything travels byte for byte, links by what they lead to, except weights in formats that
nobody converts here, what tools keep for themselves, and what cannot be copied. Whatever stays
behind is named with its reason; nothing is passed over.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtpconv.errors import UnreadableError

#: Weights in other formats: large, and of no use beside converted ones.
OTHER_WEIGHTS = (
    ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".distcp",
)  # fmt: skip
_TOOL_FOLDERS = frozenset({".git", ".cache", "__pycache__"})
#: A hub repository has some hundred; a link to `/` must not be followed for hours.
_MAX_FILES = 100_000
_MAX_DEPTH = 64
#: How often one folder is read, whatever links lead to it: links can fan out without end.
_MAX_VISITS = 16
_LFS_POINTER = b"version https://git-lfs"
#: Units: bytes. A git-lfs pointer has about 130.
_MAX_POINTER = 1024

WEIGHTS = "weights in another format"
TOOLS = "kept by tools for themselves"
EMPTY = "an empty folder"
SAVED = "what a conversion saved"
SPECIAL = "not an ordinary file"
LOOP = "a link to a folder that holds it"
DEEP = "nested or linked too deep"
DANGLING = "a link to what is not there"
#: Reasons after which somebody should look at the folder.
UNSOUND = frozenset({SPECIAL, LOOP, DEEP, DANGLING})


@dataclass(frozen=True, slots=True)
class OtherFiles:
    """Paths below an HF folder, with `/` between the parts; those of folders end in `/`."""

    #: files to copy, sorted
    travel: tuple[str, ...] = ()
    #: what stays behind, with the reason
    left: Mapping[str, str] = field(default_factory=dict)
    #: files that travel and are git-lfs pointers to what they should hold
    pointers: tuple[str, ...] = ()
    #: whether these are all; a server without a listing may have more
    listed: bool = True


def other_files(folder: Path, shards: Collection[str], saved: str | None = None) -> OtherFiles:
    """What lies in an HF folder besides `shards`; `saved` names a folder that a conversion left.

    Raises: UnreadableError if there are more files than any model has.
    """
    travel: list[str] = []
    left: dict[str, str] = {}
    for name, reason in _walk(folder, "", (), Counter(), saved):
        if reason is None and name.endswith(OTHER_WEIGHTS):
            reason = WEIGHTS
        if name in shards:
            continue
        if reason is None:
            travel.append(name)
        else:
            left[name] = reason
        if len(travel) + len(left) > _MAX_FILES:
            raise UnreadableError(
                f"{folder}: holds more than {_MAX_FILES:,} files, {name} among them; "
                "is a link in it leading elsewhere?"
            )
    pointers = tuple(n for n in travel if _is_pointer(folder / n))
    return OtherFiles(tuple(sorted(travel)), dict(sorted(left.items())), pointers)


_Folder = tuple[int, int]


def _walk(
    folder: Path,
    prefix: str,
    inside: tuple[_Folder, ...],
    visits: Counter[_Folder],
    saved: str | None,
) -> Iterator[tuple[str, str | None]]:
    """Every file below a folder, and the reason if it cannot or need not be copied."""
    here, entries = _scan(folder / prefix)
    inside = (*inside, here)
    visits[here] += 1
    empty = True
    for entry in entries:
        empty = False
        name = prefix + entry.name
        try:
            status = entry.stat()
        except OSError:
            yield name, DANGLING
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield name, None if stat.S_ISREG(status.st_mode) else SPECIAL
        elif entry.name in _TOOL_FOLDERS:
            yield f"{name}/", TOOLS
        elif name == saved:
            yield f"{name}/", SAVED
        elif (status.st_dev, status.st_ino) in inside:
            yield f"{name}/", LOOP
        elif len(inside) > _MAX_DEPTH or visits[status.st_dev, status.st_ino] >= _MAX_VISITS:
            yield f"{name}/", DEEP
        else:
            yield from _walk(folder, f"{name}/", inside, visits, saved)
    if empty and prefix:
        yield prefix, EMPTY


def _scan(folder: Path) -> tuple[_Folder, list[os.DirEntry[str]]]:
    """What names a folder whatever links lead to it, and what it holds, sorted."""
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda e: e.name)
    except OSError as error:
        raise UnreadableError(f"{folder}: cannot be read: {error.strerror}") from error
    return (status.st_dev, status.st_ino), found


def _is_pointer(path: Path) -> bool:
    try:
        if path.stat().st_size > _MAX_POINTER:
            return False
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False  # whoever copies it says what is wrong with it
