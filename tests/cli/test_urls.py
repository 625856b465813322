"""Commands take a URL wherever they only read: the same answers, under the name that was given."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpconv.cli.places import place
from mtpconv.convert import hf2mcore
from mtpconv.store import afar
from mtpconv.store.upload import Upload
from tests.cli.test_cli import Run, one_line, run
from tests.convert import test_fp8
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf
from tests.convert.test_afar import bucket, contents, fill, plain
from tests.convert.test_crcs import KEYS, rot
from tests.mapping.toy import config
from tests.store.test_remote import Server

pytest.importorskip("fsspec")
__all__ = ["bucket", "run"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afar, "_PAUSES", (0.01, 0.01))


@pytest.fixture
def store() -> str:
    return f"memory://{uuid.uuid4().hex}/place"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, ranges=True)
    yield server
    server.server.shutdown()


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    made = make_hf(tmp_path / "hf", config("deepseek_v3"), shards=3)
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture
def mcore(hf: Path, tmp_path: Path) -> Path:
    hf2mcore(hf, tmp_path / "mcore", pad_vocab=64)
    return tmp_path / "mcore"


@pytest.fixture
def trained(mcore: Path, tmp_path: Path) -> Path:
    """As Megatron saves it: without `hf_source`."""
    shutil.copytree(mcore, tmp_path / "trained")
    shutil.rmtree(tmp_path / "trained/hf_source")
    return tmp_path / "trained"


def test_like_takes_layout_and_files_from_a_folder_far_away(
    run: Run, store: str, tmp_path: Path, hf: Path, trained: Path
) -> None:
    assert run("mcore2hf", trained, tmp_path / "back", "-q").code == 2
    fill(store, hf)
    said = run("mcore2hf", trained, tmp_path / "back", "--like", store)
    assert said.code == 0, said.err
    assert "every tensor read back and equal" in said.out
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


@pytest.mark.parametrize("below", ["", "/hf_source", "/release"])
def test_like_takes_what_hf2mcore_saved(
    run: Run, store: str, tmp_path: Path, hf: Path, mcore: Path, trained: Path, below: str
) -> None:
    fill(store, mcore)
    said = run("mcore2hf", trained, tmp_path / "back", "--like", store + below)
    assert said.code == 0, said.err
    assert "tensors unchanged since hf2mcore" in said.out
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_like_from_a_web_server_without_a_listing(
    run: Run, web: Server, tmp_path: Path, hf: Path, trained: Path
) -> None:
    (hf / "tiktoken.model").write_text("words")
    said = run("mcore2hf", trained, tmp_path / "back", "--like", f"{web.url}/hf")
    assert said.code == 0, said.err
    assert "warning: the server gives no listing" in said.out
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    shutil.rmtree(tmp_path / "back")
    words = (tmp_path / "back", "-q", "--like", f"{web.url}/hf/")
    assert run("mcore2hf", f"{web.url}/trained", *words).code == 0
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_like_from_the_hub(
    run: Run, tmp_path: Path, hf: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = hf / "api/models/org/model/revision/main"  # where the server finds it
    names = [p.relative_to(hf).as_posix() for p in hf.rglob("*") if p.is_file()]
    about.parent.mkdir(parents=True)
    about.write_text(json.dumps({"siblings": [{"rfilename": name} for name in names]}))
    server = Server(hf, ranges=True)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delattr(afar.AfarFile, "_fetch")  # no tensor is asked for
    said = run("mcore2hf", trained, tmp_path / "back", "-q", "--like", "hf://org/model")
    server.server.shutdown()
    assert said.code == 0, said.err
    shutil.rmtree(hf / "api")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_codes_and_tensors_without_a_place_in_megatron_come_from_there(
    run: Run, store: str, tmp_path: Path
) -> None:
    fp8, _ = test_fp8.release(tmp_path, config("deepseek_v3"))
    raw = config("deepseek_v3")
    tensors = tensors_of(make_hf(tmp_path / "plain", raw))
    head = "model.layers.3.shared_head.head.weight"
    spec, data = tensors[head]
    carried = write_hf(tmp_path / "other", {**tensors, head: (spec, data[::-1])}, raw)
    for model in (fp8, carried):
        mcore, url = tmp_path / f"mcore_{model.name}", f"{store}/{model.name}"
        hf2mcore(model, mcore)
        fill(url, mcore / "hf_source")
        shutil.rmtree(mcore / "hf_source")
        back = tmp_path / f"back_{model.name}"
        assert run("mcore2hf", mcore, back, "-q", "--like", url).code == 0
        assert file_hashes(back) == file_hashes(model)


def test_a_store_is_not_written_over_what_like_reads(
    run: Run, bucket: str, hf: Path, trained: Path
) -> None:
    fill(f"{bucket}/hf", hf)
    before = contents(bucket)
    for target in (bucket, f"{bucket}/hf", f"{bucket}/hf/new"):
        said = run("mcore2hf", trained, target, "--overwrite", "--like", f"{bucket}/hf")
        assert said.code == 2
        assert f"{bucket}/hf" in one_line(said)
    assert contents(bucket) == before
    done = run("mcore2hf", trained, f"{bucket}/back", "-q", "--like", f"{bucket}/hf")
    assert done.code == 0, done.err
    assert contents(f"{bucket}/back") == plain(hf)


def test_like_that_is_nothing_to_export_like_is_refused_by_its_url(
    run: Run, store: str, tmp_path: Path, hf: Path, trained: Path
) -> None:
    fill(f"{store}/trained", trained)
    fill(f"{store}/hf", hf)
    Upload(f"{store}/hf").write(sorted(hf.glob("*.safetensors"))[0].name, [b"short"])
    for where in ("trained", "hf", "nothing"):
        said = run("mcore2hf", trained, tmp_path / "back", "--like", f"{store}/{where}")
        assert said.code == 3
        assert "mtpconv-" not in one_line(said)
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("which", ["hf", "mcore"])
def test_an_inventory_is_that_of_the_folder(
    run: Run, store: str, tmp_path: Path, hf: Path, mcore: Path, which: str
) -> None:
    folder = {"hf": hf, "mcore": mcore}[which]
    fill(store, folder)
    assert run("inventory", folder, "-q", "-o", tmp_path / "here.json").code == 0
    said = run("inventory", store, "-o", tmp_path / "there.json")
    assert said.code == 0, said.err
    here, there = (json.loads((tmp_path / f"{w}.json").read_text()) for w in ("here", "there"))
    assert here == there
    assert run("audit", tmp_path / "there.json", folder, "-q", "--require", "L1").code == 0


def test_an_inventory_of_bent_changed_or_truncated_files_is_refused(
    run: Run, web: Server, tmp_path: Path, hf: Path, mcore: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out.json"
    rot(mcore, KEYS[0])
    said = run("inventory", f"{web.url}/mcore", "-o", out)
    assert said.code == 3
    assert "CRC-32" in one_line(said)
    assert f"{web.url}/mcore/release/" in one_line(said)
    shard = sorted(hf.glob("*.safetensors"))[0]
    fetch = afar.AfarFile._fetch

    def fetch_and_change(self: afar.AfarFile, start: int, length: int) -> bytes:
        found = fetch(self, start, length)
        shard.write_bytes(shard.read_bytes() + b"\0")
        return found

    monkeypatch.setattr(afar.AfarFile, "_fetch", fetch_and_change)
    said = run("inventory", f"{web.url}/hf", "-o", out)
    assert said.code in (1, 3)
    assert shard.name in one_line(said)
    assert not out.exists()
    said = run("inventory", f"{web.url}/hf", "--files")
    assert said.code == 2
    assert "--files" in one_line(said)


def test_plan_and_arguments_of_a_model_far_away(
    run: Run, store: str, hf: Path, mcore: Path, trained: Path
) -> None:
    for name, folder in {"hf": hf, "mcore": mcore, "trained": trained}.items():
        fill(f"{store}/{name}", folder)
        for command in ("plan", "args"):
            here, there = run(command, folder), run(command, f"{store}/{name}")
            assert here.code == there.code == (3 if name == "trained" else 0), there.err
            assert here.out == there.out
            assert there.err.replace(f"{store}/{name}", str(folder)) == here.err


def test_a_url_where_only_a_folder_goes_writes_nothing(
    run: Run, tmp_path: Path, hf: Path, mcore: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    for words in (
        ("hf2mcore", hf, "s3://bucket/out"), ("synth", hf / "config.json", "gs://bucket/out"),
        ("inventory", hf, "-o", "s3://bucket/m.json"), ("roundtrip", "hf://org/model"),
        ("audit", hf, mcore, "--attest", "s3://b/a.json"), ("parity", "hf://org/model", mcore),
        ("hf2mcore", hf, tmp_path / "out", "--mapping", "https://host/t.toml"),
    ):  # fmt: skip
        said = run(*words)
        assert said.code == 2, words
        assert "is a URL, and only a file or folder of this machine goes here" in one_line(said)
    for empty in (
        ("hf2mcore", hf, ""), ("hf2mcore", "", "out"), ("mcore2hf", mcore, ""), ("audit", ""),
        ("mcore2hf", mcore, "out", "--like", ""), ("inventory", ""), ("audit", hf, "--base", ""),
    ):  # fmt: skip
        said = run(*empty, *(["--overwrite"] if "2" in str(empty[0]) else []))
        assert said.code == 2, empty
        assert "an empty name" in one_line(said)
    assert {p.name for p in tmp_path.iterdir()} == before
    assert run("hf2mcore", hf, f"file://{tmp_path}/out", "-q").code == 0
    assert run("audit", f"file://{hf}", f"file://{tmp_path}/out", "-q", "--require", "L2").code == 0


PASSWORDS = (
    "http://user:secret@host/g", "HTTPS://user:secret@host/g", "https://secret@host/g",
    "http://user:sec/ret@host/g", "http://user:secret#1@host/g", "s3://key:secret@bucket/g",
    "simplecache::http://user:secret@host/g", "ftp://user:secret@host/g", "http:/user:secret@h/g",
)  # fmt: skip


@pytest.mark.parametrize("url", PASSWORDS)
def test_a_url_with_a_password_is_refused_and_not_shown(
    run: Run, tmp_path: Path, hf: Path, mcore: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    for words in (
        ("hf2mcore", url, "out"), ("hf2mcore", hf, url), ("mcore2hf", url, "out"),
        ("mcore2hf", mcore, url), ("mcore2hf", mcore, "out", "--like", url), ("plan", url),
        ("audit", hf, url), ("audit", hf, "--base", url), ("audit", hf, "--report", f"json={url}"),
        ("inventory", url), ("inventory", hf, "-o", url), ("args", url), ("selftest", url),
        ("hf2mcore", hf, "out", "--mapping", url), ("acceptance", hf, "--draft", url),
    ):  # fmt: skip
        said = run(*words)
        assert said.code == 2, words
        assert "sec" not in one_line(said)
        assert "user" not in said.out + said.err.replace("a user name", "")
    assert {p.name for p in tmp_path.iterdir()} == before


def test_the_password_is_told_from_containers_and_ports() -> None:
    for url in (
        "abfs://container@account.dfs.core.windows.net/m",
        "hf://org/model@v1",
        "http://h:80/m@1",
        "https://[::1]:8080/m@1",
        "ssh://user@host/m",
        "s3://arn:aws:s3:eu:1:accesspoint/m@1",
    ):
        assert place(url) == url


@pytest.mark.parametrize("end", ["?sig=secret", "#main", "/?", "/a#b?c"])
def test_a_query_or_fragment_is_refused(run: Run, tmp_path: Path, end: str) -> None:
    for words in (("hf2mcore", f"https://host/g{end}", tmp_path / "out"),
                  ("audit", f"HTTP://host/g{end}")):  # fmt: skip
        said = run(*words)
        assert said.code == 2, words
        assert "query or fragment; name the folder's URL without" in one_line(said)
        assert "secret" not in said.err


def test_what_is_nearly_a_url_is_no_folder(
    run: Run, tmp_path: Path, hf: Path, mcore: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    for typo in ("s3:/b/x", "S3:b", "hf:org/model", "https:host/g", "gs://", "FILE:/x", "az:c"):
        for words in (("mcore2hf", mcore, typo), ("hf2mcore", hf, typo), ("audit", typo),
                      ("plan", typo), ("mcore2hf", mcore, "out", "--like", typo)):  # fmt: skip
            said = run(*words)
            assert said.code == 2, words
            assert f"{typo}: is no URL, and no such file or folder exists; write " in one_line(said)
            assert f"{typo.partition(':')[0].lower()}://..." in said.err
    assert {p.name for p in tmp_path.iterdir()} == before
    for name in ("C:x", "c:/x", "./s3:/b", "data:v1", "s3", "a/s3:b"):
        assert place(name) == name
    shutil.copytree(hf, tmp_path / "s3:b")  # exists, so it is meant
    assert run("hf2mcore", "s3:b", "./gs:out", "-q").code == 0
    assert run("audit", "s3:b", "gs:out", "-q").code == 0


def test_a_scheme_may_be_in_capitals(run: Run, tmp_path: Path, hf: Path, web: Server) -> None:
    url = web.url.replace("http://", "HTTP://")
    assert run("hf2mcore", f"{url}/hf", tmp_path / "out", "-q").code == 0
    assert run("audit", f"FILE://{hf}", tmp_path / "out", "-q").code == 0
    assert run("audit", f"{url}/hf", "-q").code == 0
    assert place("simplecache::S3://Bucket/X") == "simplecache::s3://Bucket/X"


def test_memory_that_ends_with_the_command_is_no_target(run: Run, store: str, mcore: Path) -> None:
    for url in (store, f"simplecache::{store}", store.replace("memory", "MEMORY")):
        said = run("mcore2hf", mcore, url)
        assert said.code == 2
        assert "gone when it ends; name a folder, s3://, gs:// or hf://" in one_line(said)
    assert contents(store) == {}
