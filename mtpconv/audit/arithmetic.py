"""Tensors that Megatron holds changed (norms less one), compared across formats by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtpconv.audit.subject import Subject, view_subject
from mtpconv.mapping.plan import Plan
from mtpconv.store.arithmetic import ARITHMETIC, Applied, Undone
from mtpconv.store.dequant import Dequantised
from mtpconv.store.hf import HfCheckpoint
from mtpconv.view import HfView


def as_megatron(subject: Subject, plan: Plan) -> Subject:
    """An HF side as Megatron holds it. Law: equal to it exactly if nothing changed."""
    todo = {n: word for n, word in plan.arithmetic.items() if n in subject.tensors}
    content = subject.content
    if not todo or not isinstance(content, HfCheckpoint | Dequantised):
        return subject
    said = (
        f"{len(todo)} tensors of {subject.path} were compared by value ({_says(todo)}, rounded "
        "once): Megatron does not hold their bytes"
    )
    return replace(
        subject,
        content=Applied(content, todo),
        notes=(*subject.notes, said),
        by_value=subject.by_value | frozenset(todo),
    )


def as_hf(view: HfView, carried: HfCheckpoint | None) -> Subject:
    """A Megatron side for a reference of which only digests are there."""
    subject, todo = view_subject(view), view.plan.arithmetic
    if not todo:
        return subject
    content = Undone(view, todo, (carried,))
    said = (
        f"{len(todo)} tensors ({_says(todo)}) were compared as their originals in hf_source where "
        f"{subject.path} holds exactly what is made of these, else by value, undone and rounded"
    )
    return replace(
        subject,
        content=content,
        notes=(*subject.notes, said),
        by_value=subject.by_value | frozenset(todo),
    )


def _says(todo: Mapping[str, str]) -> str:
    return ", ".join(ARITHMETIC[word].says for word in dict.fromkeys(todo.values()))
