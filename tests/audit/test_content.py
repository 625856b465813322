"""What the values of an MTP module tell: zero, NaN, constant, fresh, copied, narrowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit import twins
from mtpconv.audit.compare import read_stats
from mtpconv.audit.pair import is_router_bias
from mtpconv.audit.twins import twin_findings
from mtpconv.audit.words import Stats
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.tensors import TensorSpec
from tests.audit import sides
from tests.audit.models import CONFIGS, Model, alone, base_model, compare

GLM = "model.layers.4."
EH = GLM + "eh_proj.weight"


def fill(model: Model, name: str, word: bytes) -> None:
    spec, data = model.tensors[name]
    model.tensors[name] = (spec, word * (len(data) // len(word)))


def warned(model: Model, place: Path, **options: object) -> set[tuple[str, str | None]]:
    report = alone(model, place, **options)  # type: ignore[arg-type]
    return {(f.kind, f.tensor) for f in report.findings if f.severity == "warning"}


def test_trained_values_raise_nothing(tmp_path: Path) -> None:
    assert warned(base_model("glm-5.2.json"), tmp_path) == set()


@pytest.mark.parametrize(
    ("word", "kind", "status"),
    [
        (b"\0\0", "zero_tensor", "zero"),
        (b"\0\x80", "zero_tensor", "zero"),
        (b"\xa4\x3c", "constant_tensor", "constant"),
        (b"\x80\x7f", "not_finite", "not_finite"),
        (b"\xc1\x7f", "not_finite", "not_finite"),
    ],
)
def test_filled_tensors(word: bytes, kind: str, status: str, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    fill(model, EH, word)
    assert (kind, EH) in warned(model, tmp_path / "a")
    assert alone(model, tmp_path / "b").mtp.status == status
    assert warned(model, tmp_path / "c", read_bytes=False) == set(), "headers hold no values"


def test_zero_router_bias_is_named_in_trunk_and_mtp(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    names = [n for n in model.tensors if n.endswith("e_score_correction_bias")]
    for name in names:
        fill(model, name, b"\0\0\0\0")
    assert {t for k, t in warned(model, tmp_path) if k == "zero_tensor"} == set(names)
    assert len({model.regions[n].kind for n in names}) == 2


def test_fresh_norms(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    norms = [n for n in model.mtp() if n.endswith("norm.weight")]
    for name in norms:
        fill(model, name, b"\x80\x3f")
    report = alone(model, tmp_path / "a")
    (one,) = (f for f in report.findings if f.kind == "fresh_init")
    assert set(one.tensors) == set(norms)
    assert "threshold: all of them" in one.message
    assert report.mtp.status == "fresh"
    model.tensors[norms[0]] = base_model("glm-5.2.json").tensors[norms[0]]
    assert "fresh_init" not in {k for k, _ in warned(model, tmp_path / "b")}


def test_fresh_mtp_that_the_reference_has_too_is_no_news(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    for name in model.mtp():
        if name.endswith("norm.weight"):
            fill(model, name, b"\x80\x3f")
    report = compare(model, model, tmp_path / "a")
    assert [f.kind for f in report.findings if f.severity != "note"] == []
    trained = base_model("glm-5.2.json")
    kinds = {f.kind for f in compare(trained, model, tmp_path / "b").findings}
    assert {"fresh_init", "value_mismatch"} <= kinds


def test_tensors_copied_from_the_trunk(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    norm = GLM + "shared_head.norm.weight"
    model.tensors[norm] = model.tensors["model.norm.weight"]
    proj = GLM + "self_attn.o_proj.weight"
    model.tensors[proj] = model.tensors["model.layers.3.self_attn.o_proj.weight"]
    assert warned(model, tmp_path / "a") == {("same_as_trunk", norm), ("same_as_trunk", proj)}
    assert compare(model, model, tmp_path / "b").mtp.status == "preserved"


def test_a_tensor_copied_from_any_trunk_layer(tmp_path: Path) -> None:
    """Only layers 0 to 2 have an indexer here, so the last layer has no namesake."""
    model = base_model("glm-5.2.json")
    name = GLM + "self_attn.indexer.wk.weight"
    other = "model.layers.1.self_attn.indexer.wk.weight"
    assert name.replace(".4.", ".3.") not in model.tensors
    model.tensors[name] = model.tensors[other]
    expert = GLM + "mlp.experts.2.up_proj.weight"
    model.tensors[expert] = model.tensors["model.layers.3.mlp.experts.2.up_proj.weight"]
    assert warned(model, tmp_path / "a") == {("same_as_trunk", name), ("same_as_trunk", expert)}
    for layer in (0, 2):
        model.tensors[f"model.layers.{layer}.self_attn.indexer.wk.weight"] = model.tensors[other]
    assert warned(model, tmp_path / "b") == {("same_as_trunk", expert)}, "a buffer all layers share"


def test_looking_for_copies_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    name = GLM + "self_attn.indexer.wk.weight"
    model.tensors[name] = model.tensors["model.layers.0.self_attn.indexer.wk.weight"]
    subject = sides.hf(model.write(tmp_path / "hf"))
    outcomes = {o.name: o for o in read_stats(subject, [name])}
    assert [f.tensor for f in twin_findings(subject, model.regions, outcomes)] == [name]
    for limit in ("_MAX_STARTS", "_BUDGET"):
        with monkeypatch.context() as patch:
            patch.setattr(twins._Twins, "__init__", limited(limit))
            assert list(twin_findings(subject, model.regions, outcomes)) == []


def limited(limit: str) -> Callable[..., None]:
    real = twins._Twins.__init__

    def init(self: Any, *words: Any) -> None:
        bounds: Any = {"_MAX_STARTS": {"looks": 1}, "_BUDGET": {"budget": 1}}[limit]
        real(self, *words, **bounds)

    return init


@pytest.mark.parametrize(
    ("family", "end"),
    [("ling-mini-2.0.json", "mlp.gate.expert_bias"), ("step-3.5-flash.json", "moe.router_bias"),
     ("hy3.json", "mlp.expert_bias"), ("deepseek-v4-flash.json", "ffn.gate.bias")],
)  # fmt: skip
def test_router_biases_of_every_family(family: str, end: str, tmp_path: Path) -> None:
    config = json.loads((CONFIGS / family).read_text())
    plan = make_plan(config, find_table(config["model_type"]))
    steps = [s.hf for s in plan.steps if s.key.endswith("router.expert_bias")]
    assert all(is_router_bias(n) for hf in steps for n in hf)
    assert any(n.endswith(end) for n in plan.hf)
    name = f"model.layers.3.{end}"
    spec = TensorSpec("F32", (8,))
    model = Model({"num_hidden_layers": 4}, {name: (spec, bytes(32))})
    assert ("zero_tensor", name) in warned(model, tmp_path / "a", table=False)
    model.tensors[name] = (spec, b"".join(bytes([0, 0, i, 0x3F]) for i in range(8)))
    assert ("narrowed", name) in warned(model, tmp_path / "b", table=False)


def test_collapsed_heads_of_several_depths(tmp_path: Path) -> None:
    before = base_model("step-3.5-flash.json")
    heads = [n for n in before.mtp() if n.endswith("shared_head.output.weight")]
    assert len(heads) == 3
    assert warned(before, tmp_path / "before") == set(), "each has values of its own"
    after = before.copy()
    for name in heads:
        after.tensors[name] = before.tensors["lm_head.weight"]
    assert warned(after, tmp_path / "alone") == {("same_as_trunk", name) for name in heads}
    report = compare(before, after, tmp_path)
    assert {f.tensor for f in report.findings if f.severity == "error"} == set(heads)
    assert {(f.kind, f.hint) for f in report.findings if f.tensor in heads} == {
        ("value_mismatch", "now identical to lm_head.weight"),
        ("same_as_trunk", "identical to lm_head.weight"),
    }


def test_f32_that_fits_bf16(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    model.config["n_routed_experts"] = 16
    name = GLM + "mlp.gate.e_score_correction_bias"

    values = b"".join(b"\0\0" + bytes([i, 0x3F]) for i in range(16))
    model.tensors[name] = (TensorSpec("F32", (16,)), values)
    assert ("narrowed", name) in warned(model, tmp_path / "a", table=False)
    wide = values[:-4] + b"\1\0\x80\x3f"
    model.tensors[name] = (TensorSpec("F32", (16,)), wide)
    assert ("narrowed", name) not in warned(model, tmp_path / "b", table=False)


def test_nan_only_in_the_checkpoint_warns_in_the_trunk_too(tmp_path: Path) -> None:
    before = base_model("glm-5.2.json")
    after = before.copy()
    name = "model.layers.0.mlp.up_proj.weight"
    after.data(name, lambda d: d.__setitem__(slice(0, 2), b"\xc0\x7f"))
    report = compare(before, after, tmp_path)
    assert {(f.kind, f.severity) for f in report.findings} == {
        ("value_mismatch", "error"), ("not_finite", "warning"),
    }  # fmt: skip


def test_statistics_do_not_depend_on_blocks() -> None:
    data = bytes(range(64))
    for dtype in ("BF16", "F32", "F8_E4M3", "I64", "F16", "U8", "F4"):
        whole, parts = Stats(dtype), Stats(dtype)
        whole.add(data)
        for start in range(0, 64, 16):
            parts.add(data[start : start + 16])
        assert (whole.elements, whole.zeros, whole.constant, whole.not_finite) == (
            parts.elements, parts.zeros, parts.constant, parts.not_finite,
        )  # fmt: skip
        assert whole.mean == pytest.approx(parts.mean)
        assert whole.std == pytest.approx(parts.std)
