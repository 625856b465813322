"""What Megatron saves with `singleton_local_shards`: gate and up under keys of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.parity import mcore, runtime
from tests.convert.folders import file_hashes, make_hf
from tests.parity import configs

pytestmark = pytest.mark.megatron

MODELS = {"deepseek_v3": configs.DEEPSEEK_V3, "glm4_moe": configs.GLM4_MOE}


@pytest.mark.parametrize("model", MODELS)
def test_the_same_files_come_back(megatron_cpu: None, tmp_path: Path, model: str) -> None:
    from megatron.core import dist_checkpointing

    config = {**MODELS[model], "dtype": "float32", "moe_layer_freq": 1}
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore", layout="local")
    saved = tmp_path / "later" / "iter_0000001"
    saved.mkdir(parents=True)
    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": True}
    with runtime.quiet():
        live = mcore.build(config)
        mcore.load(live, tmp_path / "mcore" / "release")
        mcore.set_dialect(live, "te")
        state = live.module.sharded_state_dict(metadata=metadata)
        dist_checkpointing.save(state, str(saved), content_metadata=metadata)
    done = mcore2hf(tmp_path / "later", tmp_path / "back", like=hf)
    assert done.layout == "singleton_local_shards"
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    sides = open_sides(hf, tmp_path / "later")
    report = audit(sides.before, sides.after)
    assert not [f for f in report.findings if f.tensor]
