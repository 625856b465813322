"""Whatever the names, configs and counts say: no crash, no hang, no pass without a look."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mtpconv.audit.sides as sides_module
from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.hints import find_hints
from mtpconv.audit.names import split_expert
from mtpconv.audit.options import SWITCHES, Options
from mtpconv.audit.pair import find_differences
from mtpconv.audit.sides import open_sides
from mtpconv.audit.subject import Subject
from mtpconv.store.content import Piece
from mtpconv.tensors import TensorSpec
from tests.audit import sides
from tests.audit.models import base_model
from tests.convert.folders import write_hf

PARTS = st.sampled_from(
    ["model", "layers", "0", "1", "3", "99999999999999999999", "٣", "mtp", "mtp_layers", "experts",
     "embed_tokens", "lm_head", "enorm", "norm", "weight", "weight_scale_inv", "decoder", "vision",
     "gate_up_proj", "e_score_correction_bias", "", "_orig_mod", "language_model", "shared_head"]
)  # fmt: skip
NAMES = st.lists(PARTS, min_size=1, max_size=7).map(".".join)
SPECS = st.builds(
    TensorSpec,
    st.sampled_from(["BF16", "F32", "F8_E4M3", "F4", "I64", "BOOL"]),
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
).filter(lambda s: s.dtype != "F4" or s.elements % 2 == 0)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.sampled_from(["fp8", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    ["num_hidden_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules",
     "vocab_size", "n_routed_experts", "tie_word_embeddings", "quantization_config", "model_type",
     "rope_parameters", "rope_theta", "mtp_hybrid_override_pattern", "text_config"]
)  # fmt: skip
INNER = st.dictionaries(FIELDS, VALUES, max_size=5)
CONFIGS = st.builds(
    lambda outer, inner, nest: {**outer, "text_config": inner} if nest else outer,
    INNER, INNER, st.booleans(),
)  # fmt: skip


class Held:
    """Tensors without bytes."""

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        self.tensors = tensors

    def pieces(self, name: str) -> Sequence[Piece]:
        raise AssertionError(f"{name} was read although only headers were asked for")


def subject(tensors: Mapping[str, TensorSpec], config: Any) -> Subject:
    return Subject("somewhere", "hf", Held(tensors), config=config)


TENSORS = st.dictionaries(NAMES, SPECS, max_size=8)


def never_silent(report: Report) -> None:
    if report.verdict == "pass":
        assert report.compared.tensors or report.findings
        assert not any(f.severity == "error" and f.waived is None for f in report.findings)
    else:
        assert any(f.severity == "error" for f in report.findings)


@given(TENSORS, CONFIGS, st.sampled_from([None, "vllm", "sglang", "transformers"]))
@settings(max_examples=150)
def test_one_checkpoint(
    tensors: dict[str, TensorSpec], config: dict[str, Any], profile: Any
) -> None:
    never_silent(audit(None, subject(tensors, config), Options(read_bytes=False, profile=profile)))


@given(TENSORS, CONFIGS, TENSORS, CONFIGS, st.sets(st.sampled_from(sorted(SWITCHES))))
@settings(max_examples=150)
def test_two_checkpoints(
    old: dict[str, TensorSpec],
    config: dict[str, Any],
    new: dict[str, TensorSpec],
    other: dict[str, Any],
    allow: set[str],
) -> None:
    options = Options(read_bytes=False, allow=frozenset(allow))
    report = audit(subject(old, config), subject(new, other), options)
    never_silent(report)
    assert report.states.keys() == old.keys() | new.keys()
    assert all(name in report.regions for name in report.states)


@given(st.dictionaries(NAMES, SPECS, max_size=6), st.binary(min_size=1, max_size=8), CONFIGS)
@settings(max_examples=40)
def test_bytes_of_any_kind(
    tmp_path_factory: pytest.TempPathFactory,
    specs: dict[str, TensorSpec],
    pattern: bytes,
    config: dict[str, Any],
) -> None:
    place = tmp_path_factory.mktemp("any")
    names = [n for n in specs if n]
    if not names:
        return
    filled = {n: (specs[n], (pattern * 500)[: specs[n].nbytes]) for n in names}
    moved = dict(zip(names, [filled[n] for n in [*names[1:], names[0]]], strict=True))
    before = sides.hf(write_hf(place / "a", filled, config))
    after = sides.hf(write_hf(place / "b", moved, config))
    never_silent(audit(before, after, Options(allow=frozenset(SWITCHES), workers=1)))
    never_silent(audit(None, after, Options(workers=1), base=before))
    same = audit(before, before, Options(workers=1))
    assert not any(f.code.startswith("T") and f.severity == "error" for f in same.findings)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "n_routed_experts", "num_nextn_predict_layers"]
)
@pytest.mark.parametrize("count", [10**6, 10**9, 10**30])
def test_invented_counts_neither_hang_nor_eat_memory(
    field: str, count: int, tmp_path: Path
) -> None:
    model = base_model("glm-5.2.json")
    model.config[field] = count
    folder = model.write(tmp_path)
    began = time.monotonic()
    report = audit(None, open_sides(None, folder).after)
    assert time.monotonic() - began < 20
    assert report.verdict == "fail"
    assert len(report.findings) < 200_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize("counts", [(4, 99_999), (2000, 249)])
def test_a_plan_is_not_made_for_what_no_model_has(
    counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each count alone could be; together they are 1.5 million tensors that are not there."""
    model = base_model("glm-5.2.json")
    layers, experts = counts
    model.config.update(num_hidden_layers=layers, n_routed_experts=experts)
    folder = model.write(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(sides_module, "make_plan", refuse)
    report = audit(None, open_sides(None, folder).after)
    assert any("no model is that large" in f.message for f in report.findings)
    assert len(report.findings) < 5000


@pytest.mark.timeout(60)
def test_absent_experts_do_not_outgrow_the_header() -> None:
    """Each of these names would have had 9,998 findings."""
    held = [f"model.layers.{n % 4}.mlp.experts.0.a{n}.weight" for n in range(3000)]
    held += [f"model.layers.0.mlp.experts.{n}.b.weight" for n in range(9990)]
    config = {"model_type": "unknown", "num_hidden_layers": 4, "n_routed_experts": 9999}
    one = subject({n: TensorSpec("U8", (1,)) for n in held}, config)
    found = [f for f in audit(None, one, Options(read_bytes=False)).findings if f.code == "T01"]
    assert len(found) == 3000 + 9
    assert sum(len(f.message) for f in found) < 1000 * len(held)
    (whole,) = (f for f in found if "a17.weight" in f.message)
    assert whole.message == (
        "model.layers.1.mlp.experts.*.a17.weight: the config says 9999 experts, 9998 are absent;"
        " there is only model.layers.1.mlp.experts.0.a17.weight"
    )
    assert {f.tensor for f in found if f.tensor} == {
        f"model.layers.0.mlp.experts.{n}.b.weight" for n in range(9990, 9999)
    }


@pytest.mark.timeout(30)
def test_a_name_full_of_experts_takes_no_time() -> None:
    for end in ("", "\n", "\nx"):
        name = "experts.1." * 100_000 + end
        split = split_expert(name)
        assert split is not None
        assert (len(split[0]), split[1], split[2]) == (len(name) - len(end) - 2, 1, "." + end)
    assert split_expert("experts.x" * 100_000 + "\n") is None


def test_a_packed_tensor_that_claims_a_billion_experts(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    after = model.copy()
    packed = "model.layers.3.mlp.experts.down_proj"
    after.tensors[packed] = (TensorSpec("BF16", (3 * 10**7, 0, 4)), b"")
    del after.tensors["model.layers.3.mlp.experts.1.down_proj.weight"]
    before, other = (sides.hf(m.write(tmp_path / n)) for n, m in (("a", model), ("b", after)))
    tracemalloc.start()
    report = audit(before, other, Options(allow=frozenset({"expert-layout"}), workers=1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert report.verdict == "fail"


@pytest.mark.timeout(30)
def test_nested_config_neither_recurses_nor_hangs(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    folder = model.write(tmp_path)
    text = json.dumps(model.config)[:-1] + ',"a":' + '{"a":' * 50 + "1" + "}" * 50 + "}"
    (folder / "config.json").write_text(text)
    one = sides.hf(folder)
    assert audit(one, one).verdict == "pass"
    (folder / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    report = audit(None, sides.hf(folder))
    assert report.verdict == "fail"
    assert [f.file for f in report.findings if f.severity == "error"] == ["config.json"]


def test_hints_say_when_they_only_looked_at_the_start(tmp_path: Path) -> None:
    spec = TensorSpec("U8", (8192,))
    data = bytes(range(256)) * 32
    before = sides.hf(write_hf(tmp_path / "a", {"x.w": (spec, data)}, {}))
    after = sides.hf(write_hf(tmp_path / "b", {"y.w": (spec, data[:-1] + b"!")}, {}))
    options = Options()
    names = before.tensors.keys() | after.tensors.keys()
    regions = before.naming.regions(names)
    found = find_differences(before, after, options, regions)
    assert find_hints(found, before, after, regions) == {}
    poor = find_hints(found, before, after, regions, budget=0)
    assert all("only the first 4096 bytes" in text for text in poor.values())
    assert set(poor) == {"x.w", "y.w"}
