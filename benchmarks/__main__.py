"""python -m benchmarks: measure, and write docs/performance.md."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.cases import CASES, Figures, Place
from benchmarks.goals import known


def main() -> None:
    """Run the cases that were asked for; figures of earlier runs are kept beside the models."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case (5)")
    parser.add_argument("--place", type=Path, help="where models are made and converted")
    parser.add_argument("--only", default=",".join(CASES), help="cases, joined by commas")
    chosen = parser.parse_args()
    folder = chosen.place or Path(tempfile.mkdtemp(prefix="mtpconv-benchmarks-"))
    place = Place(folder, chosen.rounds)
    kept = folder / "figures.json"
    figures: Figures = json.loads(kept.read_text()) if kept.is_file() else {}
    for name in chosen.only.split(","):
        print(f"{name}:", file=sys.stderr, flush=True)
        figures |= CASES[name](place)
        kept.write_text(json.dumps(figures, indent=1))
    for goal, values in known(figures):
        mark = "ok  " if goal.met(values) else "LESS"
        shown = " ".join(f"{v:.3g}" for v in values)
        print(f"{mark} {goal.what}: {shown} ({goal.shown()})")
    if {"gigabytes", "page cache GB/s", "start import torch ms"} <= figures.keys():
        report.write(figures)
        print(f"written: {report.DOCUMENT}")
    if chosen.place is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
