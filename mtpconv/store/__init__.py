"""Checkpoints on disk: HuggingFace folders, torch_dist folders and saved manifests."""
