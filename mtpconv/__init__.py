"""Convert checkpoints between HuggingFace and Megatron-Core without losing the MTP module."""

__version__ = "0.1.0"
