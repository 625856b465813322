"""Several ranks give what one process gives, or nothing; nobody waits for the dead."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.convert.journal import read_journals
from mtpconv.errors import MtpconvError, UsageError, WriteError
from mtpconv.progress import Progress
from mtpconv.ranks import Ranks, deal, ranks_of, share
from mtpconv.store.digest import digest_tensors
from mtpconv.store.torch_dist import open_torch_dist
from tests.convert.folders import exchanged_table, file_hashes, make_hf
from tests.mapping.toy import config

ROOT = Path(__file__).resolve().parents[2]

SIZES = st.lists(st.integers(0, 100), max_size=40)


@given(SIZES, st.integers(1, 7))
def test_shares_are_stretches_and_balanced(sizes: list[int], count: int) -> None:
    items = list(enumerate(sizes))
    shares = [share(items, lambda i: i[1], Ranks(r, count)) for r in range(count)]
    assert [i for one in shares for i in one] == items
    for one in shares:
        assert sum(n for _, n in one) <= sum(sizes) / count + max(sizes, default=0)


@given(SIZES, st.integers(1, 7))
def test_whole_items_are_dealt_out_and_balanced(sizes: list[int], count: int) -> None:
    items = {f"file{i}": n for i, n in enumerate(sizes)}
    hands = [deal(items, Ranks(r, count)) for r in range(count)]
    assert sorted(i for hand in hands for i in hand) == sorted(items)
    for hand in hands:
        assert sum(items[i] for i in hand) <= sum(sizes) / count + max(sizes, default=0)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        # In a batch script, outside of srun: one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        # torchrun inside a SLURM step: the inner launcher counts.
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "9"},
            (0, 2),
        ),
        ({"RANK": "0"}, (0, 1)),
    ],
)
def test_launchers(environment: dict[str, str], wanted: tuple[int, int]) -> None:
    found = ranks_of(environment)
    assert (found.rank, found.size) == wanted


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("x", "2"), ("0", "")])
def test_a_launcher_that_contradicts_itself(rank: str, size: str) -> None:
    with pytest.raises(UsageError, match=r"RANK=.* are no rank among ranks"):
        ranks_of({"RANK": rank, "WORLD_SIZE": size})


def together(
    convert: Callable[..., Any],
    source: Path,
    target: Path,
    size: int,
    progress: Sequence[Progress] | None = None,
    patience: float = 20.0,
    **options: Any,
) -> list[Any]:
    """A conversion by several ranks, here threads; their outcomes or errors."""  # fmt: skip
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        ranks = Ranks(rank, size, "test", patience=patience)
        said = progress[rank] if progress else Progress()
        try:
            found[rank] = convert(source, target, ranks=ranks, progress=said, **options)
        except (MtpconvError, RuntimeError) as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def digests(folder: Path) -> dict[str, str]:
    checkpoint = open_torch_dist(folder)
    assert not checkpoint.problems
    return dict(digest_tensors(checkpoint, sorted(checkpoint.tensors)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_ranks_give_what_one_gives(tmp_path: Path, size: int) -> None:
    hf = make_hf(tmp_path / "hf", config("deepseek_v3"), shards=5)
    hf2mcore(hf, tmp_path / "one")
    found = together(hf2mcore, hf, tmp_path / "many", size)
    assert [getattr(f, "verified", f) for f in found] == [True] * size
    assert digests(tmp_path / "many") == digests(tmp_path / "one")
    files = {p.name for p in (tmp_path / "many/release").glob("*.distcp")}
    assert {f"__{r}_0.distcp" for r in range(size)} <= files
    saved = file_hashes(tmp_path / "one/hf_source")
    assert file_hashes(tmp_path / "many/hf_source") == saved
    found = together(mcore2hf, tmp_path / "many", tmp_path / "back", size)
    assert [f.unchanged for f in found] == [found[0].tensors] * size
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


class Raise(Progress):
    """Fails when the first bytes are done."""

    def advance(self, nbytes: int, what: str = "") -> None:
        raise RuntimeError("a bug")


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("resume", [True, False])
def test_a_rank_that_fails(tmp_path: Path, bad: int, resume: bool) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    said = [Raise() if rank == bad else Progress() for rank in range(3)]
    found = together(hf2mcore, hf, tmp_path / "mcore", 3, said, resume=resume)
    assert isinstance(found[bad], RuntimeError)
    for rank in {0, 1, 2} - {bad}:
        assert isinstance(found[rank], WriteError)
        assert f"rank {bad} failed (RuntimeError); the output is not committed" in str(found[rank])
        assert ("kept for --resume" in str(found[rank])) is resume
        assert ("nothing was left behind" in str(found[rank])) is not resume
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ([".mcore.partial", "hf"] if resume else ["hf"])
    kept = len(read_journals(tmp_path / ".mcore.partial"))
    assert (kept > 0) is resume
    again = together(hf2mcore, hf, tmp_path / "mcore", 3, resume=resume)
    assert [done.taken_over for done in again] == [kept] * 3
    hf2mcore(hf, tmp_path / "one")
    assert digests(tmp_path / "mcore") == digests(tmp_path / "one")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "mcore", "one"]


@pytest.mark.parametrize("what", ["table", "iteration", "option"])
def test_ranks_that_planned_different_things_write_nothing(tmp_path: Path, what: str) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=4)
    hf2mcore(hf, tmp_path / "run", iteration=10)
    hf2mcore(make_hf(tmp_path / "other", config(), seed=1), tmp_path / "more", iteration=20)
    (tmp_path / "more/iter_0000020").rename(tmp_path / "run/iter_0000020")
    shutil.rmtree(tmp_path / "run/hf_source")  # it would refuse the other table before
    table = exchanged_table(tmp_path / "tables")
    errors: list[str] = []

    def work(rank: int) -> None:
        options: dict[str, Any] = {"like": hf}
        if what == "table" and rank:
            options["mapping"] = table
        if what == "option" and rank:
            options["drop_mtp"] = True
        if what == "iteration" and rank:  # training goes on: the first rank has opened the tenth
            while not (tmp_path / ".back.ranks/beat.0").exists():
                time.sleep(0.01)
            (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("20")
        try:
            mcore2hf(tmp_path / "run", tmp_path / "back", ranks=Ranks(rank, 2, "x"), **options)
        except MtpconvError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("rank 1 would write something else than rank 0" in error for error in errors)
    assert not [p.name for p in tmp_path.iterdir() if "back" in p.name]


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    with pytest.raises(WriteError, match="rank 1 of 2 did not come within 1 s"):
        hf2mcore(hf, tmp_path / "mcore", ranks=Ranks(0, 2, patience=1.0))
    with pytest.raises(WriteError, match="rank 0 of 2 did not come within 1 s"):
        hf2mcore(hf, tmp_path / "mcore", ranks=Ranks(1, 2, patience=1.0))
    shutil.rmtree(tmp_path / ".mcore.ranks", ignore_errors=True)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_long_waits_are_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpconv.ranks._SILENCE", 0.2)
    said: list[list[str]] = [[] for _ in range(10)]

    def work(rank: int) -> None:
        ranks = Ranks(rank, 10, "test", patience=20.0)
        ranks.tell = said[rank].append
        time.sleep(0.6 * (rank == 9))
        ranks.meet(tmp_path / "place")
        time.sleep(0.6 * (rank > 0))
        assert ranks.gather("stage", rank) == list(range(10))
        ranks.leave(None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == [
        "waiting for rank 9 of 10 to come, at most 20 s",
        "waiting for rank 1, 2, 3, 4, 5, 6, 7, 8 and 1 more of 10",
    ]
    assert said[1] == ["waiting for rank 0 of 10 to come, at most 20 s"]


def test_what_a_killed_launch_left_is_not_believed(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    place = tmp_path / ".mcore.ranks"
    place.mkdir()
    (place / "go").write_text('{"0": "old", "1": "old"}')
    (place / "failed.0").write_text('{"why": "old"}')
    (place / "stage1.1").write_text('{"value": [[], {}]}')
    (place / "beat.1").write_text('{"nonce": "old", "launch": "test", "size": 2, "pid": 1}')
    found = together(hf2mcore, hf, tmp_path / "mcore", 2)
    assert [getattr(f, "verified", f) for f in found] == [True, True]


def test_a_folder_of_somebody_else_is_not_removed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for name in ("beat.1", "offbeat.txt"):
        (place / name).write_text("x")
    with pytest.raises(UsageError, match="is in the way and was not made by mtpconv"):
        Ranks(0, 2, "test", patience=1.0).meet(place)
    assert sorted(p.name for p in place.iterdir()) == ["beat.1", "offbeat.txt"]


def test_ranks_of_two_launchers_do_not_mix(tmp_path: Path) -> None:
    found = [Ranks(0, 2, "a", patience=5.0), Ranks(1, 3, "a", patience=1.0)]
    errors: list[MtpconvError] = []

    def meet(ranks: Ranks) -> None:
        try:
            ranks.meet(tmp_path / "place")
        except MtpconvError as error:
            errors.append(error)
        finally:
            ranks.leave(None)

    threads = [threading.Thread(target=meet, args=(r,)) for r in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any("rank 1 was started as one of 3, rank 0 as one of 2" in str(e) for e in errors)


#: One rank; the one that argv names kills itself or stops when it places its third record.
DRIVER = """
import os, signal, sys
from mtpconv.store.torch_dist_writer import TorchDistWriter
bad, how = sys.argv[1:3]
if os.environ["RANK"] == bad:
    real, count = TorchDistWriter.reserve, [0]
    def reserve(self, *rest):
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), getattr(signal, how))
        return real(self, *rest)
    TorchDistWriter.reserve = reserve
sys.argv[1:] = sys.argv[3:]
from mtpconv import ranks
ranks.Ranks.__init__.__kwdefaults__["patience"] = 6.0
from mtpconv.cli import main
main()
"""


def launch(size: int, bad: int, how: str, *arguments: Any) -> list[subprocess.Popen[str]]:
    """Ranks as srun would start them."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(bad), how, *map(str, arguments)], cwd=ROOT,
            text=True, stderr=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)},
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "how"),
    [
        pytest.param(0, "SIGKILL", marks=pytest.mark.slow),
        (2, "SIGKILL"),
        pytest.param(1, "SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_hangs(tmp_path: Path, bad: int, how: str) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    command = ["hf2mcore", hf, tmp_path / "mcore", "--resume", "--jobs", 1]
    begun = time.monotonic()
    processes = launch(3, bad, how, *command)
    for rank, process in enumerate(processes):
        if rank != bad:
            said = process.communicate(timeout=60)[1]
            assert process.returncode == 3, said
            where = f"rank {bad} (process {processes[bad].pid} on"
            assert where in said or "failed (rank" in said
            assert "the output is not committed" in said
            assert "--resume" in said
    assert time.monotonic() - begun < 60
    processes[bad].send_signal(signal.SIGKILL)
    processes[bad].communicate()
    assert not (tmp_path / "mcore").exists()
    for process in launch(3, -1, how, *command):
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0, said
    hf2mcore(hf, tmp_path / "one")
    assert digests(tmp_path / "mcore") == digests(tmp_path / "one")
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_what_a_killed_first_rank_leaves_is_named(tmp_path: Path) -> None:
    """It cleans up for all; the others must not say that nothing is left."""
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    first, second = launch(2, 0, "SIGKILL", "hf2mcore", hf, tmp_path / "mcore", "--jobs", 1)
    said = second.communicate(timeout=60)[1]
    first.communicate()
    assert second.returncode == 3, said
    assert f"removed nothing: start it again, or delete {tmp_path / '.mcore.partial'}" in said
    assert (tmp_path / ".mcore.partial").exists()
    hf2mcore(hf, tmp_path / "mcore")
    assert not (tmp_path / ".mcore.partial").exists()


def torchrun(size: int, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}",
        *arguments,
    ]  # fmt: skip
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, check=False, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_torchrun(tmp_path: Path, size: int) -> None:
    pytest.importorskip("torch")
    hf = make_hf(tmp_path / "hf", config(), shards=5)
    there = torchrun(size, "-m", "mtpconv", "hf2mcore", hf, tmp_path / "mcore")
    assert there.returncode == 0, there.stderr
    assert there.stdout.count("hf2mcore: wrote") == 1  # by the first rank
    back = torchrun(size, "-m", "mtpconv", "mcore2hf", tmp_path / "mcore", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


@pytest.mark.slow
def test_torchrun_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    hf = make_hf(tmp_path / "hf", config(), shards=5)
    (tmp_path / "driver.py").write_text(DRIVER)
    command = ["hf2mcore", hf, tmp_path / "mcore", "--resume"]
    done = torchrun(3, tmp_path / "driver.py", 1, "SIGKILL", *command)
    assert done.returncode != 0
    assert not (tmp_path / "mcore").exists()
    # torchrun ends the others; whoever sees the death first says so.
    assert "is not committed" in done.stderr or "interrupted" in done.stderr
    again = torchrun(3, "-m", "mtpconv", *command)
    assert again.returncode == 0, again.stderr
    hf2mcore(hf, tmp_path / "one")
    assert digests(tmp_path / "mcore") == digests(tmp_path / "one")
