"""Running commands and reading files with a stopwatch, in spite of noise.

The facts of the machines that this was made on: the first touch of fresh memory costs between
0.3 and 2.3 s/GB, the same copy of 4.7 GB takes 2.5 to 8.6 s. So memory is touched and freed
before everything that is timed, and only ratios within one round are compared.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = mmap.PAGESIZE


@dataclass
class Cost:
    """What one run took. Units: seconds and bytes."""

    wall: float
    cpu: float = 0.0
    #: what of it was not spent in the kernel, where a page of a new file may cost ten times as much
    user: float = 0.0
    #: anonymous memory at its peak, looked at 50 times a second
    anonymous: int = 0
    #: resident memory at its peak, mapped files included
    resident: int = 0
    #: bytes that it read and wrote through system calls
    read: int = 0
    written: int = 0


def touch_memory(nbytes: int) -> None:
    """Touch and free as much memory as the next run will want for its page cache."""
    free = os.sysconf("SC_AVPHYS_PAGES") * PAGE
    size = max(PAGE, min(nbytes, free // 2) // PAGE * PAGE)
    with mmap.mmap(-1, size) as memory:
        for at in range(0, size, PAGE):
            memory[at] = 1


def run(command: Sequence[str], quiet: bool = True) -> Cost:
    """A command to its end, fsyncs included if it does them.

    Raises: RuntimeError if it fails.
    """
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=_environment(),
        stdout=subprocess.DEVNULL if quiet else None, stderr=subprocess.PIPE,
    )  # fmt: skip
    peak = _Peak(process.pid)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # /proc still knows it
    moved = Path(f"/proc/{process.pid}/io").read_text()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - begun
    peak.stop()
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {process.returncode}: {said}")
    return Cost(
        wall, usage.ru_utime + usage.ru_stime, usage.ru_utime, peak.anonymous, peak.resident,
        *(int(line.split()[1]) for line in moved.splitlines()[:2]),  # rchar, wchar
    )  # fmt: skip


def _environment() -> dict[str, str]:
    """That of an installed copy: byte code is kept, whatever is set here."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT)}


class _Peak:
    """Watches the memory of a process; the kernel's own peak counts its parent's before exec."""

    def __init__(self, pid: int) -> None:
        self.anonymous = self.resident = 0
        self._status = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            for line in lines:
                if line.startswith("RssAnon:"):
                    self.anonymous = max(self.anonymous, int(line.split()[1]) * 1024)
                elif line.startswith("VmRSS:"):
                    self.resident = max(self.resident, int(line.split()[1]) * 1024)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def mtpconv(*arguments: str | Path) -> Cost:
    """A whole mtpconv command, from start to exit."""
    return run([sys.executable, "-m", "mtpconv", *map(str, arguments)])


def copy(source: Path, target: Path) -> Cost:
    """`cp` of a folder, and fsync of every file and folder it wrote.

    Flags are fixed: what `cp` does without differs from version to version.
    """
    script = 'cp -r --reflink=never --sparse=never "$0" "$1" && find "$1" -print0 | xargs -0 sync'
    return run(["sh", "-c", script, str(source), str(target)])


def remove(*targets: Path) -> None:
    """Remove folders and let the disk come to rest."""
    for target in targets:
        shutil.rmtree(target, ignore_errors=True)
    os.sync()


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return sorted(p for p in folder.rglob("*") if p.is_file())


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(p.stat().st_size for p in files_of(folder))


def warm(folder: Path) -> None:
    """Bring a folder into the page cache."""
    read(folder)


def cool(*folders: Path) -> None:
    """Drop a folder from the page cache."""
    for folder in folders:
        for path in files_of(folder):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read(folder: Path, block: int = 4 << 20) -> Cost:
    """Every byte read front to back into one buffer: what no reader can beat by much."""
    buffer = memoryview(bytearray(block))
    begun, used = time.monotonic(), time.process_time()
    for path in files_of(folder):
        fd = os.open(path, os.O_RDONLY)
        at = 0
        while got := os.preadv(fd, [buffer], at):
            at += got
        os.close(fd)
    return Cost(time.monotonic() - begun, time.process_time() - used)


def timed(work: Callable[[], object]) -> Cost:
    """What a function takes in this process."""
    begun, used = time.monotonic(), time.process_time()
    work()
    return Cost(time.monotonic() - begun, time.process_time() - used)


def median(values: Iterable[float]) -> float:
    """The middle one, of an even number the lower middle one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
