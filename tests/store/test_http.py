"""Servers that are broken, slow or hostile: one clear line, in bounded time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtpconv.errors import UnreadableError
from mtpconv.store import http
from mtpconv.store.remote import mirror_headers, open_remote

Reply = Callable[[str, socket.socket], None]


@contextmanager
def server(reply: Reply) -> Iterator[str]:
    """A server that hands each request's path and the raw connection to `reply`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            request = b""
            while b"\r\n\r\n" not in request:
                block = connection.recv(4096)
                if not block:
                    return
                request += block
            try:
                reply(request.split(b" ")[1].decode(), connection)
            except OSError:
                pass  # the client has had enough

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def saying(text: str) -> Reply:
    return lambda _, connection: connection.sendall(text.encode())


def ranged(content_range: str, body: str = "") -> str:
    head = f"HTTP/1.1 206 Partial\r\nContent-Range: {content_range}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}"


def one_line(error: pytest.ExceptionInfo[UnreadableError]) -> str:
    text = str(error.value)
    assert text.isprintable(), repr(text)
    return text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("lol what\r\n\r\n", "does not speak HTTP"),
        ("", "does not speak HTTP|cannot be reached"),
        ("HTTP/1.1 200 OK\r\n" + "x" * 70_000, "does not speak HTTP"),
        ("HTTP/1.1 500 \x1b[2Jno\r\nContent-Length: 0\r\n\r\n", "the server says 500"),
        ("HTTP/1.1 302 x\r\nLocation: ftp://127.0.0.1/x\r\n\r\n", "redirects to ftp:"),
        ("HTTP/1.1 302 x\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n", "says 302"),
        ("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "how large the file is"),
        (ranged("bytes 0-7/" + "9" * 5000), "how large the file is"),
        (ranged("bytes 0-7/*"), "how large the file is"),
        (ranged("bytes 8-15/100", "x" * 8), "sent bytes from 8, not from 0"),
    ],
)
def test_what_is_no_answer_is_one_line(answer: str, said: str) -> None:
    with server(saying(answer)) as url, pytest.raises(UnreadableError, match=said) as error:
        open_remote(url).read("config.json", 0, 8)
    assert url in one_line(error)


@pytest.mark.parametrize("size", [2**51, 2**62, 10**19, 10**30])
def test_a_shard_of_a_size_that_no_file_has(size: int, tmp_path: Path) -> None:
    def reply(path: str, connection: socket.socket) -> None:
        if not path.endswith(".safetensors"):
            connection.sendall(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n")
        else:
            connection.sendall(ranged(f"bytes 0-7/{size}", "\x08" + "\0" * 7).encode())

    with server(reply) as url, pytest.raises(UnreadableError) as error:
        mirror_headers(url, tmp_path)
    assert "model.safetensors: the server" in one_line(error)


@pytest.mark.parametrize(
    "url", ["http://[::1/x", "http://127.0.0.1:99999/x", "http://127.0.0.1:port/x", "http:///x",
            "https://a b/c", "http://\xe4" + "x" * 80 + "/y", "s3://[", "hf://[::1/x"],
)  # fmt: skip
def test_what_is_no_url_is_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError) as error:
        mirror_headers(url, tmp_path)
    assert url in str(error.value)


def test_an_endpoint_needs_a_scheme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in ("localhost", "localhost:8080", "//host", "ftp://host"):
        monkeypatch.setenv("HF_ENDPOINT", wrong)
        with pytest.raises(UnreadableError, match=r"HF_ENDPOINT=.* must begin with https://"):
            mirror_headers("hf://org/model", tmp_path)


def test_an_endpoint_with_a_password_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://user:secret@host")
    with pytest.raises(UnreadableError, match="HF_ENDPOINT: must hold no user") as error:
        mirror_headers("hf://org/model", tmp_path)
    assert "secret" not in str(error.value)


HEAD = "HTTP/1.1 206 x\r\nContent-Range: bytes 0-999/1000\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("at_once", ["", HEAD], ids=["headers", "body"])
def test_a_server_that_drips_is_given_up(at_once: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(_: str, connection: socket.socket) -> None:
        connection.sendall(at_once.encode())
        for byte in (HEAD + "x" * 1000)[len(at_once) :].encode():
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    monkeypatch.setattr(http, "_PATIENCE", 0.3)
    began = time.monotonic()
    with server(drip) as url, pytest.raises(UnreadableError, match="not answered within 0 s") as e:
        open_remote(url).read("config.json", 0, 1000)
    assert time.monotonic() - began < 5
    one_line(e)


def test_a_large_body_has_the_time_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(_: str, connection: socket.socket) -> None:
        connection.sendall(HEAD.encode())
        for _part in range(10):
            connection.sendall(b"x" * 100)
            time.sleep(0.05)

    monkeypatch.setattr(http, "_PATIENCE", 0.3)
    monkeypatch.setattr(http, "_SLOWEST", 1000)
    with server(slowly) as url:
        assert open_remote(url).read("config.json", 0, 1000) == (b"x" * 1000, 1000)
