from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.finding import Finding, Report
from mtpconv.report import sarif
from mtpconv.tensors import Region
from tests.conftest import ROOT
from tests.report.reports import ALL, mtp_dropped, not_checked, passing, scattered

SCHEMA = ROOT / "tests/report/schemas/sarif-2.1.0-rtm.5.json"


def _run(report: Report) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(sarif.render(report))["runs"][0]
    return run


@pytest.mark.parametrize("name", ALL)
def test_it_follows_the_published_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft4Validator(json.loads(SCHEMA.read_text("utf-8")))
    log = json.loads(sarif.render(ALL[name]()))
    validator.validate(log)
    # The check can fail.
    del log["runs"][0]["tool"]["driver"]["name"]
    assert not validator.is_valid(log)


@pytest.mark.parametrize("name", ALL)
def test_what_the_schema_cannot_say(name: str) -> None:
    run = _run(ALL[name]())
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    prints = [result["partialFingerprints"]["mtpconv/v1"] for result in run["results"]]
    assert len(prints) == len(set(prints))
    for result in run["results"]:
        assert result["ruleId"] in rules
        assert result["message"]["text"]
        # Literal braces are doubled, so nothing is a placeholder (3.11.5), and no text is a
        # link (3.11.6).
        text = result["message"]["text"]
        assert "{" not in text.replace("{{", "").replace("}}", "")
        assert not re.search(r"(?<!\\)(?:\\\\)*\[", text)
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"(?:file:///)?[A-Za-z0-9._~%/-]*", uri), uri


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A folder with a config and an index on several lines."""
    config = {
        "model_type": "x",
        "rope_parameters": {"rope_theta": 1},
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    weight_map = {f"model.layers.{n}.mlp.gate.weight": "a.safetensors" for n in range(5)}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    text = json.dumps(index, indent=2)
    (tmp_path / "model.safetensors.index.json").write_text(text, "utf-8")
    return tmp_path


def _places(report: Report, folder: Path, *findings: Finding) -> list[tuple[str, Any]]:
    report = replace(report, after=replace(report.after, path=str(folder)), findings=findings)
    places = []
    for result in _run(report)["results"]:
        place = result["locations"][0]["physicalLocation"]
        places.append((place["artifactLocation"]["uri"], place.get("region", {}).get("startLine")))
    return places


def test_findings_point_at_the_lines_of_config_and_index(export: Path) -> None:
    def error(**where: Any) -> Finding:
        return Finding("T00", "x", "error", "x", **where)

    base = f"file://{export}"
    index = "model.safetensors.index.json"
    assert _places(
        passing(),
        export,
        error(field="rope_parameters.rope_theta"),
        error(field="num_nextn_predict_layers", file="config.json", region=Region("mtp", 0)),
        error(field="vocab_size"),
        error(tensor="model.layers.3.mlp.gate.weight", region=Region("trunk", 3)),
        error(tensor="model.layers.78.enorm.weight", region=Region("mtp", 0)),
        error(file="model-00001.safetensors"),
        error(),
    ) == [
        (f"{base}/config.json", 4),
        (f"{base}/config.json", 6),
        (f"{base}/config.json", 1),
        (f"{base}/{index}", 9),
        (f"{base}/{index}", 5),
        (f"{base}/model-00001.safetensors", None),
        (f"{base}/{index}", 5),
    ]


def test_without_an_index_findings_point_at_the_config(export: Path) -> None:
    (export / "model.safetensors.index.json").unlink()
    one = Finding("T00", "x", "error", "x", tensor="lm_head.weight")
    assert _places(passing(), export, one) == [(f"file://{export}/config.json", 1)]


def test_a_relative_folder_gives_relative_uris() -> None:
    result = _run(mtp_dropped())["results"][0]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place == "export/config.json"


def test_one_result_for_each_rule_and_layer() -> None:
    results = _run(mtp_dropped())["results"]
    assert [(r["ruleId"], r["level"], r["occurrenceCount"]) for r in results] == [
        ("P01", "error", 1),
        ("T01", "error", 791),
        ("F08", "warning", 1),
    ]
    names = results[1]["locations"][0]["logicalLocations"]
    assert "model.layers.78.mlp.experts.{0..255}.up_proj.weight" in [
        name["fullyQualifiedName"] for name in names
    ]
    layers = set(scattered().regions.values())
    assert len(_run(scattered())["results"]) < 2 * len(layers) + 5


def test_fingerprints_do_not_change_when_other_findings_do() -> None:
    whole = mtp_dropped()
    fewer = replace(whole, findings=whole.findings[700:])
    prints = [
        {r["ruleId"]: r["partialFingerprints"]["mtpconv/v1"] for r in _run(report)["results"]}
        for report in (whole, fewer)
    ]
    assert prints[0] == prints[1]


def test_waived_findings_are_suppressed_with_their_reason() -> None:
    results = _run(scattered())["results"]
    waived = [r for r in results if r["ruleId"] == "T03"]
    assert waived
    for result in waived:
        assert result["suppressions"][0]["justification"] == "router bias is rounded on purpose"
    assert not any("suppressions" in r for r in results if r["ruleId"] != "T03")


def test_an_audit_that_could_not_check_is_no_success() -> None:
    assert _run(not_checked())["invocations"][0] == {"executionSuccessful": False, "exitCode": 3}
    assert _run(passing())["invocations"][0] == {"executionSuccessful": True, "exitCode": 0}


def test_never_more_results_than_code_scanning_shows() -> None:
    findings = tuple(
        Finding("T01", "missing_tensor", "error", "x", region=Region("trunk", n))
        for n in range(5100)
    )
    run = _run(replace(passing(), verdict="fail", findings=findings))
    assert len(run["results"]) == 5000
    notice = run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]
    assert notice.startswith("100 more results")
