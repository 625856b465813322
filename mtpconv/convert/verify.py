"""Reading back what was written and comparing digests with what was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mtpconv.errors import RefusedError, UnreadableError
from mtpconv.progress import Progress
from mtpconv.ranges import compress
from mtpconv.ranks import Ranks, share
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.content import Pieced
from mtpconv.store.crc_check import CrcCheck
from mtpconv.store.digest import digest_tensors
from mtpconv.tensors import TensorSpec
from mtpconv.view import HfView


def require_accepted(shards: Iterable[Path]) -> None:
    """A reader that is not ours, the safetensors library, opens every shard that was written.

    Raises: RefusedError if it does not.
    """
    from safetensors import SafetensorError, safe_open

    for path in shards:
        try:
            with safe_open(path, framework="numpy") as file:
                file.keys()
        except SafetensorError as error:
            raise RefusedError(
                f"verification: the safetensors library does not open {path.name}: {error}; "
                "nothing was kept, please report this"
            ) from error


def require_crcs(check: CrcCheck, ranks: Ranks, jobs: int) -> None:
    """Every record of the source has its CRC-32; what no rank has read whole is read here.

    Raises: UnreadableError naming file and tensor.
    """
    rests = ranks.gather("crcs", check.rest)
    rest = sorted(set(rests[0]).intersection(*rests[1:]))
    check.read(share(rest, check.nbytes, ranks), jobs)
    broken = check.broken
    if broken:
        more = f" (and {len(broken) - 1} more records)" if len(broken) > 1 else ""
        raise UnreadableError(f"{broken[0].fault}{more}; --no-verify converts what is there")


def require_zeros(view: HfView) -> None:
    """Rows beyond the vocabulary, which no HF tensor shows, are the zeros that were written.

    Raises: RefusedError naming the tensors.
    """
    bad = [name for name, _ in view.nonzero_padding()]
    if bad:
        raise RefusedError(
            f"verification: the padding of {compress(bad, 4)} does not read back as zeros; nothing "
            "was kept, check disk and memory"
        )


def verify_digests(
    written: Checkpoint | Pieced,
    specs: Mapping[str, TensorSpec],
    digests: Mapping[str, str],
    progress: Progress,
    *,
    ranks: Ranks | None = None,
    jobs: int | None = None,
) -> None:
    """Compare names, dtypes, shapes and digests of the output with those of the source.

    Each rank reads the bytes of its neighbour's share: its own may still be in its memory.

    Raises: RefusedError naming the tensors that differ; the output is then not kept.
    """
    absent = [n for n in specs if n not in written.tensors]
    extra = [n for n in written.tensors if n not in specs]
    wrong = [n for n, s in specs.items() if n in written.tensors and written.tensors[n] != s]
    for what, names in (("are missing", absent), ("are new", extra), ("have other shapes", wrong)):
        if names:
            raise RefusedError(
                f"verification: {len(names)} tensors {what} in the output: {compress(names, 4)}; "
                "nothing was kept, please report this"
            )
    ranks = ranks or Ranks()
    neighbour = Ranks((ranks.rank + 1) % ranks.size, ranks.size)
    shared = share(list(specs), lambda n: specs[n].nbytes, neighbour)
    progress.begin("verify", sum(specs[n].nbytes for n in shared))
    bad = [
        name
        for name, digest in digest_tensors(written, shared, progress.advance, jobs)
        if digest != digests[name]
    ]
    if bad:
        raise RefusedError(
            f"verification: {len(bad)} tensors read back differ from what was read: "
            f"{compress(bad, 4)}; nothing was kept, check disk and memory"
        )
