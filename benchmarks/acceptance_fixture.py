"""Acceptance of the trained fixture, intact and broken in the ways nobody notices.

    python benchmarks/acceptance_fixture.py          # a minute on one core

Prints the tables of docs/speculative.md and writes its pictures, docs/acceptance.svg and
docs/tokens_per_pass.svg.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtpconv.parity.acceptance.cost import Cost
from mtpconv.parity.acceptance.render import bars, curves
from mtpconv.parity.acceptance.report import AcceptanceOptions, AcceptanceReport
from mtpconv.parity.acceptance.run import run_acceptance

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "fixtures" / "trained"
DEPTH = "model.layers.4."

Tensors = dict[str, Any]


def swap_halves(tensors: Tensors) -> None:
    """What a converter with the other order of concatenation does."""
    name = f"{DEPTH}eh_proj.weight"
    tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, 1)


def swap_norms(tensors: Tensors) -> None:
    """What a table with two crossed rows does."""
    first, second = f"{DEPTH}enorm.weight", f"{DEPTH}hnorm.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


def swap_gate_and_up(tensors: Tensors) -> None:
    """What a wrong order in linear_fc1 does."""
    for name in [name for name in tensors if name.startswith(DEPTH) and "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def randomise(tensors: Tensors) -> None:
    """What a loader that initialises a missing MTP does."""
    random = torch.Generator().manual_seed(1)
    for name, value in tensors.items():
        copy = name.endswith(("embed_tokens.weight", "head.weight"))
        if name.startswith(DEPTH) and value.ndim == 2 and not copy:
            noise = torch.randn(value.shape, generator=random) * value.float().std()
            tensors[name] = noise.to(value.dtype)


FAULTS: dict[str, Callable[[Tensors], None]] = {
    "halves of eh_proj swapped": swap_halves,
    "enorm and hnorm swapped": swap_norms,
    "gate and up swapped": swap_gate_and_up,
    "MTP random": randomise,
}


def measured(folder: Path, **changes: Any) -> AcceptanceReport:
    """One run on the fixture's prompts, without timing."""
    options = AcceptanceOptions(
        **{"prompts": FIXTURE / "prompts.txt", "tokens": 64, "cost": False} | changes
    )
    return run_acceptance(folder, options)


def broken(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """The fixture with one fault."""
    shutil.copytree(FIXTURE / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    kept = {name: value.contiguous().clone() for name, value in tensors.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def faults() -> None:
    """Acceptance of first drafts, and whether the text is that of the intact model."""
    right = measured(FIXTURE / "model")
    rows = [("intact", right)]
    with tempfile.TemporaryDirectory() as base:
        for number, (name, change) in enumerate(FAULTS.items()):
            rows.append((name, measured(broken(Path(base) / str(number), change))))
    rows.append(("trunk trained on, MTP stale", measured(FIXTURE / "stale")))
    print("| MTP | first drafts kept | tokens per pass | text of the trunk |\n|---|---|---|---|")
    for name, report in rows:
        found = report.measured
        same = "unchanged" if found.sample == right.measured.sample else "another trunk"
        print(
            f"| {name} | {found.acceptance or 0:.0%} | {found.count.tokens_per_pass:.2f} | {same} |"
        )
    picture = bars("First drafts kept", [(n, r.measured.acceptance) for n, r in rows])
    (ROOT / "docs" / "acceptance.svg").write_text(picture)


def sources() -> None:
    """Tokens per pass by the number of drafts, and what a wider pass costs here."""
    drafts = range(1, 7)
    lines: dict[str, list[float]] = {}
    for source in ("mtp", "ngram"):
        lines[source] = [
            measured(FIXTURE / "model", draft=source, depth=k).measured.count.tokens_per_pass
            for k in drafts
        ]
    stale = [measured(FIXTURE / "stale", depth=k).measured.count.tokens_per_pass for k in drafts]
    costs: list[Cost] = []
    for k in drafts:
        cost = measured(FIXTURE / "model", depth=k, tokens=2, cost=True).cost
        assert cost is not None
        costs.append(cost)
    print(
        "\n| drafts per pass | mtp | ngram | stale mtp | cost of the pass |\n|---|---|---|---|---|"
    )
    for number, k in enumerate(drafts):
        print(
            f"| {k} | {lines['mtp'][number]:.2f} | {lines['ngram'][number]:.2f} | "
            f"{stale[number]:.2f} | {costs[number].wide:.2f} |"
        )
    picture = curves(
        "Tokens per pass of the trunk, by drafts per pass",
        [str(k) for k in drafts],
        {**lines, "stale mtp": stale, "cost of the pass": [c.wide for c in costs]},
    )
    (ROOT / "docs" / "tokens_per_pass.svg").write_text(picture)


if __name__ == "__main__":
    torch.set_num_threads(1)
    faults()
    sources()
