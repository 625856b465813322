"""What is said about mirrors of remote checkpoints, under the names that the user gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mtpconv.errors import MtpconvError


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
