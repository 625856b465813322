from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.errors import RefusedError, UnreadableError, UnsupportedError, UsageError
from mtpconv.parity import runtime
from mtpconv.parity.picture import render_html
from mtpconv.parity.render import render_json, render_text
from mtpconv.parity.report import ParityOptions
from mtpconv.parity.run import run_parity
from tests.parity import checkpoints, configs

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def pair(megatron_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A DeepSeek-V3-like model with two depths on both sides, in bfloat16."""
    base = tmp_path_factory.mktemp("pair")
    checkpoints.write_hf(configs.DEEPSEEK_V3_TWO_DEPTHS, base / "hf", dtype="bfloat16")
    checkpoints.write_mcore(configs.DEEPSEEK_V3_TWO_DEPTHS, base / "hf", base / "mcore")
    return base / "hf", base / "mcore"


@pytest.fixture(scope="module")
def broken(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with the halves of the second depth's projection swapped."""

    def change(live: dict[str, Any]) -> None:
        live["mtp.layers.1.eh_proj.weight"].copy_(live["mtp.layers.1.eh_proj.weight"].roll(32, 1))

    folder = tmp_path_factory.mktemp("broken") / "mcore"
    checkpoints.write_mcore(configs.DEEPSEEK_V3_TWO_DEPTHS, pair[0], folder, change)
    return pair[0], folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streaming_gives_what_the_whole_model_gives(pair: tuple[Path, Path], dtype: str) -> None:
    whole = run_parity(*pair, ParityOptions(dtype=dtype, noise=False))
    streamed = run_parity(*pair, ParityOptions(dtype=dtype, noise=False, stream=True))
    assert streamed.verdict == whole.verdict == "pass"
    for left, right in zip(whole.heads, streamed.heads, strict=True):
        assert left.per_position == right.per_position
        assert left.worst == right.worst
    assert [p.difference for p in whole.points] == [p.difference for p in streamed.points]
    assert whole.memory is None


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_streaming_runs_delta_nets_too(megatron_cpu: None, tmp_path: Path, name: str) -> None:
    config = configs.WITH_MTP[name]
    checkpoints.write_hf(config, tmp_path / "hf")
    checkpoints.write_mcore(config, tmp_path / "hf", tmp_path / "mcore")
    whole = run_parity(tmp_path / "hf", tmp_path / "mcore", ParityOptions(noise=False))
    streamed = run_parity(tmp_path / "hf", tmp_path / "mcore", ParityOptions(stream=True))
    assert streamed.verdict == whole.verdict == "pass"
    assert [h.per_position for h in streamed.heads] == [h.per_position for h in whole.heads]
    memory = streamed.memory
    assert memory is not None
    assert memory.megatron_peak == memory.megatron_largest


@pytest.mark.parametrize("shipped", [True, False])
def test_a_depth_that_no_field_promises(megatron_cpu: None, tmp_path: Path, shipped: bool) -> None:
    """Qwen3-Next has one, Qwen3-Coder-Next has none, and the configs are alike."""
    silent = {k: v for k, v in configs.QWEN3_NEXT.items() if k != "num_nextn_predict_layers"}
    config = configs.QWEN3_NEXT if shipped else silent
    checkpoints.write_hf(config, tmp_path / "hf")
    checkpoints.write_mcore(config, tmp_path / "hf", tmp_path / "mcore")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(silent | {"dtype": "float32"}))
    report = run_parity(tmp_path / "hf", tmp_path / "mcore")
    assert report.verdict == "pass"
    assert [head.head for head in report.heads] == ["trunk", *["depth 0"] * shipped]


def test_mtp_that_published_code_disagrees_on_is_not_run(
    megatron_cpu: None, tmp_path: Path
) -> None:
    checkpoints.write_hf(configs.WITHOUT_MTP["exaone_moe"], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(configs.EXAONE_MOE))
    with pytest.raises(UnsupportedError, match=r"exaone_moe with MTP: .* --drop-mtp") as raised:
        run_parity(tmp_path, tmp_path)
    assert raised.value.exit_code == 3


def test_a_row_within_the_window_is_said(megatron_cpu: None, tmp_path: Path) -> None:
    config = configs.WITHOUT_MTP["exaone_moe"]
    checkpoints.write_hf(config, tmp_path / "hf")
    checkpoints.write_mcore(config, tmp_path / "hf", tmp_path / "mcore")
    short = run_parity(tmp_path / "hf", tmp_path / "mcore", ParityOptions(length=16))
    assert any("not more than the window of 16" in note for note in short.notes)
    usual = run_parity(tmp_path / "hf", tmp_path / "mcore")
    assert "80 random tokens" in usual.tokens


def test_a_row_of_one_chunk_is_said(megatron_cpu: None, tmp_path: Path) -> None:
    checkpoints.write_hf(configs.QWEN3_5_TEXT, tmp_path / "hf")
    checkpoints.write_mcore(configs.QWEN3_5_TEXT, tmp_path / "hf", tmp_path / "mcore")
    short = run_parity(tmp_path / "hf", tmp_path / "mcore", ParityOptions(length=64))
    assert any("64 tokens, one chunk of a gated delta net" in note for note in short.notes)
    usual = run_parity(tmp_path / "hf", tmp_path / "mcore")
    assert "128 random tokens" in usual.tokens
    assert not any("chunk" in note for note in usual.notes)


def test_streaming_holds_one_layer_of_a_side(pair: tuple[Path, Path]) -> None:
    memory = run_parity(*pair, ParityOptions(stream=True)).memory
    assert memory is not None
    size = (pair[0] / "model.safetensors").stat().st_size * 2  # bfloat16 on disk
    assert memory.reference_peak == memory.reference_largest < size / 3
    assert memory.megatron_peak == memory.megatron_largest < size / 3
    assert memory.process_peak > memory.megatron_peak


def test_streaming_names_the_fault(broken: tuple[Path, Path]) -> None:
    report = run_parity(*broken, ParityOptions(stream=True))
    assert [head.passed for head in report.heads] == [True, True, False]
    assert report.fault is not None
    assert report.fault.message == "depth 1, after eh_proj: halves of eh_proj are swapped"
    assert report.fault.tensors == ("mtp.layers.1.eh_proj.weight",)


def test_a_fault_shows_in_bfloat16_too(broken: tuple[Path, Path]) -> None:
    report = run_parity(*broken, ParityOptions(dtype="bfloat16"))
    assert [head.passed for head in report.heads] == [True, True, False]
    assert report.fault is not None
    assert "halves of eh_proj are swapped" in report.fault.message


def test_bfloat16_passes_where_it_should(pair: tuple[Path, Path]) -> None:
    report = run_parity(*pair, ParityOptions(dtype="bfloat16", rows=2))
    assert report.verdict == "pass"
    for head in report.heads:
        assert head.limits.source == "measured noise"
        assert len(head.per_position) == 2


def test_limits_can_be_given(pair: tuple[Path, Path]) -> None:
    report = run_parity(*pair, ParityOptions(max_abs=1e-9))
    assert report.verdict == "fail"
    assert report.heads[0].limits.source == "given"
    assert run_parity(*pair, ParityOptions(mean_abs=1.0)).verdict == "pass"


def test_the_text_has_a_line_for_every_head(broken: tuple[Path, Path]) -> None:
    text = render_text(run_parity(*broken))
    lines = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert lines["trunk"].endswith("ok")
    assert lines["depth 0"].endswith("ok")
    assert "DIFFERS at 62 of 62 positions, most at row 0, position" in lines["depth 1"]
    assert "differs first: depth 1, after eh_proj: halves of eh_proj are swapped" in text
    assert text.splitlines()[-1].startswith("FAIL")


def test_the_json_says_the_same(broken: tuple[Path, Path]) -> None:
    report = run_parity(*broken)
    value = json.loads(render_json(report))
    assert value["verdict"] == "fail"
    assert value["exit_code"] == 1
    assert [head["head"] for head in value["heads"]] == ["trunk", "depth 0", "depth 1"]
    assert value["fault"]["message"].startswith("depth 1")
    assert value["versions"].keys() >= {"torch", "transformers", "megatron-core"}


def test_the_picture_is_one_file_without_links(broken: tuple[Path, Path]) -> None:
    html = render_html(run_parity(*broken))
    assert html.count("<svg") == 4  # layers, and three heads
    assert "layer 2: attention" in html
    assert "http" not in html
    assert "<script" not in html


def test_numbers_that_are_not_numbers_fail(megatron_cpu: None, tmp_path: Path) -> None:
    def change(live: dict[str, Any]) -> None:
        live["mtp.layers.0.hnorm.weight"][3] = float("nan")

    checkpoints.write_hf(configs.DEEPSEEK_V3, tmp_path / "hf")
    checkpoints.write_mcore(configs.DEEPSEEK_V3, tmp_path / "hf", tmp_path / "mcore", change)
    report = run_parity(tmp_path / "hf", tmp_path / "mcore")
    assert [head.passed for head in report.heads] == [True, False]
    assert report.fault is not None
    assert "depth 0, after hnorm: hnorm holds 1 values that are not numbers" in report.fault.message
    assert json.loads(render_json(report))["heads"][1]["max_abs"] == "nan"
    assert "<svg" in render_html(report)


def test_what_a_run_could_not_show_is_said(dsa: None, tmp_path: Path) -> None:
    config = configs.GLM_MOE_DSA
    checkpoints.write_hf(config, tmp_path / "hf")
    checkpoints.write_mcore(config, tmp_path / "hf", tmp_path / "mcore")
    short = run_parity(tmp_path / "hf", tmp_path / "mcore", ParityOptions(length=8))
    notes = " ".join(short.notes)
    assert "not more than index_topk 8" in notes
    assert "no padding rows" in notes
    assert "ReLU" in notes
    assert "epsilon 1e-06 on both sides" in notes
    usual = run_parity(tmp_path / "hf", tmp_path / "mcore")
    assert "72 random tokens" in usual.tokens
    assert "index_topk" not in " ".join(usual.notes)


def test_prompts_need_a_tokenizer(pair: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a prompt\n")
    with pytest.raises(UnsupportedError, match=r"no tokenizer\.json"):
        run_parity(*pair, ParityOptions(prompts=prompts))


def test_prompts_are_tokenised_with_the_checkpoints_tokenizer(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "hf"
    shutil.copytree(pair[0], folder)
    words = {word: number for number, word in enumerate("? one two three four five".split())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two three four\n\nfive four three two one\n")
    report = run_parity(folder, pair[1], ParityOptions(prompts=prompts))
    assert report.verdict == "pass"
    assert report.tokens == "2 prompts of prompts.txt"
    assert [len(row) for row in report.heads[0].per_position] == [4, 5]
    assert [len(row) for row in report.heads[2].per_position] == [2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ParityOptions(length=2), "need at least 4"),
        (ParityOptions(length=257), "max_position_embeddings is 256"),
        (ParityOptions(dtype="float16"), "not one of float32, bfloat16"),
        (ParityOptions(device="tpu"), "not one of auto, cpu, cuda"),
    ],
)
def test_bad_options_are_refused(
    pair: tuple[Path, Path], options: ParityOptions, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run_parity(*pair, options)


def test_cuda_is_asked_for_in_vain(pair: tuple[Path, Path]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UnsupportedError, match="sees no CUDA device"):
        run_parity(*pair, ParityOptions(device="cuda"))


def test_an_old_megatron_says_what_it_needs(megatron_cpu: None, tmp_path: Path) -> None:
    if runtime.megatron_version() >= (0, 19):
        pytest.skip("this megatron-core has sparse attention")
    checkpoints.write_hf(configs.GLM_MOE_DSA, tmp_path)
    with pytest.raises(UnsupportedError, match=r"needs megatron-core 0\.19 or newer") as raised:
        run_parity(tmp_path, tmp_path)
    assert raised.value.exit_code == 3


def test_a_family_that_parity_does_not_know(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other", "num_hidden_layers": 1}')
    (tmp_path / "model.safetensors").write_bytes((pair[0] / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedError, match="does not know model_type 'other'"):
        run_parity(tmp_path, pair[1])


def test_a_torch_dist_folder_without_the_depths_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    trunk = configs.DEEPSEEK_V3_TWO_DEPTHS | {"num_nextn_predict_layers": 1}
    checkpoints.write_mcore(trunk, pair[0], tmp_path)
    with pytest.raises(RefusedError, match=r"not stored, first mtp\.layers\.1\."):
        run_parity(pair[0], tmp_path)


def test_a_folder_that_is_no_checkpoint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        run_parity(tmp_path, pair[1])
    with pytest.raises(UnreadableError):
        run_parity(pair[0], tmp_path)
