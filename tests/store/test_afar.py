"""What is mirrored of a HuggingFace checkpoint far away says which state of it was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.store.afar import stamp


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('4294967296 "692d1f00-100000000"', '4294967296 "692e9f11-100000000"'),
        ("100 Mon, 30 Nov 2026 10:15:22 GMT", "100 Fri, 04 Dec 2026 17:44:22 GMT"),
        ("100 2026-11-30 10:15:22.1+00:00", "100 2026-12-04 11:16:23.6+00:00"),
        ('9 "0123456789abcdef0123456789abcdef-128"', '9 "9999999999999999999999999999ffef-128"'),
    ],
    ids=["nginx", "Last-Modified", "memory", "S3 in parts"],
)
def test_two_marks_are_two_times(tmp_path: Path, before: str, after: str) -> None:
    """They often end alike."""
    file = tmp_path / "file"
    file.touch()
    times = []
    for mark in (before, after, before):
        stamp(file, mark)
        times.append(file.stat().st_mtime_ns)
    assert times[0] == times[2] != times[1]
