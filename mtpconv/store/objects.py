"""Reading what a checkpoint stores beside tensors: `common.pt` and bytes entries.

Both are pickles inside a `torch.save` archive. They come back as plain values; objects stay
inert `Instance`s.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError
from mtpconv.store.dist_folder import COMMON, open_file
from mtpconv.store.pickles import Instance, is_key, load_pickle
from mtpconv.store.torch_names import allow_object
from mtpconv.store.zips import Archive, Pread

#: Bytes of one pickled object; a common state has a few tens of KB.
MAX_OBJECT = 16 << 20
#: Files in one archive: the pickle and one for each tensor beside it.
MAX_ENTRIES = 100_000
#: Nesting of the values that `plain` returns, and how many of them.
MAX_DEPTH = 64
MAX_VALUES = 300_000

_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})


def read_object(file: Path, offset: int, length: int, where: str) -> Any:
    """The object in a `torch.save` archive at `offset` of a file, as plain values.

    Raises: UnreadableError if the file is damaged, or names code that would run in torch.
    """
    fd = open_file(file)
    try:
        return object_at(partial(os.pread, fd), offset, length, where)
    finally:
        os.close(fd)


def object_at(read: Pread, offset: int, length: int, where: str) -> Any:
    """As `read_object`, of a file that is read in another way.

    Raises: as `read_object`.
    """
    data = Archive(read, offset, length, where, MAX_ENTRIES).content("data.pkl", MAX_OBJECT)
    if data is None:
        raise UnreadableError(f"{where} has no data.pkl; the file is corrupt, copy it again")
    return plain(load_pickle(data, where, allow_object, persistent=True), where)


def read_common(folder: Path) -> dict[str, Any]:
    """The common state in `common.pt` of an `iter_*` or `release` folder.

    `args` (an `argparse.Namespace` on disk) is a dict.
    Raises: UnreadableError as `read_object`, or if it is not a dict.
    """
    file = folder / COMMON
    fd = open_file(file)
    length = os.fstat(fd).st_size
    os.close(fd)
    return as_common(read_object(file, 0, length, COMMON), COMMON)


def as_common(value: Any, where: str) -> dict[str, Any]:
    """A common state, checked to be a dict with string keys.

    Raises: UnreadableError.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UnreadableError(f"{where} does not hold a dict with names as keys; not read")
    return value


def _as_dict(items: list[Any], where: str) -> dict[Any, Any]:
    if not all(type(i) is tuple and len(i) == 2 and is_key(i[0]) for i in items):
        raise UnreadableError(f"{where} holds a damaged mapping; copy the file again")
    return dict(items)


def plain(value: Any, where: str) -> Any:
    """A pickle's value as a tree: argument namespaces become dicts, shared parts are copied.

    Enums, paths and other objects stay `Instance`s (with plain arguments and state).
    Raises: UnreadableError if the tree is deeper than 64 or has more than 300,000 values,
        or contains itself.
    """
    left = MAX_VALUES

    def walk(part: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise UnreadableError(f"{where} is nested too deeply or contains itself; not read")
        if isinstance(part, dict):
            return {key: walk(child, depth + 1) for key, child in part.items()}
        if isinstance(part, list | tuple | set | frozenset):
            return type(part)(walk(child, depth + 1) for child in part)
        if type(part) is Instance:
            state = walk(part.state, depth + 1)
            if str(part.of) in _NAMESPACES and isinstance(state, dict):
                return state
            items = [walk(child, depth + 1) for child in part.items or ()]
            if str(part.of) == "collections.OrderedDict":
                return _as_dict(items, where)
            copy = Instance(part.of, walk(part.args, depth + 1), state, new=part.new)
            copy.items = items or None
            return copy
        return part

    return walk(value, 0)
