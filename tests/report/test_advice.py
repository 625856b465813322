from __future__ import annotations

from mtpconv.audit.codes import CODES
from mtpconv.report.advice import NEXT_STEPS, next_step


def test_every_kind_of_finding_has_a_next_step_and_no_other() -> None:
    assert set(NEXT_STEPS) == set(CODES)


def test_a_next_step_is_one_short_line() -> None:
    for kind, step in NEXT_STEPS.items():
        assert len(step) <= 80, kind
        assert step.isascii()
        assert step[0].islower()
        assert not step.endswith(".")


def test_an_unknown_kind_has_none() -> None:
    assert next_step("no_such_kind") is None
