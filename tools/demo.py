"""The demonstration: there and back without a loss, then a loss that the audit sees.

Runs the command line as a user would, on a checkpoint with all tensor names of GLM-5.2 and
small widths, and fails if anything does not come out as the text says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mtpconv.store.content import blocks
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_writer import index_bytes, without, write_shard

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "fixtures" / "configs" / "glm-5.2.json"

#: Tensors of GLM-5.2's one MTP depth. Source: the published index, counted 2026-11-29.
MTP_TENSORS = 791


class DemoError(Exception):
    """Something did not come out as the demonstration says."""


def mtpconv(folder: Path, *arguments: str, expect: int = 0) -> str:
    """Run a command in the folder, show it with its output, and return the output.

    Raises: DemoError if the exit code is another one.
    """
    print(f"$ mtpconv {' '.join(arguments)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "mtpconv", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode != expect:
        raise DemoError(f"mtpconv {arguments[0]} ended with {done.returncode}, not {expect}")
    return done.stdout


def same_files(before: Path, after: Path) -> None:
    """Show the sha256 of every file in both folders.

    Raises: DemoError if one differs or is in one folder only.
    """
    sums = []
    for folder in (before, after):
        files = sorted(p for p in folder.iterdir() if p.is_file())
        sums.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files})
    if sums[0] != sums[1]:
        differing = sorted(dict(sums[0].items() ^ sums[1].items()))
        raise DemoError(f"{before.name} and {after.name} differ: {', '.join(differing)}")
    print(f"$ sha256sum {before.name}/* {after.name}/*")
    for name, digest in sums[0].items():
        print(f"  {digest[:16]}  = {digest[:16]}  {name}")
    print(f"All {len(sums[0])} files are the same, byte for byte.\n", flush=True)


def save_without_mtp(source: Path, target: Path) -> int:
    """Write the checkpoint as transformers' load and save_pretrained leaves it.

    The config still promises MTP; the tensors of the layer after the trunk are gone without a
    word. Returns how many.
    """
    checkpoint = open_hf(source)
    layer = json.loads(checkpoint.config_text)["num_hidden_layers"]
    lost = [name for name in checkpoint.tensors if name.startswith(f"model.layers.{layer}.")]
    target.mkdir()
    kept = {}
    for file, header in checkpoint.shards.items():
        rest = without(header, lost)
        if rest is not None:
            kept[file] = rest
            write_shard(target / file, rest, lambda name: blocks(checkpoint, name))
    (target / "model.safetensors.index.json").write_bytes(index_bytes(kept))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    return len(lost)


def demonstrate(folder: Path) -> None:
    """Everything, in an empty folder.

    Raises: DemoError if anything does not come out as the text says.
    """
    print("1. A checkpoint with all tensor names of GLM-5.2, its widths shrunken.\n")
    shutil.copy(CONFIG, folder)
    mtpconv(folder, "synth", CONFIG.name, "GLM-5.2")
    print("2. To Megatron-Core and back.\n")
    mtpconv(folder, "hf2mcore", "GLM-5.2", "mcore")
    mtpconv(folder, "mcore2hf", "mcore", "back")
    print("3. Nothing is lost, and not a byte is changed.\n")
    mtpconv(folder, "audit", "GLM-5.2", "back")
    same_files(folder / "GLM-5.2", folder / "back")
    print("4. The same checkpoint after a load and a save_pretrained: the MTP layer is gone.\n")
    lost = save_without_mtp(folder / "back", folder / "saved")
    report = mtpconv(folder, "audit", "GLM-5.2", "saved", expect=1)
    if lost != MTP_TENSORS or str(MTP_TENSORS) not in report:
        raise DemoError(f"the audit does not name the {MTP_TENSORS} lost tensors")


def main() -> int:
    """Run it in a temporary folder and say how long it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mtpconv-demo-") as folder:
        try:
            demonstrate(Path(folder))
        except DemoError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
    print(
        f"demo: as it should be, in {time.monotonic() - start:.0f} s: identical after the round "
        f"trip, and the audit saw that {MTP_TENSORS} MTP tensors were missing."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
