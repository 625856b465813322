"""The report as JSON, for programs; docs/report.schema.json describes it.

Pure ASCII and the same bytes for the same report: keys in a fixed order, no time, no host.
"""

from __future__ import annotations

import json
from typing import Any, Final

import mtpconv
from mtpconv.audit.finding import Finding, MtpStatus, Report, Side
from mtpconv.report import words
from mtpconv.report.values import fields, plain_json

#: Grows when a field changes its meaning or goes away; new fields do not count.
VERSION: Final = 1


def render(report: Report) -> str:
    """The report as one JSON object."""
    # ASCII escapes also keep terminal controls and lone surrogates out of the file.
    return json.dumps(as_object(report), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def as_object(report: Report) -> dict[str, Any]:
    """The report as JSON types."""
    return {
        "version": VERSION,
        "tool": {"name": "mtpconv", "version": mtpconv.__version__},
        "verdict": report.verdict,
        "tier": report.tier,
        "mtp": _mtp(report.mtp),
        "findings": [_finding(one) for one in report.findings],
        "compared": {
            "tensors": report.compared.tensors,
            "bytes": report.compared.nbytes,
            "not_read": list(report.compared.not_read),
            "notes": list(report.compared.notes),
        },
        "before": None if report.before is None else _side(report.before),
        "after": _side(report.after),
        "model_type": report.model_type,
        "switches": list(report.switches),
        "checked": list(report.checked),
        "states": words.states(report),
        "regions": _regions(report),
    }


def _mtp(status: MtpStatus) -> dict[str, Any]:
    return {
        "status": status.status,
        "promised": status.promised,
        "depths": [
            {
                "depth": depth.depth,
                "status": depth.status,
                "tensors": depth.tensors,
                **fields(expected=depth.expected, detail=depth.detail),
            }
            for depth in status.depths
        ],
    }


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "code": one.code,
        "kind": one.kind,
        "severity": one.severity,
        "tensor": one.tensor,
        "message": one.message,
        **fields(
            file=one.file,
            field=one.field,
            layer=one.layer,
            prefix=one.prefix,
            region=None if one.region is None else str(one.region),
            before=plain_json(one.before),
            after=plain_json(one.after),
            hint=one.hint,
            tensors=one.tensors,
            files=one.files,
            waived=one.waived,
        ),
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "path": side.path,
        "format": side.format,
        "tensors": side.tensors,
        "bytes": side.nbytes,
        **fields(dialect=side.dialect),
    }


def _regions(report: Report) -> dict[str, dict[str, int]]:
    """Tensors of each state by part of the model, in model order."""
    found: dict[Any, dict[str, int]] = {}
    for name, state in report.states.items():
        region = report.regions.get(name)
        counts = found.setdefault(region, {})
        counts[state] = counts.get(state, 0) + 1
    order = {"root": 0, "trunk": 1, "mtp": 2}
    known = sorted(
        (region for region in found if region is not None),
        key=lambda region: (order.get(region.kind, 3), region.kind, region.index),
    )
    said = {str(region): dict(sorted(found[region].items())) for region in known}
    if None in found:
        said["unknown"] = dict(sorted(found[None].items()))
    return said
