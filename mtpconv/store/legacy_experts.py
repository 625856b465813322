"""All experts of a rank in one tensor, as Megatron's first grouped GEMM held them.

Source: megatron-core 0.16.1 transformer/moe/experts.py `GroupedMLP`, read 2026-11-29: `weight1` is
laid out as [experts, hidden, rows of linear_fc1], whatever its shape says, `weight2` as
[experts, columns of linear_fc2, hidden]: both are transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.legacy_file import Placed

_PACKED = re.compile(r"mlp\.experts\.weight([12])$")


def experts_apart(
    held: Mapping[str, Placed], ranks: int, args: Mapping[str, Any], where: str
) -> dict[str, Placed]:
    """What a rank holds, packed experts one by one; `ranks` share all experts.

    Raises: UnsupportedError if args do not say how many there are; UnreadableError if the
    tensor has another size.
    """
    found = {}
    for name, placed in held.items():
        packed = _PACKED.search(name)
        if packed is None:
            found[name] = placed
        else:
            found.update(_apart(name, placed, int(packed[1]), ranks, args, where))
    return found


def _apart(
    name: str, placed: Placed, number: int, ranks: int, args: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Placed]]:
    experts, hidden = args.get("num_experts"), args.get("hidden_size")
    if type(experts) is not int or type(hidden) is not int or experts <= 0 or hidden <= 0:
        raise UnsupportedError(
            f"{where}: {name} holds all experts of a rank, and args do not say how many of what "
            "size; save it again with --ckpt-format torch_dist"
        )
    stored, local = placed.stored, experts // ranks
    axis = 2 - number  # along which experts follow one another
    fits = len(stored.shape) == 2 and stored.shape[1 - axis] == hidden and experts % ranks == 0
    # Each has a part of the tensor, so that no invented count is walked through.
    if not fits or not 0 < local <= stored.shape[axis] or stored.shape[axis] % local:
        raise UnreadableError(
            f"{where}: {name} has shape {list(stored.shape)}; args say {experts} experts over "
            f"{ranks} ranks and hidden_size {hidden}"
        )
    each = stored.shape[axis] // local
    shape = (hidden, each) if axis == 1 else (each, hidden)
    size = stored.view_bytes // local
    for expert in range(local):
        at = expert * size
        one = replace(stored, shape=shape, view_start=stored.view_start + at, view_bytes=size)
        yield f"{name}.{expert}", replace(placed, start=placed.start + at, stored=one)
