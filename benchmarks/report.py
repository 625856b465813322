"""docs/performance.md and its plot, from the figures of one run."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from benchmarks.cases import Figures
from benchmarks.goals import GOALS, known
from benchmarks.measure import PAGE, ROOT, median, timed
from benchmarks.plot import plot

DOCUMENT = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "performance.svg"

_INTRODUCTION = """# Performance

Written by `python -m benchmarks`; do not edit. Everything is measured from the start of a
command to its exit, fsyncs included, and given as a ratio within one round: first a copy, then
the conversions, then again, each round beginning with another one. Memory is touched and freed
before each run, because the first touch of fresh memory costs more than the work itself on some
machines. A figure is the median of its rounds ({rounds} of the conversions); brackets have the
smallest and the largest.

The model is of DeepSeek-V3's kind with an MTP depth: {gigabytes:.2f} GB in 30,000 tensors of
mostly 155 KB. That is the hard case: released models have fewer, larger tensors for each byte,
so the work beside copying weighs less.

CPU limits were set for a machine on which `import torch` took 1.51 s; here it took {torch:.2f} s.
"""

_HOW = """
## Where the time goes

- Bytes are read into a block that stays in the cache, digested (BLAKE3), given their CRC-32 where
  a `.distcp` record needs one, and written, in this order, by `--jobs` threads. Records are placed
  before they are written, so the files do not depend on the number of threads.
- Tensors that lie close together are read in one call (`preadv`), whatever their order.
- With `--no-verify` mcore2hf looks at no byte. Tried: copying inside the kernel
  (`copy_file_range`, one tensor at a time, as source and target differ in order) took 1.18 CPU s/GB
  against 0.98 and 1.13 times as long (eight pairs, 2026-11-30): where source and target do not
  begin at the same place of a page, the kernel copies page by page.
- Write-back begins while bytes are still being copied. Pages are most of what writing costs, for
  `cp` too. Those that nobody will read (`--no-verify`) are given back as soon as they are on disk,
  and written into again: 1.7 CPU s/GB for hf2mcore against 2.4 (three pairs, 2026-11-30). Tried:
  writing past the page cache (`O_DIRECT`, 2 MB blocks, eight on their way) cost as much as that,
  and blocks must be put together by hand.
- Verification reads everything back and compares BLAKE3 digests. What still is in the page cache
  is read from there: it proves what was written, not that the disk will return it.
- A checkpoint with one tensor per expert has tens of thousands of entries. Planning, metadata and
  manifest take 0.1 to 0.2 ms of CPU for each tensor, in each direction.
- Digests cannot be faster than BLAKE3, which takes {blake3:.2f} CPU s/GB on this machine; reading
  from the page cache takes {cache:.2f}. The goals were set where BLAKE3 took 0.19 and the page
  cache 0.15 (AVX-512; here there is {vector}), so digests of one job could reach {ceiling:.2f} of
  reading here if nothing else took time, and 0.44 there.
- CRC-32 by isal where there is a build of it, else by zlib, which takes six times as long. Used
  here: {isal}.

## Running it

`python -m benchmarks --rounds 5 --place FOLDER` needs 30 GB of disk in FOLDER and about 30 minutes.
`--only conversion,audit` runs some cases; the document is written when all have run.
"""


def write(figures: Figures) -> None:
    """Write the document and the plot."""
    rows = known(figures)
    text = [_introduction(figures), _machine(figures)]
    text += ["\n![Each figure as a multiple of what was asked for](performance.svg)\n"]
    text += ["| what | asked for | measured | |", "| --- | --- | --- | --- |"]
    for goal, values in rows:
        mark = "yes" if goal.met(values) else "no"
        text.append(f"| {goal.what} | {goal.shown()} | {_shown(values)}{goal.unit} | {mark} |")
    text += ["", *_memory(figures), *_coarse(figures), *_baselines(figures)]
    blake3, cache = _blake3(), 1 / median(figures["page cache GB/s"])
    text.append(
        _HOW.format(
            isal="isal" if _has_isal() else "zlib",
            blake3=blake3,
            cache=cache,
            vector="AVX-512" if _has_avx512() else "none",
            ceiling=cache / (cache + blake3),
        )
    )
    DOCUMENT.write_text("\n".join(text), "utf-8")
    PICTURE.write_text(plot(rows), "utf-8")


def _introduction(figures: Figures) -> str:
    torch = median(figures["start import torch ms"]) / 1000
    rounds = len(figures["cp GB/s"])
    return _INTRODUCTION.format(gigabytes=figures["gigabytes"][0], torch=torch, rounds=rounds)


def _shown(values: list[float]) -> str:
    value = f"{median(values):.3g}"
    return value if len(values) == 1 else f"{value} [{min(values):.3g} to {max(values):.3g}]"


def _machine(figures: Figures) -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE / 1e9
    cp = figures["cp GB/s"]
    noise = max(cp) / min(cp)
    load = os.getloadavg()
    facts = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "filesystem": _filesystem(),
        "cp of the same bytes, fsync included": f"{_shown(cp)} GB/s",
        "CPU of cp": f"{_shown(figures['cp CPU s/GB'])} s/GB",
        "page cache, one reader": f"{_shown(figures['page cache GB/s'])} GB/s",
        "disk, one reader": f"{_shown(figures['disk GB/s'])} GB/s",
        "noise": f"the fastest cp took 1/{noise:.1f} of the slowest; load at the end "
        f"{load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}",
    }
    lines = ["## The machine", "", "| | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {fact} |" for name, fact in facts.items())])


def _memory(figures: Figures) -> list[str]:
    names = ("hf2mcore", "mcore2hf")
    if not all(f"quarter {n} anonymous MB" in figures for n in names):
        return []
    lines = ["Anonymous memory does not follow the bytes; the same tensors with a quarter of them:"]
    lines += ["", "| | a quarter | the whole |", "| --- | --- | --- |"]
    for name in names:
        small = figures[f"quarter {name} anonymous MB"]
        lines.append(
            f"| {name} | {_shown(small)} MB | {_shown(figures[f'{name} anonymous MB'])} MB |"
        )
    return [*lines, ""]


def _coarse(figures: Figures) -> list[str]:
    """The table of the model with larger tensors."""
    if "coarse gigabytes" not in figures:
        return []
    lines = [
        "## Larger tensors", "",
        _SMALLER.format(figures["coarse gigabytes"][0]), "",
        "| | speed to cp | CPU s/GB | CPU to that of cp |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    cp = figures["coarse cp CPU s/GB"]
    for name, what in _WAYS.items():
        cpu = figures[f"coarse {name} CPU s/GB"]
        ratio = [a / b for a, b in zip(cpu, cp, strict=True)]
        speed = figures[f"coarse {name} / cp"]
        lines.append(f"| {what} | {_shown(speed)} | {_shown(cpu)} | {_shown(ratio)} |")
    audits = [(g.what, f"coarse {g.figure}") for g in GOALS if g.figure.startswith("audit ")]
    audits = [(what, name) for what, name in audits if name in figures]
    if audits:
        lines += ["", "| | measured |", "| --- | --- |"]
        lines += [f"| {what} | {_shown(figures[name])} |" for what, name in audits]
    return [*lines, ""]


_SMALLER = (
    "{:.2f} GB in 3,200 tensors of mostly 1.6 MB (those of released models have 10 MB and more):"
)
_WAYS = {
    "hf2mcore_plain": "hf2mcore --no-verify", "mcore2hf_plain": "mcore2hf --no-verify",
    "hf2mcore": "hf2mcore", "mcore2hf": "mcore2hf",
}  # fmt: skip


def _baselines(figures: Figures) -> list[str]:
    names = [n.split(" ", 1)[1].removesuffix(" GB/s") for n in figures
             if n.startswith("baseline ") and n.endswith(" GB/s")]  # fmt: skip
    if not names:
        return []
    lines = [
        "## Other ways to write the same bytes", "",
        f"Whole processes, once each, on {figures['baseline gigabytes'][0]:.2f} GB of that kind.",
        "", "| | GB/s | CPU s/GB | resident memory |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name in names:
        speed, cpu, memory = (
            median(figures[f"baseline {name} {unit}"])
            for unit in ("GB/s", "CPU s/GB", "resident MB")
        )
        lines.append(f"| {name} | {speed:.2f} | {cpu:.2f} | {memory:.0f} MB |")
    return lines


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _filesystem() -> str:
    done = subprocess.run(
        ["stat", "-f", "-c", "%T", "."], check=False, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _blake3() -> float:
    """Units: CPU s/GB, of one thread on 2 MB at a time."""
    from blake3 import blake3

    block = os.urandom(2 << 20)
    return (
        timed(lambda: [blake3(block).digest() for _ in range(200)]).cpu / (200 * len(block)) * 1e9
    )


def _has_avx512() -> bool:
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def _has_isal() -> bool:
    from mtpconv.store.crc import crc32

    return "isal" in crc32.__module__
