"""CRC-32 of records: right whatever was read in which order, and found where torch keeps it."""

from __future__ import annotations

import json
import random
import threading
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.store.content import blocks
from mtpconv.store.crc import Sealed, SealedFile
from mtpconv.store.crc_check import CrcCheck, combined
from mtpconv.store.crew import Crew
from mtpconv.store.files import Files
from mtpconv.store.torch_dist import open_torch_dist
from tests.store.dist import random_tensors, write

Cuts = list[tuple[int, int]]


def sealed(path: Path, ranges: dict[str, tuple[int, bytes]]) -> Sealed:
    found = SealedFile()
    for name, (start, data) in ranges.items():
        found.add(name, start, len(data), zlib.crc32(data))
    return {path: found}


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crcs_of_two_stretches_make_that_of_both(a: bytes, b: bytes) -> None:
    assert combined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_crcs_of_long_stretches_combine() -> None:
    zeros = 0
    for _ in range(5):
        zeros = zlib.crc32(bytes(1 << 20), zeros)
    assert combined(zlib.crc32(b"x"), zeros, 5 << 20) == zlib.crc32(
        bytes(5 << 20), zlib.crc32(b"x")
    )


@st.composite
def tiles(draw: st.DrawFn) -> Cuts:
    """Pieces that tile 100 bytes, in any order."""
    edges = [0, *sorted(draw(st.sets(st.integers(1, 99), max_size=12))), 100]
    return draw(st.permutations(list(pairwise(edges))))


ODD = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 120)), max_size=6)


@given(tiles(), st.integers(1, 4), st.booleans(), st.randoms())
def test_several_processes_know_together_what_one_would(
    cuts: Cuts, count: int, flipped: bool, order: random.Random
) -> None:
    path, data = Path("x"), random.Random(2).randbytes(100)
    shown = bytes([*data[:50], data[50] ^ flipped, *data[51:]])
    ranges = {"a": (7, data), "b": (107, data), "unread": (207, data)}
    checks = [CrcCheck(sealed(path, ranges)) for _ in range(count)]
    order.choice(checks).saw(path, 107, memoryview(shown))
    for begin, end in cuts:
        order.choice(checks).saw(path, 7 + begin, memoryview(shown[begin:end]))
    everyone = [json.loads(json.dumps(check.known())) for check in checks]
    for check in checks:
        check.pool(everyone)
        assert check.rest == [2]
        assert [r.name for r in check.broken] == ["a", "b"] * flipped
        assert check.known() == checks[0].known()


@given(tiles(), ODD, st.booleans(), st.randoms())
def test_what_processes_read_twice_is_settled_right_or_not_at_all(
    cuts: Cuts, odd: list[tuple[int, int]], flipped: bool, order: random.Random
) -> None:
    path, data = Path("x"), random.Random(2).randbytes(100)
    shown = bytes([*data[:50], data[50] ^ flipped, *data[51:]])
    checks = [CrcCheck(sealed(path, {"a": (0, data)})) for _ in range(3)]
    for begin, end in [*cuts, *((begin, begin + size) for begin, size in odd)]:
        order.choice(checks).saw(path, begin, memoryview(shown[begin:end]))
    checks[1].pool([check.known() for check in checks])
    assert checks[1].rest in ([], [0])
    assert [r.name for r in checks[1].broken] == ["a"] * (flipped and checks[1].rest == [])


@given(tiles(), st.booleans())
def test_pieces_in_any_order_need_no_second_read(cuts: Cuts, flipped: bool) -> None:
    data = random.Random(2).randbytes(100)
    check = CrcCheck(sealed(Path("x"), {"a": (7, data)}))
    shown = bytes([*data[:50], data[50] ^ flipped, *data[51:]])
    for begin, end in cuts:
        check.saw(Path("x"), 7 + begin, memoryview(shown[begin:end]))
    assert check.rest == []
    assert [r.name for r in check.broken] == ["a"] * flipped


@given(tiles(), ODD, st.booleans(), st.randoms())
def test_odd_reads_give_the_answer_or_none(
    cuts: Cuts, odd: list[tuple[int, int]], flipped: bool, order: random.Random
) -> None:
    path, data = Path("x"), bytearray(random.Random(1).randbytes(300))
    ranges = {"a": (0, bytes(data[:90])), "b": (100, bytes(data[100:200]))}
    data[150] ^= flipped
    check = CrcCheck(sealed(path, ranges))
    reads = [*cuts, *((begin, begin + size) for begin, size in odd)]
    order.shuffle(reads)
    for begin, end in reads:  # some reach into the gap behind, some overlap
        check.saw(path, 100 + begin, memoryview(bytes(data[100 + begin : 100 + end])))
    check.saw(Path("other"), 100, memoryview(bytes(data[100:200])))
    assert check.rest in ([0], [0, 1])
    assert [r.name for r in check.broken] == ["b"] * (flipped and check.rest == [0])


def test_many_threads_and_the_rest(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(1 << 16)
    path = tmp_path / "x.distcp"
    names = {f"t{i}": (i << 10, data[i << 10 : (i + 1) << 10]) for i in range(64)}
    damaged = bytearray(data)
    damaged[5 << 10] ^= 1
    damaged[40 << 10] ^= 128
    path.write_bytes(damaged)
    check = CrcCheck(sealed(path, names))
    parts = [(at, 128) for at in range(0, 1 << 15, 128)]
    random.Random(4).shuffle(parts)

    def read(mine: list[tuple[int, int]]) -> None:
        with Files(on_read=check.saw) as files:
            for at, size in mine:
                files.read_into(path, at, memoryview(bytearray(size)))

    threads = [threading.Thread(target=read, args=(parts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.name for r in check.broken] == ["t5"]
    assert check.rest == list(range(32, 64))
    check.read(check.rest, 2)
    assert [r.name for r in check.broken] == ["t5", "t40"]
    assert not check.rest
    assert str(path) in check.broken[1].fault
    assert "t40 at byte 40,960" in check.broken[1].fault


def test_a_range_read_in_too_wild_an_order_is_left_for_later() -> None:
    data = random.Random(5).randbytes(1000)
    check = CrcCheck(sealed(Path("x"), {"a": (0, data)}))
    for begin in [*range(0, 1000, 2), *range(1, 1000, 2)]:
        check.saw(Path("x"), begin, memoryview(data[begin : begin + 1]))
    assert (check.rest, check.broken) == ([0], [])


def test_a_written_checkpoint_knows_its_crcs(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors())
    checkpoint = open_torch_dist(folder)
    check = CrcCheck(checkpoint.sealed())
    with Crew(1, on_read=check.saw) as crew:
        assert list(crew.map(lambda n, f: len(list(blocks(checkpoint, n, f))), checkpoint.tensors))
    assert (check.rest, check.broken, check.unsealed) == ([], [], 0)


@pytest.mark.parametrize("flag", [True, False])
def test_torch_says_what_the_crc_is_or_leaves_it_out(tmp_path: Path, flag: bool) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    whole = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    # A view: the record holds all of its storage, and the CRC is about that.
    state: dict[str, Any] = {"a.weight": whole, "b.weight": whole[2:4].view(16)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(flag)
    try:
        dcp.save(state, checkpoint_id=tmp_path / "release", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(before)
    checkpoint = open_torch_dist(tmp_path / "release")
    check = CrcCheck(checkpoint.sealed())
    check.read(check.rest)
    assert (check.broken, check.unsealed) == ([], 0 if flag else 2)
    chunk = checkpoint.chunks("b.weight")[0]
    data = bytearray(chunk.file.read_bytes())
    data[chunk.start + 1] ^= 1
    chunk.file.write_bytes(data)
    check = CrcCheck(open_torch_dist(tmp_path / "release").sealed())
    check.read(check.rest)
    assert [r.name for r in check.broken] == (["b.weight"] if flag else [])
