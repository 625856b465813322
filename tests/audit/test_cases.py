"""Every case of ../shared/cases comes out as its expect.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Finding, Report
from mtpconv.audit.options import Options
from tests.audit import sides

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
NAMES = sorted(p.parent.name for p in CASES.glob("*/expect.json")) if CASES.is_dir() else []

#: The exceptions that `verdict_if` describes in words.
SWITCHES = {
    "aliases allowed": "copies",
    "value-equal upcast allowed": "upcast",
    "config comparison off": "config",
    "index authoritative (vLLM and SGLang drop unindexed files)": "index-authoritative",
}


def test_the_cases_are_all_there() -> None:
    if not CASES.is_dir():
        pytest.skip("no ../shared/cases beside the checkout")
    assert len(NAMES) >= 66


def expectation(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((CASES / name / "expect.json").read_text())
    return value


def run(name: str, *allow: str, table: bool = True) -> Report:
    kind, case = expectation(name)["kind"], CASES / name
    options = Options(allow=frozenset(allow), workers=1)
    if kind == "single":
        return audit(None, sides.hf(case / "ckpt", table=table), options)
    if kind == "td_single":
        return audit(None, sides.torch_dist(case / "ckpt"), options)
    if kind == "td_pair":
        before, after = (sides.torch_dist(case / side) for side in ("before", "after"))
    elif kind == "cross":
        before = sides.hf(case / "before")
        after = sides.torch_dist_as_hf(case / "after", case / "before")
    else:
        assert kind == "pair"
        before, after = (sides.hf(case / side) for side in ("before", "after"))
    return audit(before, after, options)


SINGLE = [n for n in NAMES if expectation(n)["kind"] == "single"]


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    check(name, run(name))


@pytest.mark.parametrize("name", SINGLE)
def test_case_without_its_mapping_table(name: str) -> None:
    check(name, run(name, table=False))


def check(name: str, report: Report) -> None:
    expect = expectation(name)
    assert report.verdict == expect["verdict"], _shown(report)
    errors = [f for f in report.findings if f.severity == "error"]
    must = [] if expect.get("findings_are") == "informational" else expect["findings"]
    # A finding may say more than the expectation asks, never less and never something else.
    assert len(errors) == len(must), _shown(report)
    for entry in must:
        assert any(_covers(f, entry) for f in errors), (entry, _shown(report))
    assert all(any(_covers(f, entry) for entry in must) for f in errors), _shown(report)
    if expect.get("findings_are") == "informational":
        for entry in expect["findings"]:
            assert any(_covers(f, entry) for f in report.findings if f.severity != "error")
    for _ in expect.get("warnings", ()):
        assert any(f.severity in ("warning", "note") for f in report.findings), _shown(report)


def _covers(one: Finding, entry: dict[str, Any]) -> bool:
    return all(json.dumps(getattr(one, key)) == json.dumps(value) for key, value in entry.items())


def _shown(report: Report) -> str:
    lines = [f"{f.severity} {f.kind} {f.message}" for f in report.findings]
    return f"{report.verdict}: " + "\n".join(lines[:20])


EXCEPTIONS = [
    (name, words, verdict)
    for name in NAMES
    for words, verdict in expectation(name).get("verdict_if", {}).items()
]


@pytest.mark.parametrize(("name", "words", "verdict"), EXCEPTIONS)
def test_case_under_its_switch(name: str, words: str, verdict: str) -> None:
    report = run(name, SWITCHES[words])
    assert report.verdict == verdict, _shown(report)
    assert report.switches == (SWITCHES[words],)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("experts_string_sorted", "experts permuted: 0,1,10,11,2,3,4,5,6,7,8,9"),
        ("gate_up_swapped_dense", "exchanged its bytes"),
        ("mtp_enorm_hnorm_swapped", "exchanged its bytes"),
        ("mtp_eh_proj_halves_swapped", "halves along dim 1"),
        ("cross_eh_proj_swapped", "halves along dim 1"),
        ("mtp_index_hardcoded_61", "renamed: model.layers.3. -> model.layers.61."),
        ("mtp_index_off_by_one", "renamed: model.layers.3. -> model.layers.4."),
        ("mtp_norms_shifted_plus_one", "after == before + 1"),
        ("qkv_group_interleave_wrong", "the rows of k_proj, q_proj, v_proj are the same in"),
        ("gate_up_tp_chunks_interleaved", "the rows of gate_proj, up_proj are the same in"),
        ("pp_offset_ignored", "hold the bytes of model.layers.{0..5}."),
        ("prefix_module_orig_mod", "differ by the prefix _orig_mod.module."),
        ("td_mtp_model_layer_renamed", "transformer_layer. -> mtp.layers.0.mtp_model_layer."),
    ],
)
def test_hint_on_every_difference(name: str, words: str) -> None:
    if name not in NAMES:
        pytest.skip("no ../shared/cases beside the checkout")
    report = run(name)
    errors = [f for f in report.findings if f.severity == "error"]
    assert errors
    assert all(words in (f.hint or "") for f in errors), _hints(report)


def _hints(report: Report) -> str:
    return "\n".join(f"{f.tensor}: {f.hint}" for f in report.findings if f.severity == "error")


def test_same_inputs_same_report() -> None:
    for name in NAMES[::7]:
        assert run(name) == run(name)
