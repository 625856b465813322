"""GLM-5.2 at its true size, 1.5 TB, without 1.5 TB of disk: python -m benchmarks.scale.

Shards and `.distcp` files are sparse: every header, record frame and offset is real, data are
holes, except for a few tensors at the far ends that are really copied and compared. So planning,
placing, metadata, offsets beyond 4 GiB and memory are those of a real run; only moving bytes is
left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from blake3 import blake3

from benchmarks import model
from benchmarks.measure import ROOT, median, remove
from mtpconv.convert import hf2mcore, mcore2hf, mcore_to_hf, record_files, records, shards, verify
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.content import Files, blocks
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_writer import index_bytes, make_headers
from mtpconv.store.new_file import NewFile
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.tensors import TensorSpec
from mtpconv.view import HfView

DOCUMENT = ROOT / "docs" / "scale.md"


@dataclass
class Stage:
    """What a stage took. Units: seconds, seconds, bytes."""

    name: str
    wall: float
    cpu: float
    anonymous: int


def staged(name: str, work: Callable[..., Any], *given: Any) -> tuple[Stage, Any]:
    """Do one stage in a process of its own, as a command would: none has another's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        stage, found = process.submit(_watched, name, work, given).result()
    print(stage, file=sys.stderr, flush=True)
    return stage, found


def _watched(name: str, work: Callable[..., Any], given: Sequence[Any]) -> tuple[Stage, Any]:
    """Time a stage and watch its anonymous memory meanwhile."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    begun, used = time.monotonic(), time.process_time()
    try:
        found = work(*given)
    finally:
        over.set()
        thread.join()
    return Stage(name, time.monotonic() - begun, time.process_time() - used, most[0]), found


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _inventory(config: dict[str, Any]) -> dict[str, TensorSpec]:
    return dict(make_plan(config, find_table(config["model_type"])).hf)


def sparse_model(folder: Path, config: dict[str, Any]) -> None:
    """An HF folder with true headers and holes for data."""
    folder.mkdir()
    headers = make_headers(folder, _inventory(config))
    for file, header in headers.items():
        with (folder / file).open("wb") as out:
            out.write(header.raw)
            out.truncate(header.size)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_bytes(index_bytes(headers))


def far_ends(inventory: dict[str, TensorSpec]) -> list[str]:
    """Tensors to be copied for real: first and last, and the MTP's last expert and its glue."""
    names = list(inventory)
    experts = [n for n in names if ".layers.78.mlp.experts.255." in n]
    wanted = [names[0], names[-1], "model.norm.weight", "model.layers.78.eh_proj.weight"]
    middle = "model.layers.40.mlp.experts.128.down_proj.weight"
    return [n for n in dict.fromkeys([*wanted, middle, *experts]) if n in inventory]


def content(name: str, spec: TensorSpec) -> bytes:
    """Seeded bytes of a tensor; of 2 GB in a second."""
    return np.random.default_rng(crc32(name.encode())).bytes(spec.nbytes)


def made_up(name: str) -> str:
    """A digest for a tensor whose bytes are not looked at."""
    return blake3(name.encode()).hexdigest()


def put(folder: Path, names: Sequence[str]) -> None:
    """Seeded bytes into some tensors of a sparse folder."""
    hf = open_hf(folder)
    for name in names:
        (chunk,) = hf.chunks(name)
        fd = os.open(chunk.file, os.O_WRONLY)
        os.pwrite(fd, content(name, hf.tensors[name]), chunk.start)
        os.close(fd)


@contextmanager
def replaced(instead: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of modules that are something else for a while."""
    before = [(where, name, getattr(where, name)) for where, name, _ in instead]
    for where, name, what in instead:
        setattr(where, name, what)
    try:
        yield
    finally:
        for where, name, what in before:
            setattr(where, name, what)


def hollow(names: Sequence[str]) -> AbstractContextManager[None]:
    """Conversions that read and write only what holds one of these tensors.

    All else stays a hole; its digests are made up, and nobody asks for the CRC-32 of holes.
    """
    wanted = set(names)
    write, copy = record_files.write_batch, shards._copy
    digests, usage = verify.digest_tensors, shutil.disk_usage

    def write_batch(
        file: NewFile, batch: Sequence[records.Placed], files: Files
    ) -> list[tuple[str, str]]:
        found = []
        for placed in batch:
            step, room = placed.record.step, placed.room
            if wanted & set(step.hf):
                found += write(file, [placed], files)
                continue
            room.seal(file, 0)
            found += [(name, made_up(name)) for name in step.hf]
        return found

    def copy_tensors(
        shard: shards.Shard, tensors: Sequence[Any], files: Files, *, digest: bool
    ) -> list[Any]:
        found = []
        for tensor in tensors:
            if tensor.name in wanted:
                found += copy(shard, [tensor], files, digest=digest)
                continue
            found.append((tensor.name, made_up(tensor.name)))
            if tensor.what.spec.nbytes:  # its last byte: the file gets its length
                shard.out.write(tensor.at + tensor.what.spec.nbytes - 1, memoryview(b"\0"))
        return found

    def digest_tensors(source: Any, names: Sequence[str], *rest: Any) -> Iterator[tuple[str, str]]:
        for name in names:
            if name in wanted:
                yield from digests(source, [name], *rest)
            else:
                yield name, made_up(name)

    return replaced(
        [
            # Four times as large as else, for offsets beyond 4 GiB.
            (record_files, "FILE_LIMIT", 4 * record_files.FILE_LIMIT),
            (record_files, "write_batch", write_batch),
            (shards, "_copy", copy_tensors),
            (verify, "digest_tensors", digest_tensors),
            (mcore_to_hf, "require_crcs", lambda *_: None),
            (shutil, "disk_usage", lambda p: usage(p)._replace(free=1 << 50)),
        ]
    )


def require_same(read: Callable[[str], bytes], names: Sequence[str], specs: Any) -> None:
    """Every tensor that was really copied has its bytes. Raises: SystemExit."""
    for name in names:
        if read(name) != content(name, specs[name]):
            raise SystemExit(f"{name}: has other bytes after the conversion")


def _reader(source: Any) -> Callable[[str], bytes]:
    return lambda name: b"".join(bytes(block) for block in blocks(source, name))


def convert(source: Path, target: Path, names: Sequence[str]) -> float:
    """hf2mcore of the hollow model; gives its bytes."""
    with hollow(names):
        return float(hf2mcore(source, target).nbytes)


def export(source: Path, target: Path, names: Sequence[str]) -> None:
    """mcore2hf of the hollow model."""
    with hollow(names):
        done = mcore2hf(source, target)
    if done.unchanged != done.tensors:
        raise SystemExit(f"of {done.tensors} tensors {done.unchanged} came back unchanged")


def find_records(source: Path) -> tuple[int, int]:
    """Elements of the largest tensor, and where in its file the farthest record begins."""
    checkpoint = open_torch_dist(source)
    largest = max(spec.elements for spec in checkpoint.tensors.values())
    return largest, max(c.start for key in checkpoint.tensors for c in checkpoint.chunks(key))


def measure(folder: Path) -> tuple[list[Stage], dict[str, float]]:
    """Both conversions of a hollow GLM-5.2, and what they took."""
    config = model.published("glm-5.2")
    hf, mcore, back = folder / "hf", folder / "mcore", folder / "back"
    remove(hf, mcore, back)
    made, _ = staged("make the sparse source", sparse_model, hf, config)
    inventory = _inventory(config)
    chosen = far_ends(inventory)
    put(hf, chosen)
    there, nbytes = staged("hf2mcore, all but the bytes", convert, hf, mcore, chosen)
    opened, (largest, farthest) = staged("open it and find every record", find_records, mcore)
    plan = make_plan(config, find_table("glm_moe_dsa"))
    require_same(_reader(HfView(open_torch_dist(mcore), plan)), chosen, inventory)
    returned, _ = staged("mcore2hf, all but the bytes", export, mcore, back, chosen)
    result = open_hf(back)
    require_same(_reader(result), chosen, inventory)
    same = all(result.shards[f].raw == h.raw for f, h in open_hf(hf).shards.items())
    if not same:
        raise SystemExit("the shards came back with other headers")
    facts = {
        "tensors": len(inventory), "bytes": nbytes, "largest": largest,
        "farthest": farthest, "shards": len(result.shards), "copied": len(chosen),
        "files": len(list(mcore.rglob("*.distcp"))),
        "metadata": sum(p.stat().st_size for p in mcore.rglob(".metadata")),
        "disk": sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file()),
    }  # fmt: skip
    remove(hf, mcore, back)
    return [made, there, opened, returned], facts


_TEXT = """# A terabyte and a half

Written by `python -m benchmarks.scale`; do not edit. How long GLM-5.2 takes, how much memory and
disk, and what shows that it works at that size.

## A run with holes

`python -m benchmarks.scale` makes GLM-5.2 with its true shapes: {tensors:,} tensors, {tera:.3f} TB
in {shards} shards. Files are sparse: headers, record frames and offsets are real, data are holes,
except for {copied} tensors at the far ends (first, last, MTP glue, the last expert of MTP), which
are really copied both ways and compared. `.distcp` files are 8 GiB here and not 2, for offsets
beyond 4 GiB. Moving the other bytes is the only thing left out.

| stage | wall | CPU | anonymous memory |
| --- | --- | --- | --- |
{stages}

The farthest record begins at byte {farthest:,} of its file, the largest tensor has {largest:,}
elements, `.metadata` has {metadata:.1f} MB, the checkpoint {files} files. All of it used
{disk:.2f} GB of disk.

## What a real run takes

Measured here on 30,000 tensors of 155 KB ([performance.md](performance.md)): {cpu_there:.2f} and
{cpu_back:.2f} CPU s/GB for hf2mcore and mcore2hf without verification, {check_there:.2f} and
{check_back:.2f} with it; disk {disk_speed:.1f} GB/s for one reader. Tensors of GLM-5.2 have 25 MB,
so what is paid for each tensor weighs nothing there. The bytes are read once and written once, and
read once more by verification. A run takes as long as the slowest of disk and processors:

| place | disk | processors | hf2mcore | with verification |
| --- | --- | --- | --- | --- |
{places}

- **Memory**: {memory:.0f} MB for each process, for the names and places of tensors,
  not for their bytes.
- **Disk**: {tera:.2f} TB for the target beside {tera:.2f} TB of source, and {overhead:.2f} GB for
  record frames, metadata and `hf_source`. `--dry-run` says so before anything is written; with too
  little disk nothing is.
- **Ranks**: every rank of `torchrun`, `srun` or `mpirun` converts its share into its own files on
  the filesystem that all share; the first one commits. Shares are balanced to within one tensor
  (hf2mcore) or one shard (mcore2hf: {shards} shards, so more ranks than shards idle).
- **Interruption**: with `--resume` finished files are taken over after their bytes were checked; a
  file of hf2mcore has 2 GiB, so at most that much for each rank and job is done twice.
- **Verification** reads through the page cache. On one machine with less memory than the model
  nearly all of it comes from disk; with several ranks each reads what its neighbour wrote.

The estimates assume that reading and writing share the disk of a laptop and that a parallel
filesystem does both at its full speed; 20 % are added for what neither model sees.
"""

#: Name, GB/s read, GB/s written, whether both share one device, cores.
_PLACES = [
    ("a laptop's SSD, 2 cores", 1.5, 1.9, True, 2),
    ("a 10 GB/s filesystem, one node with 16 cores", 10.0, 10.0, False, 8),
    ("a 10 GB/s filesystem, 32 ranks", 10.0, 10.0, False, 64),
    ("a 100 GB/s filesystem, 32 ranks", 100.0, 100.0, False, 64),
]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _estimate(size: float, place: Any, cpu: float, reads: int) -> float:
    """Seconds; `size` in GB, `cpu` in CPU s/GB."""
    _, read, written, shared, cores = place
    moving = 1 / read + 1 / written if shared else max(1 / read, 1 / written)
    moving += (reads - 1) / read
    return 1.2 * size * float(max(moving, cpu / cores))


def write(
    stages: Sequence[Stage], facts: dict[str, float], figures: dict[str, list[float]]
) -> None:
    """Write docs/scale.md."""
    size = facts["bytes"] / 1e9
    cpu = {n: median(figures[f"{n} CPU s/GB"]) for n in
           ("hf2mcore_plain", "mcore2hf_plain", "hf2mcore", "mcore2hf")}  # fmt: skip
    rows = [
        f"| {s.name} | {s.wall:.1f} s | {s.cpu:.1f} s | {s.anonymous / 1e6:.0f} MB |"
        for s in stages
    ]
    places = []
    for place in _PLACES:
        plain = _estimate(size, place, cpu["hf2mcore_plain"], 1)
        checked = _estimate(size, place, cpu["hf2mcore"], 2)
        disk = f"{place[1]:g} read, {place[2]:g} written"
        places.append(
            f"| {place[0]} | {disk} GB/s | {place[4]} jobs | {_minutes(plain)} |"
            f" {_minutes(checked)} |"
        )
    text = _TEXT.format(
        tensors=int(facts["tensors"]), tera=size / 1000, shards=int(facts["shards"]),
        copied=int(facts["copied"]), stages="\n".join(rows), farthest=int(facts["farthest"]),
        largest=int(facts["largest"]), metadata=facts["metadata"] / 1e6,
        files=int(facts["files"]), disk=facts["disk"] / 1e9, cpu_there=cpu["hf2mcore_plain"],
        cpu_back=cpu["mcore2hf_plain"], check_there=cpu["hf2mcore"], check_back=cpu["mcore2hf"],
        disk_speed=median(figures["disk GB/s"]), places="\n".join(places),
        memory=max(s.anonymous for s in stages) / 1e6,
        overhead=(facts["metadata"] + 2 * 2048 * 40_000) / 1e9,
    )  # fmt: skip
    DOCUMENT.write_text(text, "utf-8")


def main() -> None:
    """Measure and write docs/scale.md; figures of `python -m benchmarks` lie in PLACE."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=main.__doc__)
    parser.add_argument("--place", type=Path, required=True)
    folder = parser.parse_args().place
    work = folder / "scale"
    work.mkdir(parents=True, exist_ok=True)
    stages, facts = measure(work)
    shutil.rmtree(work)
    print(json.dumps(facts, indent=1))
    figures = folder / "figures.json"
    if figures.is_file():
        write(stages, facts, json.loads(figures.read_text()))
        print(f"written: {DOCUMENT}")


if __name__ == "__main__":
    main()
