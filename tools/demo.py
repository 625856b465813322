"""A GLM-5.2-shaped checkpoint there and back, audited; then its MTP layer is lost, as in real life.

Every one of the model's 59,585 tensor names is there, only widths are small. `make demo` runs it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtpconv.store.content import Files, blocks  # noqa: E402
from mtpconv.store.hf import open_hf  # noqa: E402
from mtpconv.store.hf_writer import index_bytes, without, write_shard  # noqa: E402


def run(*words: str, expect: int = 0) -> None:
    """Run one mtpconv command, show it, and insist on its exit code."""
    print(f"\n$ mtpconv {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "mtpconv", *words], check=False).returncode
    if code != expect:
        sys.exit(f"demo: exit code {code}, expected {expect}")
    if expect:
        print(f"(exit code {code})")


def lose_mtp(source: Path, target: Path) -> None:
    """What transformers' save_pretrained does to this model: layer 78 gone, config unchanged."""
    hf = open_hf(source)
    gone = [n for n in hf.tensors if n.startswith("model.layers.78.")]
    headers = {f: kept for f, h in hf.shards.items() if (kept := without(h, gone)) is not None}
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    with Files() as files:
        for name, header in headers.items():
            write_shard(target / name, header, lambda n: blocks(hf, n, files))
    (target / "model.safetensors.index.json").write_bytes(index_bytes(headers))


def same_files(left: Path, right: Path) -> int:
    """Compare sha256 of every file; the number of files."""
    names = {p.name for folder in (left, right) for p in folder.iterdir()}
    for name in sorted(names):
        digests = [hashlib.sha256((d / name).read_bytes()).hexdigest() for d in (left, right)]
        if digests[0] != digests[1]:
            sys.exit(f"demo: {name} differs")
        print(f"  {digests[0][:16]}...  {name}")
    return len(names)


def main() -> None:
    """Tell the story in six commands."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mtpconv-demo-") as place:
        root = Path(place)
        hf, mcore, back, lost = (str(root / n) for n in ("hf", "mcore", "back", "lost"))
        config = str(ROOT / "fixtures" / "configs" / "glm-5.2.json")
        print("1. A checkpoint with all tensor names of GLM-5.2 and small widths")
        run("synth", config, hf, "--shards", "8")
        print("\n2. To Megatron and back")
        run("hf2mcore", hf, mcore)
        run("mcore2hf", mcore, back)
        print("\n3. The proof: every byte of every tensor, and every file")
        run("audit", hf, back)
        print("\nsha256 of the files, equal on both sides:")
        count = same_files(Path(hf), Path(back))
        print(f"{count} files, all equal")
        print("\n4. Now the MTP layer goes the way transformers' save_pretrained loses it")
        lose_mtp(Path(back), Path(lost))
        run("audit", hf, lost, expect=1)
    print(f"\ndemo: done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
