"""torch_dist checkpoints in object stores and behind web servers become the same HF files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.convert.to_afar import mcore2hf_afar
from mtpconv.errors import RefusedError, UnreadableError, UnsupportedError, UsageError
from mtpconv.store import afar
from mtpconv.store.afar_dist import open_dist_afar
from mtpconv.store.dist_metadata_writer import write_config
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.upload import Upload
from tests.convert import test_afar as hf_afar
from tests.convert import test_fp8
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf
from tests.convert.test_crcs import KEYS, rot
from tests.mapping.toy import config
from tests.store.test_remote import Server

pytest.importorskip("fsspec")
store, impatient = hf_afar.store, hf_afar.impatient


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_hf(tmp_path / "hf", config(), shards=3)


@pytest.fixture
def mcore(hf: Path, tmp_path: Path) -> Path:
    hf2mcore(hf, tmp_path / "mcore", pad_vocab=64)
    return tmp_path / "mcore"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, ranges=True)
    yield server
    server.server.shutdown()


def back(url: str, target: Path, **options: Any) -> Any:
    place = target.parent / f"{target.name}_mirror"
    place.mkdir()
    opened = open_dist_afar(url, place, source=options.get("like") is None)
    return mcore2hf(opened.mirror.path, target, opened=opened, **options)


@pytest.mark.parametrize("below", ["", "/release"])
def test_the_same_files_as_from_a_folder(
    store: str, tmp_path: Path, hf: Path, mcore: Path, below: str
) -> None:
    hf_afar.fill(store, mcore)
    done, here = back(store + below, tmp_path / "back"), mcore2hf(mcore, tmp_path / "local")
    assert done.verified
    assert (done.unchanged, done.tensors, done.notes) == (here.unchanged, here.tensors, here.notes)
    assert file_hashes(tmp_path / "back") == file_hashes(tmp_path / "local") == file_hashes(hf)


def test_codes_and_scales_of_fp8_come_from_there(store: str, tmp_path: Path) -> None:
    hf, _ = test_fp8.release(tmp_path, config("deepseek_v3"))
    hf2mcore(hf, tmp_path / "mcore")
    hf_afar.fill(store, tmp_path / "mcore")
    assert back(store, tmp_path / "back").verified
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_carried_tensors_come_from_there(store: str, tmp_path: Path) -> None:
    raw = config("deepseek_v3")
    tensors = tensors_of(make_hf(tmp_path / "plain", raw))
    head = "model.layers.3.shared_head.head.weight"
    spec, data = tensors[head]
    hf = write_hf(tmp_path / "hf", {**tensors, head: (spec, data[::-1])}, raw)
    assert hf2mcore(hf, tmp_path / "mcore").carried == (head,)
    hf_afar.fill(store, tmp_path / "mcore")
    assert back(store, tmp_path / "back").verified
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_from_a_store_into_a_store(store: str, tmp_path: Path, hf: Path, mcore: Path) -> None:
    hf_afar.fill(store, mcore)
    (tmp_path / "mirror").mkdir()
    opened = open_dist_afar(store, tmp_path / "mirror")
    assert mcore2hf_afar(opened.mirror.path, f"{store}_back", opened=opened).verified
    assert hf_afar.contents(f"{store}_back") == hf_afar.plain(hf)


def test_a_source_is_not_replaced(store: str, tmp_path: Path, hf: Path, mcore: Path) -> None:
    """However it is spelled, and whatever --overwrite says."""
    hf_afar.fill(f"{store}/run", mcore)
    hf_afar.fill(f"{store}/hf", hf)
    before = hf_afar.contents(store)
    for source, targets in {
        "run/release": (
            "run/release",
            "run/release/",
            "run//release/new",
            "run/hf_source",
            "run",
            "",
        ),
        "run": ("run", "run/hf", "run/release"),
    }.items():
        place = tmp_path / source.replace("/", "_")
        place.mkdir()
        opened = open_dist_afar(f"{store}/{source}", place)
        for target in targets:
            for url in (f"{store}/{target}", f"{store}/{target}".replace("s3:", "s3a:")):
                with pytest.raises(UsageError, match=r"lies inside|holds"):
                    mcore2hf_afar(opened.mirror.path, url, opened=opened, overwrite=True)
        assert hf_afar.contents(store) == before
        done = mcore2hf_afar(opened.mirror.path, f"{store}/hf", opened=opened, overwrite=True)
        assert done.verified
    assert hf_afar.contents(store) == before


def test_what_torch_saved(store: str, tmp_path: Path, hf: Path, mcore: Path) -> None:
    """Records with frames that nobody knows, in the order that torch gives them."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    target = tmp_path / "again/release"
    stored = open_torch_dist(mcore)
    state = {n: torch.empty(s.shape, dtype=torch.bfloat16) if s.dtype == "BF16"
             else torch.empty(s.shape, dtype=torch.float32)
             for n, s in stored.tensors.items()}  # fmt: skip
    dcp.load(state, storage_reader=FileSystemReader(mcore / "release"), no_dist=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(target, thread_count=2), no_dist=True)
    write_config(target)
    (target / "common.pt").write_bytes((mcore / "release/common.pt").read_bytes())
    (target.parent / "latest_checkpointed_iteration.txt").write_text("release")
    hf_afar.fill(store, target.parent)
    assert back(store, tmp_path / "back", like=hf).verified
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


@pytest.mark.parametrize("key", KEYS)
def test_a_flipped_bit_is_not_converted(
    web: Server, tmp_path: Path, hf: Path, mcore: Path, key: str
) -> None:
    rot(mcore, key)
    with pytest.raises(UnreadableError) as caught:
        back(f"{web.url}/mcore", tmp_path / "back", like=hf)
    for word in (f"{web.url}/mcore/release/__0_0.distcp: ", key, "CRC-32", "--no-verify"):
        assert word in str(caught.value)
    assert not (tmp_path / "back").exists()
    assert not back(f"{web.url}/mcore", tmp_path / "bent", like=hf, verify=False).verified


@pytest.mark.parametrize("change", ["rewrite", "lengthen", "remove"])
def test_a_checkpoint_that_changes(store: str, tmp_path: Path, mcore: Path, change: str) -> None:
    hf_afar.fill(store, mcore)
    file = mcore / "release/__0_0.distcp"
    data = file.read_bytes()

    def happens() -> None:
        where = Upload(f"{store}/release")
        if change == "remove":
            where.remove([file.name])
        else:
            where.write(file.name, [data[:-1] + b"\x55" if change == "rewrite" else data + b"\0"])

    with pytest.raises((UnreadableError, RefusedError), match=file.name):
        back(store, tmp_path / "back", progress=hf_afar.Once(happens))
    assert not (tmp_path / "back").exists()


def test_requests_and_bytes_are_few(
    web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path, mcore: Path
) -> None:
    monkeypatch.setattr(afar, "SPAN", 1 << 13)
    files = list((mcore / "release").glob("*.distcp"))
    size = sum(p.stat().st_size for p in files)
    back(f"{web.url}/mcore", tmp_path / "back", like=hf, jobs=1)
    assert len(web.requests) <= 25 + 4 * len(files) + 1.5 * size / (1 << 13)
    assert web.sent < 1.6 * size
    assert len(open_torch_dist(mcore).tensors) > len(web.requests)


def run(*words: Any, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mtpconv", *map(str, words)], check=False, capture_output=True,
        text=True, env={**os.environ, "TMPDIR": str(place)},
    )  # fmt: skip


def test_a_web_server_gives_no_listing(web: Server, tmp_path: Path, hf: Path, mcore: Path) -> None:
    url = f"{web.url}/mcore"
    with pytest.raises(UnsupportedError, match=r"/hf_source: the server gives no listing"):
        back(url, tmp_path / "back")
    refused = run("mcore2hf", url, tmp_path / "back", place=tmp_path)
    assert refused.returncode == 3
    assert refused.stderr.startswith(f"mtpconv: {url}/hf_source: ")
    done = run("mcore2hf", url, tmp_path / "back", "--like", hf, place=tmp_path)
    assert done.returncode == 0, done.stderr
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    whole = run("mcore2hf", f"{url}/release", tmp_path / "two", "--like", mcore, place=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert file_hashes(tmp_path / "two") == file_hashes(hf)


def test_the_command_line(store: str, tmp_path: Path, hf: Path, mcore: Path) -> None:
    """What is said names the URL, never the mirror; nothing is left in the temporary place."""
    if store.startswith("memory"):
        store = f"local://{mcore}"
    else:
        hf_afar.fill(store, mcore)
    before = {p.name for p in tmp_path.iterdir()}
    done = run("mcore2hf", store, tmp_path / "back", "--log-format", "json", place=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["event"] == "done"
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    lost = run("mcore2hf", f"{store}/nothing", tmp_path / "other", place=tmp_path)
    assert lost.returncode == 3
    assert lost.stderr.startswith(f"mtpconv: {store}/nothing: neither .metadata nor")
    Upload(store).write("release/__0_0.distcp", [b"short"])
    cut = run("mcore2hf", store, tmp_path / "other", place=tmp_path)
    assert cut.returncode == 3
    assert cut.stderr.startswith("mtpconv: __0_0.distcp ends at byte 5 and .metadata needs")
    assert f"`mtpconv audit {store}` lists every problem" in cut.stderr
    for said in (done, lost, cut):
        assert "mtpconv-" not in said.stderr + said.stdout
        assert len(said.stderr.splitlines()) == 1 or said is done
    assert {p.name for p in tmp_path.iterdir()} == before | {"back"}


def test_audits_read_headers(store: str, tmp_path: Path, hf: Path, mcore: Path) -> None:
    if store.startswith("memory"):
        store = f"local://{mcore}"
    else:
        hf_afar.fill(store, mcore)
    for words in ((hf, store), (store, hf), (store,), (store, store)):
        done = run("audit", *words, "--format", "json", place=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["tier"] == "L0"
        assert f"mtpconv: of {store} only headers are read: tier L0" in done.stderr
        assert "mtpconv-" not in done.stderr + done.stdout
    fs, root = hf_afar.fsspec.core.url_to_fs(store)
    (damaged,) = fs.glob(f"{root}/release/__0_0.distcp")
    fs.pipe_file(damaged, b"short")
    fs.invalidate_cache()
    found = run("audit", hf, store, place=tmp_path)
    assert found.returncode in (1, 3)
    assert "__0_0.distcp ends at byte 5" in found.stdout
    assert "mtpconv-" not in found.stderr + found.stdout
