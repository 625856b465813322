"""One side of an audit, whatever it is on disk: names, bytes or digests, config, problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtpconv.audit.finding import Side
from mtpconv.audit.names import Naming
from mtpconv.audit.promise import naming_of
from mtpconv.store.arithmetic import Undone
from mtpconv.store.checkpoint import Checkpoint, Problem
from mtpconv.store.content import Files, Piece, Pieced, pieces
from mtpconv.store.crc_check import CrcCheck
from mtpconv.store.hf import CONFIG_NAME, HfCheckpoint
from mtpconv.store.legacy import MegatronCheckpoint
from mtpconv.store.manifest import Manifest
from mtpconv.store.source import HfSource
from mtpconv.store.torch_dist import TorchDistCheckpoint
from mtpconv.tensors import Region, TensorSpec
from mtpconv.view import HfView

#: `Subject.config_source` of a torch_dist checkpoint.
ARGS = "args"
#: Megatron-Bridge's own file for what Megatron-LM writes into args.
RUN_CONFIG = "run_config.yaml"
_UNREADABLE = ("unreadable_file", "index_missing_file")


@dataclass(frozen=True, slots=True)
class Expected:
    """The inventory a mapping table promises for a config."""

    #: None for a tensor whose shape a broken config does not tell
    tensors: Mapping[str, TensorSpec | None]
    regions: Mapping[str, Region]
    #: names that are there and that the table leaves out on purpose, and what becomes of them
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """One side of an audit.

    `content` has the names the report uses: a torch_dist checkpoint compared with an HF folder
    comes as a view that already has HF names.
    """

    path: str
    format: str
    content: Checkpoint | Pieced
    problems: Sequence[Problem] = ()
    #: config.json as raw JSON, or Megatron's args; None if this side has neither
    config: Mapping[str, Any] | None = None
    #: where `config` is from: `config.json` or `args`
    config_source: str = CONFIG_NAME
    #: a file that says what absent args would, in a form that is not read
    told_in: str | None = None
    #: BLAKE3 per tensor where the bytes are elsewhere
    digests: Mapping[str, str] | None = None
    #: what the table promises; None without a table
    expected: Expected | None = None
    #: names given by another side or by a table, where names alone do not tell
    regions: Mapping[str, Region] = field(default_factory=dict)
    dialect: str | None = None
    #: files that the index names; None without an index
    indexed_files: frozenset[str] | None = None
    #: tensors seen through arithmetic: equal values there are never called identical bytes
    by_value: frozenset[str] = frozenset()
    #: told of what is read where records have a CRC-32; None if nobody asked
    crcs: CrcCheck | None = None
    #: file of each tensor, where one file holds it whole
    where: Mapping[str, str] = field(default_factory=dict)
    #: only headers were fetched from elsewhere: there are no tensor bytes to read
    afar: bool = False
    #: what the report must say about how this side was read
    notes: tuple[str, ...] = ()
    #: what travelled with a Megatron checkpoint so that an export is complete; None without it
    source: HfSource | None = None
    #: what modelopt's own file says about quantisation; config.json may be silent
    quant_config: Mapping[str, Any] | None = None

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every readable tensor."""
        return self.content.tensors

    @property
    def has_bytes(self) -> bool:
        """False for a manifest."""
        return self.digests is None

    @property
    def model_type(self) -> str | None:
        """model_type of the config."""
        value = (self.config or {}).get("model_type")
        return value if isinstance(value, str) else None

    @property
    def naming(self) -> Naming:
        """How this side's names map to regions."""
        return naming_of(self.config)

    @property
    def unread(self) -> frozenset[str]:
        """Tensors known to be in files that are absent or unreadable."""
        lost = (p.tensors for p in self.problems if p.kind in _UNREADABLE)
        return frozenset(name for names in lost for name in names)

    @property
    def blind(self) -> bool:
        """Whether some file could not be read and nothing says what it holds."""
        return any(
            p.kind in _UNREADABLE
            and not p.tensors
            and not (p.file or "").endswith((CONFIG_NAME, ".index.json"))
            for p in self.problems
        )

    @property
    def misshapen(self) -> frozenset[str]:
        """Tensors that could not be brought into their shape; each is a problem of its own."""
        return frozenset(p.tensor for p in self.problems if p.kind == "shape_mismatch" and p.tensor)

    @property
    def ghosts(self) -> frozenset[str]:
        """Tensors that the index puts into a file that does not hold them."""
        return frozenset(
            p.tensor for p in self.problems if p.kind == "index_entry_not_in_file" and p.tensor
        )

    @property
    def stored(self) -> Checkpoint | Pieced:
        """The content before arithmetic was undone."""
        return self.content.view if isinstance(self.content, Undone) else self.content

    @property
    def megatron(self) -> MegatronCheckpoint | None:
        """The Megatron checkpoint behind the names, None for other sides."""
        content = self.stored.checkpoint if isinstance(self.stored, HfView) else self.stored
        return content if isinstance(content, MegatronCheckpoint) else None

    def files(self) -> Files:
        """Open files for reading this side."""
        return Files(on_read=self.crcs.saw if self.crcs is not None else None)

    def record_problems(self) -> Sequence[Problem]:
        """Records that cannot be read, for formats that keep a header with every tensor.

        They lie beside the bytes, so finding them takes longer than opening.
        """
        content = self.megatron
        if not isinstance(content, TorchDistCheckpoint):
            return ()
        known = {p.file for p in self.problems}
        return [p for p in content.check_records() if p.file not in known]

    def trained_padding(self) -> Sequence[tuple[str, int]]:
        """HF names whose Megatron tensor has non-zero rows beyond the vocabulary, and how many.

        No HF tensor shows these rows, so comparing tensors cannot find them. Takes a read of them.
        """
        content = self.stored
        return list(content.nonzero_padding()) if isinstance(content, HfView) else ()

    def side(self) -> Side:
        """What the report says about this side."""
        total = sum(spec.nbytes for spec in self.tensors.values())
        return Side(self.path, self.format, len(self.tensors), total, self.dialect)


def hf_subject(checkpoint: HfCheckpoint, expected: Expected | None = None) -> Subject:
    """An HF folder as one side."""
    indexed = frozenset(checkpoint.weight_map.values()) if checkpoint.index is not None else None
    return Subject(
        str(checkpoint.path), "hf", checkpoint, checkpoint.problems, checkpoint.config,
        expected=expected, indexed_files=indexed, where=checkpoint.where,
        quant_config=checkpoint.quant_config,
    )  # fmt: skip


def manifest_subject(manifest: Manifest) -> Subject:
    """A saved manifest as one side."""
    source = CONFIG_NAME if manifest.source_format == "hf" else ARGS
    return Subject(
        str(manifest.path), "manifest", manifest, (), manifest.config, source,
        digests=manifest.digests,
    )  # fmt: skip


def view_subject(view: HfView, expected: Expected | None = None, *, ours: bool = True) -> Subject:
    """A torch_dist checkpoint seen under HF names as one side; `ours`: mtpconv wrote it.

    Sharded keys that the mapping table does not know are problems: nothing disappears silently.
    """
    unknown = [
        Problem("extra_tensor", f"{key}: no row of the mapping table knows it", tensor=key)
        for key in view.unmapped
        if not key.endswith("_extra_state")
    ]
    problems = [*_under_hf_names(view), *unknown]
    return Subject(
        str(view.path), view.format, view, problems, saved_args(view.checkpoint), ARGS,
        expected=expected, regions=view.plan.regions, dialect=view.dialect,
        told_in=_told_in(view.checkpoint),
        notes=(*_left_out(view.checkpoint), *view.remarks(ours=ours)),
    )  # fmt: skip


def _under_hf_names(view: HfView) -> Iterator[Problem]:
    """The view's problems, with the HF names of the tensors that a lost file held parts of."""
    names: dict[str, list[str]] = {}
    if any(p.tensors for p in view.problems):
        for step in view.plan.steps:
            key = view.layout.address(step.key, view.plan.geometry).key
            names.setdefault(key, []).extend(step.hf)
    for problem in view.problems:
        found = {hf for key in problem.tensors for hf in names.get(key, (key,))}
        yield replace(problem, tensors=tuple(sorted(found)))


def torch_dist_subject(checkpoint: MegatronCheckpoint) -> Subject:
    """A Megatron checkpoint under its own sharded keys as one side."""
    return Subject(
        str(checkpoint.path), checkpoint.format, checkpoint, checkpoint.problems,
        saved_args(checkpoint), ARGS, told_in=_told_in(checkpoint), notes=_left_out(checkpoint),
    )  # fmt: skip


def _left_out(checkpoint: Checkpoint) -> tuple[str, ...]:
    if isinstance(checkpoint, MegatronCheckpoint) and checkpoint.ignored:
        return (f"{checkpoint.path}: optimizer state ({checkpoint.ignored} entries) not compared",)
    return ()


def saved_args(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The plain values of the saved args; None if there are none."""
    args = checkpoint.common.get("args") if isinstance(checkpoint, MegatronCheckpoint) else None
    if not isinstance(args, Mapping):
        return None
    plain = (int, float, str, list, tuple, type(None))
    # Names that mean something else in a config.json.
    others = ("model_type", "mtp_hybrid_override_pattern")
    return {k: v for k, v in args.items() if isinstance(v, plain) and k not in others}


def _told_in(checkpoint: Checkpoint) -> str | None:
    """The file that says what args would, for checkpoints of Megatron-Bridge.

    Source: Megatron-Bridge docs/training/checkpointing.md @ 5d6e5f83, read 2026-11-29.
    """
    if isinstance(checkpoint, MegatronCheckpoint) and (checkpoint.folder / RUN_CONFIG).is_file():
        return RUN_CONFIG
    return None


def without_unindexed(subject: Subject) -> Subject:
    """The side as engines see it: files that the index does not name do not exist."""
    indexed = subject.indexed_files
    if indexed is None:
        return subject
    problems = []
    for problem in subject.problems:
        files = [f for f in problem.files if f in indexed]
        stray = problem.kind == "tensor_not_in_index" and problem.file not in indexed
        unread = (
            problem.kind == "unreadable_file"
            and not problem.tensors
            and ((problem.file or "").endswith(".safetensors") and problem.file not in indexed)
        )
        copies = problem.kind.startswith("duplicate_tensor") and len(files) < 2
        if not (stray or unread or copies):
            problems.append(problem)
    held = {n: s for n, s in subject.tensors.items() if subject.where.get(n) in indexed}
    content = _Narrowed(subject.content, held)
    return replace(subject, content=content, problems=tuple(problems))


@dataclass(frozen=True, slots=True)
class _Narrowed:
    """Some of the tensors of a checkpoint."""

    whole: Checkpoint | Pieced
    tensors: Mapping[str, TensorSpec]

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of a tensor lie."""
        return pieces(self.whole, name)
