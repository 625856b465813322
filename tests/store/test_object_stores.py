"""Audits of checkpoints in object stores: headers only, and every failure is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.errors import UnreadableError
from mtpconv.store.hf import open_hf
from mtpconv.store.remote import mirror_headers, open_remote
from tests.convert import test_afar as afar
from tests.convert.folders import make_hf
from tests.mapping.toy import config

store = afar.store


def mirror(url: str, place: Path) -> Path:
    place.mkdir()
    return mirror_headers(url, place)


def test_the_mirror_says_the_same_as_the_folder(store: str, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    afar.fill(store, hf)
    there, here = open_hf(mirror(store, tmp_path / "mirror")), open_hf(hf)
    assert (there.tensors, there.config, there.problems) == (here.tensors, here.config, ())
    assert {n: h.raw for n, h in there.shards.items()} == {n: h.raw for n, h in here.shards.items()}


def test_what_is_not_there_is_said_with_its_url(store: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError) as error:
        mirror(f"{store}/nothing", tmp_path / "mirror")
    assert str(error.value).startswith(f"{store}/nothing: ")


def test_no_credentials_and_no_server_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for key, said in ((None, "NoCredentialsError"), ("test", "EndpointConnectionError")):
        if key is not None:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(UnreadableError, match=said) as error:
            open_remote("s3://bucket/model").read("config.json", 0, 8)
        assert str(error.value).startswith("s3://bucket/model: config.json cannot be read: ")
        assert str(error.value).isprintable()
    s3fs.S3FileSystem.clear_instance_cache()
