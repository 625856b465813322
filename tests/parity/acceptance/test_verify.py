"""Drafting changes nothing but the speed: the rules alone, and on a model that is a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.parity.acceptance.drafts import Draft, Drafter, ModelDrafter, MtpDrafter, NgramDrafter
from mtpconv.parity.acceptance.verify import (
    Count,
    Greedy,
    Sampling,
    continue_drafting,
    continue_plainly,
)

torch = pytest.importorskip("torch")

WORDS = 5


@dataclass
class Table:
    """A model whose next token depends on the last one; depths guess with some noise.

    The hidden state of a position is its token, so that a depth can be asked what it stood on.
    """

    depths: int
    noise: float = 1.0
    calls: list[tuple[int, list[int], list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self._next = torch.randn(WORDS, WORDS, generator=random) * 1.5
        self._wrong = torch.randn(WORDS, WORDS, generator=random)

    def trunk(self, tokens: Any, last: int) -> tuple[Any, Any]:
        row = torch.tensor(list(tokens))
        return row[:, None].float(), self._next[row[-last:]]

    def depth(self, number: int, hidden: Any, following: Any) -> tuple[Any, Any]:
        self.calls.append((number, hidden[:, 0].int().tolist(), list(following)))
        last = following[-1]
        return hidden + 100, self._next[last] + self.noise * self._wrong[last]


def drafter_of(name: str, model: Table) -> Drafter:
    if name == "mtp":
        return MtpDrafter(model)
    return NgramDrafter() if name == "ngram" else ModelDrafter(Table(0), "other")


@pytest.mark.parametrize("name", ["mtp", "ngram", "other"])
@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, WORDS - 1), min_size=2, max_size=6),
    depth=st.integers(1, 5),
    depths=st.integers(1, 3),
    noise=st.sampled_from([0.0, 0.5, 3.0]),
    length=st.integers(1, 20),
)
def test_greedy_text_is_that_of_the_trunk(
    name: str, prompt: list[int], depth: int, depths: int, noise: float, length: int
) -> None:
    model = Table(depths, noise)
    plain = continue_plainly(model, prompt, length, Greedy())
    drafted, count = continue_drafting(
        model, drafter_of(name, model), prompt, length, depth, Greedy()
    )
    assert drafted == plain
    assert len(drafted) == len(prompt) + length
    assert count.tokens == length - 1
    assert all(k <= r <= m for k, r, m in zip(count.kept, count.reached, count.made, strict=True))


def test_a_perfect_draft_head_is_always_kept() -> None:
    model = Table(1, noise=0.0)
    _, count = continue_drafting(model, MtpDrafter(model), [1, 2], 25, 3, Greedy())
    assert count.kept == count.reached == count.made
    assert count.tokens_per_pass == 4
    assert count.passes == 6


def test_depths_are_chained_and_the_last_goes_on() -> None:
    model = Table(2)
    MtpDrafter(model).draft([1, 2, 3], torch.tensor([[1.0], [2.0]]), 4, Greedy().pick)
    a, b, c, _ = (call[2][-1] for call in [*model.calls[1:], (0, [], [0])])
    first, second, third, fourth = model.calls
    assert first == (0, [1, 2], [2, 3])
    assert second == (1, [101, 102], [3, a])  # one token further, on depth 0's states
    assert third == (1, [101, 102, 202], [3, a, b])  # its own last state and draft come after
    assert fourth == (1, [101, 102, 202, 302], [3, a, b, c])


def test_the_context_is_looked_up_from_its_end() -> None:
    drafts = NgramDrafter(2).draft([7, 8, 1, 7, 8, 2, 5, 7, 8], None, 3, Greedy().pick)
    assert [draft.token for draft in drafts] == [2, 5, 7]
    assert NgramDrafter().draft([1, 2, 3], None, 3, Greedy().pick) == []


def chi_squared(seen: Counter[Any], chances: dict[Any, float], total: int) -> float:
    """Sum of squared surprises over its degrees of freedom; about 1 if the chances are right."""
    return sum(
        (seen[key] - total * chance) ** 2 / (total * chance) for key, chance in chances.items()
    ) / (len(chances) - 1)


@pytest.mark.parametrize("certain", [False, True])
def test_the_rejection_rule_leaves_the_distribution(certain: bool) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.5, -1.0], [0.0] * 5])
    rule = Sampling(1.0, seed=1)
    guess = torch.tensor([0.05, 0.1, 0.6, 0.2, 0.05])
    seen: Counter[int] = Counter()
    total = 5_000
    for _ in range(total):
        token = 2 if certain else int(torch.multinomial(guess, 1, generator=rule._random))
        kept, after = rule.keep(logits, [Draft(token, None if certain else guess.double())])
        seen[token if kept else after] += 1
    chances = dict(enumerate(logits[0].softmax(-1).tolist()))
    assert chi_squared(seen, chances, total) < 4  # 1 in 400 of right rules would fail
    wrong = dict(enumerate(guess.tolist()))
    assert chi_squared(seen, wrong, total) > 30


@pytest.mark.parametrize("name", ["mtp", "ngram", "other"])
def test_sampled_text_has_the_distribution_of_the_trunk(name: str) -> None:
    model, temperature = Table(1, noise=2.0), 0.7
    prompt = [0, 1, 2, 0, 1]
    rule = Sampling(temperature, seed=5)
    drafter = drafter_of(name, model)
    seen: Counter[tuple[int, ...]] = Counter()
    total = 2_000
    for _ in range(total):
        tokens, _ = continue_drafting(model, drafter, prompt, 3, 2, rule)
        seen[tuple(tokens[5:])] += 1
    step = (model._next.double() / temperature).softmax(-1)
    chances = {
        (a, b, c): float(step[1, a] * step[a, b] * step[b, c])
        for a in range(WORDS)
        for b in range(WORDS)
        for c in range(WORDS)
    }
    assert abs(sum(chances.values()) - 1) < 1e-9
    likely = {key: chance for key, chance in chances.items() if chance * total >= 5}
    assert sum(likely.values()) > 0.9
    assert chi_squared(seen, likely, total) < 1.6


def test_counts_tell_reached_from_made() -> None:
    count = Count()
    for kept in (0, 1, 3):
        count.add(3, kept)
    assert count.made == [3, 3, 3]
    assert count.reached == [3, 2, 1]
    assert count.kept == [2, 1, 1]
    assert count.rate(0) == 2 / 3
    assert count.rate(5) is None
    assert (count.passes, count.tokens) == (3, 7)
    other = Count()
    other.add(1, 1)
    count.merge(other)
    assert count.kept == [3, 1, 1]
    assert count.tokens == 9


def test_the_table_is_no_constant() -> None:
    text = continue_plainly(Table(1), [0, 1], 30, Sampling(1.0, 2))
    assert len(set(pairwise(text))) > 8
