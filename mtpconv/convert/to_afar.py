"""torch_dist checkpoint -> HF files in an object store, streamed; nothing of them lies here.

A store has no renames. So config.json comes last, after everything else is there and was read
back: without it no loader takes the rest for a model.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from mtpconv.convert.mcore_to_hf import (
    McoreToHf,
    checkpoint_files,
    outcome_of,
    plan_mcore2hf,
    write_rest,
)
from mtpconv.convert.needs import TO_HF, memory_need
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.snapshot import Snapshot
from mtpconv.convert.verify import verify_digests
from mtpconv.errors import UsageError
from mtpconv.progress import Progress
from mtpconv.ranks import Ranks
from mtpconv.store.afar import open_afar
from mtpconv.store.afar_dist import AfarMegatron
from mtpconv.store.content import Reading, reading
from mtpconv.store.crew import Crew
from mtpconv.store.files import Files
from mtpconv.store.hf import CONFIG_NAME
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.store.upload import Upload

_Shard = tuple[str, ShardHeader, list[tuple[str, Reading]]]


def mcore2hf_afar(
    source: Path,
    url: str,
    *,
    like: Path | None = None,
    mapping: Path | None = None,
    drop_mtp: bool = False,
    frozen_vision: bool = False,
    fp8: str = "keep",
    overwrite: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    jobs: int | None = None,
    opened: AfarMegatron | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Convert a torch_dist checkpoint to HF files below a URL, one shard for each job at a time.

    `opened`: as `mcore2hf`.

    Law: as `mcore2hf`; if it fails, what was uploaded is removed again.

    Raises: as `mcore2hf`.
    """
    started = time.monotonic()
    progress = progress or Progress()
    upload = Upload(url)
    there = upload.names()
    if there and not overwrite:
        raise UsageError(f"{url}: holds {len(there)} files; pass --overwrite or name another")
    snapshot = Snapshot(checkpoint_files(source))
    work = plan_mcore2hf(
        source, like=like, mapping=mapping, drop_mtp=drop_mtp, frozen_vision=frozen_vision,
        fp8=fp8, opened=opened,
    )  # fmt: skip
    memory = memory_need(len(work.names), TO_HF, jobs, Ranks()) + (opened.memory if opened else 0)
    if dry_run:
        return outcome_of(work, source, url, memory=memory, dry_run=True)
    with tempfile.TemporaryDirectory(prefix="mtpconv-") as place, Crew(jobs) as crew:
        rest = Path(place, "rest")
        rest.mkdir()
        write_rest(work, rest)
        others = sorted(p.relative_to(rest).as_posix() for p in rest.rglob("*") if p.is_file())
        written = [*work.headers, *others]
        clean = upload.undo(written)
        try:
            # From now on there is no model here, neither the old one nor the new one.
            upload.remove([n for n in there if n == CONFIG_NAME])
            digests = _upload_shards(work, upload, crew, progress)
            for name in others:
                if name != CONFIG_NAME:
                    upload.write(name, [(rest / name).read_bytes()])
            if verify:
                mirror = Path(place, "mirror")
                mirror.mkdir()
                specs = {n: work.content.tensors[n] for n in work.names}
                back = open_afar(url, mirror)
                verify_digests(back, specs, digests, progress, jobs=crew.jobs)
            snapshot.require_unchanged()
            if opened is not None:  # the snapshot is of its mirror
                opened.require_unchanged()
            upload.remove([n for n in there if n not in set(written)])
            upload.write(CONFIG_NAME, [(rest / CONFIG_NAME).read_bytes()])
        except BaseException:
            clean()
            raise
    return outcome_of(
        work, source, url, memory=memory, seconds=time.monotonic() - started,
        verified=verify,
    )  # fmt: skip


def _upload_shards(
    work: McoreToHf, upload: Upload, crew: Crew, progress: Progress
) -> dict[str, str]:
    """Upload every shard; gives the digests of their tensors."""
    progress.begin("upload", sum(h.size for h in work.headers.values()))
    saying = threading.Lock()
    content = work.content
    # Where the bytes lie is found out here, by one thread: a checkpoint looks it up once.
    todo = (
        (name, header, [(n, reading(content, n)) for n in header.payload_order])
        for name, header in work.headers.items()
    )

    def send(item: _Shard, files: Files) -> dict[str, str]:
        name, header, readings = item
        digests: dict[str, str] = {}

        def parts() -> Iterator[bytes | memoryview]:
            yield header.raw
            for tensor, what in readings:
                hasher = blake3()
                for block in what.blocks(files):
                    hasher.update(block)
                    yield block
                digests[tensor] = hasher.hexdigest()
                with saying:
                    progress.advance(what.spec.nbytes, tensor)

        upload.write(name, parts())
        return digests

    found: dict[str, str] = {}
    for digests in crew.map(send, todo):
        found.update(digests)
    return found
