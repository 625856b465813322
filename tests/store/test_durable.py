"""Small files: what was written is what was read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mtpconv.errors import WriteError
from mtpconv.store.durable import copy_file


@pytest.mark.parametrize("damage", [b"y", b"", b"xx"])
def test_a_copy_that_is_not_what_was_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    copy_file(tmp_path / "a", tmp_path / "sub/b")
    assert (tmp_path / "sub/b").read_bytes() == b"x"

    def bad(source: Path, target: Path) -> Any:
        target.write_bytes(damage)

    monkeypatch.setattr(shutil, "copyfile", bad)
    with pytest.raises(WriteError, match=r"b: is not what .*a holds"):
        copy_file(tmp_path / "a", tmp_path / "b")
