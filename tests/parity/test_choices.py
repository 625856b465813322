from __future__ import annotations

import pytest

from mtpconv.geometry import read_geometry
from mtpconv.parity.settings import Settings, read_settings
from tests.parity import configs

torch = pytest.importorskip("torch")


@pytest.fixture
def settings() -> Settings:
    return read_settings(read_geometry(configs.DEEPSEEK_V3))


def settled(settings: Settings, ours: object, theirs: object, k: int = 4) -> tuple[object, int]:
    from mtpconv.parity.choices import Record, Settle

    with Record(settings) as record:
        torch.topk(theirs, k)
    with Settle(settings, record.choices, 1e-5) as settle:
        chosen = torch.topk(ours, k)
    assert torch.equal(chosen.values, ours.gather(1, chosen.indices))  # type: ignore[attr-defined]
    return chosen.indices.sort(1).values.tolist(), settle.ties.settled


def row(*scores: float) -> object:
    return torch.tensor([scores])


def test_a_tie_follows_the_reference(settings: Settings) -> None:
    ours = row(9, 8, 7, 1, 1.000001, 0, 0, 0)
    theirs = row(9, 8, 7, 1.000001, 1, 0, 0, 0)
    assert settled(settings, ours, theirs) == ([[0, 1, 2, 3]], 1)


def test_a_real_difference_stays(settings: Settings) -> None:
    ours = row(9, 8, 7, 1, 1.1, 0, 0, 0)
    theirs = row(9, 8, 7, 1.1, 1, 0, 0, 0)
    assert settled(settings, ours, theirs) == ([[0, 1, 2, 4]], 0)


def test_a_clear_choice_that_the_reference_lacks_stays(settings: Settings) -> None:
    ours = row(9, 8, 7, 5, 4.99999, 0, 0, 0)
    theirs = row(0, 8, 7, 5, 4.99999, 0, 0, 0)
    assert settled(settings, ours, theirs) == ([[0, 1, 2, 3]], 0)


def test_masked_scores_are_no_ties_that_count(settings: Settings) -> None:
    masked = float("-inf")
    ours = row(9, 8, masked, masked, masked, masked, masked, masked)
    theirs = row(9, 8, masked, masked, masked, masked, 1, 1)
    assert settled(settings, ours, theirs)[1] == 0


def test_other_uses_of_topk_are_left_alone(settings: Settings) -> None:
    ours = row(9, 8, 7, 1, 1.000001, 0, 0, 0)
    theirs = row(9, 8, 7, 1.000001, 1, 0, 0, 0)
    assert settled(settings, ours, theirs, k=5)[1] == 0
    wide = torch.cat([ours, ours], 1)
    assert settled(settings, wide, wide)[1] == 0


def test_rows_of_made_up_tokens_at_the_end_are_left_alone(settings: Settings) -> None:
    ours = torch.cat([row(9, 8, 7, 1, 1.000001, 0, 0, 0)] * 2)
    theirs = row(9, 8, 7, 1.000001, 1, 0, 0, 0)
    assert settled(settings, ours, theirs) == ([[0, 1, 2, 3], [0, 1, 2, 4]], 1)
