"""Opening checkpoints as sides of an audit, the way the command line does."""

from __future__ import annotations

from pathlib import Path

from mtpconv.audit.subject import (
    Expected,
    Subject,
    hf_subject,
    torch_dist_subject,
    view_subject,
)
from mtpconv.errors import UsageError
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.view import HfView


def hf(path: Path, *, table: bool = False) -> Subject:
    """An HF folder; with `table`, the inventory that its mapping table promises."""
    checkpoint = open_hf(path)
    plan = plan_of(checkpoint) if table else None
    return hf_subject(checkpoint, Expected(plan.hf, plan.regions) if plan else None)


def plan_of(checkpoint: HfCheckpoint) -> Plan | None:
    """The plan of a checkpoint; None if there is no table for it or no config."""
    if checkpoint.config is None:
        return None
    try:
        table = find_table(str(checkpoint.config.get("model_type")))
    except UsageError:
        return None
    return make_plan(checkpoint.config, table, checkpoint.tensors.keys())


def torch_dist(path: Path) -> Subject:
    """A torch_dist folder under its own keys."""
    return torch_dist_subject(open_torch_dist(path))


def torch_dist_as_hf(path: Path, like: Path) -> Subject:
    """A torch_dist folder seen under the HF names of another checkpoint."""
    plan = plan_of(open_hf(like))
    assert plan is not None, f"{like}: no mapping table"
    return view_subject(HfView(open_torch_dist(path), plan))
