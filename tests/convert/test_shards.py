"""Shards written from a checkpoint, with digests of what went in or without."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.convert.shards import Shard, write_shards
from mtpconv.store.crew import Crew
from mtpconv.store.digest import digest_tensors
from mtpconv.store.files import BLOCK
from mtpconv.store.hf import open_hf
from mtpconv.tensors import TensorSpec
from tests.convert.folders import write_hf
from tests.mapping.toy import config


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("jobs", [1, 2])
def test_digests_are_those_of_the_source_or_none_at_all(
    tmp_path: Path, digest: bool, jobs: int
) -> None:
    """Of tensors larger than a block and of those that are copied together."""
    sizes = {"large": BLOCK + 5, "small": 7, "none": 0, "larger": 2 * BLOCK + 1}
    tensors = {n: (TensorSpec("U8", (s,)), n[-1].encode() * s) for n, s in sizes.items()}
    source = open_hf(write_hf(tmp_path / "hf", tensors, config()))
    ((name, header),) = source.shards.items()
    shard = Shard(tmp_path / name, header)
    told: list[Shard] = []
    with Crew(jobs) as crew:
        write_shards([shard], source, crew, lambda *_: None, told.append, digest=digest)
    assert told == [shard]
    assert (tmp_path / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    right = dict(digest_tensors(source, list(sizes)))
    assert shard.digests == (right if digest else {})
