"""The trained fixture: its rate means something, and every silent fault of the MTP shows in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore
from mtpconv.errors import UnsupportedError, UsageError
from mtpconv.parity.acceptance.render import bars, render_json, render_text
from mtpconv.parity.acceptance.report import AcceptanceOptions
from mtpconv.parity.acceptance.run import run_acceptance
from mtpconv.parity.run import run_parity

FIXTURE = Path(__file__).parents[3] / "fixtures" / "trained"
MODEL, STALE, PROMPTS = FIXTURE / "model", FIXTURE / "stale", FIXTURE / "prompts.txt"

Tensors = dict[str, Any]

pytest.importorskip("transformers")


def options(**changes: Any) -> AcceptanceOptions:
    usual: dict[str, Any] = {"prompts": PROMPTS, "cost": False, "tokens": 20}
    return AcceptanceOptions(**usual | changes)


def changed(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """The fixture with something done to its tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def swap_halves(tensors: Tensors) -> None:
    name = "model.layers.4.eh_proj.weight"
    tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, 1).contiguous()


def randomise(tensors: Tensors) -> None:
    import torch

    random = torch.Generator().manual_seed(1)
    for name, value in tensors.items():
        copy = name.endswith(("embed_tokens.weight", "head.weight"))
        if name.startswith("model.layers.4.") and value.ndim == 2 and not copy:
            noise = torch.randn(value.shape, generator=random) * value.float().std()
            tensors[name] = noise.to(value.dtype)


def test_the_trained_head_drafts_what_the_trunk_says() -> None:
    report = run_acceptance(MODEL, options(tokens=48))
    assert report.measured.acceptance is not None
    assert report.measured.acceptance > 0.7
    assert report.measured.divergence is None
    assert report.measured.count.tokens_per_pass > 1.7
    assert report.exit_code == 0


@pytest.mark.parametrize(("name", "most"), [("halves", 0.15), ("random", 0.15), ("stale", 0.6)])
def test_what_breaks_the_draft_head_leaves_the_text_alone(
    tmp_path: Path, name: str, most: float
) -> None:
    made = {"halves": swap_halves, "random": randomise}
    folder = STALE if name == "stale" else changed(tmp_path / "model", made[name])
    report = run_acceptance(folder, options())
    assert report.measured.acceptance is not None
    assert report.measured.acceptance < most
    assert report.measured.divergence is None  # drafting is exact, whatever the drafts are worth
    if name != "stale":
        right = run_acceptance(MODEL, options())
        assert report.measured.sample == right.measured.sample


@pytest.mark.slow
def test_the_gates(tmp_path: Path) -> None:
    assert run_acceptance(MODEL, options(min_acceptance=0.7)).exit_code == 0
    broken = changed(tmp_path / "model", swap_halves)
    low = run_acceptance(broken, options(min_acceptance=0.6))
    assert low.exit_code == 1
    assert "below 60%" in low.reasons[0]
    fell = run_acceptance(broken, options(against=MODEL))
    assert fell.exit_code == 1
    assert "fell by more than 2%" in fell.reasons[0]
    assert run_acceptance(MODEL, options(against=broken)).exit_code == 0


@pytest.mark.megatron
def test_torch_dist_gives_the_same_rate(megatron_cpu: None, tmp_path: Path) -> None:
    hf2mcore(MODEL, tmp_path / "mcore")
    left = run_acceptance(MODEL, options(depth=3))
    right = run_acceptance(tmp_path / "mcore", options(depth=3))
    assert right.measured.kind == "torch_dist"
    assert right.measured.count == left.measured.count
    assert right.measured.sample == left.measured.sample
    assert right.exit_code == 0


@pytest.mark.megatron
def test_the_fixture_passes_parity(megatron_cpu: None, tmp_path: Path) -> None:
    from mtpconv.parity.report import ParityOptions

    hf2mcore(MODEL, tmp_path / "mcore")
    report = run_parity(MODEL, tmp_path / "mcore", ParityOptions(prompts=PROMPTS))
    assert report.verdict == "pass", report.fault


def test_more_drafts_than_depths_go_on_from_the_last() -> None:
    report = run_acceptance(MODEL, options(depth=4))
    assert len(report.measured.count.made) == 4
    assert report.measured.count.tokens_per_pass > 2.5
    assert report.measured.divergence is None
    assert any("4 drafts from 1 MTP depth" in note for note in report.notes)


@pytest.mark.slow
def test_other_sources_of_drafts() -> None:
    looked_up = run_acceptance(MODEL, options(draft="ngram", depth=3))
    assert looked_up.measured.draft == "ngram"
    assert looked_up.measured.divergence is None
    itself = run_acceptance(MODEL, options(draft=str(MODEL), depth=3))
    assert itself.measured.acceptance == 1
    other = run_acceptance(MODEL, options(draft=str(STALE), depth=3))
    assert other.measured.divergence is None
    assert (other.measured.acceptance or 0) < 1


def test_sampling_is_seeded_and_keeps_most_drafts() -> None:
    first = run_acceptance(MODEL, options(temperature=0.8, seed=3))
    again = run_acceptance(MODEL, options(temperature=0.8, seed=3))
    other = run_acceptance(MODEL, options(temperature=0.8, seed=4))
    assert first.measured.count == again.measured.count
    assert first.measured.sample == again.measured.sample != other.measured.sample
    assert (first.measured.acceptance or 0) > 0.7


def test_the_cost_of_a_wider_pass_is_measured() -> None:
    report = run_acceptance(MODEL, options(depth=4, cost=True))
    assert report.cost is not None
    assert report.cost.tokens == 5
    assert 0.3 < report.cost.wide < 5  # far below 5 times, on any machine
    assert report.cost.draft is not None
    assert report.speedup is not None
    given = run_acceptance(MODEL, options(depth=4, cost=True, draft_cost=0.25))
    assert given.draft_cost == 0.25
    assert "at a draft cost of 0.25 passes" in render_text(given)


def test_the_reports(tmp_path: Path) -> None:
    report = run_acceptance(MODEL, options(depth=2, against=STALE))
    text = render_text(report)
    assert "draft 0:" in text
    assert "tokens per trunk pass" in text
    assert str(STALE) in text
    assert text.splitlines()[-1].startswith("PASS")
    value = json.loads(render_json(report))
    assert value["exit_code"] == 0
    assert value["measured"]["acceptance"][0] > value["against"]["acceptance"][0]
    picture = bars("rates", [("model", 0.8), ("<broken>", None)])
    assert "80%" in picture
    assert "&lt;broken&gt;" in picture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "not between 1 and 64"),
        ({"tokens": 1}, "at least 2"),
        ({"temperature": -1.0}, "not between 0 and 10"),
        ({"min_acceptance": 2.0}, "not between 0 and 1"),
        ({"tokens": 600}, "max_position_embeddings of 512"),
        ({"draft": "nothing"}, "neither mtp, ngram nor a folder"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_acceptance(MODEL, options(**changes))


def test_a_model_without_mtp_has_nothing_to_draft_with(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((MODEL / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="promises no MTP depth"):
        run_acceptance(tmp_path / "model", options())
    report = run_acceptance(tmp_path / "model", options(draft="ngram"))
    assert report.measured.depth == 4
    assert report.exit_code == 0
