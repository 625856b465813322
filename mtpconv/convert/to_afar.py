"""torch_dist checkpoint -> HF files in an object store, streamed; nothing of them lies here.

A store has no renames. So config.json comes last, after everything else is there and was read
back: without it no loader takes the rest for a model.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from mtpconv.convert.export import Export, write_rest
from mtpconv.convert.mcore_to_hf_plan import McoreToHf
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.verify import require_accepted, require_crcs, verify_digests
from mtpconv.errors import MtpconvError, UsageError
from mtpconv.progress import Progress
from mtpconv.ranges import compress
from mtpconv.ranks import Ranks
from mtpconv.store.afar import open_afar
from mtpconv.store.afar_dist import AfarMegatron, AfarSource
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.content import Reading, reading
from mtpconv.store.crew import Crew
from mtpconv.store.dist_folder import METADATA, TRACKER
from mtpconv.store.files import Files
from mtpconv.store.hf import CONFIG_NAME, QUANT_CONFIG_NAME
from mtpconv.store.legacy_file import NAME as RANK_FILE
from mtpconv.store.places import check_apart
from mtpconv.store.safetensors_header import ShardHeader, plain
from mtpconv.store.upload import Upload
from mtpconv.store.usual_files import LOADED

#: Endings of shards and their index.
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_Shard = tuple[str, ShardHeader, list[tuple[str, Reading]]]


def mcore2hf_afar(
    source: Path,
    url: str,
    *,
    like: Path | AfarSource | None = None,
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

    `like`, `opened`: as `mcore2hf`. `overwrite` removes old shards, index, config and what else
    loaders look for; other files stay.

    Law: as `mcore2hf`; if it fails, what was uploaded is removed again, and nothing else.

    Raises: as `mcore2hf`.
    """
    progress = progress or Progress()
    upload = Upload(url)
    reads = [source] if opened is None else opened.mirror.reads
    beside = [like] if like is None or isinstance(like, Path) else like.reads
    check_apart(url, *reads, *beside, mapping)
    there = upload.names()
    if there and not overwrite:
        raise UsageError(f"{url}: holds {len(there)} files; pass --overwrite or name another")
    _require_no_megatron(url, there)
    export = Export(
        source, like=like, mapping=mapping, drop_mtp=drop_mtp, frozen_vision=frozen_vision,
        fp8=fp8, verify=verify, opened=opened,
    )  # fmt: skip
    work, memory = export.work, export.memory(jobs, Ranks())
    if dry_run:
        return export.outcome(url, memory)
    with (
        tempfile.TemporaryDirectory(prefix="mtpconv-") as place,
        Crew(jobs, on_read=export.crcs.saw) as crew,
    ):
        rest = Path(place, "rest")
        rest.mkdir()
        write_rest(work, rest)
        others = sorted(p.relative_to(rest).as_posix() for p in rest.rglob("*") if p.is_file())
        left = [n for n in there if n not in {*work.headers, *others}]
        stale = [n for n in left if _is_of_a_model(n)]
        try:
            # From now on there is no model here, neither the old one nor the new one.
            upload.remove([n for n in there if n == CONFIG_NAME])
            digests = _upload_shards(work, upload, crew, progress)
            if verify:
                require_crcs(export.crcs, Ranks(), crew.jobs)
            for name in others:
                if name != CONFIG_NAME:
                    upload.write(name, [(rest / name).read_bytes()])
            upload.remove(stale)
            if verify:
                _read_back(work, url, Path(place, "mirror"), digests, crew, progress)
            export.require_unchanged()
            upload.write(CONFIG_NAME, [(rest / CONFIG_NAME).read_bytes()])
        except BaseException as error:
            stay = upload.undo()
            if not stay:
                raise
            said = f"{len(stay)} files may still be there, first {plain(stay[0])}; remove them"
            if not isinstance(error, MtpconvError):
                error.add_note(f"{url}: {said}")  # whoever reports the signal says it
                raise
            raise type(error)(f"{error}; {said}") from error
    done = export.outcome(url, memory, digests)
    stay = [n for n in left if n not in stale]
    if not stay:
        return done
    note = f"{len(stay)} files that were there are no part of a model and stay: {compress(stay, 4)}"
    return replace(done, notes=(*done.notes, note))


def _require_no_megatron(url: str, names: Iterable[str]) -> None:
    """Refuse to write over a Megatron checkpoint, below which others may lie."""
    for name in names:
        last = name.rpartition("/")[2]
        if last in (METADATA, TRACKER, RANK_FILE) or last.endswith(".distcp"):
            raise UsageError(
                f"{url}: holds a Megatron checkpoint ({plain(name)}), which --overwrite does not "
                "remove; name another place"
            )


def _is_of_a_model(name: str) -> bool:
    """Whether loaders would take an old file for a part of the new model; none in a folder."""
    loaded = (*LOADED, CONFIG_NAME, QUANT_CONFIG_NAME)
    return name in loaded or ("/" not in name and name.endswith(_WEIGHTS))


def _read_back(
    work: McoreToHf,
    url: str,
    mirror: Path,
    digests: Mapping[str, str],
    crew: Crew,
    progress: Progress,
) -> None:
    """Verify what was uploaded; `mirror` is made. Raises: as `mcore2hf`, naming the URL."""
    mirror.mkdir()
    try:
        back = open_afar(url, mirror)
        require_sound(back)
        require_accepted(mirror / name for name in back.shards)  # with holes for tensor bytes
        specs = {n: work.content.tensors[n] for n in work.names}
        verify_digests(back, specs, digests, progress, jobs=crew.jobs)
    except MtpconvError as error:
        raise type(error)(str(error).replace(str(mirror), url)) from error


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
