"""Audits and inventories by several ranks give what one process gives, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.audit.compare import Outcome
from mtpconv.audit.options import Options, Sample
from mtpconv.audit.shares import _as_json, _from_json
from mtpconv.audit.sides import open_sides
from mtpconv.audit.words import Stats
from mtpconv.cli.audit import run_with_progress
from mtpconv.convert import hf2mcore
from mtpconv.progress import Progress
from mtpconv.report import FORMATS
from tests.convert.folders import make_hf, tensors_of, write_hf
from tests.convert.test_crcs import rot
from tests.mapping.toy import config

ROOT = Path(__file__).resolve().parents[2]
KEY = "decoder.layers.1.mlp.router.weight"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("ranks") / "hf", config(), shards=4)


@pytest.fixture(scope="module")
def mcore(hf: Path) -> Path:
    hf2mcore(hf, hf.parent / "mcore", pad_vocab=64)
    return hf.parent / "mcore"


@pytest.fixture
def bad(hf: Path, tmp_path: Path) -> Path:
    """Flipped bytes in MTP and trunk, zeros, a tensor that is gone."""
    folder = tmp_path / "bad"
    tensors = tensors_of(hf)
    mtp = [n for n in tensors if n.startswith("model.layers.3.")]
    trunk = [n for n in tensors if n.startswith("model.layers.1.")]
    for name in (mtp[0], mtp[-1], trunk[0], trunk[-1]):
        spec, data = tensors[name]
        tensors[name] = (spec, bytes([data[0] ^ 1]) + data[1:])
    zero = next(n for n in mtp if n.endswith("eh_proj.weight"))
    tensors[zero] = (tensors[zero][0], bytes(len(tensors[zero][1])))
    del tensors[trunk[1]]
    return write_hf(folder, tensors, json.loads((hf / "config.json").read_text()))


#: One rank; the one that argv names kills itself when it has something to compare.
DRIVER = """
import os, signal, sys
bad = sys.argv.pop(1)
from mtpconv.audit import shares
from mtpconv.store import manifest
if os.environ.get("RANK") == bad:
    def die(*rest):
        os.kill(os.getpid(), signal.SIGKILL)
    shares.share = manifest.share = die
from mtpconv import ranks
ranks.Ranks.__init__.__kwdefaults__["patience"] = 20.0
from mtpconv.cli import main
main()
"""


def launch(size: int, place: Path, *arguments: Any, bad: int = -1) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of ranks as srun would start them in a folder."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(bad), *map(str, arguments)], cwd=place, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "RANK": str(rank), "WORLD_SIZE": str(size),
            },
        )
        for rank in range(size)
    ]  # fmt: skip
    if bad >= 0:
        started[bad].wait(60)  # or it would stay a zombie, which looks alive
    said = [process.communicate(timeout=60) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


def alone(before: Path | None, after: Path, **options: Any) -> str:
    """The report of one process, as JSON."""
    report = run_with_progress(open_sides(before, after), Options(**options), Progress())
    return FORMATS["json"](report)


def require_equal(place: Path, size: int, wanted: str, code: int, *arguments: Any) -> None:
    """The first rank says what is wanted, the others nothing; all exit alike; nothing is left."""
    place.mkdir()
    found = launch(size, place, "audit", *arguments, "--format", "json", "--quiet")
    assert found == [(code, wanted if rank == 0 else "", "") for rank in range(size)]
    assert not list(place.iterdir())


@pytest.mark.parametrize("size", [1, 3])
def test_identical(tmp_path: Path, hf: Path, size: int) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(hf, copy)
    wanted = alone(hf, copy)
    assert json.loads(wanted)["verdict"] == "pass"
    require_equal(tmp_path / "cwd", size, wanted, 0, hf, copy)


def test_differences(tmp_path: Path, hf: Path, bad: Path) -> None:
    wanted = alone(hf, bad)
    kinds = {f["kind"] for f in json.loads(wanted)["findings"]}
    assert {"value_mismatch", "missing_tensor", "zero_tensor"} <= kinds
    require_equal(tmp_path / "pair", 3, wanted, 1, hf, bad)
    require_equal(tmp_path / "single", 2, alone(None, bad), 1, bad)


@pytest.mark.parametrize("direction", ["mcore first", "mcore last"])
def test_across_formats_with_a_flipped_bit(
    tmp_path: Path, hf: Path, mcore: Path, direction: str
) -> None:
    rotten = tmp_path / "rotten"
    shutil.copytree(mcore, rotten)
    rot(rotten, KEY)
    rot(rotten, "embedding.word_embeddings.weight", 640)  # padding: no HF tensor shows it
    pair = (rotten, hf) if direction == "mcore first" else (hf, rotten)
    wanted = alone(*pair)
    messages = [f["message"] for f in json.loads(wanted)["findings"]]
    assert sum("CRC-32" in m for m in messages) == 2
    code = {"fail": 1, "error": 3}[json.loads(wanted)["verdict"]]
    require_equal(tmp_path / "cwd", 2, wanted, code, *pair)


def test_records_that_ranks_read_in_turns_are_settled_together(
    tmp_path: Path, hf: Path, mcore: Path
) -> None:
    """With a sample nothing is read for its own sake: a record of 4 experts is cut by the ranks."""
    rotten = tmp_path / "rotten"
    shutil.copytree(mcore, rotten)
    rot(rotten, "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight")
    wanted = alone(rotten, hf, sample=Sample(1, 9))
    assert "CRC-32" in wanted
    code = {"fail": 1, "error": 3}[json.loads(wanted)["verdict"]]
    require_equal(tmp_path / "cwd", 3, wanted, code, rotten, hf, "--sample", "1/9")


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed(tmp_path: Path, hf: Path, bad: Path, dead: int) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    found = launch(3, tmp_path, "audit", hf, bad, "--meet", meet, bad=dead)
    for rank in {0, 1, 2} - {dead}:
        code, out, error = found[rank]
        assert (code, out) == (3, "")
        # Whoever sees the death first says so, and the others repeat it.
        assert f"rank {dead} (process" in error
        assert "there is no result" in error
        assert "not committed" not in error
        assert error.count("mtpconv: rank") == 1
    assert found[dead][0] < 0


def test_a_rank_that_cannot_report(tmp_path: Path, hf: Path) -> None:
    found = launch(2, tmp_path, "audit", hf, hf, "--report", "json=/dev/full")
    assert [code for code, *_ in found] == [3, 3]
    assert "rank 0 failed (/dev/full: the report cannot be written" in found[1][2]


@pytest.mark.parametrize(
    "command", [["audit", "after", "after"], ["audit", "after"], ["inventory", "after", "-o", "m"]]
)
def test_ranks_that_see_other_files(tmp_path: Path, hf: Path, command: list[str]) -> None:
    """Two nodes whose local disks hold different weights under one name."""
    other = make_hf(tmp_path / "other", config(), shards=4, seed=1)
    places = [tmp_path / "node0", tmp_path / "node1"]
    for place, after in zip(places, (hf, other), strict=True):
        place.mkdir()
        (place / "after").symlink_to(after)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, "-1", *command, "--meet", str(tmp_path)],
            cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank, place in enumerate(places)
    ]  # fmt: skip
    for process in started:
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (3, "")
        assert "rank 1 has other options than rank 0 or does not see the same files" in error
    assert not [place for place in places if (place / "m").exists()]


def test_inventory(tmp_path: Path, mcore: Path) -> None:
    for size, name in ((1, "one.json"), (3, "three.json")):
        found = launch(size, tmp_path, "inventory", mcore, "--files", "-o", name)
        assert [code for code, *_ in found] == [0] * size, found
        assert [out.count("root ") for _, out, _ in found] == [1, *([0] * (size - 1))]
    assert (tmp_path / "three.json").read_bytes() == (tmp_path / "one.json").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "three.json"]


def test_an_inventory_without_one_of_its_ranks(tmp_path: Path, mcore: Path) -> None:
    found = launch(2, tmp_path, "inventory", mcore, bad=1)
    assert [found[0][0], found[0][1]] == [3, ""]
    assert "rank 1 (process" in found[0][2]


FLOATS = st.floats()


@given(FLOATS, FLOATS, st.integers(0, 2**64 - 1), st.booleans())
def test_outcomes_survive_json(total: float, squares: float, word: int, same: bool) -> None:
    stats = Stats("F64", 2**53 + 1, 3, 2, total, squares, word, same, 7)
    for one in (
        Outcome("n", same, 2**53 + 1, 2**60 + 1, None, stats),
        Outcome("n", same, 5, 6, stats, Stats("BF16")),
        Outcome("\udcff", same=False, unreadable=("before", "gone")),
    ):
        back = _from_json(json.loads(json.dumps(_as_json(one))))
        assert repr(back) == repr(one)  # NaN is no number that equals itself
