"""Converting between HuggingFace and torch_dist, both ways, from one plan."""

from mtpconv.convert.hf_to_mcore import HfToMcore, hf2mcore
from mtpconv.convert.mcore_to_hf import McoreToHf, mcore2hf
from mtpconv.convert.outcome import Outcome

__all__ = ["HfToMcore", "McoreToHf", "Outcome", "hf2mcore", "mcore2hf"]
