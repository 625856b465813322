"""How long work tells about itself; the command line draws it, the core only reports."""

from __future__ import annotations


class Progress:
    """Receives what is going on. This one is silent; the command line has a visible one."""

    def begin(self, stage: str, total: int) -> None:
        """A stage with `total` bytes to move begins."""

    def advance(self, nbytes: int, what: str = "") -> None:
        """`nbytes` more are done; `what` names the region under way."""

    def note(self, text: str) -> None:
        """Something the user should know although nothing is wrong."""

    def end(self) -> None:
        """Nothing more follows, whether all went well or not."""
