"""Converting between HuggingFace and torch_dist, both ways, from one plan."""

from mtpconv.convert.hf_to_mcore import hf2mcore
from mtpconv.convert.hf_to_mcore_plan import HfToMcore
from mtpconv.convert.mcore_to_hf import mcore2hf
from mtpconv.convert.mcore_to_hf_plan import McoreToHf
from mtpconv.convert.outcome import Outcome

__all__ = ["HfToMcore", "McoreToHf", "Outcome", "hf2mcore", "mcore2hf"]
