"""The two sides agree on every family, and the reference agrees with itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.geometry import read_geometry
from mtpconv.parity import hf, mcore, mcore_forward
from tests.parity import checkpoints, configs

pytestmark = pytest.mark.megatron

ALL = configs.WITH_MTP | configs.WITHOUT_MTP


@pytest.mark.parametrize("name", ALL)
def test_both_sides_give_the_same_logits(megatron_cpu: None, tmp_path: Path, name: str) -> None:
    import torch

    from mtpconv.parity import choices

    config = ALL[name]
    checkpoints.need_megatron_for(config)
    checkpoints.write_hf(config, tmp_path / "hf")
    checkpoints.write_mcore(config, tmp_path / "hf", tmp_path / "mcore")
    reference = hf.load_hf(tmp_path / "hf")
    model = mcore.build(config, seed=9)
    mcore.load(model, tmp_path / "mcore")
    tokens = torch.randint(128, (40,), generator=torch.Generator().manual_seed(5))
    with choices.Record(model.settings) as record:
        left = hf.heads(reference, tokens)
    with choices.Settle(model.settings, record.choices, choices.TIE["float32"]) as settle:
        right = mcore_forward.heads(model, tokens)
    depths = read_geometry(config).depths
    assert list(left) == list(right) == ["trunk", *(f"depth {d}" for d in range(depths))]
    # The norm of a delta net divides by states that may be next to nothing.
    near = 5e-4 if model.settings.delta_nets else 5e-5
    for head, logits in left.items():
        assert logits.shape == right[head].shape
        assert logits.std() > 0.5
        assert torch.allclose(logits, right[head], atol=near, rtol=0), head
    assert settle.ties.settled < 0.05 * max(1, settle.ties.rows)


@pytest.mark.parametrize("name", ["deepseek_v3, two depths", "glm4_moe"])
def test_our_own_mtp_reference_equals_that_of_transformers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = checkpoints.write_hf(configs.WITH_MTP[name], tmp_path)
    tokens = torch.arange(30)
    theirs = hf.load_hf(folder)
    assert theirs.reference == "transformers MtpModel"
    logits = hf.heads(theirs, tokens)
    monkeypatch.setattr(hf, "_transformers_mtp", lambda *_: None)
    ours = hf.load_hf(folder)
    assert ours.reference.startswith("own, of ")
    for head, value in hf.heads(ours, tokens).items():
        assert torch.equal(value, logits[head]), head


def test_a_missing_mtp_tensor_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    from mtpconv.errors import RefusedError

    file = checkpoints.write_hf(configs.DEEPSEEK_V3, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RefusedError, match=r"model\.layers\.3\.eh_proj\.weight"):
        hf.load_hf(tmp_path)


def test_a_missing_trunk_tensor_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    from mtpconv.errors import RefusedError

    file = checkpoints.write_hf(configs.LLAMA, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RefusedError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        hf.load_hf(tmp_path)
