"""A checkpoint in memory, to be damaged and written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpconv.audit.sides import open_sides
from mtpconv.store.content import Files, blocks
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_writer import index_bytes, make_header, write_shard
from mtpconv.tensors import TensorSpec

INDEX = "model.safetensors.index.json"


@dataclass
class Copy:
    """A checkpoint in memory, to be damaged and written."""

    tensors: dict[str, tuple[TensorSpec, bytes]]
    shard: dict[str, str]
    config: dict[str, Any]
    mtp: tuple[str, ...]
    #: damage done to the files after they are written
    then: list[Callable[[Path], None]] = field(default_factory=list)

    def named(self, *ends: str) -> str:
        """The first tensor, MTP before trunk, whose name ends so. Raises: NotApplicable."""
        for name in (*self.mtp, *self.tensors):
            if name.endswith(ends):
                return name
        raise NotApplicable(f"no tensor ends with {' or '.join(ends)}")

    def one(self) -> str:
        """Any tensor that has bytes, MTP before trunk."""
        return next(n for n in (*self.mtp, *self.tensors) if self.tensors[n][1])

    def edit(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Replace the bytes of a tensor."""
        spec, data = self.tensors[name]
        self.tensors[name] = (spec, change(data))

    def drop(self, *names: str) -> None:
        """Remove tensors. Raises: NotApplicable if there are none."""
        if not names:
            raise NotApplicable("nothing of this kind in the checkpoint")
        for name in names:
            del self.tensors[name]

    def rename(self, old: str, new: str) -> None:
        """Move a tensor to another name."""
        self.tensors[new] = self.tensors.pop(old)
        self.shard[new] = self.shard.pop(old)

    def swap(self, a: str, b: str) -> None:
        """Exchange two tensors."""
        self.tensors[a], self.tensors[b] = self.tensors[b], self.tensors[a]


class NotApplicable(Exception):
    """The checkpoint has nothing that this fault could happen to."""


def read_copy(folder: Path) -> Copy:
    """The whole checkpoint."""
    hf = open_hf(folder)
    with Files() as files:
        tensors = {
            n: (s, b"".join(bytes(b) for b in blocks(hf, n, files))) for n, s in hf.tensors.items()
        }
    config = dict(hf.config or {})
    sides = open_sides(None, folder)
    expected = sides.after.expected
    regions = expected.regions if expected else sides.after.naming.regions(hf.tensors)
    mtp = tuple(n for n in tensors if n in regions and regions[n].kind == "mtp")
    return Copy(tensors, dict(hf.where), config, mtp)


def write_copy(copy: Copy, folder: Path) -> Path:
    """The copy as an HF folder with an index, then the damage to its files."""
    folder.mkdir()
    groups: dict[str, dict[str, TensorSpec]] = {}
    for name, (spec, _) in copy.tensors.items():
        groups.setdefault(copy.shard[name], {})[name] = spec
    headers = {f: make_header(folder / f, g, {"format": "pt"}) for f, g in groups.items()}
    for file, header in headers.items():
        write_shard(folder / file, header, lambda n: iter([memoryview(copy.tensors[n][1])]))
    (folder / INDEX).write_bytes(index_bytes(headers))
    (folder / "config.json").write_text(json.dumps(copy.config, indent=2))
    for damage in copy.then:
        damage(folder)
    return folder
