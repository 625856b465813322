from __future__ import annotations

from typing import Any

import pytest

from mtpconv.parity.compare import MAX_FACTOR, MEAN_FACTOR, USUAL_NOISE, compare_head, limits

torch = pytest.importorskip("torch")

QUIET = {"transformers": (0.0, 0.0), "megatron-core": (0.0, 0.0)}


def logits(seed: int, rows: int = 6, vocab: int = 11) -> Any:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_limits_follow_the_noisier_side() -> None:
    found = limits(1.0, "float32", 4, {"a": (1e-3, 2e-2), "b": (3e-3, 1e-2)})
    assert (found.mean, found.largest) == (MEAN_FACTOR * 3e-3, MAX_FACTOR * 2e-2)
    assert found.source == "measured noise"


def test_no_noise_is_not_taken_for_no_limit() -> None:
    mean, largest = USUAL_NOISE["float32"]
    found = limits(2.0, "float32", 4, QUIET)
    assert found.mean == pytest.approx(MEAN_FACTOR * 2 * mean / 10)
    assert found.largest == pytest.approx(MAX_FACTOR * 2 * largest / 10)


def test_unmeasured_noise_grows_with_depth() -> None:
    shallow = limits(1.0, "bfloat16", 4, {})
    deep = limits(1.0, "bfloat16", 64, {})
    assert shallow.source == "usual noise of bfloat16"
    assert deep.mean == pytest.approx(4 * shallow.mean)


def test_given_limits_are_all_there_is() -> None:
    found = limits(1.0, "float32", 4, QUIET, max_abs=0.5)
    assert (found.mean, found.largest, found.source) == (float("inf"), 0.5, "given")


def test_the_worst_place_is_found_in_its_row() -> None:
    left = [{"trunk": logits(1)}, {"trunk": logits(2, rows=4)}]
    right = [{head: value.clone() for head, value in row.items()} for row in left]
    right[1]["trunk"][2, 7] += 1
    tokens = [torch.arange(6), torch.arange(10, 14)]
    found = compare_head("trunk", tokens, left, right, QUIET, "float32", 4)
    assert not found.passed
    assert (found.worst.row, found.worst.position, found.worst.token) == (1, 2, 12)
    assert found.worst.logit == 7
    assert found.worst.megatron - found.worst.reference == pytest.approx(1)
    assert [len(row) for row in found.per_position] == [6, 4]
    assert found.per_position[1][2] == pytest.approx(1)
    assert found.max_abs == pytest.approx(1)
    assert found.mean_abs == pytest.approx(1 / 110)


def test_equal_logits_are_equal_in_every_measure() -> None:
    rows = [{"trunk": logits(1)}]
    found = compare_head("trunk", [torch.arange(6)], rows, rows, QUIET, "float32", 4)
    assert found.passed
    assert (found.max_abs, found.kl_max, found.top1, found.top5) == (0, 0, 1, 1)
    assert found.cosine == pytest.approx(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_fails(value: float) -> None:
    left, right = [{"trunk": logits(1)}], [{"trunk": logits(1)}]
    right[0]["trunk"][3, 2] = value
    found = compare_head("trunk", [torch.arange(6)], left, right, {}, "bfloat16", 4)
    assert not found.passed
    assert found.worst.position == 3
    given = compare_head("trunk", [torch.arange(6)], left, right, {}, "bfloat16", 4, max_abs=1e9)
    assert not given.passed


def test_agreement_counts_shared_places() -> None:
    left = [{"trunk": torch.tensor([[5.0, 4, 3, 2, 1, 0, -1], [5.0, 4, 3, 2, 1, 0, -1]])}]
    right = [{"trunk": torch.tensor([[4.0, 5, 3, 2, 1, 0, -1], [5.0, 4, 3, 2, -1, 0, 9]])}]
    found = compare_head("trunk", [torch.arange(2)], left, right, {}, "float32", 4)
    assert found.top1 == 0.0
    assert found.top5 == pytest.approx(0.9)  # one of the second row's five went
