"""Forward parity: the same tokens through transformers and megatron-core, compared per head."""
