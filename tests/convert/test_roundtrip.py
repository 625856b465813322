"""HF -> Megatron -> HF gives the same files back; laws over random geometries."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.convert import hf2mcore, mcore2hf, record_files
from mtpconv.errors import UsageError
from mtpconv.mapping.layouts import layout_of
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.synth import shrink
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_empty_shard, write_hf
from tests.mapping.toy import config, configs

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"


def published(name: str, **changes: Any) -> dict[str, Any]:
    """A published config with small widths and few experts; layer numbers stay real."""
    return {**shrink(json.loads((CONFIGS / name).read_text())), "n_routed_experts": 2, **changes}


@pytest.mark.parametrize(
    ("name", "layer"), [("glm-5.2.json", 78), ("glm-5.1.json", 78), ("deepseek-v3.json", 61)]
)
def test_real_layer_numbers_and_every_file_hash(tmp_path: Path, name: str, layer: int) -> None:
    raw = published(name)
    raw.pop("quantization_config", None)
    hf = make_hf(tmp_path / "hf", raw)
    there = hf2mcore(hf, tmp_path / "mcore")
    assert there.verified
    assert there.mtp_depths == 1
    assert any(f"model.layers.{layer}.eh_proj" in n for n in tensors_of(hf))
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert back.unchanged == back.tensors == len(tensors_of(hf))
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


LAYOUTS = st.sampled_from(
    ["training", "local", "canonical", "stacked_experts", "stacked_experts,mtp_model_layer"]
)


@settings(max_examples=15)
@given(raw=configs(), layout=LAYOUTS, seed=st.integers(0, 3), shards=st.integers(1, 4))
def test_law_round_trip_over_random_geometries(
    raw: dict[str, Any], layout: str, seed: int, shards: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        hf = make_hf(root / "hf", raw, seed=seed, shards=shards)
        hf2mcore(hf, root / "mcore", layout=layout)
        mcore2hf(root / "mcore", root / "back")
        assert file_hashes(root / "back") == file_hashes(hf)


def test_stacked_layers_round_trip(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config("deepseek_v3", first_k_dense_replace=0))
    done = hf2mcore(hf, tmp_path / "mcore")
    assert done.layout == layout_of(["stacked_layers", "stacked_experts"]).name
    keys = open_torch_dist(tmp_path / "mcore").tensors
    assert keys["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (3, 4, 8, 8)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_the_files_do_not_depend_on_the_number_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "FILE_LIMIT", 2000)
    hf = make_hf(tmp_path / "hf", config(), shards=5)
    for verify in (True, False):
        found = []
        for jobs in (1, 2, 5):
            mcore, back = tmp_path / f"mcore{jobs}{verify}", tmp_path / f"back{jobs}{verify}"
            hf2mcore(hf, mcore, jobs=jobs, verify=verify)
            mcore2hf(mcore, back, jobs=jobs, verify=verify)
            assert len(list(mcore.rglob("*.distcp"))) >= 5
            assert file_hashes(back) == file_hashes(hf)
            found.append(file_hashes(mcore))
        assert found[0] == found[1] == found[2]


def test_iteration_folder_and_latest_file(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "a", iteration=7)
    assert (tmp_path / "a/latest_checkpointed_iteration.txt").read_text() == "7"
    assert (tmp_path / "a/iter_0000007/.metadata").is_file()
    hf2mcore(hf, tmp_path / "b")
    assert (tmp_path / "b/latest_checkpointed_iteration.txt").read_text() == "release"
    for source in ("a", "a/iter_0000007", "b", "b/release"):
        mcore2hf(tmp_path / source, tmp_path / "back", overwrite=True)
        assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_an_iteration_that_no_tracker_can_name(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    with pytest.raises(UsageError, match="--iteration 1000000000000000000: must be from 0 to 9"):
        hf2mcore(hf, tmp_path / "mcore", iteration=10**18)
    assert not (tmp_path / "mcore").exists()
    hf2mcore(hf, tmp_path / "mcore", iteration=10**18 - 1)
    assert mcore2hf(tmp_path / "mcore", tmp_path / "back").verified


def test_tensors_that_stand_in_two_files_are_counted_once(tmp_path: Path) -> None:
    tensors = tensors_of(make_hf(tmp_path / "plain", config()))
    hf = write_hf(tmp_path / "hf", tensors, config())
    shutil.copy(hf / "model.safetensors", hf / "consolidated.safetensors")
    there = hf2mcore(hf, tmp_path / "mcore")
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert (back.tensors, back.unchanged, back.mtp_tensors) == (
        len(tensors), len(tensors), there.mtp_tensors
    )  # fmt: skip
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_irregular_shards_order_metadata_and_nested_files(tmp_path: Path) -> None:
    """Names of shards, an empty one, header order, metadata, a separate mtp.safetensors, code."""
    raw = config()
    tensors = tensors_of(make_hf(tmp_path / "plain", raw))
    names = sorted(tensors, key=lambda n: (hash(n) % 7, n))
    hf = write_hf(
        tmp_path / "hf",
        {n: tensors[n] for n in names},
        raw,
        shard_of={
            n: "mtp.safetensors" if ".layers.3." in n else f"part-{len(n) % 2}.safetensors"
            for n in names
        },
        metadata={"format": "pt", "note": "ünïcode"},
    )
    (hf / "inference").mkdir()
    (hf / "inference" / "model.py").write_text("print('never run')\n")
    (hf / "tokenizer.json").write_bytes(b"\x00\xff not json")
    write_empty_shard(hf)
    hf2mcore(hf, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_copies_that_differ_are_carried_and_come_back(tmp_path: Path) -> None:
    raw = config("deepseek_v3")
    tensors = tensors_of(make_hf(tmp_path / "plain", raw))
    head = "model.layers.3.shared_head.head.weight"
    spec, data = tensors[head]
    assert data == tensors["lm_head.weight"][1]
    hf = write_hf(tmp_path / "hf", {**tensors, head: (spec, data[::-1])}, raw)
    done = hf2mcore(hf, tmp_path / "mcore")
    assert done.carried == (head,)
    assert any("carried" in n for n in done.notes)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_like_takes_the_original_folder_or_the_saved_one(tmp_path: Path) -> None:
    """A checkpoint that Megatron saved later has no hf_source beside it."""
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    (tmp_path / "later").mkdir()
    (tmp_path / "mcore/release").rename(tmp_path / "later/iter_0000009")
    for number, like in enumerate((hf, tmp_path / "mcore", tmp_path / "mcore/hf_source")):
        back = tmp_path / f"back{number}"
        mcore2hf(tmp_path / "later/iter_0000009", back, like=like)
        assert file_hashes(back) == file_hashes(hf)


def test_like_with_config_alone_makes_shards_of_its_own(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config("deepseek_v3"))
    hf2mcore(hf, tmp_path / "mcore")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((hf / "config.json").read_bytes())
    mcore2hf(tmp_path / "mcore", tmp_path / "back", like=bare)
    assert tensors_of(tmp_path / "back") == tensors_of(hf)
    import safetensors

    with safetensors.safe_open(tmp_path / "back/model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(tensors_of(hf))


def test_dry_run_writes_nothing_and_says_what_it_needs(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    planned = hf2mcore(hf, tmp_path / "mcore", dry_run=True)
    assert planned.dry_run
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    hf2mcore(hf, tmp_path / "mcore")
    used = sum(p.stat().st_size for p in (tmp_path / "mcore").rglob("*") if p.is_file())
    assert used <= planned.disk
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back", dry_run=True)
    assert not (tmp_path / "back").exists()
    assert back.disk >= sum(p.stat().st_size for p in hf.iterdir())


def test_a_plan_expanded_by_hand_agrees_with_the_written_keys(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore", layout="canonical")
    plan = make_plan(config(), find_table("glm_moe_dsa"))
    assert set(open_torch_dist(tmp_path / "mcore").tensors) == {s.key for s in plan.steps}
