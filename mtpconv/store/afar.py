"""A HuggingFace checkpoint far away, read in ranges as if it lay here; none of it is kept.

Headers and small files are mirrored into a folder of sparse files (`mtpconv.store.remote`), so
that everything that reads folders works; tensor bytes are fetched when they are asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import cast

from blake3 import blake3

from mtpconv.errors import RefusedError, UnreadableError
from mtpconv.store.checkpoint import Chunk
from mtpconv.store.content import Run
from mtpconv.store.crew import default_jobs
from mtpconv.store.files import Files
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.other_files import OTHER_WEIGHTS
from mtpconv.store.remote import (
    WORKERS,
    Remote,
    fetch_file,
    mirror_headers,
    open_remote,
    require_ranges,
)
from mtpconv.store.usual_files import USUAL, named_code
from mtpconv.tensors import Box

#: Units: bytes. What one request asks for: enough to hide its latency.
SPAN = 8 << 20
#: Stretches of all files of a checkpoint that are kept: eight threads, each with a tensor of which
#: eight ranks saved a part.
KEPT = 64
#: Units: seconds before a failed request is made again.
_PAUSES = (0.5, 2.0, 8.0)
#: Modules that modules import that ...: no more steps than that.
_STEPS = 8


class Stretches:
    """What is kept of the files of a checkpoint, for all threads: they get neighbours in turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: the least recently used first
        self._kept: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()

    def get(self, key: tuple[str, int], fetch: Callable[[], bytes]) -> bytes:
        """A stretch; whoever asks first fetches it, others wait.

        Raises: whatever `fetch` raises.
        """
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            else:
                while len(self._kept) >= KEPT:
                    self._kept.popitem(last=False)
                own = self._kept[key] = Future[bytes]()
        if found is not None:
            return found.result()
        try:
            own.set_result(fetch())
        except BaseException as error:
            own.set_exception(error)
            with self._lock:
                if self._kept.get(key) is own:
                    del self._kept[key]
            raise
        return own.result()

    @staticmethod
    def memory() -> int:
        """Units: bytes. What is kept at most, and one stretch under way for each thread."""
        return (KEPT + default_jobs()) * SPAN


class AfarFile:
    """One remote file; stands where a path would (`mtpconv.store.files.Computed`)."""

    def __init__(
        self, remote: Remote, url: str, name: str, size: int, stretches: Stretches | None = None
    ) -> None:
        """`stretches` are shared by all files of a checkpoint."""
        self._remote = remote
        self._url = f"{url}/{name}"
        self._name = name
        self._size = size
        self._stretches = stretches or Stretches()

    def __str__(self) -> str:
        return self._url

    @property
    def name(self) -> str:
        """The file's name."""
        return self._name

    def pread(self, size: int, start: int) -> bytes:
        """Up to `size` bytes from `start`, fewer where the file ends; as `os.pread` gives them.

        Raises: UnreadableError as `read_into`.
        """
        data = bytearray(max(min(size, self._size - start), 0))
        self._fill(start, memoryview(data))
        return bytes(data)

    def read_into(self, files: Files, start: int, view: memoryview) -> None:  # noqa: ARG002
        """Fill `view` from byte `start`.

        Raises: UnreadableError if the file ends early, changed, or cannot be fetched.
        """
        if start + len(view) > self._size:
            raise UnreadableError(f"{self._url}: ends at byte {self._size}; it is truncated")
        self._fill(start, view)

    def _fill(self, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            number, skip = divmod(start + done, SPAN)
            part = self._stretch(number)[skip : skip + len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)

    def _stretch(self, number: int) -> bytes:
        start = number * SPAN
        length = min(SPAN, self._size - start)
        return self._stretches.get((self._url, number), lambda: self._fetch(start, length))

    def _fetch(self, start: int, length: int) -> bytes:
        for pause in (*_PAUSES, None):
            try:
                found = self._remote.read(self._name, start, length)
                if found is None:
                    raise UnreadableError(f"{self._url}: vanished while it was read")
                data, size = found
                if size == self._size and len(data) == length:
                    return data
                if size != self._size:
                    raise RefusedError(
                        f"{self._url}: had {self._size:,} bytes and now has {size:,}; "
                        "run again when nobody writes to it"
                    )
                raise UnreadableError(f"{self._url}: {len(data):,} of {length:,} bytes came")
            except UnreadableError:
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError  # the last attempt returns or raises


@dataclass(frozen=True, slots=True)
class AfarCheckpoint(HfCheckpoint):
    """A remote folder; `path` is its mirror, which has headers and small files only."""

    remote: Remote = field(kw_only=True)
    afar: Mapping[str, AfarFile] = field(kw_only=True)
    marks: Mapping[str, str] = field(kw_only=True)

    @property
    def memory(self) -> int:
        """Units: bytes. What is kept of it at most."""
        return Stretches.memory()

    def chunks(self, name: str) -> Sequence[Chunk]:
        """The one chunk of a tensor; whoever reads it gets the bytes from afar."""
        run = self.runs(name)[0]
        box = Box.whole(self.tensors[name].shape)
        return (Chunk(cast(Path, run.file), run.start, box),)

    def runs(self, name: str) -> Sequence[Run]:
        """The one run of a tensor."""
        file = self.where[name]
        header = self.shards[file]
        begin, end = header.offsets[name]
        return (Run(0, end - begin, self.afar[file], header.data_start + begin),)

    def require_unchanged(self) -> None:
        """Refuse a source that changed. Raises: UnreadableError naming the first file."""
        require_marks(self.remote, self.marks)


def require_marks(remote: Remote, marks: Mapping[str, str]) -> None:
    """Refuse files that changed. Raises: UnreadableError naming the first one."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for name, mark in zip(marks, pool.map(remote.mark, marks), strict=True):
            if mark != marks[name]:
                raise UnreadableError(
                    f"{name}: changed while it was read; nothing was kept, run again when nobody "
                    "writes to it"
                )


def stamp(path: Path, mark: str) -> None:
    """Give a mirrored file a time that is the original's mark.

    Whoever asks whether the mirror changed learns whether the original did.
    """
    time_of = int.from_bytes(blake3(mark.encode()).digest()[:7], "big")
    os.utime(path, ns=(time_of, time_of))


def open_afar(url: str, folder: Path, remote: Remote | None = None) -> AfarCheckpoint:
    """Open a remote HF folder; `folder` is empty and gets its mirror.

    `remote` is what lies at the URL, if it is known.

    Raises: UnreadableError if it cannot be reached or is no checkpoint; UnsupportedError if the
    server sends whole files only; RefusedError if a tensor stands in two files, which only a local
    copy can compare.
    """
    url = url.rstrip("/")
    remote = remote or open_remote(url)
    found: dict[str, str] = {}
    mirror_headers(url, folder, remote, found)
    listed = remote.below("")
    if listed is None:
        _fetch_usual(remote, url, folder)
    else:
        _fetch_files(remote, url, listed, folder)
    hf = replace(open_hf(folder, compare_duplicates=False), listed=listed is not None)
    for problem in hf.problems:
        if problem.kind == "duplicate_tensor":
            raise RefusedError(f"{url}: {problem.message}; download it")
    for file in list(hf.shards)[:1]:
        require_ranges(remote, url, file)
    marks = {file: found[file] for file in hf.shards}
    for file, mark in marks.items():
        stamp(folder / file, mark)
    for path in folder.rglob("*"):  # small ones are here whole: their bytes say it
        if path.is_file() and path.relative_to(folder).as_posix() not in found:
            stamp(path, blake3(path.read_bytes()).hexdigest())
    same = {one.name: getattr(hf, one.name) for one in fields(HfCheckpoint)}
    kept = Stretches()
    afar = {f: AfarFile(remote, url, f, header.size, kept) for f, header in hf.shards.items()}
    return AfarCheckpoint(**same, remote=remote, afar=afar, marks=marks)


def _fetch_usual(remote: Remote, url: str, folder: Path) -> None:
    """Fetch what a release may have, and the code that its configs name, step by step."""
    _fetch_files(remote, url, USUAL, folder)
    asked: set[str] = set()
    for _ in range(_STEPS):
        new = named_code(folder) - asked
        _fetch_files(remote, url, sorted(new), folder)
        asked |= new


def _fetch_files(remote: Remote, url: str, names: Sequence[str], folder: Path) -> None:
    """Fetch those that are no weights and not there yet; a server need not have them."""
    ended = (".safetensors", *OTHER_WEIGHTS)
    wanted = [n for n in names if not n.endswith(ended) and not (folder / n).exists()]
    with ThreadPoolExecutor(WORKERS) as pool:  # each is a round trip, for those absent too
        list(pool.map(lambda name: fetch_file(remote, url, name, folder), wanted))
