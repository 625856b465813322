"""Ranges of files below an http(s) URL, each request within a time limit.

Python's timeouts are for one read of the socket; a server that sends a byte now and then would
hold an audit for ever. Here a clock shuts the connection when the time of a request is up.
"""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from threading import Timer
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import Request

from mtpconv.errors import UnreadableError
from mtpconv.store.safetensors_header import plain

#: Units: seconds. Until the headers of an answer are there, redirects included.
_PATIENCE = 30.0
#: Units: bytes a second. A body that comes slower is given up.
_SLOWEST = 50_000
#: Units: seconds. However large a header or index is.
_LONGEST = 600.0
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})")


class HttpFolder:
    """Files below an http(s) URL; servers that ignore ranges are read no further than needed."""

    def __init__(self, base: str, token: str | None = None) -> None:
        """`token` is shown to the named server only."""
        self._base = base
        self._token = token

    def names(self) -> Sequence[str] | None:
        """HTTP has no listing."""
        return None

    def below(self, folder: str) -> Sequence[str] | None:  # noqa: ARG002
        """HTTP has no listing."""
        return None

    def has_ranges(self, name: str) -> bool:
        """See `Remote.has_ranges`."""
        status: list[int] = []
        self._ask(name, 1, 1, lambda answer: status.append(answer.status))
        return status == [206]

    def mark(self, name: str) -> str:
        """See `Remote.mark`."""
        found: list[str] = []
        size = self._ask(name, 0, 1, lambda answer: found.append(_tag(answer)))
        return f"{size[1] if size else None} {' '.join(found)}"

    def read(self, name: str, start: int, length: int) -> tuple[bytes, int] | None:
        """See `Remote.read`."""
        return self._ask(name, start, length, lambda _: None)

    def _ask(
        self, name: str, start: int, length: int, look: Callable[[HTTPResponse], None]
    ) -> tuple[bytes, int] | None:
        url = f"{self._base}/{quote(name)}"
        clock = _Clock()
        try:
            with clock, self._open(url, start, length, clock) as answer:
                look(answer)
                return _answered(answer, start, length, url, clock)
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                return None
            if error.code == 416:  # an empty file has no first byte
                return b"", 0
            said = plain(str(error.reason).partition("\n")[0])
            raise UnreadableError(f"{url}: the server says {error.code} {said}") from error
        except (OSError, ValueError, OverflowError, HTTPException) as error:
            if clock.is_over:
                what = f"not answered within {clock.seconds:.0f} s"
            elif isinstance(error, InvalidURL):
                what = f"is no URL: {error}"
            elif isinstance(error, HTTPException):
                what = f"the server does not speak HTTP ({type(error).__name__})"
            else:
                what = f"cannot be reached: {error}"
            more = "try again or download the files"
            raise UnreadableError(f"{url}: {plain(what)}; {more}") from error

    def _open(self, url: str, start: int, length: int, clock: _Clock) -> HTTPResponse:
        headers = {"Accept-Encoding": "identity"}
        request = Request(url, headers=headers)  # noqa: S310
        request.add_header("Range", f"bytes={start}-{start + length - 1}")
        if self._token:
            # Not forwarded when the hub redirects to its storage: that host needs no token.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        opener = urllib.request.build_opener(_Http(clock), _Https(clock), _Redirects())
        answer: HTTPResponse = opener.open(request, timeout=_PATIENCE)
        return answer


def _answered(
    answer: HTTPResponse, start: int, length: int, url: str, clock: _Clock
) -> tuple[bytes, int]:
    body = _decimal(answer.headers.get("Content-Length"))
    if answer.status == 206:
        said = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if said is None:
            raise UnreadableError(f"{url}: the server does not say how large the file is")
        if int(said[1]) != start:
            raise UnreadableError(f"{url}: the server sent bytes from {said[1]}, not from {start}")
        skip, size = 0, int(said[3])
    elif body is None:
        raise UnreadableError(f"{url}: the server does not say how large the file is")
    else:
        skip, size = start, body
    wanted = skip + min(length, max(size - start, 0))
    clock.restart(min(_PATIENCE + wanted / _SLOWEST, _LONGEST))
    data = answer.read(skip + length)
    if clock.is_over and len(data) < wanted:
        raise TimeoutError
    return data[skip:], size


def _tag(answer: HTTPResponse) -> str:
    """What the server says that tells one state of a file from another."""
    known = (answer.headers.get(key) for key in ("ETag", "Last-Modified"))
    return next((text for text in known if text), "")


def _decimal(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,20}", text) else None


class _Clock:
    """Shuts the connections of one request when its time is up."""

    def __init__(self) -> None:
        self.seconds = _PATIENCE
        self.is_over = False
        self._sockets: list[socket.socket] = []
        self._timer: Timer | None = None

    def __enter__(self) -> _Clock:
        self.restart(_PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        while self._sockets:
            self._sockets.pop().close()

    def restart(self, seconds: float) -> None:
        """Give the request so much time from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self.seconds = seconds
        self._timer = Timer(seconds, self._shut)
        self._timer.daemon = True
        self._timer.start()

    def watch(self, opened: socket.socket) -> None:
        """Have a connection shut too; one that was made too late at once."""
        self._sockets.append(opened.dup())  # TLS takes the socket over, but not its twin
        if self.is_over:
            self._shut()

    def _shut(self) -> None:
        self.is_over = True
        for opened in list(self._sockets):
            try:
                opened.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already


class _Connection(HTTPConnection):
    clock: _Clock

    def connect(self) -> None:
        super().connect()
        self.clock.watch(self.sock)  # for https before the handshake, which may drip too


class _SafeConnection(HTTPSConnection, _Connection):
    pass


def _making(kind: type[_Connection], clock: _Clock) -> Callable[..., _Connection]:
    def make(*words: Any, **named: Any) -> _Connection:
        connection = kind(*words, **named)
        connection.clock = clock
        return connection

    return make


class _Http(urllib.request.HTTPHandler):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_making(_Connection, self._clock), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def https_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_making(_SafeConnection, self._clock), request)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Never to ftp:// and the like, which no clock watches."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise ValueError(f"it redirects to {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
