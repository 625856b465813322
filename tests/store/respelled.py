"""torch_dist checkpoints with other keys or content, as other tools would have written them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mtpconv.store.content import blocks
from mtpconv.store.dist_metadata_writer import write_common, write_config, write_metadata
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.tensors import Box, TensorSpec

#: A tensor with its bytes.
Held = tuple[TensorSpec, bytes]


def respelled(source: Path, target: Path, *changes: tuple[str, str]) -> Path:
    """The same tensors under keys in which each pair's first text became its second."""

    def new(key: str) -> str:
        for old, replacement in changes:
            key = key.replace(old, replacement)
        return key

    return rewritten(source, target, lambda key, held: [(new(key), held)])


def rewritten(
    source: Path,
    target: Path,
    change: Callable[[str, Held], Iterable[tuple[str, Held]]],
    more: Mapping[str, Held] | None = None,
) -> Path:
    """Whatever `change` makes of every tensor, and `more`."""
    checkpoint = open_torch_dist(source)
    target.mkdir()
    with TorchDistWriter(target) as writer:

        def write(key: str, held: Held) -> None:
            spec, data = held
            writer.write(key, spec, Box.whole(spec.shape), iter([memoryview(data)]))

        for key, spec in checkpoint.tensors.items():
            data = b"".join(bytes(b) for b in blocks(checkpoint, key))
            for name, held in change(key, (spec, data)):
                write(name, held)
        for name, held in (more or {}).items():
            write(name, held)
        write_metadata(target, writer.close())
    args = checkpoint.common.get("args", {})
    write_common(target, {"args": args, "checkpoint_version": 3.0, "iteration": 1})
    write_config(target)
    return target
