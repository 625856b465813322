"""Coverage-guided fuzzing of one reader: `python tests/fuzz/guided.py TARGET [libFuzzer flags]`.

Interesting inputs are kept in tests/fuzz/corpus/TARGET when `--keep` is given.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["mtpconv"]):
    from tests.fuzz.targets import NAMES, make_targets


def main() -> None:
    """Set up one target and hand over to libFuzzer."""
    name, *flags = sys.argv[1:]
    if name not in NAMES:
        sys.exit(f"{name}: must be one of {', '.join(NAMES)}")
    targets = make_targets()
    kept = Path(__file__).parent / "corpus" / name
    found = Path(tempfile.mkdtemp(prefix="mtpconv-corpus-"))
    if "--keep" in flags:
        flags.remove("--keep")
        kept.mkdir(parents=True, exist_ok=True)
        found = kept
    (found / "sound").write_bytes(targets.seeds()[name])
    folders = [str(found)] + ([str(kept)] if kept.is_dir() and kept != found else [])
    words = [sys.argv[0], *flags, "-timeout=20", "-rss_limit_mb=2048", *folders]
    atheris.Setup(words, lambda data: targets.run(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
