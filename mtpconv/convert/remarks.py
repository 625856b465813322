"""What an outcome has to say besides counts: one line each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from mtpconv.convert.agreement import is_mtp_name
from mtpconv.mapping.plan import Plan
from mtpconv.ranges import compress, compress_names
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.fp8_tensors import SCALE
from mtpconv.store.manifest import Manifest
from mtpconv.store.other_files import UNSOUND, OtherFiles
from mtpconv.store.safetensors_header import plain
from mtpconv.tensors import TensorSpec

#: Names that a note spells out.
_SHOWN = 4


def file_notes(others: OtherFiles) -> Iterator[str]:
    """Files that did not travel, by reason, or may not have, and those that are only pointers."""
    for reason in dict.fromkeys(others.left.values()):
        names = [plain(n) for n, why in others.left.items() if why == reason]
        warning = "warning: " if reason in UNSOUND else ""
        yield f"{warning}{len(names)} left behind, {plain(reason)}: {compress(names, _SHOWN)}"
    if others.pointers:
        names = [plain(n) for n in others.pointers]
        yield (
            f"warning: {len(names)} git-lfs pointers travelled in place of files: "
            f"{compress(names, _SHOWN)}; run `git lfs pull` in the source and convert again"
        )
    if not others.listed:
        yield (
            "warning: the server gives no listing: besides weights, only names that releases "
            "usually have and code that the configs name were looked for; if there is more, "
            "download the folder and name that"
        )


def resume_notes(earlier: int, taken_over: int) -> Iterator[str]:
    """Finished files of an earlier run that this one could not use."""
    unfit = earlier - taken_over
    if unfit > 0:
        yield (
            f"{unfit} finished file{'s' * (unfit > 1)} of an earlier run did not fit and "
            f"{'were' if unfit > 1 else 'was'} written anew: another source, other options or "
            "another number of ranks, or damaged"
        )


def unsealed_notes(records: int) -> Iterator[str]:
    """Records of which nothing tells whether they are whole."""
    if records:
        yield (
            f"{records} records were saved without a CRC-32 of their own: flipped bits in them "
            "cannot be seen"
        )


class Since(NamedTuple):
    """What became of the tensors since hf2mcore saved their digests."""

    unchanged: int
    #: those of MTP among them
    unchanged_mtp: int
    #: names of the others, in ranges
    changed: tuple[str, ...]
    #: says so if the trunk went on without MTP, else empty
    stale: str
    #: written in another form than hf2mcore read, so that nothing tells if they were trained
    not_compared: int
    #: those of MTP among them
    not_compared_mtp: int


def since(
    known: Manifest,
    digests: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    plan: Plan,
    computed: Collection[str],
    remade: Collection[str],
) -> Since:
    """Compare written tensors with the manifest that travelled along.

    `computed` names the tensors whose bytes are no copy of anything; `remade` those in FP8 that is
    new, trained or not.
    """
    same = {n for n, d in digests.items() if known.digests.get(n) == d and n not in computed}
    # What is written in another dtype has changed its form, which says nothing about training.
    others = {n for n in digests.keys() - same if n in remade or known.tensors.get(n) != specs[n]}
    changed = [n for n in digests if n not in same and n not in others]
    mtp = {n for n in digests if is_mtp_name(plan, n.removesuffix(SCALE))}
    copies = {copy.hf for copy in plan.copies}  # of the trunk's embedding and head
    own = mtp - copies
    trunk_changed = sum(n not in mtp for n in changed)
    stale = ""
    if trunk_changed and own and own <= same:
        stale = (
            f"warning: {trunk_changed} tensors of the trunk changed and none of the {len(own)} of "
            "MTP did: its drafts are those of before training; was MTP trained and saved?"
        )
    groups = tuple(compress_names(changed))
    return Since(len(same), len(same & mtp), groups, stale, len(others), len(others & mtp))


def carried_notes(
    carried: Checkpoint | None, plan: Plan, written: Collection[str], changes: Since | None
) -> Iterator[str]:
    """Tensors that Megatron has no place for, where those in Megatron went on without them."""
    if carried is None or (changes is not None and not changes.changed):
        return
    there = set(written)
    names = [n for n in carried.tensors if n in there and n not in plan.arithmetic]
    if names:
        what = "come from before training" if changes else "are as hf2mcore saved them"
        yield (
            f"warning: {len(names)} carried tensors {what}, Megatron has no place for them: "
            f"{compress(names, _SHOWN)}"
        )
