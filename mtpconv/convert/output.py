"""A target folder that appears whole or not at all.

Everything is written into `.NAME.partial/target` beside the target, fsynced, and renamed at
the end; `.NAME.partial` also has the journal of what is done, and for a moment what is
replaced. Whatever a killed run left there is put back, removed by the next one, or taken over
with `resume`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mtpconv.convert.journal import Done, Journal, read_journals
from mtpconv.convert.lock import Lock
from mtpconv.convert.target import check_space, check_target, explain, work_folder
from mtpconv.errors import MtpconvError, UnreadableError, UsageError, WriteError
from mtpconv.ranks import Ranks
from mtpconv.store.durable import sync
from mtpconv.store.places import Places, real_path

#: The file by which a work folder is known to be ours.
_MARK = "mtpconv"
_MARK_TEXT = b"An unfinished conversion; the next one to the same target removes or resumes it.\n"


class Output:
    """Context manager around one target folder; with several ranks, the first one owns it.

    `about` says what will be written; ranks that do not all say the same write nothing.
    A target that is a link is written where the link leads.

    Raises: UsageError if the target exists (without `overwrite`), is, holds or lies in what the
    command `reads`, or is being written; UnreadableError if ranks differ; WriteError if there is
    too little space or the disk fails. Neither it nor any other error of ours points into the work
    folder, which is gone then.
    """

    def __init__(
        self,
        target: Path,
        reads: Places,
        *,
        overwrite: bool,
        need: int,
        resume: bool = False,
        ranks: Ranks | None = None,
        about: Callable[[], str] = str,
    ) -> None:
        self.shown = target
        self.target = real_path(target)
        self.work = work_folder(self.target)
        self.folder = self.work / "target"
        self.ranks = ranks or Ranks()
        self.journal = Journal(self.work, self.ranks.rank)
        self._before = self.work / "before"
        self._replaced = self.work / "replaced"
        self._meeting = self.work.with_suffix(".ranks")
        self._lock = Lock(self.work.with_suffix(".lock"), target)
        self._reads = reads
        self._overwrite = overwrite
        self._need = need
        self._resume = resume
        self._about = about
        self._known: dict[str, Done] = {}
        #: finished files of earlier runs that this rank took over
        self.taken_over = 0
        #: finished files of earlier runs that there were; the first rank knows
        self.earlier = 0
        self._parents: list[Path] = []
        self._ours = False
        self._committed = False
        self._first_lives = True
        self._check()

    def __enter__(self) -> Self:
        try:
            if self.ranks.is_first:
                self._make_parents()
                self._lock.take()
            self.ranks.meet(self._meeting)
            if self.ranks.is_first:
                self._prepare()
            if self.ranks.size > 1:
                self._require_one_plan(self.ranks.gather("prepared", self._about()))
            if self._resume:
                self._known = read_journals(self.work)
        except OSError as error:
            self._leave(error)
            raise explain(error, self.shown) from error
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        kept = self._leave(error)
        if isinstance(error, OSError):
            error = explain(error, self.shown)
        if self._committed and self.work.exists():
            raise WriteError(
                f"{self.shown}: is written and whole, but what it replaced cannot be removed; "
                f"delete {self.work}"
            ) from error
        if self._committed and not isinstance(error, Exception):
            return True  # a signal that came too late
        if isinstance(error, MtpconvError):
            text = str(error).replace(str(self.folder), str(self.shown))
            if isinstance(error, WriteError):
                text += f"; {self._what_is_left(kept)}"
            raise type(error)(text) from error
        if error is not None and not isinstance(error, Exception) and self._resume:
            error.add_note(self._what_is_left(kept))  # whoever reports the signal says it
        return False

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
        self.taken_over += 1

    def commit(self) -> None:
        """Make the target appear, with `overwrite` instead of what was there.

        Raises: UsageError if something appeared at the target meanwhile; it is left as it is.
        """
        for root, _, _ in os.walk(self.folder):
            sync(Path(root))
        # Whatever appeared since: `_appear` refuses it, or it may be overwritten.
        check_target(self.target, self._reads, overwrite=True)
        there = self._overwrite and self.target.exists()
        if not (there and _exchange(self.folder, self.target)):
            if there:
                self.target.rename(self._replaced)
            self._appear()
        self._committed = True
        for parent in (self.target.parent, *(made.parent for made in self._parents)):
            sync(parent)

    def _appear(self) -> None:
        try:
            self.folder.rename(self.target)  # replaces an empty folder and nothing else
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise UsageError(
                f"{self.shown}: something appeared there meanwhile and was left as it is; "
                "name another folder"
            ) from error

    def _require_one_plan(self, plans: Sequence[str]) -> None:
        other = next((rank for rank, plan in enumerate(plans) if plan != plans[0]), None)
        if other is not None:
            raise UnreadableError(
                f"rank {other} would write something else than rank 0: its options or its source "
                "differ (copies must have the same times, as of cp -p), or the source changed "
                "before it started; start all again with one command, and name the iteration's "
                "folder while training goes on"
            )

    def _check(self) -> None:
        check_target(self.target, self._reads, overwrite=self._overwrite)

    def _make_parents(self) -> None:
        self._parents = [p for p in self.target.parents if not p.exists()]
        self.target.parent.mkdir(parents=True, exist_ok=True)

    def _prepare(self) -> None:
        """An empty target folder; what an earlier run finished lies in `before`."""
        self._require_ours()
        if not self._put_back():
            raise UsageError(
                f"{self.shown}: a killed run had moved what was there to {self._replaced}, and "
                "now there is something else; move one of them elsewhere"
            )
        self._check()  # now that nobody else writes it
        if not self._resume:
            self._clear()
        self.work.mkdir(exist_ok=True)
        self._ours = True
        (self.work / _MARK).write_bytes(_MARK_TEXT)
        self._before.mkdir(exist_ok=True)
        for path in [*self.folder.rglob("*.distcp"), *self.folder.rglob("*.safetensors")]:
            path.replace(self._before / path.name)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        known = read_journals(self.work)
        for path in self._before.iterdir():
            if path.name not in known:  # nobody would take it over
                path.unlink()
        self.earlier = sum((self._before / name).exists() for name in known)
        kept = sum(path.stat().st_size for path in self._before.iterdir())
        check_space(self.shown, self._need - kept)
        self.folder.mkdir()

    def _require_ours(self) -> None:
        """Refuse a folder of somebody else where ours has to be; one without anything is ours."""
        if os.path.lexists(self.work) and not (
            self.work.is_dir()
            and not self.work.is_symlink()
            and ((self.work / _MARK).is_file() or not any(self.work.iterdir()))
        ):
            raise UsageError(
                f"{self.work}: is in the way and was not made by mtpconv; move it elsewhere or "
                "name another target"
            )

    def _put_back(self) -> bool:
        """Undo half a replacement; False if something new is where the old target was."""
        if not os.path.lexists(self._replaced):
            return True
        if not self.folder.exists():
            return True  # it was whole: the new target is in place
        with contextlib.suppress(OSError):
            self._replaced.rename(self.target)  # onto nothing or an empty folder only
        return not os.path.lexists(self._replaced)

    def _clear(self) -> None:
        """Remove the work folder as far as possible; what is left keeps its mark."""
        mark = self.work / _MARK
        with contextlib.suppress(OSError):
            for path in self.work.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path != mark:
                    path.unlink()
            if all(path == mark for path in self.work.iterdir()):
                mark.unlink(missing_ok=True)
                self.work.rmdir()

    def _leave(self, error: BaseException | None) -> int:
        """Clean up; gives the number of finished files that are kept."""
        self.journal.close()
        self._first_lives = self.ranks.first_lives
        self.ranks.leave(error)
        try:
            if not self._ours or not self._lock.taken:
                return 0
            if not self._committed and not self._put_back():
                return 0
            kept = len(read_journals(self.work)) if self._resume and not self._committed else 0
            if not kept:
                self._clear()
            return kept
        finally:
            self._lock.release()
            for path in self._parents:
                with contextlib.suppress(OSError):  # not empty: there is a target
                    path.rmdir()

    def _what_is_left(self, kept: int) -> str:
        if self._committed:
            return "it is in place all the same"
        if os.path.lexists(self._replaced):
            return f"what was there before is in {self._replaced}, put it back"
        if kept:
            return f"{kept} finished file{'s are' if kept > 1 else ' is'} kept for --resume"
        if self._resume and not self.ranks.is_first:
            return "what is finished is kept for --resume"  # the first rank has the count
        if not self._first_lives:
            return f"rank 0 is gone and removed nothing: start it again, or delete {self.work}"
        if self._ours and self.work.exists():
            return f"what was written cannot be removed, delete {self.work}"
        if self._resume:
            return "no file was finished, so nothing was left behind"
        return "nothing was left behind"


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders at once; False where the system, or this filesystem, cannot.

    Source: rename(2), man-pages 6.9: AT_FDCWD is -100, RENAME_EXCHANGE is 2.
    """
    try:
        call = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return int(call(-100, os.fsencode(one), -100, os.fsencode(other), ctypes.c_uint(2))) == 0
