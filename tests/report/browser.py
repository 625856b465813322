"""A real headless Chromium, driven over its debugging pipe with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

#: Seconds that one answer of the browser may take; a busy machine starts it slowly.
LIMIT = 60.0

#: Puts the two ends of the pipe where Chromium looks for them.
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""

KEYS = {"ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "End": 35, "/": 191}


def chromium() -> str:
    """Path of an installed Chromium; skips the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no Chromium on PATH; on Debian: apt-get install chromium")


class Browser:
    """A browser with a profile of its own; it serves many pages, one at a time."""

    def __init__(self, profile: Path) -> None:
        """Start it; `with` ends it."""
        program = [
            chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync",
            "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._number = 0
        self._buffer = b""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        start = [sys.executable, "-c", _START, str(to_browser), str(from_browser), *program]
        self._process = subprocess.Popen(
            start, pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Self:
        """The browser itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, whatever happened."""
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(
        self, method: str, session: str | None, parameters: dict[str, Any],
        note: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:  # fmt: skip
        """One command of the DevTools protocol and its answer; events on the way go to `note`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            note(answer)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"Chromium did not answer within {LIMIT} s")
            block = os.read(self._in, 1 << 16)
            if not block:
                raise RuntimeError("Chromium ended")
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


class Page:
    """One open page."""

    def __init__(self, browser: Browser, url: str, *, dark: bool = False) -> None:
        """A page of the browser; `with` opens and closes it."""
        self._browser = browser
        self._url = url
        self._scheme = "dark" if dark else "light"
        self._session: str | None = None
        self._target = ""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        """The page, loaded and drawn."""
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=1500, height=1100, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": self._scheme}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=self._url)
        self.wait("document.body && document.body.dataset.ready === 'yes'")
        return self

    def __exit__(self, *_: object) -> None:
        """Close the page."""
        self._session = None
        self.call("Target.closeTarget", targetId=self._target)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its answer."""
        return self._browser.call(method, self._session, parameters, self._note)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what a test must know: script errors, policy violations, requests."""
        what = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(what["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(what["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + LIMIT
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def click(self, expression: str) -> None:
        """A real mouse click in the middle of the element that an expression gives."""
        box = self.value(
            f"(() => {{ const e = {expression}; e.scrollIntoView({{block: 'center', inline: "
            "'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=box[0], y=box[1], button="left", clickCount=1,
            )  # fmt: skip

    def press(self, key: str) -> None:
        """One key, pressed and released."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": key} if len(key) == 1 else {}
        if key == "Enter":
            text = {"text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        """Type into the focused field."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> bytes:
        """The whole visible page as PNG."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data
