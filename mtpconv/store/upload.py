"""Writing files to an object store, each streamed in parts; through fsspec."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any
from urllib.parse import urlsplit

from mtpconv.errors import MtpconvError, UnreadableError, UnsupportedError, UsageError, WriteError
from mtpconv.store.object_store import asking, open_store
from mtpconv.store.safetensors_header import plain

#: Units: bytes. One part of an upload; S3 takes 10,000 of them for a file.
_PART = 16 << 20


class Upload:
    """The files below a URL, to be written and removed; a file appears when it is complete.

    Raises: UsageError if it names no place; UnreadableError if it is no URL or cannot be opened;
    UnsupportedError if the scheme cannot be written or needs a package.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            scheme = urlsplit(url).scheme
        except ValueError as error:
            raise UnreadableError(f"{url}: is no URL: {error}") from error
        if "://" not in self.url:  # fsspec would take the rest for a folder here
            raise UsageError(f"{url}: names no place in the store; add one")
        if scheme in ("http", "https"):
            raise UnsupportedError(f"{url}: cannot be written; name s3://, gs:// or hf://")
        self._fs, self._root = open_store(
            url, lambda apart: self._asking(UnreadableError, "cannot be opened", apart)
        )
        self._begun: set[str] = set()

    def names(self) -> list[str]:
        """Names of all files below, with `/` between the parts. Raises: UnreadableError."""
        try:
            with self._asking(UnreadableError, "cannot be listed"):
                self._fs.invalidate_cache()
                found = self._fs.find(self._root)
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(self._root).lstrip("/") for path in found)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write one file from its bytes in order. Raises: WriteError, and whatever `parts` does."""
        self._begun.add(name)
        with self._writing(name):
            out = self._create(f"{self._root}/{name}")
        try:
            for part in parts:
                with self._writing(name):
                    out.write(part)
            with self._writing(name):
                out.close()
        except BaseException:
            _discard(out)
            raise

    def _create(self, path: str) -> Any:
        try:
            return self._fs.open(path, "wb", block_size=_PART)
        except FileNotFoundError:  # a store that has folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(path, "wb", block_size=_PART)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Raises: WriteError."""
        for name in names:
            with (
                suppress(FileNotFoundError),
                self._asking(WriteError, "cannot be removed", at=f"/{name}"),
            ):
                self._fs.rm_file(f"{self._root}/{name}")

    def undo(self) -> list[str]:
        """Remove every file that was written, or begun, after a failure; gives those that stay."""
        stay = []
        for name in sorted(self._begun):
            try:
                self.remove([name])
            except WriteError:  # the failure that led here is what there is to tell
                stay.append(name)
        return stay

    def _writing(self, name: str) -> AbstractContextManager[None]:
        return self._asking(WriteError, "cannot be written", (), at=f"/{name}")

    def _asking(
        self,
        kind: type[MtpconvError],
        what: str,
        told_apart: tuple[type[Exception], ...] = (FileNotFoundError,),
        at: str = "",
    ) -> AbstractContextManager[None]:
        return asking(lambda e: kind(f"{self.url}{at}: {what}: {_reason(e)}"), told_apart)


def _reason(error: Exception) -> str:
    """Why a store did not do it, and what to do where its own words do not say."""
    said = plain(str(error).partition("\n")[0])
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return said or type(error).__name__
    return (
        f"{type(error).__name__}: {said}; check the address, the network and the credentials "
        "and try again"
    )


def _discard(out: Any) -> None:
    """Give a file up that is not complete; closing it would make it appear."""
    with suppress(Exception):  # some have nothing to discard and say so
        out.discard()
    from fsspec.spec import AbstractBufferedFile

    if isinstance(out, AbstractBufferedFile):
        out.closed = True  # else it is completed when it is collected
    else:
        with suppress(Exception):
            out.close()
