"""The closed list of findings: each kind has one stable code; docs/findings.md explains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtpconv.audit.finding import Finding, Severity

#: Code by kind. The first letter groups: T tensors, F files, C config, P presence of MTP,
#: V values, E engines, A the audit itself, W waivers. Codes are never reused.
CODES: Mapping[str, str] = {
    "missing_tensor": "T01",
    "extra_tensor": "T02",
    "dtype_mismatch": "T03",
    "shape_mismatch": "T04",
    "value_mismatch": "T05",
    "unreadable_file": "F01",
    "index_missing_file": "F02",
    "index_entry_not_in_file": "F03",
    "tensor_not_in_index": "F04",
    "duplicate_key_in_index": "F05",
    "duplicate_tensor_conflict": "F06",
    "duplicate_tensor": "F07",
    "index_total_size": "F08",
    "index_ambiguous": "F09",
    "duplicate_key_in_config": "F10",
    "config_missing": "F11",
    "source_damaged": "F12",
    "config_mismatch": "C01",
    "config_contradiction": "C02",
    "mtp_missing": "P01",
    "mtp_orphan": "P02",
    "mtp_partial": "P03",
    "zero_tensor": "V01",
    "not_finite": "V02",
    "constant_tensor": "V03",
    "fresh_init": "V04",
    "stale_mtp": "V05",
    "same_as_trunk": "V06",
    "narrowed": "V07",
    "mtp_unchanged": "V08",
    "engine_ignores": "E01",
    "engine_refuses": "E02",
    "engine_note": "E03",
    "nothing_compared": "A01",
    "tier_not_reached": "A02",
    "not_read": "A03",
    "completeness_not_checked": "A04",
    "waived_unread": "A05",
    "waiver_unused": "W01",
    "waiver_expired": "W02",
}


def finding(kind: str, severity: Severity, message: str, **fields: Any) -> Finding:
    """A finding of a known kind. Raises: KeyError for a kind that is not on the list."""
    return Finding(CODES[kind], kind, severity, message, **fields)


#: Looked for whenever a checkpoint is opened.
_ALWAYS = tuple(k for k, c in CODES.items() if c[0] in "FA")
_PAIR = ("missing_tensor", "extra_tensor", "dtype_mismatch", "shape_mismatch")
_PROMISES = ("mtp_missing", "mtp_orphan", "config_contradiction")
_VALUES = (
    "zero_tensor", "not_finite", "constant_tensor", "fresh_init", "same_as_trunk", "narrowed",
)  # fmt: skip


def checked_kinds(
    *,
    is_pair: bool,
    has_config: bool,
    compares_config: bool,
    compares_bytes: bool,
    reads_values: bool,
    has_table: bool,
    has_base: bool,
    has_waivers: bool,
    profile: str | None,
) -> tuple[str, ...]:
    """The kinds of findings that an audit of this form looks for, in the order of `CODES`."""
    kinds = {*_ALWAYS}
    if is_pair or has_table:
        kinds.update(_PAIR)
    if has_config:
        kinds.update(_PROMISES)
    if has_config and not is_pair and not has_table:
        kinds.update(("missing_tensor", "shape_mismatch", "mtp_partial"))
    if compares_config:
        kinds.add("config_mismatch")
    if compares_bytes:
        kinds.add("value_mismatch")
    if reads_values:
        kinds.update(_VALUES)
    if has_base:
        kinds.add("stale_mtp")
    if has_waivers:
        kinds.update(("waiver_unused", "waiver_expired"))
    if profile is not None:
        kinds.update(k for k, c in CODES.items() if c[0] == "E")
    return tuple(k for k in CODES if k in kinds)
