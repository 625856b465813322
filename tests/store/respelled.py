"""torch_dist checkpoints with other keys, as other tools would have written them."""

from __future__ import annotations

from pathlib import Path

from mtpconv.store.content import blocks
from mtpconv.store.dist_metadata_writer import write_common, write_config, write_metadata
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.tensors import Box


def respelled(source: Path, target: Path, *changes: tuple[str, str]) -> Path:
    """The same tensors under keys in which each pair's first text became its second."""
    checkpoint = open_torch_dist(source)
    target.mkdir()
    with TorchDistWriter(target) as writer:
        for key, spec in checkpoint.tensors.items():
            new = key
            for old, replacement in changes:
                new = new.replace(old, replacement)
            data = b"".join(bytes(b) for b in blocks(checkpoint, key))
            writer.write(new, spec, Box.whole(spec.shape), iter([memoryview(data)]))
        write_metadata(target, writer.close())
    write_common(target, {"args": {}, "checkpoint_version": 3.0, "iteration": 1})
    write_config(target)
    return target
