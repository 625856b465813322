"""Headers from afar: few bytes, the same findings, no leak of tokens."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpconv.errors import UnreadableError
from mtpconv.store.hf import open_hf
from mtpconv.store.places import is_remote
from mtpconv.store.remote import mirror_headers, open_remote
from tests.convert.folders import make_hf
from tests.mapping.toy import config


class Server:
    """A local HTTP server over a folder, with or without ranges, that remembers requests."""

    def __init__(self, folder: Path, ranges: bool) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.sent = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Authorization")))
                redirect = re.fullmatch(r"/org/model/resolve/main/(.+)", self.path)
                if redirect:
                    self.send_response(302)
                    self.send_header("Location", f"http://127.0.0.1:{outer.port}/cdn/{redirect[1]}")
                    self.end_headers()
                    return
                path = folder / self.path.removeprefix("/cdn").lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                data = path.read_bytes()
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
                if ranges and asked:
                    part = data[int(asked[1]) : int(asked[2]) + 1]
                    if not part:
                        self.send_error(416)
                        return
                    self.send_response(206)
                    end = int(asked[1]) + len(part) - 1
                    self.send_header("Content-Range", f"bytes {asked[1]}-{end}/{len(data)}")
                else:
                    part = data
                    self.send_response(200)
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                outer.sent += len(part)
                try:
                    self.wfile.write(part)
                except (BrokenPipeError, ConnectionResetError):
                    pass

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(params=[True, False], ids=["ranges", "no_ranges"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    server = Server(hf, request.param)
    yield server, hf
    server.server.shutdown()


def test_the_mirror_says_the_same_as_the_folder(
    served: tuple[Server, Path], tmp_path: Path
) -> None:
    server, hf = served
    folder = tmp_path / "mirror"
    folder.mkdir()
    there, here = open_hf(mirror_headers(server.url, folder)), open_hf(hf)
    assert there.tensors == here.tensors
    assert there.config == here.config
    assert there.problems == here.problems == ()
    assert {n: h.raw for n, h in there.shards.items()} == {n: h.raw for n, h in here.shards.items()}
    assert [h.size for h in there.shards.values()] == [h.size for h in here.shards.values()]


def test_two_requests_a_shard_and_no_payload(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    server = Server(hf, ranges=True)
    folder = tmp_path / "mirror"
    folder.mkdir()
    mirror_headers(server.url, folder)
    server.server.shutdown()
    shards = [path for path, _ in server.requests if path.endswith(".safetensors")]
    assert len(shards) == 2 * 3
    small = sum(len(p.read_bytes()) for p in (hf / "config.json", *hf.glob("*.index.json")))
    headers = sum(len(h.raw) for h in open_hf(hf).shards.values())
    assert server.sent == small + headers


def test_faults_are_found_from_afar(served: tuple[Server, Path], tmp_path: Path) -> None:
    server, hf = served
    shards = sorted(hf.glob("*.safetensors"))
    shards[0].unlink()
    shards[1].write_bytes(b"")
    with shards[2].open("ab") as file:
        file.write(b"\0")
    folder = tmp_path / "mirror"
    folder.mkdir()
    there = open_hf(mirror_headers(server.url, folder))
    assert {p.kind for p in there.problems} == {p.kind for p in open_hf(hf).problems}
    assert {p.file for p in there.problems} >= {s.name for s in shards}


def test_the_hub_gets_the_token_and_its_storage_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    server = Server(hf, ranges=True)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder = tmp_path / "mirror"
    folder.mkdir()
    assert open_hf(mirror_headers("hf://org/model", folder)).tensors == open_hf(hf).tensors
    server.server.shutdown()
    assert {token for path, token in server.requests if path.startswith("/org")} == {
        "Bearer secret"
    }
    assert {token for path, token in server.requests if path.startswith("/cdn")} == {None}


def test_what_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    server = Server(tmp_path, ranges=True)
    folder = tmp_path / "mirror"
    folder.mkdir()
    with pytest.raises(UnreadableError, match=r"neither .* nor model\.safetensors is there"):
        mirror_headers(server.url, folder)
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(UnreadableError, match="cannot be reached"):
        mirror_headers(server.url, folder)
    with pytest.raises(UnreadableError, match="must look like hf://"):
        open_remote("hf://nothing")


def test_an_index_cannot_lead_outside(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=2)
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    index["weight_map"]["x"] = "../../escape.safetensors"
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    server = Server(hf, ranges=True)
    folder = tmp_path / "deep" / "mirror"
    folder.mkdir(parents=True)
    there = open_hf(mirror_headers(server.url, folder))
    server.server.shutdown()
    assert not any("escape" in path for path, _ in server.requests)
    assert "index_missing_file" in {p.kind for p in there.problems}


def test_other_schemes_go_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    memory = fsspec.filesystem("memory")
    for path in hf.iterdir():
        memory.pipe(f"/bucket/model/{path.name}", path.read_bytes())
    folder = tmp_path / "mirror"
    folder.mkdir()
    assert open_hf(mirror_headers("memory://bucket/model", folder)).tensors == open_hf(hf).tensors
    with pytest.raises(UnreadableError):
        mirror_headers("memory://bucket/nothing", folder)


@pytest.mark.parametrize("broken", ["__init__", "ls", "info", "cat_file"])
def test_what_a_package_behind_fsspec_raises_is_one_line(broken: str, tmp_path: Path) -> None:
    """s3fs has NoCredentialsError and EndpointConnectionError, which are no OSError."""
    fsspec = pytest.importorskip("fsspec")

    class NoCredentials(Exception):
        pass

    class Bucket:
        def ls(self, path: str, detail: bool = True, **_: object) -> list[dict[str, object]]:
            return [{"name": f"{path}/model.safetensors", "type": "file", "size": 10}]

        def info(self, path: str, **_: object) -> dict[str, object]:
            if not path.endswith("model.safetensors"):
                raise FileNotFoundError(path)
            return {"name": path, "size": 10, "type": "file"}

        def cat_file(self, path: str, start: int = 0, end: int = 0, **_: object) -> bytes:
            return (2).to_bytes(8, "little")[start:end] if start < 8 else b"{}"

    kind: Any = type("Cloud", (Bucket, fsspec.AbstractFileSystem), {"cachable": False})
    fsspec.register_implementation("cloud", kind, clobber=True)
    mirror_headers("cloud://bucket/model", tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentials("Unable to locate\ncredentials")

    setattr(kind, broken, refuse)
    with pytest.raises(UnreadableError, match=r"NoCredentials: Unable to locate$") as error:
        mirror_headers("cloud://bucket/model", tmp_path)
    assert str(error.value).startswith("cloud://bucket/model: ")


def test_local_paths_are_not_remote() -> None:
    assert not any(is_remote(t) for t in ("a/b", "/a", "./a", "C:/x", "file"))
    assert all(is_remote(t) for t in ("hf://a/b", "https://a", "s3://b/c"))
