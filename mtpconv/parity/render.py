"""A parity report as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mtpconv.parity.compare import HeadResult
from mtpconv.parity.report import ParityReport

#: Version of the JSON layout; grows when a field changes its meaning or goes away.
FORMAT = 1


def render_text(report: ParityReport) -> str:
    """The report for a terminal, a line per head and one for what differs."""
    return "\n".join(_lines(report))


def _lines(report: ParityReport) -> Iterator[str]:
    yield f"parity {report.model_type}, {report.dtype} on {report.device}: {report.tokens}"
    yield f"  reference   {report.hf} (MTP: {report.reference})"
    yield f"  megatron    {report.mcore} ({report.modules})"
    yield f"  versions    {', '.join(f'{k} {v}' for k, v in report.versions.items())}"
    yield ""
    yield "  head      mean abs   max abs    limits (mean, max)   cosine    KL max    top-1  top-5"
    for head in report.heads:
        yield _head_line(head)
    if not any(head.head != "trunk" for head in report.heads):
        yield "  MTP       no depth was compared"
    yield ""
    if report.ties:
        yield f"  {report.ties} of {report.choices} top-k choices were ties and settled alike"
    if report.memory is not None:
        memory = report.memory
        yield (
            f"  held at once: {_mib(memory.reference_peak)} of the reference, "
            f"{_mib(memory.megatron_peak)} of Megatron (largest units "
            f"{_mib(memory.reference_largest)}, {_mib(memory.megatron_largest)}); "
            f"process peak {_mib(memory.process_peak)}"
        )
    for note in report.notes:
        yield f"  note: {note}"
    if report.fault is not None:
        yield f"  differs first: {report.fault.message}"
        for name in report.fault.tensors[:8]:
            yield f"    {name}"
        if len(report.fault.tensors) > 8:
            yield f"    and {len(report.fault.tensors) - 8} more"
    yield f"{'PASS' if report.verdict == 'pass' else 'FAIL'} in {report.seconds:.1f} s"


def _head_line(head: HeadResult) -> str:
    limits = f"{head.limits.mean:.1e}, {head.limits.largest:.1e}"
    line = (
        f"  {head.head:<8}  {head.mean_abs:<9.1e}  {head.max_abs:<9.1e}  {limits:<19}  "
        f"{head.cosine:<8.6f}  {head.kl_max:<8.1e}  {head.top1:<5.1%}  {head.top5:<5.1%}"
    )
    if head.passed:
        return line + "  ok"
    worst = head.worst
    above = sum(not spot <= head.limits.largest for row in head.per_position for spot in row)
    return (
        f"{line}  DIFFERS at {above} of {head.positions} positions, most at row {worst.row}, "
        f"position {worst.position}, token {worst.token}: "
        f"logit {worst.logit} is {worst.reference:.4g} and {worst.megatron:.4g}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def render_json(report: ParityReport) -> str:
    """The report as JSON; numbers that JSON cannot hold become strings."""
    value = {"format": FORMAT, "exit_code": report.exit_code} | asdict(report)
    if report.fault is not None:
        value["fault"]["message"] = report.fault.message
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
