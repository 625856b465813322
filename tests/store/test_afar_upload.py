"""Files that are uploaded appear when they are complete, and go again without anybody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mtpconv.errors import MtpconvError, UnreadableError, UsageError, WriteError
from mtpconv.store import upload as module
from mtpconv.store.upload import Upload
from tests.convert import test_afar as afar

store = afar.store


def broken(size: int = 1) -> Iterator[bytes]:
    yield b"x" * size
    raise UnreadableError("the source is gone")


@pytest.mark.parametrize("size", [1, 6 << 20], ids=["one part", "several parts"])
def test_a_file_that_fails_never_appears(
    store: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(module, "_PART", 5 << 20)
    Upload(store).write("model", [b"old"])
    new = Upload(store)
    with pytest.raises(UnreadableError, match="the source is gone"):
        new.write("model", broken(size))
    if store.startswith("s3"):  # memory has no uploads: what is opened there is empty
        assert afar.contents(store) == {"model": b"old"}
        fs, root = afar.fsspec.core.url_to_fs(store)
        assert not fs.call_s3("list_multipart_uploads", Bucket=root.partition("/")[0]).get(
            "Uploads"
        )
    new.undo()
    assert afar.contents(store) == {}


def test_what_was_not_begun_stays(store: str) -> None:
    for name in ("old", "other/old"):
        Upload(store).write(name, [b"old"])
    new = Upload(store)
    new.write("new", [b"new"])
    with pytest.raises(UnreadableError):
        new.write("half", broken())
    new.undo()
    assert sorted(afar.contents(store)) == ["old", "other/old"]


def test_one_file_that_stays_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Upload("memory://stays")
    for name in "abc":
        new.write(name, [b"new"])
    real = new._fs.rm_file

    def rm_file(path: str) -> Any:
        if path.endswith("/a"):
            raise RuntimeError("no OSError, as of many a package behind fsspec")
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(new._fs, "rm_file", rm_file)
        assert new.undo() == ["a"]
    assert new.names() == ["a"]
    assert new.undo() == []
    assert new.names() == []


class Lost(Exception):
    """As of botocore or httpx: no OSError."""


def lose(*_: Any, **__: Any) -> Any:
    raise Lost("no route to \x1b[31mhost\nand more")


LOST = (
    r"{where}: {what}: Lost: 'no route to \\x1b\[31mhost'; check the address, the network and "
    r"the credentials and try again"
)


@pytest.mark.parametrize(
    ("method", "use", "where", "what", "kind"),
    [
        ("find", lambda up: up.names(), "", "cannot be listed", UnreadableError),
        ("invalidate_cache", lambda up: up.names(), "", "cannot be listed", UnreadableError),
        ("open", lambda up: up.write("a", [b"x"]), "/a", "cannot be written", WriteError),
        ("rm_file", lambda up: up.remove(["a"]), "/a", "cannot be removed", WriteError),
    ],
)  # fmt: skip
def test_a_store_that_is_lost_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    use: Callable[[Upload], object],
    where: str,
    what: str,
    kind: type[MtpconvError],
) -> None:
    url = "memory://lost/model"
    upload = Upload(url)
    monkeypatch.setattr(upload._fs, method, lose)
    with pytest.raises(kind, match=f"^{LOST.format(where=url + where, what=what)}$"):
        use(upload)


@pytest.mark.parametrize("method", ["write", "close", "makedirs"])
def test_a_store_that_is_lost_in_a_file(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    upload = Upload("memory://lost/model")

    class File:
        def write(self, data: bytes) -> int:
            return len(data)

        def close(self) -> None:
            """All is well."""

        def discard(self) -> None:
            lose()

    def start(*_: Any, **__: Any) -> File:
        if method == "makedirs":
            raise FileNotFoundError
        return File()

    monkeypatch.setattr(upload._fs, "open", start)
    monkeypatch.setattr(upload._fs if method == "makedirs" else File, method, lose)
    where = "memory://lost/model/a"
    with pytest.raises(WriteError, match=f"^{LOST.format(where=where, what='cannot be written')}$"):
        upload.write("a", [b"x"])


def test_an_error_of_the_source_is_not_one_of_the_store() -> None:
    def parts() -> Iterator[bytes]:
        yield b"x"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match=r"^the disk is gone$"):
        Upload("memory://source").write("a", parts())


def test_a_store_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afar.fsspec.core, "url_to_fs", lose)
    what = LOST.format(where="s3://bucket", what="cannot be opened")
    with pytest.raises(UnreadableError, match=f"^{what}$"):
        Upload("s3://bucket/")


def test_urls_that_name_nothing() -> None:
    with pytest.raises(UnreadableError, match="is no URL"):
        Upload("s3://[")
    with pytest.raises(UsageError, match="names no place in the store"):
        Upload("s3://")
