"""Stores behind fsspec: each package there has exceptions of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from mtpconv.errors import MtpconvError, UnsupportedError


@contextmanager
def asking(
    fail: Callable[[Exception], MtpconvError],
    told_apart: tuple[type[Exception], ...] = (FileNotFoundError,),
) -> Iterator[None]:
    """Calls of a store: whatever goes wrong, but what is `told_apart`, is raised as `fail` says."""
    try:
        yield
    except told_apart:
        raise
    except Exception as error:
        raise fail(error) from error


def open_store(
    url: str, opening: Callable[[tuple[type[Exception], ...]], AbstractContextManager[None]]
) -> tuple[Any, str]:
    """The file system of a URL, and where in there; `opening` gives an `asking`.

    Raises: UnsupportedError if it needs a package or fsspec does not know it; as `opening`.
    """
    try:
        import fsspec
    except ImportError as error:
        raise UnsupportedError(f"{url}: needs fsspec; pip install 'mtpconv[remote]'") from error
    try:
        with opening((ImportError, ValueError)):
            found: tuple[Any, str] = fsspec.core.url_to_fs(url.rstrip("/"))
    except (ImportError, ValueError) as error:
        scheme = urlsplit(url).scheme
        raise UnsupportedError(f"{url}: fsspec cannot open {scheme}://: {error}") from error
    return found


def place_in_store(url: str) -> tuple[Any, PurePosixPath]:
    """The store that a URL leads into, None if fsspec does not know it, and where in there."""
    last = url.rpartition("::")[2]
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(urlsplit(last).scheme)
    except (ImportError, ValueError):
        return None, PurePosixPath()
    host = kind._get_kwargs_from_urls(last).get("host")
    return (kind, host), PurePosixPath(kind._strip_protocol(last))
