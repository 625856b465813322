"""Rows beyond the vocabulary: zeros in, cut out again, and never cut if they hold numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.cli.app import app
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.convert.hf_to_mcore_plan import plan_hf2mcore
from mtpconv.convert.verify import verify_digests
from mtpconv.errors import RefusedError
from mtpconv.store.content import blocks
from mtpconv.store.torch_dist import open_torch_dist
from tests.convert.folders import file_hashes, make_hf, overwrite, tensors_of
from tests.mapping.toy import config

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def padded(tmp_path: Path, multiple: int, **changes: Any) -> tuple[Path, Path]:
    hf = make_hf(tmp_path / "hf", config(**changes))
    hf2mcore(hf, tmp_path / "mcore", pad_vocab=multiple)
    return hf, tmp_path / "mcore"


@pytest.mark.parametrize("tied", [False, True])
def test_zero_rows_come_and_go(tmp_path: Path, tied: bool) -> None:
    hf, mcore = padded(tmp_path, 48, vocab_size=70, tie_word_embeddings=tied)
    stored = open_torch_dist(mcore)
    names = {EMBEDDING: "model.embed_tokens.weight"} | ({} if tied else {HEAD: "lm_head.weight"})
    for key, name in names.items():
        spec, raw = tensors_of(hf)[name]
        assert stored.tensors[key].shape == (96, *spec.shape[1:])
        padding = bytes(stored.tensors[key].nbytes - spec.nbytes)
        assert b"".join(map(bytes, blocks(stored, key))) == raw + padding
    assert (HEAD in stored.tensors) is not tied
    args = stored.common["args"]
    assert (args["vocab_size"], args["padded_vocab_size"]) == (70, 96)
    assert args["make_vocab_size_divisible_by"] == 32
    mcore2hf(mcore, tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_a_vocabulary_that_fits_is_left_alone(tmp_path: Path) -> None:
    _, mcore = padded(tmp_path, 32, vocab_size=64)
    assert open_torch_dist(mcore).tensors[EMBEDDING].shape[0] == 64


@pytest.mark.parametrize(("rows", "said"), [(96, []), (1200, ["1,200 rows for 1,190 tokens"])])
def test_padding_is_said(tmp_path: Path, rows: int, said: list[str]) -> None:
    hf = make_hf(tmp_path / "hf", config(vocab_size=min(rows, 1190)))
    done = hf2mcore(hf, tmp_path / "mcore", pad_vocab=48, dry_run=True)
    assert len(done.notes) == len(said)
    assert all(text in note for text, note in zip(said, done.notes, strict=True))


def test_padding_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = make_hf(tmp_path / "hf", config(vocab_size=64))

    def damage(*rest: Any, **options: Any) -> None:
        checkpoint = open_torch_dist(tmp_path / ".mcore.partial/target")
        (chunk,) = checkpoint.chunks(HEAD)
        assert isinstance(chunk.file, Path)
        raw = bytearray(chunk.file.read_bytes())
        raw[chunk.start + checkpoint.tensors[HEAD].nbytes - 1] ^= 1
        chunk.file.write_bytes(raw)
        verify_digests(*rest, **options)

    monkeypatch.setattr("mtpconv.convert.hf_to_mcore.verify_digests", damage)
    with pytest.raises(RefusedError, match=r"padding of lm_head\.weight does not read back"):
        hf2mcore(hf, tmp_path / "mcore", pad_vocab=48)
    assert not (tmp_path / "mcore").exists()


def test_disk_is_reserved_for_padding(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(vocab_size=64))
    plain, grown = plan_hf2mcore(hf).disk, plan_hf2mcore(hf, pad_vocab=1000).disk
    row = tensors_of(hf)["lm_head.weight"][0].nbytes // 64
    assert grown - plain == 2 * (1000 - 64) * row


def test_rows_that_hold_numbers_are_not_cut(tmp_path: Path) -> None:
    _, mcore = padded(tmp_path, 48, vocab_size=70)
    stored = open_torch_dist(mcore)
    data = bytearray(b"".join(map(bytes, blocks(stored, HEAD))))
    data[-1] = 0x3F
    overwrite(mcore, HEAD, bytes(data))
    with pytest.raises(RefusedError, match=r"lm_head\.weight: 26 rows beyond .* are not zero"):
        mcore2hf(mcore, tmp_path / "back")


@pytest.mark.parametrize("stage", [".", "release"])
def test_printed_args_are_those_of_the_stored_rows(
    tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, mcore = padded(tmp_path, 512, vocab_size=70)
    said = open_torch_dist(mcore).common["args"]
    with pytest.raises(SystemExit) as stop:
        app(["args", str(mcore / stage), "--format", "namespace"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert said["padded_vocab_size"] == 512
    for name in ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"):
        assert f"args.{name} = {said[name]}" in lines
    assert "args.params_dtype = torch.bfloat16" in lines


def test_args_that_are_not_the_whole_model_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {**config(), "dtype": "float64"}
    (tmp_path / "config.json").write_text(json.dumps(made))
    for form in ("flags", "yaml", "namespace"):
        with pytest.raises(SystemExit) as stop:
            app(["args", str(tmp_path / "config.json"), "--format", form])
        said = capsys.readouterr()
        assert (stop.value.code, said.out) == (3, "")
        assert "Megatron cannot be told: " in said.err
