from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from mtpconv.audit.finding import Finding, MtpDepth, MtpStatus
from mtpconv.report import junit
from mtpconv.tensors import Region
from tests.conftest import ROOT
from tests.report.reports import ALL, mtp_dropped, not_checked, passing, scattered

XSD = ROOT / "tests/report/schemas/junit-10.xsd"


@pytest.mark.parametrize("name", ALL)
def test_it_follows_the_published_schema(name: str) -> None:
    xmlschema = pytest.importorskip("xmlschema")
    schema = xmlschema.XMLSchema(str(XSD))
    schema.validate(junit.render(ALL[name]()))
    # The check can fail: a case without a name is refused.
    assert not schema.is_valid(junit.render(ALL[name]()).replace(' name="', ' nome="'))


@pytest.mark.parametrize("name", ALL)
def test_counts_agree_with_the_cases(name: str) -> None:
    root = ET.fromstring(junit.render(ALL[name]()))
    for node in [root, *root.iter("testsuite")]:
        assert int(node.get("tests") or -1) == len(list(node.iter("testcase")))
        assert int(node.get("failures") or 0) == len(list(node.iter("failure")))
        assert int(node.get("errors") or 0) == len(list(node.iter("error")))
    ids = [(c.get("classname"), c.get("name")) for c in root.iter("testcase")]
    assert len(ids) == len(set(ids))


def _failed(text: str) -> dict[tuple[str | None, str | None], str]:
    return {
        (case.get("classname"), case.get("name")): failure.text or ""
        for case in ET.fromstring(text).iter("testcase")
        for failure in case.iter("failure")
    }


def test_791_missing_tensors_are_one_case() -> None:
    failed = _failed(junit.render(mtp_dropped()))
    assert set(failed) == {
        ("mtpconv.mtp.0", "P01 mtp_missing"),
        ("mtpconv.mtp.0", "T01 missing_tensor"),
    }
    assert (
        "model.layers.78.mlp.experts.{0..255}.up_proj.weight"
        in failed["mtpconv.mtp.0", "T01 missing_tensor"]
    )


def test_cases_are_per_rule_and_layer_group() -> None:
    failed = _failed(junit.render(scattered()))
    assert set(failed) == {
        ("mtpconv.mtp.0", "T05 value_mismatch"),
        ("mtpconv.trunk", "T05 value_mismatch"),
        ("mtpconv.checkpoint", "C01 config_mismatch"),
    }
    assert len(junit.render(scattered())) < 100_000


def test_a_case_keeps_its_name_when_it_starts_to_fail() -> None:
    good = ET.fromstring(junit.render(passing()))
    bad = ET.fromstring(junit.render(mtp_dropped()))
    names = [{(c.get("classname"), c.get("name")) for c in r.iter("testcase")} for r in (good, bad)]
    assert ("mtpconv.mtp.0", "T01 missing_tensor") in names[0] & names[1]
    assert not list(good.iter("failure"))


def test_a_rule_that_was_not_looked_for_is_no_passed_case() -> None:
    text = junit.render(replace(passing(), checked=("value_mismatch",)))
    assert "T05 value_mismatch" in text
    assert "T01" not in text
    assert "config_mismatch" not in text


def test_warnings_and_waived_findings_do_not_fail() -> None:
    failed = _failed(junit.render(scattered()))
    assert not any("T03" in str(name) for name in failed)
    root = ET.fromstring(junit.render(scattered()))
    outputs = " ".join(node.text or "" for node in root.iter("system-out"))
    assert "waived: router bias is rounded on purpose" in outputs


def test_not_checked_is_an_error_and_not_a_pass() -> None:
    root = ET.fromstring(junit.render(not_checked()))
    assert int(root.get("errors") or 0) == 1


def test_hostile_names_stay_text() -> None:
    text = junit.render(ALL["hostile"]())
    text.encode()
    tags = {node.tag for node in ET.fromstring(text).iter()}
    assert tags == {
        "testsuites", "testsuite", "testcase", "properties", "property", "failure", "system-out",
    }  # fmt: skip


def test_same_report_same_bytes() -> None:
    for name, make in ALL.items():
        assert junit.render(make()) == junit.render(make()), name


@pytest.mark.timeout(30)
def test_depths_that_no_model_has_are_one_group() -> None:
    """60,000 names with a layer number each were as many suites, each with every depth."""
    names = {f"model.layers.{i}.{i * 7}.x": Region("mtp", i) for i in range(60_000)}
    findings = tuple(
        Finding("T02", "extra_tensor", "error", f"{name}: is not in the reference", name)
        for name in names
    )
    depths = tuple(MtpDepth(i, "extra", 1, None) for i in range(len(names)))
    report = replace(
        passing(), verdict="fail", findings=findings, mtp=MtpStatus("extra", 1, depths),
        states=dict.fromkeys(names, "extra"), regions=names,
    )  # fmt: skip
    text = junit.render(report)
    assert len(text) < 200_000
    suites = re.findall(r'<testsuite name="(mtp[^"]*)"', text)
    assert suites == [f"mtp.{n}" for n in sorted([*map(str, range(16)), "16+"])]
    assert "and 59,984 more depths: 59,984 extra" in text
    case = text.split('<testsuite name="mtp.16+"')[1].split("</testsuite>")[0]
    assert "59,984 times" in case
