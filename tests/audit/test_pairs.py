"""Faults between a reference and a checkpoint, in every family and every part of the model."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.options import Options, Sample
from mtpconv.audit.subject import hf_subject, manifest_subject
from mtpconv.audit.words import as_words, decode, round_to
from mtpconv.errors import UsageError
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import read_manifest, take_manifest, write_manifest
from mtpconv.tensors import TensorSpec
from tests.audit import sides
from tests.audit.models import FAMILIES, Model, base_model, compare, errors, said, shown

families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_a_copy_passes_at_full_tier(family: str, tmp_path: Path) -> None:
    model = base_model(family)
    report = compare(model, model, tmp_path)
    assert (report.verdict, report.tier, report.mtp.status) == ("pass", "L2", "preserved")
    assert report.compared.tensors == len(model.tensors)
    assert report.compared.nbytes == sum(s.nbytes for s, _ in model.tensors.values())
    assert set(report.states.values()) == {"identical"}


@families
def test_flipped_bits_anywhere_are_found_and_nothing_else(family: str, tmp_path: Path) -> None:
    model = base_model(family)
    for number, names in enumerate((model.mtp(), model.trunk(), [*model.tensors][::3])):
        after = model.copy()
        for name in names:
            after.data(name, lambda d: d.__setitem__(len(d) // 2, d[len(d) // 2] ^ 1))
        report = compare(model, after, tmp_path / str(number))
        assert said(report) == sorted(("value_mismatch", n) for n in names)
        assert all("1 of" in f.message for f in errors(report))


@families
def test_an_mtp_tensor_that_vanishes_is_named(family: str, tmp_path: Path) -> None:
    model = base_model(family)
    for number, name in enumerate(model.mtp()[:: max(len(model.mtp()) // 3, 1)]):
        after = model.copy()
        del after.tensors[name]
        report = compare(model, after, tmp_path / str(number))
        assert said(report) == [("missing_tensor", name)]
        depth = report.mtp.depths[model.regions[name].index]
        if len(model.mtp(depth.depth)) > 1:
            assert depth.status == "partial"
            assert name in (depth.detail or "")


@families
def test_a_lost_depth_is_dropped_and_the_others_preserved(family: str, tmp_path: Path) -> None:
    model = base_model(family)
    last = max(model.regions[n].index for n in model.mtp())
    after = model.copy()
    gone = model.mtp(last)
    for name in gone:
        del after.tensors[name]
    report = compare(model, after, tmp_path)
    assert said(report) == sorted(("missing_tensor", n) for n in gone)
    statuses = [d.status for d in report.mtp.depths]
    assert statuses == ["preserved"] * last + ["dropped"]
    assert report.mtp.status == "dropped"


@families
def test_wrong_dtype_and_shape_with_the_same_bytes(family: str, tmp_path: Path) -> None:
    model = base_model(family)
    name = next(n for n in model.mtp() if len(model.tensors[n][0].shape) == 2)
    spec, data = model.tensors[name]
    after = model.copy()
    after.tensors[name] = (TensorSpec("F16", spec.shape), data)
    assert said(compare(model, after, tmp_path / "a")) == [("dtype_mismatch", name)]
    after.tensors[name] = (TensorSpec(spec.dtype, spec.shape[::-1]), data)
    report = compare(model, after, tmp_path / "b")
    square = spec.shape == spec.shape[::-1]
    assert said(report) == ([] if square else [("shape_mismatch", name)])


def _swap(a: str, b: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.tensors[a], model.tensors[b] = model.tensors[b], model.tensors[a]

    return change


def _halves(name: str, rows: bool) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        spec, data = model.tensors[name]
        row = len(data) // (1 if rows else spec.shape[0])
        half = row // 2
        lines = [data[i : i + row] for i in range(0, len(data), row)]
        model.tensors[name] = (spec, b"".join(x[half:] + x[:half] for x in lines))

    return change


def _rename(old: str, new: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.tensors = {
            new + n.removeprefix(old) if n.startswith(old) else n: t
            for n, t in model.tensors.items()
        }

    return change


def _plus_one(name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        spec, data = model.tensors[name]
        values = decode(spec.dtype, as_words(spec.dtype, data))
        assert values is not None
        moved = round_to(spec.dtype, values + 1)
        assert moved is not None
        model.tensors[name] = (spec, moved.tobytes())

    return change


def _experts(prefix: str, leaf: str, order: list[int]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        old = [model.tensors[f"{prefix}{e}.{leaf}"] for e in order]
        for expert, tensor in enumerate(old):
            model.tensors[f"{prefix}{expert}.{leaf}"] = tensor

    return change


GLM = "model.layers.4."
HINTS: list[tuple[str, Callable[[Model], None], str]] = [
    ("glm-5.2.json", _swap(GLM + "enorm.weight", GLM + "hnorm.weight"), "exchanged its bytes"),
    (
        "glm-5.2.json",
        _swap(
            GLM + "mlp.experts.1.gate_proj.weight", GLM + "mlp.experts.1.up_proj.weight"
        ),
        "exchanged its bytes",
    ),
    ("glm-5.2.json", _halves(GLM + "eh_proj.weight", rows=False), "halves along dim 1"),
    ("glm-5.2.json", _halves(GLM + "mlp.gate.weight", rows=True), ""),
    (
        "glm-5.2.json",
        _halves(GLM + "self_attn.o_proj.weight", rows=True),
        "halves along dim 0",
    ),
    ("mimo-7b.json", _halves("model.mtp_layers.0.input_proj.weight", False), "halves along dim 1"),
    ("k-exaone-236b-a23b.json", _plus_one("mtp.norm.weight"), "after == before + 1"),
    ("k-exaone-236b-a23b.json", _rename("mtp.", "model.mtp."), "differ by the prefix model."),
    ("step-3.5-flash.json", _rename("model.layers.3.", "model.layers.30."), "renamed: model.lay"),
    (
        "glm-5.2.json",
        _experts(GLM + "mlp.experts.", "down_proj.weight", [0, 2, 1]),
        "experts permuted: 0,2,1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fault", "hint"), HINTS)
def test_hints_name_the_fault(
    family: str, fault: Callable[[Model], None], hint: str, tmp_path: Path
) -> None:
    model = base_model(family)
    after = model.copy()
    fault(after)
    report = compare(model, after, tmp_path)
    assert errors(report), "the fault changed nothing"
    assert all(hint in (f.hint or "") for f in errors(report)), [f.hint for f in errors(report)]


def test_layers_written_from_the_wrong_place(tmp_path: Path) -> None:
    model = base_model("mimo-7b.json")
    after = model.copy()
    moved = [n for n in model.tensors if n.startswith("model.layers.2.")]
    for name in moved:
        after.tensors[name] = model.tensors[name.replace("layers.2.", "layers.1.")]
    report = compare(model, after, tmp_path)
    assert said(report) == sorted(("value_mismatch", n) for n in moved)
    hint = "shifted: model.layers.2. hold the bytes of model.layers.1. in the reference"
    assert {f.hint for f in errors(report)} == {hint}


def test_router_bias_rounded_through_bf16(tmp_path: Path) -> None:
    model = base_model("deepseek-v3.json")
    name = "model.layers.4.mlp.gate.e_score_correction_bias"
    spec, data = model.tensors[name]
    values = decode("F32", as_words("F32", data))
    assert values is not None
    after = model.copy()
    words = round_to("BF16", values)
    assert words is not None
    after.tensors[name] = (spec, (words.astype("<u4") << 16).tobytes())
    report = compare(model, after, tmp_path)
    assert said(report) == [("value_mismatch", name)]
    assert errors(report)[0].hint == "every value was rounded through BF16"


def test_signed_zero_and_nan_bits_are_bytes(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    name = model.mtp()[0]
    zero, nan = model.copy(), model.copy()
    zero.data(name, lambda d: d.__setitem__(slice(0, 2), b"\0\0"))
    nan.data(name, lambda d: d.__setitem__(slice(0, 2), b"\xc1\x7f"))
    other_zero, other_nan = zero.copy(), nan.copy()
    other_zero.data(name, lambda d: d.__setitem__(slice(0, 2), b"\0\x80"))
    other_nan.data(name, lambda d: d.__setitem__(slice(0, 2), b"\xc0\x7f"))
    assert said(compare(zero, other_zero, tmp_path / "a")) == [("value_mismatch", name)]
    assert said(compare(nan, other_nan, tmp_path / "b")) == [("value_mismatch", name)]
    same = compare(nan, nan, tmp_path / "c")
    assert same.verdict == "pass"
    assert [f.severity for f in same.findings if f.kind == "not_finite"] == ["note"]


# Switches: strict by default, allowed by name, and never on anyone's word.


def _with_copies(differ: bool) -> tuple[Model, Model]:
    before = base_model("glm-5.2.json")
    embed = before.tensors["model.embed_tokens.weight"]
    before.tensors[GLM + "embed_tokens.weight"] = embed
    before.tensors[GLM + "shared_head.head.weight"] = before.tensors["lm_head.weight"]
    if differ:
        before.data(GLM + "embed_tokens.weight", lambda d: d.__setitem__(0, d[0] ^ 1))
    return before, base_model("glm-5.2.json")


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_copies(differ: bool, added: bool, tmp_path: Path) -> None:
    pair = _with_copies(differ)
    before, after = reversed(pair) if added else pair
    kind = "extra_tensor" if added else "missing_tensor"
    strict = compare(before, after, tmp_path / "strict")
    assert len(errors(strict)) == 2
    allowed = compare(before, after, tmp_path / "allowed", allow=frozenset({"copies"}))
    left = [(kind, GLM + "embed_tokens.weight")] if differ else []
    assert said(allowed) == left
    assert allowed.switches == ("copies",)


def test_tied_head_with_headers_only_goes_by_shape(tmp_path: Path) -> None:
    before = base_model("glm-4.5.json")
    before.config["tie_word_embeddings"] = True
    after = before.copy()
    del after.tensors["lm_head.weight"]
    report = compare(before, after, tmp_path / "a", read_bytes=False)
    assert report.verdict == "pass"
    assert any("bytes not read" in f.message for f in report.findings)
    assert compare(before, after, tmp_path / "b").verdict == "fail", "its bytes do differ"


@pytest.mark.parametrize("tied", [True, False, None])
def test_tied_heads(tied: bool | None, tmp_path: Path) -> None:
    before = base_model("glm-4.5.json")
    before.config["tie_word_embeddings"] = tied
    if tied is None:
        del before.config["tie_word_embeddings"]
    before.tensors["lm_head.weight"] = before.tensors["model.embed_tokens.weight"]
    after = before.copy()
    del after.tensors["lm_head.weight"]
    assert compare(before, after, tmp_path / "a").verdict == ("pass" if tied else "fail")
    assert compare(after, before, tmp_path / "b").verdict == ("pass" if tied else "fail")
    switch = frozenset({"tied-heads"})
    assert compare(before, after, tmp_path / "c", allow=switch).verdict == "pass"
    before.data("lm_head.weight", lambda d: d.__setitem__(0, d[0] ^ 1))
    assert compare(before, after, tmp_path / "d", allow=switch).verdict == "fail"


def _upcast(model: Model, name: str, wider: str) -> None:
    spec, data = model.tensors[name]
    values = decode(spec.dtype, as_words(spec.dtype, data))
    assert values is not None
    cast = values.astype({"F32": "<f4", "F64": "<f8"}[wider])
    model.tensors[name] = (TensorSpec(wider, spec.shape), cast.tobytes())


@pytest.mark.parametrize("wider", ["F32", "F64"])
def test_upcast(wider: str, tmp_path: Path) -> None:
    before = base_model("glm-4.5.json")
    name = before.mtp()[-1]
    after = before.copy()
    _upcast(after, name, wider)
    switch = frozenset({"upcast"})
    assert said(compare(before, after, tmp_path / "a")) == [("dtype_mismatch", name)]
    assert compare(before, after, tmp_path / "b", allow=switch).verdict == "pass"
    assert compare(after, before, tmp_path / "c", allow=switch).verdict == "fail", "a downcast"
    after.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    assert compare(before, after, tmp_path / "d", allow=switch).verdict == "fail"


def _packed(model: Model) -> Model:
    out = model.copy()
    prefixes = {n.split("experts.0.")[0] for n in model.tensors if "experts.0." in n}
    for prefix in prefixes:
        for leaf, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            names = [f"{prefix}experts.{e}.{p}.weight" for e in range(3) for p in parts]
            rows, columns = out.tensors[names[0]][0].shape
            data = b"".join(out.tensors.pop(n)[1] for n in names)
            spec = TensorSpec("BF16", (3, rows * len(parts), columns))
            out.tensors[f"{prefix}experts.{leaf}"] = (spec, data)
    return out


@pytest.mark.parametrize("unpack", [False, True])
def test_expert_layout(unpack: bool, tmp_path: Path) -> None:
    loose = base_model("glm-4.5.json")
    packed = _packed(loose)
    before, after = (packed, loose) if unpack else (loose, packed)
    switch = frozenset({"expert-layout"})
    assert compare(before, after, tmp_path / "a").verdict == "fail"
    assert compare(before, after, tmp_path / "b", allow=switch).verdict == "pass"
    name = next(n for n in after.mtp_names() if "experts" in n)
    after.data(name, lambda d: d.__setitem__(-1, d[-1] ^ 1))
    wrong = compare(before, after, tmp_path / "c", allow=switch)
    assert wrong.verdict == "fail"
    assert len(errors(wrong)) < len(errors(compare(before, after, tmp_path / "d")))


def test_vocabulary_padding(tmp_path: Path) -> None:
    before = base_model("deepseek-v3.json")
    after = before.copy()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        spec, data = after.tensors[name]
        wide = TensorSpec(spec.dtype, (spec.shape[0] + 8, spec.shape[1]))
        after.tensors[name] = (wide, data + bytes(8 * spec.shape[1] * 2))
    switch = frozenset({"vocab-padding"})
    assert len(errors(compare(before, after, tmp_path / "a"))) == 2
    for number, pair in enumerate(((before, after), (after, before))):
        assert compare(*pair, tmp_path / f"b{number}", allow=switch).verdict == "pass"
    after.data("lm_head.weight", lambda d: d.__setitem__(-1, 1))
    assert said(compare(before, after, tmp_path / "c", allow=switch)) == [
        ("shape_mismatch", "lm_head.weight")
    ]


def test_an_unknown_switch_is_refused() -> None:
    with pytest.raises(UsageError, match="copys"):
        Options(allow=frozenset({"copys"}))


# Tiers, manifests, samples.


def _manifest(folder: Path, out: Path) -> Any:
    checkpoint = open_hf(folder)
    write_manifest(take_manifest(checkpoint, folder, "hf", config=checkpoint.config), out)
    return manifest_subject(read_manifest(out))


def test_manifests_reach_l1_on_either_side(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    name = model.mtp()[3]
    wrong = model.copy()
    wrong.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    live = sides.hf(model.write(tmp_path / "live"))
    bad = sides.hf(wrong.write(tmp_path / "bad"))
    saved = _manifest(tmp_path / "live", tmp_path / "live.json")
    saved_bad = _manifest(tmp_path / "bad", tmp_path / "bad.json")
    for before, after in ((saved, live), (live, saved), (saved, saved)):
        report = audit(before, after)
        assert (report.verdict, report.tier) == ("pass", "L1")
        assert audit(before, after, Options(require="L1")).verdict == "pass"
        unmet = audit(before, after, Options(require="L2"))
        assert (unmet.verdict, errors(unmet)[0].kind) == ("error", "tier_not_reached")
    for before, after in ((saved, bad), (live, saved_bad), (saved, saved_bad)):
        report = audit(before, after)
        assert said(report) == [("value_mismatch", name)]


def test_manifests_see_config_and_missing_tensors(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    saved = _manifest(model.write(tmp_path / "a"), tmp_path / "a.json")
    after = model.copy()
    after.config["num_nextn_predict_layers"] = 0
    del after.tensors[model.mtp()[0]]
    report = audit(saved, sides.hf(after.write(tmp_path / "b")))
    assert said(report) == [
        ("config_mismatch", "num_nextn_predict_layers"),
        ("missing_tensor", model.mtp()[0]),
    ]


def test_headers_only_is_l0_and_says_so(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    wrong = model.copy()
    wrong.data(model.mtp()[0], lambda d: d.__setitem__(0, d[0] ^ 1))
    report = compare(model, wrong, tmp_path / "a", read_bytes=False)
    assert (report.verdict, report.tier, report.compared.nbytes) == ("pass", "L0", 0)
    assert report.mtp.status == "present"
    assert compare(model, wrong, tmp_path / "b", read_bytes=False, require="L2").verdict == "error"


def test_sample_reads_all_of_mtp_and_lists_the_rest(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    report = compare(model, model, tmp_path / "a", sample=Sample.parse("1/4"))
    left = set(report.compared.not_read)
    assert left
    assert left <= set(model.trunk())
    assert report.compared.tensors + len(left) == len(model.tensors)
    assert {n for n, s in report.states.items() if s == "not_read"} == left
    assert report.tier == "L0"
    assert compare(model, model, tmp_path / "b", sample=Sample.parse("4/4")).tier == "L2"
    for text in ("0/3", "4/3", "1", "a/b", "1/0", "-1/2"):
        with pytest.raises(UsageError):
            Sample.parse(text)


def test_two_models_with_nothing_in_common_never_pass(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    none = Model(dict(model.config), {})
    assert compare(none, none, tmp_path / "a").verdict == "error"
    assert compare(model, none, tmp_path / "b").verdict == "fail"
    assert compare(none, model, tmp_path / "c").verdict == "fail"


# After training.


def test_structure_counts_changes_and_flags_an_untrained_mtp(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    trained = model.copy()
    for name in model.trunk():
        trained.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    report = compare(model, trained, tmp_path / "a", expect="structure")
    assert report.verdict == "pass"
    assert (
        f"trunk: {len(model.trunk())} of {len(model.trunk())} tensors changed"
        in report.compared.notes
    )
    assert [f.kind for f in report.findings if f.severity == "warning"] == ["mtp_unchanged"]
    for name in model.mtp():
        trained.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    assert "mtp_unchanged" not in {
        f.kind for f in compare(model, trained, tmp_path / "b", expect="structure").findings
    }
    same = compare(model, model, tmp_path / "c", expect="structure")
    assert "no tensor changed" in shown(same)
    del trained.tensors[model.mtp()[0]]
    assert said(compare(model, trained, tmp_path / "d", expect="structure")) == [
        ("missing_tensor", model.mtp()[0])
    ]


def trained(model: Model, leave: Callable[[str], bool]) -> Model:
    """The model after training that left some tensors as they were."""
    after = model.copy()
    for name in model.tensors:
        if not leave(name):
            after.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    return after


def unchanged(before: Model, after: Model, place: Path) -> list[tuple[int | None, str]]:
    report = compare(before, after, place, expect="structure")
    assert report.verdict == "pass", shown(report)
    found = [f for f in report.findings if f.kind == "mtp_unchanged"]
    return [(f.region.index if f.region else None, f.message) for f in found]


def test_each_depth_must_change(tmp_path: Path) -> None:
    before = base_model("step-3.5-flash.json")
    idle = {*before.mtp(1), *before.mtp(2)}
    found = unchanged(before, trained(before, idle.__contains__), tmp_path / "a")
    assert [depth for depth, _ in found] == [1, 2]
    assert "none of the 17 tensors of MTP depth 1 did" in found[0][1]
    assert unchanged(before, trained(before, lambda _: False), tmp_path / "b") == []


def test_a_router_bias_or_a_copy_alone_is_no_training(tmp_path: Path) -> None:
    before = base_model("deepseek-v3.json")
    idle = set(before.mtp())
    bias = next(n for n in idle if n.endswith("e_score_correction_bias"))
    copies = {n for n in idle if n.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert len(copies) == 2
    for number, moved in enumerate(({bias}, copies, {bias, *copies})):
        after = trained(before, (idle - moved).__contains__)
        ((depth, said_),) = unchanged(before, after, tmp_path / str(number))
        assert depth == 0
        assert f"only router biases and copies of root tensors did ({len(moved)})" in said_
    own = trained(before, (idle - {"model.layers.4.enorm.weight"}).__contains__)
    assert unchanged(before, own, tmp_path / "own") == []


def test_what_sampling_left_out_is_not_called_unchanged(tmp_path: Path) -> None:
    before = base_model("glm-5.2.json")
    after = trained(before, lambda n: n not in before.trunk())
    report = compare(before, after, tmp_path, expect="structure", sample=Sample.parse("1/1000000"))
    (one,) = (f for f in report.findings if f.kind == "mtp_unchanged")
    assert "this is the checkpoint itself" not in one.message
    assert "unread" in one.message


def test_a_copy_of_the_trunk_is_seen_after_training(tmp_path: Path) -> None:
    before = base_model("glm-5.2.json")
    after = trained(before, lambda _: False)
    norm = "model.layers.4.shared_head.norm.weight"
    after.tensors[norm] = after.tensors["model.norm.weight"]
    report = compare(before, after, tmp_path / "a", expect="structure")
    assert [f.tensor for f in report.findings if f.kind == "same_as_trunk"] == [norm]
    before.tensors[norm] = before.tensors["model.norm.weight"]
    report = compare(before, after, tmp_path / "b", expect="structure")
    assert "same_as_trunk" not in {f.kind for f in report.findings}, "the reference has it too"


def test_what_one_side_holds_twice_may_go_in_training(tmp_path: Path) -> None:
    """Equality is judged within one side: after training every tensor is new."""
    before = base_model("deepseek-v3.json")
    before.config["tie_word_embeddings"] = True
    before.tensors["lm_head.weight"] = before.tensors["model.embed_tokens.weight"]
    after = trained(before, lambda _: False)
    del after.tensors["lm_head.weight"]
    assert compare(before, after, tmp_path / "a", expect="structure").verdict == "pass"
    assert compare(before, after, tmp_path / "b").verdict == "fail", "the embedding differs"
    back = compare(after, before, tmp_path / "c", expect="structure")
    assert back.verdict == "pass", shown(back)
    before.config["tie_word_embeddings"] = after.config["tie_word_embeddings"] = False
    assert compare(before, after, tmp_path / "d", expect="structure").verdict == "fail"

    before = base_model("deepseek-v3.json")
    after = trained(before, lambda _: False)
    for name in list(after.tensors):
        if name.endswith(("4.embed_tokens.weight", "4.shared_head.head.weight")):
            del after.tensors[name]
    allow = frozenset({"copies"})
    assert compare(before, after, tmp_path / "e", expect="structure").verdict == "fail"
    found = compare(before, after, tmp_path / "f", expect="structure", allow=allow)
    assert found.verdict == "pass", shown(found)
    before.data("model.layers.4.embed_tokens.weight", lambda d: d.__setitem__(0, d[0] ^ 1))
    found = compare(before, after, tmp_path / "g", expect="structure", allow=allow)
    assert said(found) == [("missing_tensor", "model.layers.4.embed_tokens.weight")]


def test_stale_mtp_against_a_base(tmp_path: Path) -> None:
    base = base_model("step-3.5-flash.json")
    trained = base.copy()
    for name in base.trunk():
        trained.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    subject = sides.hf(base.write(tmp_path / "base"))
    after = sides.hf(trained.write(tmp_path / "after"))
    report = audit(after, after, base=subject)
    assert [(f.kind, f.region and f.region.index) for f in errors(report)] == [
        ("stale_mtp", 0), ("stale_mtp", 1), ("stale_mtp", 2),
    ]  # fmt: skip
    assert report.mtp.status == "stale"
    assert audit(subject, subject, base=subject).verdict == "pass", "the trunk did not move either"
    for name in base.mtp(1):
        trained.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    after = sides.hf(trained.write(tmp_path / "after2"))
    assert [f.region and f.region.index for f in errors(audit(None, after, base=subject))] == [0, 2]


# Reference at fault.


def test_an_unreadable_reference_is_an_error_not_a_fail(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    before, after = model.write(tmp_path / "a"), model.write(tmp_path / "b")
    (before / "model.safetensors").write_bytes(b"")
    report = audit(sides.hf(before), sides.hf(after))
    assert (report.verdict, report.tier) == ("error", "none")
    assert report.findings[0].message.startswith("reference: ")
    report = audit(sides.hf(after), sides.hf(before))
    assert report.verdict == "fail"
    assert said(report) == [("unreadable_file", "model.safetensors")]


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    before, after = model.write(tmp_path / "a"), model.write(tmp_path / "b")
    subject = sides.hf(after)
    with (after / "model.safetensors").open("r+b") as file:
        file.truncate((after / "model.safetensors").stat().st_size // 2)
    report = audit(sides.hf(before), subject)
    assert report.verdict == "fail"
    assert {f.kind for f in errors(report)} == {"unreadable_file"}
    assert report.tier == "L0"
    backwards = audit(hf_subject(subject.content), sides.hf(before))  # type: ignore[arg-type]
    assert backwards.verdict == "error"


def test_report_does_not_depend_on_order_or_threads(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    wrong = model.copy()
    for name in model.mtp()[:5]:
        wrong.data(name, lambda d: d.__setitem__(0, d[0] ^ 1))
    backwards = Model(wrong.config, dict(reversed(wrong.tensors.items())), wrong.regions)
    first = compare(model, wrong, tmp_path)
    (tmp_path / "after" / "model.safetensors").unlink()
    place = sides.hf(backwards.write(tmp_path / "after"))
    second = audit(sides.hf(tmp_path / "before"), place, Options(workers=4))
    assert first == second


def test_float_helpers_agree_with_ieee() -> None:
    values = [0.0, -0.0, 1.0, -2.5, 1e-3, 65504.0, 3.4e38]
    data = struct.pack(f"<{len(values)}f", *values)
    decoded = decode("F32", as_words("F32", data))
    assert decoded is not None
    for dtype in ("BF16", "F16"):
        words = round_to(dtype, decoded)
        assert words is not None
        back = decode(dtype, words)
        assert back is not None
        assert round_to(dtype, back).tobytes() == words.tobytes()  # type: ignore[union-attr]
    e4m3 = decode("F8_E4M3", as_words("F8_E4M3", bytes([0x38, 0x7E, 0x7F, 0x01, 0xB8])))
    assert e4m3 is not None
    assert [float(v) for v in e4m3[[0, 1, 3, 4]]] == [1.0, 448.0, 2.0**-9, -1.0]
    assert e4m3[2] != e4m3[2]
    e5m2 = decode("F8_E5M2", as_words("F8_E5M2", bytes([0x3C, 0x7B, 0x7C, 0x7E])))
    assert e5m2 is not None
    assert [float(v) for v in e5m2[:3]] == [1.0, 57344.0, float("inf")]


def test_configs_are_not_shared_between_models() -> None:
    first = base_model("glm-5.2.json")
    first.config["num_hidden_layers"] = 99
    assert copy.deepcopy(base_model("glm-5.2.json").config)["num_hidden_layers"] == 4
