"""One writer at a time: never two holders, no lock that outlives its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert.lock import Lock
from mtpconv.convert.lock import _is_ours as is_ours
from mtpconv.errors import UsageError


def lock(folder: Path) -> Lock:
    return Lock(folder / ".target.lock", folder / "target")


def test_the_second_is_told_who_has_it(tmp_path: Path) -> None:
    first, second = lock(tmp_path), lock(tmp_path)
    first.take()
    with pytest.raises(UsageError, match=rf"target: another mtpconv.*process {os.getpid()} on"):
        second.take()
    assert not second.taken
    second.release()  # was never taken: must not remove the first one's file
    assert (tmp_path / ".target.lock").exists()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.take()
    second.release()


def test_taking_and_releasing_never_leaves_two_holders(tmp_path: Path) -> None:
    """The file is removed on release; whoever opened it before must not hold a ghost."""
    holders, most, taken = 0, 0, 0
    counting = threading.Lock()

    def work() -> None:
        nonlocal holders, most, taken
        for _ in range(300):
            mine = lock(tmp_path)
            try:
                mine.take()
            except UsageError:
                continue
            with counting:
                holders += 1
                taken += 1
                most = max(most, holders)
            with counting:
                holders -= 1
            mine.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 40


def test_a_file_that_was_removed_and_made_again_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between open and flock its holder releases it and another one takes a new file."""
    real: Callable[..., Any] = fcntl.flock
    other = lock(tmp_path)
    (tmp_path / ".target.lock").touch()

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / ".target.lock").unlink()
        other.take()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UsageError, match="another mtpconv"):
        lock(tmp_path).take()
    other.release()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from mtpconv.convert.lock import Lock;"
        "Lock(Path(sys.argv[1]), Path('t')).take(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / ".target.lock"], check=False)
    assert (tmp_path / ".target.lock").exists()
    mine = lock(tmp_path)
    mine.take()
    mine.release()


@pytest.mark.parametrize("host", ["here", "elsewhere"])
@pytest.mark.parametrize("alive", [True, False])
def test_filesystems_without_flock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, alive: bool
) -> None:
    """The process that the file names decides; one of another machine may live."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    name = socket.gethostname() if host == "here" else "another-machine"
    holder = {"pid": os.getpid() if alive else dead.pid, "host": name}
    (tmp_path / ".target.lock").write_text(json.dumps(holder))
    mine = lock(tmp_path)
    if host == "here" and not alive:
        mine.take()
        mine.release()
    else:
        with pytest.raises(UsageError, match=f"another mtpconv.*on {name}"):
            mine.take()


def test_without_flock_two_that_start_together_do_not_both_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    first, second = lock(tmp_path), lock(tmp_path)
    real: Callable[[int], bool] = is_ours

    def late(fd: int) -> bool:
        """The second comes after the first found nobody in the file and before it is in there."""
        monkeypatch.setattr("mtpconv.convert.lock._is_ours", real)
        with pytest.raises(UsageError, match="another mtpconv is just starting"):
            second.take()
        return real(fd)

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("mtpconv.convert.lock._is_ours", late)
    first.take()
    assert (first.taken, second.taken) == (True, False)
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.take()
    second.release()
