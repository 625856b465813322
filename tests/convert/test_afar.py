"""Checkpoints in object stores and behind web servers: the same bytes, streamed both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore
from mtpconv.convert.to_afar import mcore2hf_afar
from mtpconv.errors import (
    MtpconvError,
    RefusedError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    WriteError,
)
from mtpconv.progress import Progress
from mtpconv.store import afar
from mtpconv.store.afar import AfarFile, open_afar
from mtpconv.store.digest import digest_tensors
from mtpconv.store.files import Files
from mtpconv.store.hf import open_hf
from mtpconv.store.remote import open_remote
from mtpconv.store.upload import Upload
from tests.convert.folders import file_hashes, make_hf
from tests.mapping.toy import config
from tests.store.test_remote import Server

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afar, "_PAUSES", (0.01, 0.01))


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty place in an S3-compatible server, or in memory."""
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/model"
        return
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket = uuid.uuid4().hex  # the server remembers those of earlier tests
    fsspec.filesystem("s3").mkdir(bucket)
    yield f"s3://{bucket}/model"
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def fill(url: str, folder: Path) -> None:
    upload = Upload(url)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        upload.write(path.relative_to(folder).as_posix(), [path.read_bytes()])


def contents(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    return {name: fs.cat_file(f"{root}/{name}") for name in Upload(url).names()}


def plain(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes()
            for p in folder.rglob("*") if p.is_file()}  # fmt: skip


def mcore_of(url: str, root: Path, name: str = "mcore", **options: Any) -> Path:
    mirror = root / f"mirror_{name}"
    mirror.mkdir()
    hf2mcore(mirror, root / name, opened=open_afar(url, mirror), **options)
    return root / name


def test_there_and_back(store: str, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config("deepseek_v3"), shards=4)
    (hf / "assets/more").mkdir(parents=True)
    (hf / "assets/more/about.txt").write_text("files in folders travel, too")
    fill(store, hf)
    mcore = mcore_of(store, tmp_path)
    hf2mcore(hf, tmp_path / "local")
    assert file_hashes(mcore / "release") == file_hashes(tmp_path / "local/release")
    done = mcore2hf_afar(mcore, f"{store}_back")
    assert done.verified
    assert contents(f"{store}_back") == plain(hf)


def test_every_tensor_reads_the_same(store: str, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    fill(store, hf)
    (tmp_path / "mirror").mkdir()
    there, here = open_afar(store, tmp_path / "mirror"), open_hf(hf)
    names = sorted(here.tensors)
    assert dict(digest_tensors(there, names)) == dict(digest_tensors(here, names))
    for name in names:  # chunks must never point into the mirror, which has holes
        (chunk,) = there.chunks(name)
        assert isinstance(chunk.file, AfarFile)


@pytest.mark.parametrize("span", [1, 7, 64, 1 << 20])
def test_ranges_of_any_size(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: int
) -> None:
    monkeypatch.setattr(afar, "SPAN", span)
    data = bytes(range(200))
    Upload(store).write("file", [data])
    file = AfarFile(open_remote(store), store, "file", len(data))
    with Files() as files:
        for start, length in [(0, 200), (3, 150), (199, 1), (0, 0), (200, 0), (60, 9)]:
            view = memoryview(bytearray(length))
            file.read_into(files, start, view)
            assert bytes(view) == data[start : start + length]
        with pytest.raises(UnreadableError, match="ends at byte 200"):
            file.read_into(files, 199, memoryview(bytearray(2)))


def test_a_web_server(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    server = Server(hf, ranges=True)
    hf2mcore(hf, tmp_path / "local")
    mcore = mcore_of(server.url, tmp_path)
    server.server.shutdown()
    assert file_hashes(mcore) == file_hashes(tmp_path / "local")


def test_a_web_server_that_sends_whole_files_only(tmp_path: Path) -> None:
    server = Server(make_hf(tmp_path / "hf", config(), shards=3), ranges=False)
    with pytest.raises(UnsupportedError, match="sends whole files only; download them"):
        mcore_of(server.url, tmp_path)
    server.server.shutdown()


class Once(Progress):
    """Does something when the first bytes are done."""

    def __init__(self, what: Any) -> None:
        self._todo = [what]

    def advance(self, nbytes: int, what: str = "") -> None:
        while self._todo:
            self._todo.pop()()


@pytest.mark.parametrize("change", ["rewrite", "lengthen", "remove"])
def test_a_remote_source_that_changes(store: str, tmp_path: Path, change: str) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    fill(store, hf)
    shard = sorted(hf.glob("*.safetensors"))[-1]
    data = shard.read_bytes()

    def happens() -> None:
        if change == "remove":
            Upload(store).remove([shard.name])
        else:
            changed = data[:-1] + b"\x55" if change == "rewrite" else data + b"\0"
            Upload(store).write(shard.name, [changed])

    with pytest.raises((UnreadableError, RefusedError), match=shard.name):
        mcore_of(store, tmp_path, progress=Once(happens))
    assert not (tmp_path / "mcore").exists()


def test_a_tensor_in_two_files(store: str, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    fill(store, hf)
    Upload(store).write("twin.safetensors", [next(hf.glob("*.safetensors")).read_bytes()])
    with pytest.raises(RefusedError, match="were not compared; download it"):
        mcore_of(store, tmp_path)


def test_requests_that_fail_are_made_again(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Upload(store).write("file", [b"abcdef"])
    remote = open_remote(store)
    real, failures = type(remote).read, [0]

    def read(self: Any, name: str, start: int, length: int) -> Any:
        failures[0] += 1
        if failures[0] <= 2:
            raise UnreadableError("the network is down")
        return real(self, name, start, length)

    monkeypatch.setattr(type(remote), "read", read)
    view = memoryview(bytearray(6))
    with Files() as files:
        AfarFile(remote, store, "file", 6).read_into(files, 0, view)
        assert bytes(view) == b"abcdef"
        failures[0] = -100
        monkeypatch.setattr(type(remote), "read", lambda *_: (b"abc", 6))
        with pytest.raises(UnreadableError, match="3 of 6 bytes came"):
            AfarFile(remote, store, "file", 6).read_into(files, 0, view)


def test_targets_that_hold_something(store: str, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=2)
    mcore = tmp_path / "mcore"
    hf2mcore(hf, mcore)
    Upload(store).write("model-00009-of-00009.safetensors", [b"old"])
    Upload(store).write("config.json", [b"{}"])
    with pytest.raises(UsageError, match="holds 2 files; pass --overwrite"):
        mcore2hf_afar(mcore, store)
    planned = mcore2hf_afar(mcore, store, overwrite=True, dry_run=True)
    assert planned.dry_run
    assert len(contents(store)) == 2
    mcore2hf_afar(mcore, store, overwrite=True)
    assert contents(store) == plain(hf)


class Bad(Exception):
    pass


@pytest.mark.parametrize("at", ["upload", "verify", "config"])
def test_an_upload_that_fails_leaves_nothing(
    store: str, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mcore = tmp_path / "mcore"
    hf2mcore(make_hf(tmp_path / "hf", config(), shards=3), mcore)
    real = Upload.write

    def write(self: Upload, name: str, parts: Any) -> None:
        if name == "config.json" and at == "config":
            raise WriteError("the store is full")
        if at == "verify" and name.endswith("2-of-00003.safetensors"):
            whole = bytearray(b"".join(bytes(p) for p in parts))
            whole[-1] ^= 1
            parts = [bytes(whole)]
        real(self, name, parts)

    monkeypatch.setattr(Upload, "write", write)

    def stop() -> None:
        raise Bad

    said = Once(stop) if at == "upload" else Progress()
    with pytest.raises((MtpconvError, Bad)):
        mcore2hf_afar(mcore, store, progress=said)
    assert contents(store) == {}


def test_schemes_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be written"):
        Upload("https://example.org/model")
    with pytest.raises(UnsupportedError, match="fsspec cannot open"):
        Upload("nonsense://x/y")


def test_the_command_line(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    server = Server(hf, ranges=True)
    command = [sys.executable, "-m", "mtpconv", "hf2mcore"]

    def run(*words: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run([*command, *map(str, words)], check=False, capture_output=True,
                              text=True, env=environment)  # fmt: skip

    done = run(server.url, tmp_path / "mcore")
    assert done.returncode == 0, done.stderr
    lost = run(server.url + "/nothing", tmp_path / "other")
    server.server.shutdown()
    assert lost.returncode == 3
    assert f"{server.url}/nothing" in lost.stderr
    assert "mtpconv-" not in lost.stderr
    hf2mcore(hf, tmp_path / "local")
    assert file_hashes(tmp_path / "mcore") == file_hashes(tmp_path / "local")
    command[-1] = "mcore2hf"
    back = run(tmp_path / "mcore", f"local://{tmp_path}/back", "--log-format", "json")
    assert back.returncode == 0, back.stderr
    assert json.loads(back.stderr.splitlines()[-1])["event"] == "done"
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    again = run(tmp_path / "mcore", f"local://{tmp_path}/back", "--resume")
    assert again.returncode == 2
    assert "--resume needs a folder" in again.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "local", "mcore"]
