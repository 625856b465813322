"""What hf2mcore will do: an HF folder opened and checked, nothing written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.audit.promise import read_promise
from mtpconv.convert import identity
from mtpconv.convert.agreement import agreed_plan
from mtpconv.convert.arithmetic import applied
from mtpconv.convert.fp8 import Fp8, as_bf16, bf16_inventory, fp8_mode, fp8_weights
from mtpconv.convert.needs import files_need, names_need
from mtpconv.errors import RefusedError, UnreadableError, UnsupportedError, UsageError
from mtpconv.mapping.check import discard_reason, is_carried, own_table
from mtpconv.mapping.layouts import Layout, first_hole, layout_of, training_layout
from mtpconv.mapping.plan import Plan, padded_plan
from mtpconv.mapping.table import Table
from mtpconv.mapping.table_reader import find_table, table_names
from mtpconv.megatron_args import megatron_args
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.dequant import HfTensors
from mtpconv.store.dist_folder import is_torch_dist
from mtpconv.store.fp8_tensors import SCALE
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.other_files import OtherFiles
from mtpconv.store.source import OwnTable, files_beside
from mtpconv.tensors import TensorSpec

#: Units: bytes. A record's zip overhead and its metadata entry, measured 1.1 KB and 0.4 KB.
RECORD_OVERHEAD = 2048


@dataclass(frozen=True)
class HfToMcore:
    """A conversion that was planned and found possible; nothing is written yet."""

    hf: HfCheckpoint
    #: the same tensors as Megatron gets them: FP8 weights as BF16, no scales
    content: HfTensors
    #: these after their arithmetic
    changed: HfTensors
    plan: Plan
    layout: Layout
    #: HF names converted, in plan order
    names: tuple[str, ...]
    #: MTP names left out because of --drop-mtp
    dropped: tuple[str, ...]
    #: names the table carries beside
    carried: tuple[str, ...]
    #: Megatron's arguments for the model, for `common.pt`
    args: Mapping[str, Any]
    #: what Megatron cannot be told about the model
    gaps: tuple[str, ...]
    #: files that travel, and those that stay behind
    others: OtherFiles
    fp8: Fp8 = "keep"
    #: the user's table, if it says anything else than a shipped one
    own_table: OwnTable | None = None
    #: whether the written config says that there is no MTP: it was dropped, or asked to be where
    #: the config promises what no tensor keeps
    unpromised: bool = False

    @property
    def nbytes(self) -> int:
        """Payload bytes that go into the Megatron checkpoint."""
        copies = sum(self.content.tensors[c.hf].nbytes for c in self.plan.copies)
        return sum(self.content.tensors[n].nbytes for n in self.names) - copies

    @property
    def discarded(self) -> dict[str, str]:
        """Names that the table leaves out on purpose, each with its reason."""
        found = {}
        for name in self.hf.tensors:
            if name not in self.plan.hf and name not in self.dropped:
                reason = discard_reason(self.plan.table, name)
                if reason is not None:
                    found[name] = reason
        return found

    @property
    def kept(self) -> dict[str, TensorSpec]:
        """FP8 codes and scales, which travel beside."""
        gone = set(self.dropped)
        weights = [q for n, q in fp8_weights(self.content).items() if n not in gone]
        return {n: s for q in weights for n, s in q.specs.items()}

    @property
    def stored(self) -> dict[str, TensorSpec]:
        """The HF tensors that hf_source describes."""
        gone = {*self.dropped, *(n + SCALE for n in self.dropped), *self.discarded}
        left = {n: s for n, s in self.hf.tensors.items() if n not in gone}
        return bf16_inventory(left, fp8_weights(self.content)) if self.fp8 == "bf16" else left

    @property
    def disk(self) -> int:
        """Disk that the target needs, in bytes, rounded up."""
        carried = sum(
            self.content.tensors[n].nbytes for n in (*self.carried, *self.plan.arithmetic)
        )
        copies = sum(self.content.tensors[c.hf].nbytes for c in self.plan.copies)
        if self.fp8 == "keep":
            carried += sum(spec.nbytes for spec in self.kept.values())
        carried += files_need(self.hf.path, self.others.travel) + names_need(self.hf.tensors)
        padding = sum(
            self.content.tensors[s.hf[0]].nbytes * s.shape[0] // max(s.specs[0].shape[0], 1)
            - self.content.tensors[s.hf[0]].nbytes
            for s in self.plan.steps
            if s.op.name == "pad_rows"
        )
        records = 2 * len(self.plan.steps)  # tensors, and an _extra_state for most of them
        return self.nbytes + carried + copies + padding + RECORD_OVERHEAD * records + (1 << 20)


def plan_hf2mcore(
    source: Path,
    *,
    mapping: Path | None = None,
    layout: str | None = None,
    drop_mtp: bool = False,
    fp8: str = "keep",
    pad_vocab: int = 1,
    opened: HfCheckpoint | None = None,
) -> HfToMcore:
    """Open and check an HF folder; everything that can be refused is refused here.

    `opened` is `source` opened already, as remote folders are.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError.
    """
    mode = fp8_mode(fp8)
    hf = opened or _open(source)
    require_sound(hf)
    if hf.config is None:
        raise UnreadableError(f"{source}: has no config.json; it says what the model is")
    table = table_for(hf.config, mapping)
    if not table.converts:
        raise UnsupportedError(
            f"{source}: {table.model_type} is not converted: Megatron-Core lacks "
            f"{table.needs or 'parts of it'}; inventory and audit work"
        )
    content = as_bf16(hf, table)
    tensors = content.tensors
    chosen: list[Layout] = []

    def choose(plan: Plan) -> Layout:
        chosen.append(layout_for(plan, layout))
        return chosen[-1]

    plan, dropped = agreed_plan(
        hf.config, table, tensors, choose, where=str(source), drop_mtp=drop_mtp
    )
    for step in plan.steps:
        kinds = {tensors[n].dtype for n in step.hf}
        if len(kinds) > 1:
            raise RefusedError(
                f"{source}: {' and '.join(step.hf)} become one Megatron tensor "
                f"but have dtypes {' and '.join(sorted(kinds))}"
            )
    gone = set(dropped)
    gaps: list[str] = []
    plan = padded_plan(plan, pad_vocab)
    args = megatron_args(plan.geometry, _rows(plan), gaps)
    return HfToMcore(
        hf,
        content,
        applied(content, plan),
        plan,
        layout_for(plan, layout) if drop_mtp else chosen[-1],
        tuple(n for n in plan.hf if n not in gone),
        dropped,
        tuple(n for n in tensors if n not in plan.hf and is_carried(table, n)),
        args,
        tuple(gaps),
        files_beside(hf),
        mode,
        None if mapping is None else own_table_of(table, mapping),
        bool(dropped) or (drop_mtp and bool(read_promise(hf.config).depths)),
    )


def own_table_of(table: Table, path: Path) -> OwnTable | None:
    """What is kept of a user's table; None if it says what a shipped one says."""
    digest = identity.of_table(table)
    shipped = find_table(table.model_type) if table.model_type in table_names() else None
    if shipped is not None and identity.of_table(shipped) == digest:
        return None
    return OwnTable(path.name, digest)


def _open(source: Path) -> HfCheckpoint:
    try:
        return open_hf(source)
    except UnreadableError:
        if is_torch_dist(source):
            raise UsageError(
                f"{source}: is a Megatron checkpoint; mcore2hf converts it to HuggingFace"
            ) from None
        raise


def _rows(plan: Plan) -> int | None:
    """Rows of embedding and LM head, None if no table row may be padded."""
    return next((s.shape[0] for s in plan.steps if s.op.name == "pad_rows"), None)


def table_for(config: Mapping[str, object], mapping: Path | None) -> Table:
    """The table that the user named, else the shipped one of the config's model_type."""
    return own_table(mapping) if mapping is not None else find_table(str(config.get("model_type")))


def layout_for(plan: Plan, named: str | None) -> Layout:
    """The layout to write: `training` (default), `local`, dialect names, joined by commas."""
    training = [d.name for d in training_layout(plan).dialects]
    local = [plan.table.local_spec] if plan.table.local_spec else []
    short = {"training": training, "local": [*training, *local], "canonical": []}
    named = named or "training"
    layout = layout_of(n for word in named.split(",") for n in short.get(word, [word]))
    for dialect in layout.dialects:
        if dialect.read_only:
            raise UsageError(f"--layout {named}: {dialect.name} is read, never written")
        if dialect.name.startswith("local_spec") and dialect.name not in local:
            raise UsageError(
                f"--layout {named}: {dialect.name} is not how {plan.table.model_type} is spelled; "
                f"its local spec is {', '.join(local) or 'not known'}"
            )
    hole = first_hole(plan, layout)
    if hole is not None:
        raise UsageError(
            f"--layout {named}: {hole} would have holes, as not all layers are alike; "
            "leave stacked_layers out"
        )
    return layout
