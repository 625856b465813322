"""What to do about each kind of finding, in one line; docs/findings.md says more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Next step by kind.
NEXT_STEPS: Final[Mapping[str, str]] = {
    "missing_tensor": "export again from a source that has them; for MTP, with MTP switched on",
    "extra_tensor": "fix the names in the exporter; engines ignore or refuse unknown tensors",
    "dtype_mismatch": "keep these tensors out of the cast; --allow upcast permits exact widening",
    "shape_mismatch": "cut only padding on export; --allow vocab-padding permits proven padding",
    "value_mismatch": "find the step that changed them; after training, use --expect structure",
    "unreadable_file": "copy or download the file again; its tensors were not checked",
    "index_missing_file": "fetch the file that the index names",
    "index_entry_not_in_file": "write the index from the shards that were really written",
    "tensor_not_in_index": "add the tensors to the index, or delete the file that holds them",
    "duplicate_key_in_index": "write the index again; parsers keep only the last of two keys",
    "duplicate_tensor_conflict": "delete the file that does not belong to this checkpoint",
    "duplicate_tensor": "nothing must be done; deleting one copy saves space",
    "index_total_size": "write the sum of the tensors' bytes into the index",
    "index_ambiguous": "keep one index in the folder",
    "duplicate_key_in_config": "delete the wrong one of the two keys",
    "config_missing": "copy config.json from the source",
    "source_damaged": "copy hf_source again; to export with other files, use --like",
    "config_mismatch": "set the fields to what the reference, or the run that trained it, says",
    "config_contradiction": "decide which of the fields is right and delete the other",
    "mtp_missing": "restore the MTP tensors, or set the field to 0 if they are gone on purpose",
    "mtp_orphan": "put the field that promises MTP back; engines ignore the tensors without it",
    "mtp_partial": "compare with the original checkpoint, then it is exact",
    "zero_tensor": "check that the converter maps and loads these tensors",
    "not_finite": "export again; uninitialised memory was written",
    "constant_tensor": "check that these tensors were loaded before the export",
    "fresh_init": "load the MTP weights before training, and audit right after the import",
    "stale_mtp": "export the trained MTP, or waive this if MTP was frozen on purpose",
    "same_as_trunk": "check the mapping of these tensors",
    "narrowed": "take the tensor from a source that never cast it",
    "mtp_unchanged": "check that MTP was trained and that its weights were exported",
    "engine_ignores": "read the message before you serve this with that engine",
    "engine_refuses": "change what the message names, or choose another engine",
    "engine_note": "nothing must be done",
    "nothing_compared": "name two checkpoints of one model",
    "tier_not_reached": "give the checkpoint instead of its manifest, and leave --sample out",
    "not_read": "read everything before a release: from this disk, without --sample",
    "waived_unread": "fetch the file; --allow index-authoritative ignores what no index names",
    "completeness_not_checked": "compare with the original, or pass a table with --mapping",
    "waiver_unused": "delete the waiver",
    "waiver_expired": "fix the fault, or decide again and set a new date",
}


def next_step(kind: str) -> str | None:
    """The next step for a kind; None for one that this version does not know."""
    return NEXT_STEPS.get(kind)
