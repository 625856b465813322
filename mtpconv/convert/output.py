"""A target folder that appears whole or not at all.

Everything is written into `.NAME.partial/target` beside the target, fsynced, and renamed at
the end; `.NAME.partial` also has the journal of what is done. Whatever a killed run left is
removed by the next one, or taken over with `resume`.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from mtpconv.convert.journal import Done, Journal, read_journals
from mtpconv.convert.lock import Lock
from mtpconv.convert.ranks import Ranks
from mtpconv.errors import UsageError, WriteError
from mtpconv.store.source import sync


class Output:
    """Context manager around one target folder; with several ranks, the first one owns it.

    Raises: UsageError if the target exists (without `overwrite`), lies in the source or holds
    it, or is being written; WriteError if there is too little space or the disk fails.
    """

    def __init__(
        self,
        target: Path,
        source: Path,
        *,
        overwrite: bool,
        need: int,
        resume: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        # The name is not resolved: a target that is a symlink is replaced, not followed.
        plain = target.name not in ("", "..")
        self.target = target.parent.resolve() / target.name if plain else target.resolve()
        beside = self.target.parent / f".{self.target.name}"
        self.work = beside.with_name(beside.name + ".partial")
        self.folder = self.work / "target"
        self.ranks = ranks or Ranks()
        self.journal = Journal(self.work, self.ranks.rank)
        self._before = self.work / "before"
        self._replaced = beside.with_name(beside.name + ".replaced")
        self._meeting = beside.with_name(beside.name + ".ranks")
        self._lock = Lock(beside.with_name(beside.name + ".lock"), self.target)
        self._need = need
        self._resume = resume
        self._known: dict[str, Done] = {}
        self._committed = False
        check_target(self.target, source, overwrite=overwrite)

    def __enter__(self) -> Self:
        try:
            if self.ranks.is_first:
                self.target.parent.mkdir(parents=True, exist_ok=True)
                self._lock.take()
            self.ranks.meet(self._meeting)
            if self.ranks.is_first:
                self._prepare()
            self.ranks.gather("prepared", None)
            if self._resume:
                self._known = read_journals(self.work)
        except OSError as error:
            self._leave(error)
            raise explain(error, self.target) from error
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        kept = self._leave(error)
        if isinstance(error, OSError):
            error = explain(error, self.target)
        if isinstance(error, WriteError):
            text = str(error).replace(str(self.folder), str(self.target))
            rest = (
                f"{kept} finished files are kept for --resume"
                if kept
                else "nothing was left behind"
            )
            raise WriteError(f"{text}; {rest}") from error

    def finished(self, name: str, holds: str) -> tuple[Path, Done] | None:
        """A file of an earlier run that says it holds the same, and what its journal says.

        It is moved into the target by `take_over`, after its bytes have been checked.
        """
        done = self._known.get(name)
        path = self._before / name
        return (path, done) if done is not None and done.holds == holds and path.exists() else None

    def take_over(self, path: Path, folder: Path, done: Done) -> None:
        """Use a finished file of an earlier run in this one."""
        path.rename(folder / path.name)
        self.journal.add(path.name, done)

    def commit(self) -> None:
        """Make the target appear, replacing what was there."""
        for root, _, _ in os.walk(self.folder):
            sync(Path(root))
        if self.target.exists():
            self.target.rename(self._replaced)
        self.folder.rename(self.target)
        self._committed = True
        sync(self.target.parent)
        if self._replaced.exists():
            shutil.rmtree(self._replaced)

    def _prepare(self) -> None:
        """An empty target folder; what an earlier run finished lies in `before`."""
        if self._replaced.exists():  # killed between the two renames of `commit`
            if self.target.exists():
                shutil.rmtree(self._replaced)
            else:
                self._replaced.rename(self.target)
        if not self._resume and self.work.exists():
            shutil.rmtree(self.work)
        self._before.mkdir(parents=True, exist_ok=True)
        kept = 0
        for path in [*self.folder.rglob("*.distcp"), *self.folder.rglob("*.safetensors")]:
            path.replace(self._before / path.name)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        kept = sum(path.stat().st_size for path in self._before.iterdir())
        check_space(self.target, self._need - kept)
        self.folder.mkdir()

    def _leave(self, error: BaseException | None) -> int:
        """Clean up; gives the number of finished files that are kept."""
        self.journal.close()
        self.ranks.leave(error)
        if not self.ranks.is_first or not self._lock.taken:
            return 0
        try:
            kept = len(read_journals(self.work)) if self._resume and not self._committed else 0
            if not kept:
                shutil.rmtree(self.work, ignore_errors=True)
            return kept
        finally:
            self._lock.release()


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse a target that would lose something. Raises: UsageError."""
    real, origin = target.resolve(), source.resolve()
    if real == origin or origin in real.parents:
        raise UsageError(f"{target}: lies inside the source {source}; name another folder")
    if real in origin.parents:
        raise UsageError(f"{target}: holds the source {source}; name another folder")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise UsageError(f"{target}: is a file; name a folder")
    if any(target.iterdir()) and not overwrite:
        raise UsageError(f"{target}: exists and is not empty; pass --overwrite or name another")


def check_space(target: Path, need: int) -> None:
    """Refuse a target whose disk is too small. Raises: WriteError."""
    folder = target
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise WriteError(
            f"{target}: needs {need / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; "
            "free some or name another disk"
        )


def explain(error: OSError, target: Path) -> WriteError:
    """An operating-system error while writing as one clear line."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError(f"{target}: {error.strerror}; free some space and run again")
    return WriteError(f"{target}: cannot be written: {error.strerror or error}")
