"""kill -9 at random moments: never a target that a reader accepts and that is wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpconv.convert import hf2mcore
from tests.convert.folders import file_hashes, make_hf
from tests.convert.nursery import Nursery
from tests.mapping.toy import config


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as running:
        yield running


def kill_at_random(nursery: Nursery, root: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    hf = make_hf(root / "hf", config(), shards=4)
    hf2mcore(hf, root / "mcore")
    sources = {"hf2mcore": hf, "mcore2hf": root / "mcore"}
    wholes, spans = {}, {}
    for name, source in sources.items():
        begun = time.monotonic()
        assert nursery.run(name, source, root / name) == 0
        spans[name] = time.monotonic() - begun
        wholes[name] = file_hashes(root / name)
    originals = {name: file_hashes(source) for name, source in sources.items()}
    killed = finished = 0
    for number in range(times):
        name = chance.choice(sorted(sources))
        target = root / f"target_{name}"
        options = {
            "overwrite": True,
            "resume": chance.random() < 0.7,
            "jobs": chance.choice([1, 2]),
            "verify": chance.random() < 0.7,
        }
        status = nursery.run(
            name, sources[name], target, kill_after=chance.random() * 1.2 * spans[name], **options
        )
        assert status in (0, -9)
        killed += status == -9
        finished += status == 0
        if target.exists():
            assert file_hashes(target) == wholes[name], f"kill {number} of seed {seed}"
        assert file_hashes(sources[name]) == originals[name]
    assert killed > times // 4
    for name, source in sources.items():
        target = root / f"target_{name}"
        assert nursery.run(name, source, target, overwrite=True, resume=True) == 0
        assert file_hashes(target) == wholes[name]
        left = [p.name for p in root.iterdir() if p.name.startswith(f".{target.name}")]
        assert left == []


def test_killed_at_random_moments(nursery: Nursery, tmp_path: Path) -> None:
    kill_at_random(nursery, tmp_path, 20, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_200_random_moments(nursery: Nursery, tmp_path: Path) -> None:
    kill_at_random(nursery, tmp_path, 200, seed=2)
