"""Small models of several families, in memory, to be damaged and written."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Finding, Report
from mtpconv.audit.options import Options
from mtpconv.synth import shrink
from mtpconv.tensors import ROOT, Region, TensorSpec
from tests.audit import sides
from tests.conftest import ROOT as REPO
from tests.convert.folders import make_hf, tensors_of, write_hf

Tensors = dict[str, tuple[TensorSpec, bytes]]

CONFIGS = REPO / "fixtures" / "configs"
#: One of each way to lay out MTP, with so few layers that a test takes milliseconds.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm-5.2.json": {"num_hidden_layers": 4, "n_routed_experts": 3},
    "deepseek-v3.json": {"num_hidden_layers": 4, "n_routed_experts": 3},
    "glm-4.5.json": {"num_hidden_layers": 4, "n_routed_experts": 3},
    "mimo-7b.json": {"num_hidden_layers": 3},
    "mimo-v2-flash.json": {"num_hidden_layers": 3, "n_routed_experts": 3},
    "k-exaone-236b-a23b.json": {"num_hidden_layers": 3, "num_experts": 3},
    "ernie-4.5-21b-a3b.json": {"num_hidden_layers": 3, "moe_num_experts": 3},
    "longcat-flash-chat.json": {"num_layers": 2, "num_hidden_layers": 2, "n_routed_experts": 3},
    "step-3.5-flash.json": {"num_hidden_layers": 3, "moe_num_experts": 3},
}
_PER_LAYER = ("layer_types", "indexer_types", "mlp_layer_types", "hybrid_layer_pattern")


@dataclass
class Model:
    """Tensors and config; edited freely, then written."""

    config: dict[str, Any]
    tensors: Tensors
    regions: dict[str, Region] = field(default_factory=dict)

    def copy(self) -> Model:
        """An independent copy."""
        return Model(copy.deepcopy(self.config), dict(self.tensors), self.regions)

    def mtp(self, depth: int | None = None) -> list[str]:
        """Names of the MTP tensors."""
        return [
            n
            for n in self.tensors
            if self._region(n).kind == "mtp" and depth in (None, self._region(n).index)
        ]

    def mtp_names(self) -> list[str]:
        """Names of MTP tensors, edited ones included, by their start."""
        starts = {n.split("mlp.")[0] for n, r in self.regions.items() if r.kind == "mtp"}
        return [n for n in self.tensors if n.startswith(tuple(starts))]

    def trunk(self) -> list[str]:
        """Names of the trunk tensors."""
        return [n for n in self.tensors if self._region(n).kind == "trunk"]

    def _region(self, name: str) -> Region:
        return self.regions.get(name, ROOT)

    def data(self, name: str, change: Callable[[bytearray], None]) -> None:
        """Edit the bytes of a tensor."""
        spec, data = self.tensors[name]
        edited = bytearray(data)
        change(edited)
        self.tensors[name] = (spec, bytes(edited))

    def write(self, folder: Path) -> Path:
        """Write as an HF folder with one file."""
        write_hf(folder, self.tensors, self.config)
        if not self.tensors:
            (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        return folder


def base_model(name: str) -> Model:
    """A small model of a family, whole and trained-looking."""
    return _base_model(name).copy()


@cache
def _base_model(name: str) -> Model:
    config = {**shrink(json.loads((CONFIGS / name).read_text())), **FAMILIES[name]}
    config.pop("quantization_config", None)
    for key in _PER_LAYER:
        if isinstance(config.get(key), list):
            config[key] = config[key][: config["num_hidden_layers"]]
    with TemporaryDirectory() as place:
        folder = make_hf(Path(place) / "hf", config, shards=1)
        subject = sides.hf(folder, table=True)
        assert subject.expected is not None
        return Model(config, tensors_of(folder), dict(subject.expected.regions))


def compare(before: Model, after: Model, place: Path, **options: Any) -> Report:
    """Audit one model against another."""
    old, new = before.write(place / "before"), after.write(place / "after")
    return audit(sides.hf(old), sides.hf(new), Options(workers=1, **options))


def alone(model: Model, place: Path, *, table: bool = True, **options: Any) -> Report:
    """Audit one model against its own config."""
    folder = model.write(place / "alone")
    return audit(None, sides.hf(folder, table=table), Options(workers=1, **options))


def errors(report: Report) -> list[Finding]:
    """The findings that fail the audit."""
    return [f for f in report.findings if f.severity == "error"]


def said(report: Report) -> list[tuple[str, str]]:
    """Kind and subject of each error."""
    return sorted((f.kind, f.tensor or f.field or f.prefix or f.file or "") for f in errors(report))


def shown(report: Report) -> str:
    """The findings, for a failing assertion."""
    return "\n".join(f"{f.severity} {f.code} {f.message}" for f in report.findings[:20])
