from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

import mtpconv
from mtpconv.audit.finding import Report
from mtpconv.report import attest
from tests.report.reports import ALL, mtp_dropped, not_checked, passing, scattered

MANIFEST = b'{"format": "mtpconv-manifest"}\n'


def _statement(report: Report) -> dict[str, Any]:
    text = attest.render(report, manifest=MANIFEST, name="export.json")
    assert text.isascii()
    statement: dict[str, Any] = json.loads(text)
    return statement


@pytest.mark.parametrize("name", ALL)
def test_it_has_the_fields_of_statement_v1_and_test_result_v01(name: str) -> None:
    # No JSON schema is published; these are the required fields of the specification.
    statement = _statement(ALL[name]())
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    for subject in statement["subject"]:
        assert subject["digest"]
    predicate = statement["predicate"]
    assert predicate["result"] in ("PASSED", "WARNED", "FAILED")
    for descriptor in predicate["configuration"]:
        assert descriptor.keys() & {"uri", "digest", "content"}
    lists = [predicate[f"{word}Tests"] for word in ("passed", "warned", "failed")]
    every = [name for names in lists for name in names]
    assert all(isinstance(name, str) for name in every)
    assert len(every) == len(set(every))


def test_it_names_manifest_verdict_tier_and_tool_version() -> None:
    statement = _statement(mtp_dropped())
    assert statement["subject"] == [
        {"name": "export.json", "digest": {"sha256": hashlib.sha256(MANIFEST).hexdigest()}}
    ]
    said = statement["predicate"]["configuration"][0]["annotations"]
    assert said["verdict"] == "fail"
    assert said["tier"] == "L2"
    assert said["version"] == mtpconv.__version__
    assert said["mtp"] == "absent"
    assert statement["predicate"]["failedTests"] == [
        "mtp.0: P01 mtp_missing",
        "mtp.0: T01 missing_tensor",
    ]


def test_results() -> None:
    assert _statement(passing())["predicate"]["result"] == "PASSED"
    assert _statement(mtp_dropped())["predicate"]["result"] == "FAILED"
    assert _statement(not_checked())["predicate"]["result"] == "FAILED"
    assert _statement(not_checked())["predicate"]["failedTests"]
    warned = replace(
        passing(), findings=tuple(f for f in mtp_dropped().findings if f.severity == "warning")
    )
    assert _statement(warned)["predicate"]["result"] == "WARNED"
    assert _statement(warned)["predicate"]["warnedTests"] == ["checkpoint: F08 index_total_size"]


def test_a_pass_says_what_was_looked_for() -> None:
    passed = _statement(passing())["predicate"]["passedTests"]
    assert "mtp.0: T05 value_mismatch" in passed
    assert "checkpoint: C01 config_mismatch" in passed
    assert "trunk: T01 missing_tensor" in _statement(scattered())["predicate"]["passedTests"]
