"""Writing files to an object store, each streamed in parts; through fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from mtpconv.errors import UnreadableError, UnsupportedError, WriteError

#: Units: bytes. One part of an upload; S3 takes 10,000 of them for a file.
_PART = 16 << 20


class Upload:
    """The files below a URL, to be written and removed; a file appears when it is complete.

    Raises: UnsupportedError if the scheme cannot be written or needs a package.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme = urlsplit(url).scheme
        if scheme in ("http", "https"):
            raise UnsupportedError(f"{url}: cannot be written; name s3://, gs:// or hf://")
        try:
            import fsspec
        except ImportError as error:
            raise UnsupportedError(f"{url}: needs fsspec; pip install 'mtpconv[remote]'") from error
        try:
            fs, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UnsupportedError(f"{url}: fsspec cannot open {scheme}://: {error}") from error
        self._fs: Any = fs
        self._root: str = root

    def names(self) -> list[str]:
        """Names of all files below, with `/` between the parts."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableError(f"{self.url}: cannot be listed: {error}") from error
        return sorted(path.removeprefix(self._root).lstrip("/") for path in found)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write one file from its bytes in order. Raises: WriteError."""
        try:
            with self._create(f"{self._root}/{name}") as out:
                for part in parts:
                    out.write(part)
        except OSError as error:
            raise WriteError(f"{self.url}/{name}: cannot be written: {error}") from error

    def _create(self, path: str) -> Any:
        try:
            return self._fs.open(path, "wb", block_size=_PART)
        except FileNotFoundError:  # a store that has folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(path, "wb", block_size=_PART)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files. Raises: WriteError."""
        for name in names:
            try:
                self._fs.rm_file(f"{self._root}/{name}")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise WriteError(f"{self.url}/{name}: cannot be removed: {error}") from error

    def undo(self, names: Sequence[str]) -> Callable[[], None]:
        """What removes files as well as it can, after a failure."""

        def clean() -> None:
            with suppress(WriteError):
                self.remove(names)

        return clean
