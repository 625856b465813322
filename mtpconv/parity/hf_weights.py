"""Weights of a HuggingFace folder, straight from the safetensors files, for one module at a time.

`from_pretrained` drops the MTP layers without a word, and it cannot load a single layer. This
reads what a module of transformers asks for by the names on disk. transformers 5 keeps the
experts of a layer packed in two tensors; on disk they are apart or packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.parity.families import Spelling, respelled
from mtpconv.store.content import Files, reading
from mtpconv.store.dequant import Dequantised, HfTensors
from mtpconv.store.fp8_tensors import find_fp8, without_quantisation
from mtpconv.store.hf import HfCheckpoint, open_hf

#: safetensors dtype names to torch's, for the dtypes parity computes with.
TORCH_DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

#: Spellings of the three matrices of an expert on disk: gate, up, down.
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

_OF_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


class HfWeights:
    """Tensors of an HF folder by name, read one by one; block FP8 as the BF16 it stands for.

    Raises: RefusedError for a tensor that is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._stored: HfCheckpoint = open_hf(folder, compare_duplicates=False)
        self.checkpoint: HfTensors = self._stored
        if any(spec.dtype == "F8_E4M3" for spec in self._stored.tensors.values()):
            found = find_fp8(self._stored.tensors, self._stored.config or {}, str(folder))
            self.checkpoint = Dequantised(self._stored, found)
        self._files = Files()

    @property
    def has_fp8(self) -> bool:
        """Whether some weights are stored in FP8."""
        return self.checkpoint is not self._stored

    @property
    def config(self) -> dict[str, Any] | None:
        """config.json as parsed, for weights as they are read: nothing is quantised any more."""
        return None if self._stored.config is None else without_quantisation(self._stored.config)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    @property
    def names(self) -> Iterator[str]:
        """Every tensor name."""
        return iter(self.checkpoint.tensors)

    def read(self, name: str) -> Any:
        """A torch tensor of its own with the stored dtype and bytes."""
        import torch

        spec = self.checkpoint.tensors.get(name)
        if spec is None:
            return self._slice(name)
        dtype = TORCH_DTYPES.get(spec.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"{name} is {spec.dtype}; parity computes with {', '.join(TORCH_DTYPES)}"
            )
        out = np.empty(spec.nbytes, "u1")
        if spec.nbytes:
            reading(self.checkpoint, name).fill(self._files, out.data)
        return torch.from_numpy(out).view(getattr(torch, dtype)).reshape(spec.shape)

    def _slice(self, name: str) -> Any:
        """A matrix of one expert out of the tensor that holds those of all."""
        found = _OF_EXPERT.match(name)
        if found is not None:
            head, expert, part = found.groups()
            packed = head + ("down_proj" if part == "down_proj" else "gate_up_proj")
            if packed in self:
                rows = self.read(packed)[int(expert)]
                return rows if part == "down_proj" else rows.chunk(2)[part == "up_proj"]
        raise RefusedError(f"{self.checkpoint.path}: no tensor {name}, which parity needs")

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def module_state(
    module: Any, weights: HfWeights, prefix: str, spelling: Spelling = ()
) -> dict[str, Any]:
    """Everything a module of transformers needs, as a state dict of CPU tensors.

    The module's tensors lie under `prefix` on disk, respelled; they are cast to its dtypes.

    Raises: RefusedError if a tensor is not there; shapes are left to `load_state_dict`.
    """
    return {
        name: _find(prefix + name, respelled(prefix + name, spelling), weights, wanted.dtype)
        for name, wanted in module.state_dict().items()
    }


def _find(name: str, on_disk: str, weights: HfWeights, dtype: Any) -> Any:
    for candidate in (on_disk, name):
        if candidate in weights:
            return weights.read(candidate).to(dtype)
    head, _, tail = on_disk.rpartition("experts.")
    if head and tail in ("gate_up_proj", "down_proj"):
        for gate, up, down in EXPERT_PARTS:
            parts = (gate, up) if tail == "gate_up_proj" else (down,)
            packed = _packed(weights, f"{head}experts.", parts, dtype)
            if packed is not None:
                return packed
    raise RefusedError(f"{weights.checkpoint.path}: no tensor {on_disk}, which parity needs")


def _packed(weights: HfWeights, prefix: str, parts: Sequence[str], dtype: Any) -> Any:
    """All experts in one tensor, filled in place: they are most of what a layer holds.

    Shape: parts [rows, columns] each; result [experts, parts * rows, columns].
    """
    import torch

    count = 0
    while f"{prefix}{count}.{parts[0]}.weight" in weights:
        count += 1
    if not count:
        return None
    rows, columns = weights.read(f"{prefix}0.{parts[0]}.weight").shape
    packed = torch.empty(count, len(parts), rows, columns, dtype=dtype)
    for expert in range(count):
        for number, part in enumerate(parts):
            packed[expert, number] = weights.read(f"{prefix}{expert}.{part}.weight")
    return packed.flatten(1, 2)
