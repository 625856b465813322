"""The families in tests: their releases as small configs, and what no release of theirs shows."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpconv.geometry import EXPERT_FIELDS, read_geometry
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table_reader import find_table, table_names
from mtpconv.synth import fewer, shrink, synth
from tests.conftest import ROOT

CONFIGS = ROOT / "fixtures" / "configs"

CONVERTED = [n for n in table_names() if find_table(n).converts]
NOT_CONVERTED = [n for n in table_names() if not find_table(n).converts]

#: Config fields with which a family uses the rows that none of its pinned releases uses.
UNRELEASED: dict[str, dict[str, Any]] = {
    "bailing_moe_v2": {"num_nextn_predict_layers": 1, "use_qkv_bias": True},
    "ernie4_5_moe": {"tie_word_embeddings": False},
    "glm4_moe_lite": {"q_lora_rank": None},
    "kimi_k2": {"num_nextn_predict_layers": 1, "q_lora_rank": None},
    "nemotron_h": {"hybrid_override_pattern": "M*E-", "num_hidden_layers": 4},
    "qwen3": {"attention_bias": True, "tie_word_embeddings": False},
    "qwen3_moe": {"attention_bias": True, "mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
}


@dataclass(frozen=True)
class Variant:
    """One way a checkpoint of a family can look."""

    family: str
    label: str
    config: dict[str, Any]
    #: names that tell spellings apart, as in the releases of the tables
    present: Collection[str] | None = None

    def plan(self) -> Plan:
        """All that such a checkpoint holds."""
        return make_plan(self.config, find_table(self.family), self.present)

    def write(self, folder: Path, *, shards: int = 3) -> Path:
        """A seeded HF folder of it."""
        synth(self.plan(), folder, shards=shards)
        return folder


def variants(family: str) -> list[Variant]:
    """The releases of a family in BF16 and what they leave out; with MTP before without."""
    table = find_table(family)
    found = []
    for label, entry in table.releases.items():
        config = json.loads((CONFIGS / entry["config"]).read_text(encoding="utf-8"))
        config.pop("quantization_config", None)
        found.append(Variant(family, label, config, entry.get("present")))
    if family in UNRELEASED:
        found.append(Variant(family, "unreleased", found[0].config | UNRELEASED[family]))
    return sorted(found, key=lambda v: not read_geometry(v.config, table.mtp_default).depths)


def small(variant: Variant) -> Variant:
    """The same layers and depths, under their own numbers, with small widths and two experts."""
    config = shrink(variant.config)
    for part in (config, config.get("text_config", {})):
        part.update({field: 2 for field in EXPERT_FIELDS if part.get(field)})
    return replace(variant, config=config)


def distinct(family: str) -> list[Variant]:
    """The small variants of a family, without those that say the same at that size."""
    found: list[Variant] = []
    for variant in map(small, variants(family)):
        if (variant.config, variant.present) not in [(v.config, v.present) for v in found]:
            found.append(variant)
    return found


def fewest_layers(variant: Variant, widths: Mapping[str, int] | None = None) -> Variant:
    """So few layers, and two experts, that every row of the table is still there."""
    config = variant.config if widths is None else shrink(variant.config, widths)
    whole = replace(variant, config=fewer(config, experts=2))
    wanted = rows_of(whole.plan())
    for layers in range(1, whole.plan().geometry.layers + 1):
        cut = replace(variant, config=fewer(whole.config, layers=layers))
        if rows_of(cut.plan()) == wanted:
            return cut
    raise AssertionError(f"{variant.label}: some rows need all layers")


def rows_of(plan: Plan) -> set[tuple[str, str, str]]:
    """Rows of the table that a plan uses, apart for trunk and MTP."""
    return {(s.region.kind, s.row.block, s.row.key) for s in plan.steps}
