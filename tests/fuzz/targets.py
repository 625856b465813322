"""What the fuzzers feed: each target takes bytes and must raise nothing but documented errors.

Inputs are written into a folder where the reader expects them, beside sound files, so that the
fuzzer gets past the first check.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.errors import MtpconvError
from mtpconv.mapping.check import check, check_plan, own_table
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table, parse_table
from mtpconv.store.content import blocks
from mtpconv.store.manifest import read_manifest
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.synth import synth

CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
    "n_routed_experts": 1, "n_shared_experts": 1, "num_experts_per_tok": 1,
    "first_k_dense_replace": 0, "hidden_size": 4, "intermediate_size": 4,
    "moe_intermediate_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
    "q_lora_rank": 2, "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
    "v_head_dim": 2, "vocab_size": 8, "dtype": "bfloat16", "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "tie_word_embeddings": False,
}  # fmt: skip


class Targets:
    """The targets, with the sound checkpoints they damage."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.hf = place / "hf"
        plan = make_plan(CONFIG, find_table("deepseek_v3"))
        synth(plan, self.hf, shards=2)
        hf2mcore(self.hf, place / "mcore")
        self.mcore = place / "mcore" / "release"
        self.distcp = next(self.mcore.glob("*.distcp"))
        self.shard = sorted(self.hf.glob("*.safetensors"))[0]
        shutil.copytree(self.hf, place / "w_hf")
        shutil.copytree(place / "mcore", place / "w_mcore")

    def seeds(self) -> Mapping[str, bytes]:
        """A sound input for every target."""
        return {
            "header": self.shard.read_bytes(),
            "index": (self.hf / "model.safetensors.index.json").read_bytes(),
            "config": json.dumps(CONFIG).encode(),
            "metadata": (self.mcore / ".metadata").read_bytes(),
            "common": (self.mcore / "common.pt").read_bytes(),
            "record": self.distcp.read_bytes(),
            "manifest": (self.place / "mcore/hf_source/manifest.json").read_bytes(),
            "table": (find_table("deepseek_v3").path).read_bytes(),
        }

    def run(self, name: str, data: bytes) -> None:
        """Feed one input; any exception but a documented one escapes."""
        target: Callable[[bytes], None] = getattr(self, f"_{name}")
        with suppress(MtpconvError):
            target(data)

    def _in_hf(self, name: str, data: bytes) -> None:
        path = self.place / "w_hf" / name
        path.write_bytes(data)
        try:
            sides = open_sides(self.hf, path.parent)
            audit(sides.before, sides.after)
            alone = open_sides(None, path.parent)
            assert audit(None, alone.after).verdict in ("pass", "fail", "error")
        finally:
            path.write_bytes((self.hf / name).read_bytes())

    def _header(self, data: bytes) -> None:
        self._in_hf(self.shard.name, data)

    def _index(self, data: bytes) -> None:
        self._in_hf("model.safetensors.index.json", data)

    def _config(self, data: bytes) -> None:
        self._in_hf("config.json", data)

    def _in_mcore(self, name: str, data: bytes) -> None:
        path = self.place / "w_mcore" / "release" / name
        path.write_bytes(data)
        try:
            stored = open_torch_dist(path.parent)
            for key in list(stored.tensors)[:50]:
                for _ in blocks(stored, key):
                    pass
            sides = open_sides(self.hf, self.place / "w_mcore")
            audit(sides.before, sides.after)
        finally:
            path.write_bytes((self.mcore / name).read_bytes())

    def _metadata(self, data: bytes) -> None:
        self._in_mcore(".metadata", data)

    def _common(self, data: bytes) -> None:
        self._in_mcore("common.pt", data)

    def _record(self, data: bytes) -> None:
        self._in_mcore(self.distcp.name, data)

    def _manifest(self, data: bytes) -> None:
        path = self.place / "manifest.json"
        path.write_bytes(data)
        read_manifest(path)

    def _table(self, data: bytes) -> None:
        path = self.place / "table.toml"
        path.write_bytes(data)
        check(parse_table(path), CONFIG)
        check_plan(make_plan(CONFIG, own_table(path)))  # as a conversion with --mapping does


NAMES = ("header", "index", "config", "metadata", "common", "record", "manifest", "table")


def make_targets() -> Targets:
    """Targets in a temporary folder that lives as long as the process."""
    return Targets(Path(tempfile.mkdtemp(prefix="mtpconv-fuzz-")))
