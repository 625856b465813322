"""Files synced on another thread: told of when they are on disk, closed after their last sync."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from mtpconv.convert.flush import Flusher
from mtpconv.store.new_file import NewFile


def test_a_growing_file_is_synced_and_a_finished_one_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: happened.append("sync"))
    file = NewFile(tmp_path / "file")

    def close() -> str:
        assert threading.current_thread() is not threading.main_thread()
        file.close()
        happened.append("close")
        return "file"

    def then(name: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        happened.append(name)

    with Flusher(every=100) as flusher:
        flusher.wrote(file, 60)
        flusher.wrote(file, 60)
        flusher.finish(file, close, then)
        flusher.settle()
    assert happened == ["sync", "close", "file"]


def test_a_failed_sync_is_an_error_and_what_was_finished_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    done: list[str] = []
    with pytest.raises(OSError, match="Input/output"), Flusher(every=1) as flusher:  # noqa: PT012
        flusher.wrote(NewFile(tmp_path / "one"), 1)
        flusher.finish(NewFile(tmp_path / "other"), lambda: "whole", done.append)
        flusher.settle()
    assert done == ["whole"]


def test_a_file_whose_writeback_failed_is_never_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a failed write once; the last fsync then succeeds."""

    def fail(fd: int) -> None:
        time.sleep(0.1)  # the file is finished meanwhile
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    file = NewFile(tmp_path / "file")
    done: list[str] = []
    with pytest.raises(OSError, match="Input/output"), Flusher(every=1) as flusher:  # noqa: PT012
        flusher.wrote(file, 1)
        flusher.finish(file, lambda: "whole", done.append)
        flusher.settle()
    assert done == []
