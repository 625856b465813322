"""Values of findings as plain JSON: whatever a config held, no NaN, no cycle, no surprise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from mtpconv.tensors import TensorSpec

_MAX_DEPTH: Final = 32


def plain_json(value: Any, depth: int = 0) -> Any:
    """The value with JSON types only; NaN and infinities become strings, deep parts `...`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth == _MAX_DEPTH:
        return "..."
    if isinstance(value, TensorSpec):
        return {"dtype": value.dtype, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {str(key): plain_json(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner, depth + 1) for inner in value]
    if isinstance(value, set | frozenset):
        # Sorted: a set has no order, and a report must not change from run to run.
        return sorted((plain_json(inner, depth + 1) for inner in value), key=str)
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def fields(**given: Any) -> dict[str, Any]:
    """An object without the fields that say nothing: None and empty lists."""
    return {
        name: plain_json(value)
        for name, value in given.items()
        if value is not None and value != ()
    }
