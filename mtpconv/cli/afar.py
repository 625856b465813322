"""What is said about mirrors of remote checkpoints, under the names that the user gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mtpconv.errors import MtpconvError


def mirrored(url: str, place: Path) -> AbstractContextManager[Callable[[str], str]]:
    """`named` for the mirror of a URL that `mtpconv.store.remote_dist` makes below `place`."""
    from mtpconv.store.remote_dist import stand_in  # brings in http and ssl

    return named((stand_in(url, place), url), (place, url.rpartition("/")[0]))


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
