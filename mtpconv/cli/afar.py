"""What is said about mirrors of remote checkpoints, under the names that the user gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mtpconv.errors import MtpconvError


@contextmanager
def mirror_of(text: str) -> Iterator[tuple[str, Path, Callable[[str], str]]]:
    """A URL, an empty folder for its mirror while it is needed, and `named` for what is said.

    The mirror itself is made by `mtpconv.store.remote_dist` or `mtpconv.store.afar_dist`.
    """
    from mtpconv.store.remote_dist import stand_in  # brings in http and ssl

    url = text.rstrip("/")
    with TemporaryDirectory(prefix="mtpconv-") as place:
        stands = (stand_in(url, Path(place)), url), (place, url.rpartition("/")[0])
        with named(*stands) as renamed:
            yield url, Path(place), renamed


@contextmanager
def headers_of(text: str) -> Iterator[Path]:
    """A checkpoint as a folder or file: what was named, or of a URL a mirror of its headers."""
    if "://" not in text:  # most are none, and what follows brings in numpy
        yield Path(text)
        return
    from mtpconv.store.places import is_remote
    from mtpconv.store.remote_dist import mirror_any

    if not is_remote(text):
        yield Path(text)
        return
    with mirror_of(text) as (url, place, _):
        yield mirror_any(url, place)


@contextmanager
def named(*stands: tuple[object, str]) -> Iterator[Callable[[str], str]]:
    """Errors name URLs in place of the folders that stand for them, the first ones first.

    Gives what does the same to a text.
    """

    def renamed(text: str) -> str:
        for folder, url in stands:
            text = text.replace(str(folder), url)
        return text

    try:
        yield renamed
    except MtpconvError as error:
        raise type(error)(renamed(str(error))) from error
