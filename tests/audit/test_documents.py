"""The pages on findings and profiles say what the code does."""

from __future__ import annotations

import re

import pytest

from mtpconv.audit.codes import CODES, finding
from mtpconv.audit.options import SWITCHES
from mtpconv.audit.profiles import RULES
from tests.conftest import ROOT

FINDINGS = (ROOT / "docs" / "findings.md").read_text("utf-8")
PROFILES = (ROOT / "docs" / "profiles.md").read_text("utf-8")


def test_every_code_is_documented_and_nothing_else() -> None:
    documented = {kind: code for code, kind in re.findall(r"^### (\w\d\d) (\w+)$", FINDINGS, re.M)}
    assert documented == dict(CODES)


@pytest.mark.parametrize("kind", CODES)
def test_each_has_cause_example_and_cure(kind: str) -> None:
    section = FINDINGS.split(f"### {CODES[kind]} {kind}\n")[1].split("\n#")[0]
    for head in ("**Cause.**", "**Example.**", "**Cure.**"):
        assert section.count(head) == 1, f"{kind} lacks {head}"


def test_codes_are_unique_and_unknown_kinds_are_refused() -> None:
    assert len(set(CODES.values())) == len(CODES)
    with pytest.raises(KeyError):
        finding("no_such_kind", "error", "x")


def test_every_switch_is_documented() -> None:
    documented = re.findall(r"^\| `([a-z][a-z-]*)` \|", FINDINGS, re.M)
    assert sorted(documented) == sorted(SWITCHES)


def test_every_rule_of_a_profile_is_documented_with_its_source() -> None:
    documented = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| (.+) \|$", PROFILES, re.M))
    assert documented == {rule.name: rule.source for rule in RULES}
    types = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", PROFILES, re.M))
    assert types == {r.name: ", ".join(sorted(r.types)) if r.types else "all" for r in RULES}
