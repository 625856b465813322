"""The outcome of an audit as an in-toto statement, ready to be signed.

The subject is the manifest of the audited checkpoint: whoever has the checkpoint can take the
manifest again, byte for byte, and so knows what the statement is about. Nothing is signed here.
Source: in-toto/attestation spec/v1/statement.md, spec/v1/resource_descriptor.md and
spec/predicates/test-result.md (test-result v0.1), read 2026-11-29.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

import mtpconv
from mtpconv.audit.finding import Report
from mtpconv.report.cases import Outcome, test_cases
from mtpconv.report.escape import plain

_RESULTS: Final = {"pass": "PASSED", "fail": "FAILED", "error": "FAILED"}
_LISTS: Final[dict[Outcome, str]] = {
    "passed": "passedTests",
    "warned": "warnedTests",
    "failed": "failedTests",
    "error": "failedTests",
}


def render(report: Report, *, manifest: bytes, name: str = "manifest.json") -> str:
    """The statement; `manifest` is the content of the manifest file of `report.after`."""
    tests: dict[str, list[str]] = {key: [] for key in dict.fromkeys(_LISTS.values())}
    for case in test_cases(report):
        tests[_LISTS[case.outcome]].append(case.name)
    result = _RESULTS[report.verdict]
    if result == "PASSED" and tests["warnedTests"]:
        result = "WARNED"
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": plain(name), "digest": {"sha256": hashlib.sha256(manifest).hexdigest()}}
        ],
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": result,
            # The predicate has no field for these; annotations of the configuration may.
            "configuration": [
                {
                    "name": "mtpconv audit",
                    "uri": f"pkg:pypi/mtpconv@{mtpconv.__version__}",
                    "annotations": {
                        "version": mtpconv.__version__,
                        "verdict": report.verdict,
                        "tier": report.tier,
                        "mtp": report.mtp.status,
                        "before": None if report.before is None else report.before.path,
                        "switches": list(report.switches),
                        "tensorsCompared": report.compared.tensors,
                        "bytesCompared": report.compared.nbytes,
                    },
                }
            ],
            **tests,
        },
    }
    return json.dumps(statement, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
