"""What a conversion does with tensors that Megatron holds changed, and what it claims of them.

The originals always travel beside. Levels as in docs/fp8.md: `bytes` where the original is the
answer, `values` where the arithmetic or its inverse was computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mtpconv.convert.outcome import NamedStep
from mtpconv.errors import RefusedError
from mtpconv.mapping.plan import Plan
from mtpconv.ranges import compress
from mtpconv.store.arithmetic import ARITHMETIC, Applied, Undone
from mtpconv.store.dequant import HfTensors
from mtpconv.store.hf import HfCheckpoint
from mtpconv.store.source import HfSource
from mtpconv.view import HfView


def applied(content: HfTensors, plan: Plan) -> HfTensors:
    """The HF side as Megatron gets it. Raises: UnsupportedError."""
    return Applied(content, plan.arithmetic) if plan.arithmetic else content


def undone(view: HfView, *originals: HfCheckpoint | None) -> HfView | Undone:
    """Megatron's tensors as HF has them. Raises: UnsupportedError."""
    todo = view.plan.arithmetic
    return Undone(view, todo, originals) if todo else view


def originals_of(origin: HfSource) -> tuple[HfCheckpoint | None, HfCheckpoint | None]:
    """Where the originals are: beside the checkpoint, or in the folder given with --like."""
    return origin.carried, origin.quantised


def require_restored(content: HfView | Undone) -> None:
    """What was just written is what the originals become. Raises: RefusedError."""
    if isinstance(content, Undone) and content.computed:
        raise RefusedError(
            f"verification: {len(content.computed)} tensors are not what their originals become: "
            f"{compress(content.computed, 4)}; nothing was kept, please report this"
        )


def computed_names(content: HfView | Undone) -> frozenset[str]:
    """HF names whose bytes are no copy of anything."""
    return frozenset(content.computed) if isinstance(content, Undone) else frozenset()


def import_arithmetic(plan: Plan) -> Iterator[NamedStep]:
    """What hf2mcore computed."""
    for word, count in Counter(plan.arithmetic.values()).items():
        what = f"{ARITHMETIC[word].says}, rounded once; the originals travel in hf_source"
        yield NamedStep(word, "values", count, what)


def export_arithmetic(plan: Plan, content: HfView | Undone) -> Iterator[NamedStep]:
    """What mcore2hf computed, and what it took from the originals instead."""
    names: Mapping[str, str] = plan.arithmetic if isinstance(content, Undone) else {}
    back = computed_names(content)
    for word in dict.fromkeys(names.values()):
        mine = [n for n, w in names.items() if w == word]
        computed = sum(n in back for n in mine)
        if computed < len(mine):
            what = f"{ARITHMETIC[word].says} of exactly the original, which was written"
            yield NamedStep("restore", "bytes", len(mine) - computed, what)
        if computed:
            what = f"{ARITHMETIC[word].says}, undone and rounded once; identical to nothing"
            yield NamedStep(f"undo {word}", "values", computed, what)
