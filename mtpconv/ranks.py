"""Several processes, on one machine or many, that convert or audit one checkpoint together.

The launcher (torchrun, srun, mpirun) starts the same command everywhere; the ranks find each
other in a folder on a filesystem they all write to, beside the target of a conversion. No network,
no scheduler of our own. Each does its share, the first one commits, or reports.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mtpconv.errors import MtpconvError, UnreadableError, UsageError, WriteError

T = TypeVar("T")

#: rank, number of ranks, and what tells one launch from another, per launcher.
#: SLURM sets the first two of srun's variables in batch scripts, too, hence the step's own.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
    ("PMI_RANK", "PMI_SIZE", ("PMI_ID",)),
)
#: Units: seconds between two signs of life.
_BEAT = 2.0
#: Units: seconds of waiting before the user is told for whom.
_SILENCE = 5.0
#: What ranks write where they meet, and its parts.
_OURS = re.compile(r"\.?(beat|go|failed|left|stage\d+)(\.\d+)*")
#: Ranks that a line names.
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """What it means that a rank is lost, for whoever has to say it."""

    error: type[MtpconvError]
    #: if one never came
    absent: str
    #: if one failed or died
    lost: str
    #: what to do then
    advice: str
    #: what to do if the folder where they meet is somebody else's
    elsewhere: str


CONVERSION = Loss(
    WriteError,
    "nothing was written",
    "the output is not committed",
    "run again, with --resume to keep what is done",
    "name another target",
)
READING = Loss(
    UnreadableError,
    "there is no result; all ranks must see the folder of --meet (default: the current one)",
    "there is no result",
    "run again",
    "name another folder with --meet",
)


class Ranks:
    """One rank among `size`; with one rank nothing is written and nobody is waited for.

    `patience` is how many seconds a rank may show no sign of life; `tell` gets a line when the
    others let this one wait.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        launch: str = "",
        *,
        patience: float = 60.0,
        loss: Loss = CONVERSION,
    ) -> None:
        self.rank = rank
        self.size = size
        self._loss = loss
        self._stages = 0
        self._launch = launch
        self._patience = patience
        self._place: Path | None = None
        self._beating: threading.Thread | None = None
        self._over = threading.Event()
        self._signs: dict[int, tuple[str, float]] = {}
        self.tell: Callable[[str], object] = lambda _: None

    @property
    def is_first(self) -> bool:
        """Whether this rank prepares, commits and reports."""
        return self.rank == 0

    @contextlib.contextmanager
    def together(self, folder: Path, *about: str) -> Iterator[None]:
        """Meet in a folder of `folder` made for what this is about, and leave at the end.

        Raises: UsageError if it cannot be made there; the `error` of the loss if a rank is lost.
        """
        if self.size == 1:
            yield
            return
        tag = hashlib.sha256(json.dumps([self._launch, *about]).encode()).hexdigest()[:12]
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(
                f"{folder}: ranks cannot meet there, it is no folder that can be written; "
                f"{self._loss.elsewhere}"
            )
        try:
            self.meet(folder / f".mtpconv-ranks-{tag}")
            yield
        except BaseException as error:
            self.leave(error)
            raise
        self.leave(None)

    def meet(self, place: Path) -> None:
        """Wait until all ranks are there; nothing in `place` is of an earlier launch by then.

        Raises: the `error` of the loss if some do not come.
        """
        if self.size == 1:
            return
        nonce = secrets.token_hex(8)
        if self.is_first:
            found = [path.name for path in place.iterdir()] if place.exists() else []
            if not all(_OURS.fullmatch(name) for name in found):
                raise UsageError(
                    f"{place}: is in the way and was not made by mtpconv; move it elsewhere or "
                    f"{self._loss.elsewhere}"
                )
            shutil.rmtree(place, ignore_errors=True)  # of a launch that was killed
            place.mkdir(exist_ok=True)
        self._place = place
        self._beating = threading.Thread(target=self._beat, args=(nonce,), daemon=True)
        self._beating.start()
        begun = time.monotonic()
        told = False
        while not (self._all_here() if self.is_first else self._is_expected(nonce)):
            waited = time.monotonic() - begun
            if waited > self._patience:
                raise self._loss.error(
                    f"rank {self._listed(self._absent())} did not come within "
                    f"{self._patience:.0f} s; {self._loss.absent}"
                )
            if waited > _SILENCE and not told:
                self.tell(
                    f"waiting for rank {self._listed(self._absent())} to come, "
                    f"at most {self._patience:.0f} s"
                )
                told = True
            time.sleep(0.05)

    def gather(self, stage: str, value: T) -> list[T]:
        """The values of all ranks, in their order, once all have come to this stage.

        Values are JSON; all ranks go through the same stages in the same order, whose names may
        come again. Raises: the `error` of the loss if a rank failed or died.
        """
        if self.size == 1:
            return [value]
        self._stages += 1
        place = f"stage{self._stages}"
        try:
            self._put(f"{place}.{self.rank}", {"stage": stage, "value": value})
        except FileNotFoundError as error:
            raise self._loss.error(
                f"rank 0 ended before rank {self.rank} was done; {self._loss.lost}"
            ) from error
        found: dict[int, Any] = {}

        def complete() -> bool:
            for rank in range(self.size):
                if rank not in found:
                    said = self._read(f"{place}.{rank}")
                    if said.get("stage", stage) != stage:
                        raise self._loss.error(
                            f"rank {rank} does something else: {said['stage']} instead of {stage}; "
                            f"{self._loss.lost}, start all with one command on the same files"
                        )
                    if "value" in said:
                        found[rank] = said["value"]
            return len(found) == self.size

        self._wait(complete, found)
        return [found[rank] for rank in range(self.size)]

    @property
    def first_lives(self) -> bool:
        """Whether the first rank, which cleans up for all, still can."""
        return self.is_first or self._place is None or self._lives(0)

    def leave(self, error: BaseException | None) -> None:
        """Say how it ended; the first rank stays until the others have left."""
        if self._place is None:
            return
        with contextlib.suppress(OSError):
            if error is not None:
                text = str(error) if isinstance(error, MtpconvError) else type(error).__name__
                self._put(f"failed.{self.rank}", {"why": text})
            self._put(f"left.{self.rank}", {})
            if self.is_first:
                end = time.monotonic() + 5 * _BEAT
                while time.monotonic() < end and any(
                    not (self._place / f"left.{r}").exists() and self._lives(r)
                    for r in range(1, self.size)
                ):
                    time.sleep(0.05)
        self._over.set()
        if self._beating is not None:
            self._beating.join()
        if self.is_first:
            shutil.rmtree(self._place, ignore_errors=True)
        self._place = None

    def _beat(self, nonce: str) -> None:
        """Signs of life; the first rank may clear the place once more while all still meet."""
        me = {
            "nonce": nonce, "launch": self._launch, "size": self.size,
            "pid": os.getpid(), "host": socket.gethostname(),
        }  # fmt: skip
        count = 0
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                self._put(f"beat.{self.rank}", {**me, "count": count})
            count += 1
            met = self._place is not None and (self._place / "go").exists()
            self._over.wait(_BEAT if met else 0.1)

    def _all_here(self) -> bool:
        """True once every rank of this launch shows life; tells them so."""
        beats = [self._read(f"beat.{rank}") for rank in range(self.size)]
        for rank, beat in enumerate(beats):
            if beat and beat.get("size") != self.size:
                raise UsageError(
                    f"rank {rank} was started as one of {beat.get('size')}, rank {self.rank} as "
                    f"one of {self.size}; start all with one launcher"
                )
        if not all(beat and beat.get("launch") == self._launch for beat in beats):
            return False
        self._put("go", {str(rank): beat["nonce"] for rank, beat in enumerate(beats)})
        return True

    def _absent(self) -> list[int]:
        """Who has not answered yet."""
        if not self.is_first:
            return [0]
        beats = {rank: self._read(f"beat.{rank}") for rank in range(self.size)}
        return [rank for rank, beat in beats.items() if beat.get("launch") != self._launch]

    def _listed(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
        return f"{', '.join(map(str, ranks[:_LISTED]))}{more} of {self.size}"

    def _is_expected(self, nonce: str) -> bool:
        return self._read("go").get(str(self.rank)) == nonce

    def _wait(self, ready: Callable[[], bool], come: Collection[int]) -> None:
        """Wait until `ready`, as long as all who have not `come` live."""
        begun = time.monotonic()
        told = False
        pause = 0.01
        while not ready():
            absent = sorted(set(range(self.size)) - {self.rank, *come})
            if absent and not told and time.monotonic() - begun > _SILENCE:
                self.tell(f"waiting for rank {self._listed(absent)}")
                told = True
            for rank in absent:
                why = self._read(f"failed.{rank}").get("why")
                if why is not None:
                    raise self._loss.error(f"rank {rank} failed ({why}); {self._loss.lost}")
                if time.monotonic() - begun > 1.0 and not self._lives(rank):
                    beat = self._read(f"beat.{rank}")
                    raise self._loss.error(
                        f"rank {rank} (process {beat.get('pid')} on {beat.get('host')}) died or "
                        f"hangs; {self._loss.lost}, {self._loss.advice}"
                    )
            time.sleep(pause)
            pause = min(0.2, pause * 1.5)

    def _lives(self, rank: int) -> bool:
        """False once a rank is known to be dead, or has shown nothing new for too long."""
        beat = self._read(f"beat.{rank}")
        now = time.monotonic()
        sign = f"{beat.get('nonce')} {beat.get('count')}"
        known = self._signs.get(rank)
        if known is None or known[0] != sign:
            self._signs[rank] = known = (sign, now)
        if beat.get("host") == socket.gethostname() and not process_lives(beat.get("pid")):
            return False
        return now - known[1] <= self._patience

    def _put(self, name: str, value: Mapping[str, Any]) -> None:
        assert self._place is not None
        part = self._place / f".{name}.{self.rank}"
        part.write_text(json.dumps(value))
        part.replace(self._place / name)

    def _read(self, name: str) -> dict[str, Any]:
        assert self._place is not None
        try:
            # On NFS, opening the folder is what makes new names of other machines visible.
            os.close(os.open(self._place, os.O_RDONLY))
            value = json.loads((self._place / name).read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def ranks_of(environment: Mapping[str, str], loss: Loss = CONVERSION) -> Ranks:
    """The rank that a launcher gave this process; one of one without a launcher.

    Raises: UsageError if the launcher's variables contradict each other.
    """
    for rank_name, size_name, launch_names in _LAUNCHERS:
        rank, size = environment.get(rank_name), environment.get(size_name)
        if rank is None or size is None:
            continue
        if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
            raise UsageError(
                f"{rank_name}={rank} and {size_name}={size} are no rank among ranks; "
                "unset both, or start through torchrun, srun or mpirun"
            )
        launch = " ".join(environment.get(name, "") for name in launch_names)
        return Ranks(int(rank), int(size), launch, loss=loss)
    return Ranks(loss=loss)


def share(items: Sequence[T], size: Callable[[T], int], ranks: Ranks) -> Sequence[T]:
    """This rank's stretch of the items; all stretches have about the same number of bytes."""
    if ranks.size == 1:
        return items
    total = sum(map(size, items)) or 1
    done, first, last = 0, len(items), 0
    for i, item in enumerate(items):
        nbytes = size(item)
        # An item belongs where its middle lies.
        where = (2 * done + nbytes) * ranks.size // (2 * total)
        if min(where, ranks.size - 1) == ranks.rank:
            first, last = min(first, i), i + 1
        done += nbytes
    return items[first:last]


def deal(sizes: Mapping[T, int], ranks: Ranks) -> list[T]:
    """This rank's items where each goes whole: the largest first, to whoever has least."""
    loads = [0] * ranks.size
    mine = set()
    for item in sorted(sizes, key=lambda i: (-sizes[i], str(i))):
        least = loads.index(min(loads))
        loads[least] += sizes[item]
        if least == ranks.rank:
            mine.add(item)
    return [item for item in sizes if item in mine]


def process_lives(pid: object) -> bool:
    """Whether a process of this machine is running."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
