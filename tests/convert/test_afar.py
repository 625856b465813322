"""Checkpoints in object stores and behind web servers: the same bytes, streamed both ways."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore, record_files
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
from tests.convert import test_fp8
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_empty_shard, write_hf
from tests.convert.test_crcs import KEYS, rot
from tests.convert.test_resume import Stop
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
    else:
        yield from s3_place(monkeypatch)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty place in an S3-compatible server."""
    yield from s3_place(monkeypatch)


def s3_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty place in an S3-compatible server, which runs meanwhile."""
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
    write_empty_shard(hf)
    fill(store, hf)
    mcore = mcore_of(store, tmp_path)
    hf2mcore(hf, tmp_path / "local")
    assert file_hashes(mcore / "release") == file_hashes(tmp_path / "local/release")
    done = mcore2hf_afar(mcore, f"{store}_back")
    assert done.verified
    assert done.unchanged == done.tensors
    assert contents(f"{store}_back") == plain(hf)


def test_a_trunk_that_went_on_without_mtp_is_said_to_at_a_url_too(tmp_path: Path) -> None:
    raw = config("deepseek_v3")
    hf = make_hf(tmp_path / "hf", raw)
    hf2mcore(hf, tmp_path / "before")
    tensors = tensors_of(hf)
    spec, data = tensors["model.norm.weight"]
    after = write_hf(tmp_path / "after", {**tensors, "model.norm.weight": (spec, data[::-1])}, raw)
    hf2mcore(after, tmp_path / "mcore")
    shutil.rmtree(tmp_path / "mcore/hf_source")
    shutil.copytree(tmp_path / "before/hf_source", tmp_path / "mcore/hf_source")
    done = mcore2hf_afar(tmp_path / "mcore", f"memory://{tmp_path.name}/back")
    assert done.unchanged == done.tensors - 1
    assert [n for n in done.notes if "drafts are those of before training" in n]


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


def test_files_of_a_web_server_come_by_their_usual_names_and_as_the_configs_name_them(
    tmp_path: Path,
) -> None:
    own = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModel": "org/other--modeling_x.X"}
    hf = make_hf(tmp_path / "hf", {**config(), "auto_map": own})
    slow = {"auto_map": {"AutoTokenizer": ["tokenization_toy.Slow", None]}}
    (hf / "tokenizer_config.json").write_text(json.dumps(slow))
    (hf / "video_preprocessor_config.json").write_text("{}")
    (hf / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "processing.P"}}')
    (hf / "preprocessor_config.json").write_text("no JSON travels as it is")
    for name in ("tiktoken.model", "tekken.json", "vocab.txt", "chat_template.jinja", "LICENSE",
                 "configuration_toy.py", "processing.py", "parts.py"):  # fmt: skip
        (hf / name).write_text(name)
    (hf / "tokenization_toy.py").write_text("import os\nfrom .parts import Part\n")
    server = Server(hf, ranges=True)
    (tmp_path / "mirror").mkdir()
    opened = open_afar(server.url, tmp_path / "mirror")
    done = hf2mcore(tmp_path / "mirror", tmp_path / "mcore", opened=opened)
    server.server.shutdown()
    here = hf2mcore(hf, tmp_path / "local")
    assert file_hashes(tmp_path / "mcore") == file_hashes(tmp_path / "local")
    assert not [path for path, _ in server.requests if "modeling_x" in path]
    (note,) = set(done.notes) - set(here.notes)
    assert note.startswith("warning: the server gives no listing")


def test_a_store_with_a_listing_leaves_nothing_to_warn_of(store: str, tmp_path: Path) -> None:
    fill(store, make_hf(tmp_path / "hf", config()))
    (tmp_path / "mirror").mkdir()
    opened = open_afar(store, tmp_path / "mirror")
    done = hf2mcore(tmp_path / "mirror", tmp_path / "mcore", opened=opened)
    assert not [note for note in done.notes if "listing" in note]


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


def test_a_shard_that_changes_right_after_its_header_came(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors lie in another order now, and would be read under each other's names."""
    hf = make_hf(tmp_path / "hf", config(), shards=1)
    (shard,) = hf.glob("*.safetensors")
    tensors = tensors_of(hf)
    order = list(tensors)
    one, other = (f"model.layers.1.mlp.experts.{e}.gate_proj.weight" for e in (0, 1))
    i, j = order.index(one), order.index(other)
    order[i], order[j] = other, one
    head = open_hf(hf).shards[shard.name]
    new = write_hf(
        tmp_path / "new", {n: tensors[n] for n in order}, config(), metadata=head.metadata
    )
    fill(store, hf)

    def change(*_: Any) -> None:
        Upload(store).write(shard.name, [(new / shard.name).read_bytes()])

    monkeypatch.setattr(afar, "require_ranges", change)
    with pytest.raises(UnreadableError, match=f"{shard.name}: changed while it was read"):
        mcore_of(store, tmp_path)


def test_a_stopped_run_is_resumed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless something changed there, be it config.json only."""
    monkeypatch.setattr(record_files, "FILE_LIMIT", 2000)
    fill(store, make_hf(tmp_path / "hf", config(), shards=4))

    def go(name: str, progress: Progress | None = None) -> Any:
        (tmp_path / name).mkdir()
        there = open_afar(store, tmp_path / name)
        return hf2mcore(
            tmp_path / name, tmp_path / "mcore", opened=there, resume=True, jobs=1,
            progress=progress,
        )  # fmt: skip

    with pytest.raises(WriteError):
        go("first", Stop(9000))
    Upload(store).write("config.json", [(tmp_path / "hf/config.json").read_bytes() + b"\n"])
    with pytest.raises(WriteError):
        go("second", changed := Stop(9000))
    assert not changed.taken
    assert go("third").taken_over > 0


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
    saved = mcore / "hf_source/files/generation_config.json"
    right = saved.read_bytes()
    saved.write_bytes(right + b" ")
    with pytest.raises(
        UnreadableError, match=r"generation_config\.json: is not what hf2mcore saved"
    ):
        mcore2hf_afar(mcore, store, overwrite=True)
    assert len(contents(store)) == 2
    saved.write_bytes(right)
    planned = mcore2hf_afar(mcore, store, overwrite=True, dry_run=True)
    assert planned.dry_run
    assert len(contents(store)) == 2
    mcore2hf_afar(mcore, store, overwrite=True)
    assert contents(store) == plain(hf)


def test_overwrite_removes_what_is_of_a_model(store: str, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=2)
    hf2mcore(hf, tmp_path / "mcore")
    fill(store, make_hf(tmp_path / "old", config(), shards=5))
    old = ("tokenizer.model", "tiktoken.model", "hf_quant_config.json",
           "adapter.safetensors.index.json")  # fmt: skip
    mine = ("notes.txt", "README.md", "pytorch_model.bin", "logs/config.json",
            "lora/model.safetensors")  # fmt: skip
    for name in (*old, *mine):
        Upload(store).write(name, [b"{}"])
    done = mcore2hf_afar(tmp_path / "mcore", store, overwrite=True)
    assert done.notes[-1].startswith("5 files that were there are no part of a model and stay: ")
    assert contents(store) == {**plain(hf), **dict.fromkeys(mine, b"{}")}


@pytest.mark.parametrize(
    "name",
    [
        ".metadata", "release/.metadata", "latest_checkpointed_iteration.txt",
        "run/iter_0000009/__3_1.distcp", "iter_0000009/mp_rank_00/model_optim_rng.pt",
    ],
)  # fmt: skip
def test_a_megatron_checkpoint_is_not_overwritten(tmp_path: Path, name: str) -> None:
    store = f"memory://{uuid.uuid4().hex}/run"
    hf2mcore(make_hf(tmp_path / "hf", config()), tmp_path / "mcore")
    for file in (name, "config.json"):
        Upload(store).write(file, [b"{}"])
    with pytest.raises(UsageError, match=rf"holds a Megatron checkpoint \({re.escape(name)}\)"):
        mcore2hf_afar(tmp_path / "mcore", store, overwrite=True)
    assert len(contents(store)) == 2


@pytest.mark.parametrize("scheme", ["file", "local", "simplecache::file"])
def test_a_url_of_this_machine_that_is_read(tmp_path: Path, scheme: str) -> None:
    """The source, what holds it, what lies in it, hf_source, --like."""
    mcore, like = tmp_path / "run/mcore", make_hf(tmp_path / "like", config())
    hf2mcore(like, mcore)
    (tmp_path / "link").symlink_to(mcore)
    before = plain(tmp_path)
    source = mcore / "release"
    for at in ("run/mcore/release", "run/mcore/hf_source", "run/mcore/release/new", "run/mcore",
               "run", "link/release/", "like"):  # fmt: skip
        with pytest.raises(UsageError, match=r"lies inside|holds"):
            mcore2hf_afar(source, f"{scheme}://{tmp_path}/{at}", like=like, overwrite=True)
        assert plain(tmp_path) == before


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


class Lost(Exception):
    """As of botocore or httpx: no OSError."""


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_store_that_dies_is_told_with_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """That nothing can be removed either does not hide why the upload failed."""
    mcore, url = tmp_path / "mcore", f"memory://{uuid.uuid4().hex}/model"
    hf2mcore(make_hf(tmp_path / "hf", config(), shards=3), mcore)

    def lose(*_: Any, **__: Any) -> Any:
        raise Lost("connection refused")

    def die() -> None:
        kind = fsspec.get_filesystem_class("memory")
        monkeypatch.setattr(kind, "open", lose)
        monkeypatch.setattr(kind, "rm_file", lose)

    with pytest.raises(
        WriteError,
        match=rf"^{url}/model-0000\d-of-00003.safetensors: cannot be written: Lost: connection "
        r"refused; check the address, the network and the credentials and try again; \d files may "
        r"still be there, first model-00001-of-00003.safetensors; remove them$",
    ):
        mcore2hf_afar(mcore, url, jobs=jobs, progress=Once(die))


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_flipped_bit_is_not_uploaded(store: str, tmp_path: Path, jobs: int) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    hf2mcore(hf, tmp_path / "mcore", pad_vocab=64)
    for key in KEYS:
        file = rot(tmp_path / "mcore", key)
        with pytest.raises(
            UnreadableError, match=f"{re.escape(key)}.*CRC-32.*--no-verify"
        ) as caught:
            mcore2hf_afar(tmp_path / "mcore", store, jobs=jobs)
        assert str(file) in str(caught.value)
        assert contents(store) == {}
        rot(tmp_path / "mcore", key)  # back again
    rot(tmp_path / "mcore", KEYS[0])
    assert not mcore2hf_afar(tmp_path / "mcore", store, jobs=jobs, verify=False).verified


def test_an_hf_source_that_changes_is_not_uploaded(store: str, tmp_path: Path) -> None:
    hf, _ = test_fp8.release(tmp_path, config("deepseek_v3"))
    hf2mcore(hf, tmp_path / "mcore")
    (kept, *_) = sorted((tmp_path / "mcore/hf_source/quantised").glob("*.safetensors"))
    change = Once(lambda: os.utime(kept, ns=(1, 1)))
    with pytest.raises(UnreadableError, match=f"{kept.name}: was written to while it was read"):
        mcore2hf_afar(tmp_path / "mcore", store, progress=change)
    assert contents(store) == {}


def test_an_index_that_arrives_wrong_is_not_kept(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf2mcore(make_hf(tmp_path / "hf", config(), shards=2), tmp_path / "mcore")
    real = Upload.write

    def write(self: Upload, name: str, parts: Any) -> None:
        if name.endswith("index.json"):
            parts = [bytes(b"".join(parts)).replace(b"1-of", b"7-of")]
        real(self, name, parts)

    monkeypatch.setattr(Upload, "write", write)
    with pytest.raises(UnreadableError, match="which is not there") as caught:
        mcore2hf_afar(tmp_path / "mcore", store)
    assert f"`mtpconv audit {store}`" in str(caught.value)
    assert contents(store) == {}


def test_a_failure_removes_nothing_but_what_was_uploaded(store: str, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    hf2mcore(hf, tmp_path / "mcore")
    fill(store, hf)
    Upload(store).write("notes.txt", [b"mine"])

    def stop() -> None:
        raise Bad

    with pytest.raises(Bad):
        mcore2hf_afar(tmp_path / "mcore", store, overwrite=True, jobs=1, progress=Once(stop))
    gone = {"config.json", sorted(p.name for p in hf.glob("*.safetensors"))[0]}
    assert contents(store).keys() == {*plain(hf), "notes.txt"} - gone


def test_schemes_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be written"):
        Upload("https://example.org/model")
    with pytest.raises(UnsupportedError, match="fsspec cannot open"):
        Upload("nonsense://x/y")


def test_the_command_line(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    server = Server(hf, ranges=True)
    command = [sys.executable, "-m", "mtpconv", "hf2mcore"]

    def run(*words: Any, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path), **more}
        return subprocess.run([*command, *map(str, words)], check=False, capture_output=True,
                              text=True, env=environment)  # fmt: skip

    done = run(server.url, tmp_path / "mcore")
    assert done.returncode == 0, done.stderr
    lost = run(server.url + "/nothing", tmp_path / "other")
    server.server.shutdown()
    assert lost.returncode == 3
    assert f"{server.url}/nothing" in lost.stderr
    if importlib.util.find_spec("s3fs"):
        command[-1] = "mcore2hf"
        away = run(
            tmp_path / "mcore", "s3://bucket/model", AWS_ENDPOINT_URL="http://127.0.0.1:1",
            AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
        )  # fmt: skip
        assert away.returncode == 3
        assert away.stderr.startswith("mtpconv: s3://bucket/model: cannot be listed: Endpoint")
        assert away.stderr.count("\n") == 1
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


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_the_command_line_sees_that_a_url_is_the_target(tmp_path: Path, scheme: str) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "run/mcore", iteration=1000)
    before = plain(tmp_path)
    run = tmp_path / "run/mcore"
    for words in (
        ("hf2mcore", f"{scheme}://{hf}", hf),
        ("mcore2hf", f"{scheme}://{run}", run),
        ("mcore2hf", run / "iter_0001000", f"{scheme}://{run}"),
        ("mcore2hf", f"{scheme}://{run}/iter_0001000", f"{scheme}://{run}"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "mtpconv", *map(str, words), "--overwrite"], check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2, words
        assert "the source" in done.stderr
        assert plain(tmp_path) == before


def test_file_urls_are_folders(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=2)
    for words in (
        ("hf2mcore", f"file://{hf}", tmp_path / "mcore"),
        ("mcore2hf", f"file://{tmp_path}/mcore", f"file://{tmp_path}/back", "--resume"),
    ):
        command = [sys.executable, "-m", "mtpconv", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True)
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
