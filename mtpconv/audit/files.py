"""What is wrong with the files themselves: problems of the reader as findings."""

from __future__ import annotations

from collections.abc import Iterator

from mtpconv.audit.codes import CODES, finding
from mtpconv.audit.finding import Finding, Severity
from mtpconv.audit.subject import Subject
from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Problem
from mtpconv.store.source_seal import saved_manifest, source_faults

#: Faults after which the reference no longer says what the right bytes are.
_SPOILS_REFERENCE = frozenset(
    {"unreadable_file", "index_missing_file", "duplicate_tensor_conflict"}
)


def file_findings(subject: Subject) -> Iterator[Finding]:
    """One finding per problem of the checkpoint under audit."""
    for problem in subject.problems:
        yield _finding(subject, problem, "warning" if problem.warning else "error", "")


def record_findings(subject: Subject) -> Iterator[Finding]:
    """Tensors whose own headers are damaged; takes a read of each of them."""
    for problem in subject.record_problems():
        yield _finding(subject, problem, "error", "")


def padding_findings(subject: Subject) -> Iterator[Finding]:
    """Rows beyond the vocabulary that are not zero: they were trained, and an export cuts them."""
    for name, rows in subject.trained_padding():
        shape = list(subject.tensors[name].shape)
        yield finding(
            "shape_mismatch", "error",
            f"{subject.path}: {rows} rows beyond the config's vocabulary are not zero; they were "
            "trained, and an export would cut them",
            tensor=name, before=shape, after=[shape[0] + rows, *shape[1:]],
            region=subject.naming.region(name),
        )  # fmt: skip


def source_findings(subject: Subject) -> Iterator[Finding]:
    """Files of `hf_source` that are not as they were saved; takes a read of them."""
    source = subject.source
    if source is None or subject.afar:
        return
    try:
        for fault in source_faults(source, saved_manifest(source)):
            yield finding(
                "source_damaged", "error", f"{fault.file}: {fault.what}; mcore2hf refuses it",
                file=fault.file.name,
            )  # fmt: skip
    except UnreadableError as error:
        yield finding("source_damaged", "error", str(error))


def reference_findings(subject: Subject) -> Iterator[Finding]:
    """Problems of the reference: errors only where it no longer says what is right."""
    for problem in subject.problems:
        spoils = problem.kind in _SPOILS_REFERENCE and not problem.warning
        yield _finding(subject, problem, "error" if spoils else "warning", "reference: ")


def _finding(subject: Subject, problem: Problem, severity: Severity, prefix: str) -> Finding:
    # A reader may know more kinds than there are codes; such a file could not be understood.
    kind = problem.kind if problem.kind in CODES else "unreadable_file"
    region = subject.naming.region(problem.tensor) if problem.tensor else None
    return finding(
        kind, severity, prefix + problem.message, tensor=problem.tensor, file=problem.file,
        tensors=problem.tensors, files=problem.files, region=region,
    )  # fmt: skip
