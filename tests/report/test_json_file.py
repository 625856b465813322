from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.audit.finding import Finding
from mtpconv.report import json_file
from mtpconv.report.values import plain_json
from mtpconv.tensors import TensorSpec
from tests.conftest import ROOT
from tests.report.reports import ALL, mtp_dropped, passing


def _schema() -> Any:
    return json.loads((ROOT / "docs/report.schema.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ALL)
def test_it_follows_the_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = _schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(json_file.render(ALL[name]())))


def test_the_schema_refuses_what_is_not_a_report() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(_schema())
    good = json.loads(json_file.render(mtp_dropped()))
    for spoil in (
        lambda r: r.pop("mtp"),
        lambda r: r.update(verdict="ok"),
        lambda r: r.update(version=2),
        lambda r: r["findings"][0].pop("tensor"),
        lambda r: r["findings"][0].update(severity="fatal"),
        lambda r: r["compared"].update(bytes=-1),
        lambda r: r["mtp"].update(promised="1"),
    ):
        bad = json.loads(json.dumps(good))
        spoil(bad)
        assert not validator.is_valid(bad)


def test_every_field_that_is_written_is_in_the_schema() -> None:
    schema = _schema()
    report = json.loads(json_file.render(ALL["hostile"]()))
    assert set(report) == set(schema["properties"])
    finding = schema["$defs"]["finding"]["properties"]
    written: set[str] = set()
    for name in ALL:
        for one in json.loads(json_file.render(ALL[name]()))["findings"]:
            written |= set(one)
    assert written <= set(finding)


def test_the_shape_that_programs_rely_on() -> None:
    report = json.loads(json_file.render(mtp_dropped()))
    assert report["verdict"] == "fail"
    assert report["tier"] == "L2"
    assert report["mtp"]["status"] == "absent"
    assert report["mtp"]["depths"] == [
        {"depth": 0, "status": "absent", "tensors": 0, "expected": 791}
    ]
    assert len(report["findings"]) == 793
    assert report["findings"][0] == {
        "code": "T01",
        "kind": "missing_tensor",
        "severity": "error",
        "tensor": "model.layers.78.enorm.weight",
        "message": "model.layers.78.enorm.weight: is not in after",
        "region": "mtp.0",
        "hint": "the whole depth is gone",
    }
    assert report["compared"]["tensors"] == 59585 - 791
    assert report["states"] == {"identical": 58794, "missing": 791}
    assert report["regions"]["mtp.0"] == {"missing": 791}
    assert list(report["regions"])[:2] == ["root", "trunk.0"]
    assert list(report["regions"])[-1] == "mtp.0"


def test_config_values_keep_their_type() -> None:
    for value in (0, None, False, "0", 1.5, [1, [2]], {"a": None}):
        finding = Finding("C01", "config_mismatch", "error", "x", before=value, after=0)
        report = json.loads(json_file.render(replace(passing(), findings=(finding,))))
        assert report["findings"][0].get("before") == value
        assert report["findings"][0]["after"] == 0


@given(
    st.recursive(
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()),
            st.binary(max_size=4), st.just(TensorSpec("BF16", (2, 3))),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
            st.frozensets(st.integers(), max_size=3),
        ),
        max_leaves=10,
    )
)  # fmt: skip
def test_any_value_becomes_strict_ascii_json(value: Any) -> None:
    text = json.dumps(plain_json(value), allow_nan=False)
    assert text.isascii()
    json.loads(text)


def test_values_that_contain_themselves_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "..." in json.dumps(plain_json(loop))
    assert plain_json(math.nan) == "nan"


def test_same_report_same_bytes() -> None:
    for name, make in ALL.items():
        assert json_file.render(make()) == json_file.render(make()), name


def test_it_is_ascii_without_controls() -> None:
    shown = json_file.render(ALL["hostile"]())
    assert shown.isascii()
    assert not set(shown) & {chr(n) for n in range(32) if n != 10}
