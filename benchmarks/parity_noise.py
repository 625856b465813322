"""How far two right implementations are apart, in multiples of their own rounding noise.

    python benchmarks/parity_noise.py        # about a minute on one core

The numbers behind MEAN_FACTOR, MAX_FACTOR and USUAL_NOISE of mtpconv/parity/compare.py: small
seeded models of every family that the installed megatron-core can build, two rows of tokens
each, in float32 and bfloat16. Prints a table.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from mtpconv.parity import runtime
from mtpconv.parity.report import ParityOptions
from mtpconv.parity.run import run_parity
from tests.parity import checkpoints, configs


def main() -> None:
    """Run everything and print the table."""
    print("| model | dtype | head | mean | largest | noise: mean, largest | ratios | scale |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, runtime.session("cpu"):
        for number, (family, config) in enumerate((configs.WITH_MTP | configs.WITHOUT_MTP).items()):
            if config["model_type"] in configs.SPARSE and runtime.megatron_version() < (0, 19):
                continue
            base = Path(name) / str(number)
            checkpoints.write_hf(config, base / "hf", dtype="bfloat16")
            checkpoints.write_mcore(config, base / "hf", base / "mcore")
            for dtype in ("float32", "bfloat16"):
                options = ParityOptions(dtype=dtype, rows=2, seed=number)
                for head in run_parity(base / "hf", base / "mcore", options).heads:
                    mean = max(noise[0] for noise in head.noise.values())
                    largest = max(noise[1] for noise in head.noise.values())
                    print(
                        f"| {family} | {dtype} | {head.head} | {head.mean_abs:.1e} | "
                        f"{head.max_abs:.1e} | {mean:.1e}, {largest:.1e} | "
                        f"{head.mean_abs / mean:.2f}, {head.max_abs / largest:.2f} | "
                        f"{head.scale:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
