"""A config.json as numbers: layers, depths, dims and per-layer facts.

The only place that knows how families spell their configs. The config is read as raw JSON:
transformers' AutoConfig invents `num_nextn_predict_layers = 1` for deepseek_v3 and glm4_moe
when the field is absent, and 0, null and absent must stay three different things here.
"""

from mtpconv.geometry.config import Config, require_int, text_config
from mtpconv.geometry.facts import FACTS, index_sharing
from mtpconv.geometry.kinds import Kind
from mtpconv.geometry.model import DTYPES, EXPERT_FIELDS, MTP_FIELDS, Geometry, read_geometry

__all__ = [
    "DTYPES", "EXPERT_FIELDS", "FACTS", "MTP_FIELDS", "Config", "Geometry", "Kind",
    "index_sharing", "read_geometry", "require_int", "text_config",
]  # fmt: skip
