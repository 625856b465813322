"""The commands in the documents: found, run and compared, so that no page shows what is not so.

A fenced block of the language `console` is a session in bash. A line that begins with `$ ` is a
command (a trailing backslash continues it), the lines below it are its output, stderr included.
CONTRIBUTING.md, "Commands in the documents", is the rest of the contract.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

#: A comment right above a block: `<!-- skip: REASON -->`, or `<!-- setup:` and shell lines.
_COMMENT = re.compile(r"<!--\s*(skip|setup):(.*?)-->\s*\Z", re.DOTALL)
_FENCE = re.compile(r"( *)(`{3,}|~{3,}) *([\w+-]*)")
_OURS = re.compile(r"(\$ +)?(mtpconv|make) ")
#: Commands that .ci/run runs itself, and that would run this file again from inside a test.
_OF_CI = ("make test", "make test-slow", "make test-megatron", "make lint")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class DocumentError(Exception):
    """A document breaks the contract, or a command does not do what the document shows."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command with the output that the document shows for it."""

    line: int
    text: str
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One session of a document."""

    document: str
    line: int
    commands: tuple[Command, ...]
    setup: str = ""
    skip: str = ""

    @property
    def runs(self) -> bool:
        """Whether there is something to run."""
        return bool(self.commands) and not self.skip

    @property
    def uses_make(self) -> bool:
        """Whether a target of the Makefile is run: those take longer and have their own test."""
        return any(c.text.startswith("make ") for c in self.commands)


def blocks(document: str, text: str) -> list[Block]:
    """The sessions of a Markdown text, in order.

    Raises: DocumentError if a command would stay unchecked: one of ours in a block of another
    language, text above the first command, a block skipped without a reason, or output of a
    command that is not run here.
    """
    found: list[Block] = []
    lines = text.splitlines()
    at = above = 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at].rstrip())
        if fence is None:
            at += 1
            continue
        first = at + 1
        indent, mark, language = fence.groups()
        at = first
        while at < len(lines) and lines[at].strip() != mark:
            at += 1
        if at == len(lines):
            raise DocumentError(f"{document}:{first}: the block has no end")
        body = [line.removeprefix(indent) for line in lines[first:at]]
        if language == "console":
            comment = _COMMENT.search("\n".join(lines[above : first - 1]))
            found.append(_block(document, first, body, comment))
        elif language in ("", "bash", "sh", "shell", "shell-session", "text"):
            for number, line in enumerate(body, first + 1):
                if _OURS.match(line):
                    raise DocumentError(
                        f"{document}:{number}: a command outside a ```console block is not "
                        "checked; make it one, with `$ ` before the command"
                    )
        at += 1
        above = at
    return found


def _block(document: str, line: int, body: Sequence[str], comment: re.Match[str] | None) -> Block:
    kind, value = (comment[1], comment[2].strip()) if comment else ("", "")
    if kind == "skip" and not value:
        raise DocumentError(f"{document}:{line}: a skipped block needs a reason")
    commands: list[Command] = []
    continued = False
    for number, text in enumerate(body, line + 1):
        if text.startswith("$ ") or continued:
            if continued:
                last = commands.pop()
                joined = f"{last.text[:-1].rstrip()} {text.removeprefix('>').strip()}"
                commands.append(Command(last.line, joined, ()))
            else:
                commands.append(Command(number, text[2:].strip(), ()))
            continued = commands[-1].text.endswith("\\")
        elif commands:
            last = commands.pop()
            commands.append(Command(last.line, last.text, (*last.expected, text.rstrip())))
        elif text.strip():
            raise DocumentError(f"{document}:{number}: output without a `$ ` command above it")
    if not commands:
        raise DocumentError(f"{document}:{line}: a console block without a `$ ` command")
    kept = []
    for command in commands:
        if not command.text.startswith(_OF_CI):
            kept.append(command)
        elif any(command.expected):
            raise DocumentError(
                f"{document}:{command.line}: `{command.text}` is run by .ci/run and not by this "
                "test, so its output cannot be shown"
            )
    return Block(
        document,
        line,
        tuple(kept),
        setup=value if kind == "setup" else "",
        skip=value if kind == "skip" else "",
    )


def run(block: Block, folder: Path, environment: Mapping[str, str], limit: float) -> None:
    """Run a block in the folder and compare what it prints. Units: limit in seconds, per command.

    A command must succeed, unless the next one is `echo $?` and so shows the exit code.

    Raises: DocumentError at the first command that fails or prints something else.
    """
    where = f"{block.document}:{block.line}"
    if block.setup:
        status, output = _bash(f"set -euo pipefail\n{block.setup}", folder, environment, limit)
        if status:
            raise DocumentError(f"{where}: the setup failed with {status}\n{output}")
    previous = 0
    following = [*(b.text for _, b in pairwise(block.commands)), ""]
    for command, then in zip(block.commands, following, strict=True):
        where = f"{block.document}:{command.line}"
        # Each command has a shell of its own, which must know how the last one ended.
        script = f"(exit {previous})\n{command.text}"
        previous, output = _bash(script, folder, environment, limit)
        if previous and then != "echo $?":
            raise DocumentError(f"{where}: `{command.text}` failed with {previous}\n{output}")
        shown = "\n".join(command.expected).rstrip().splitlines()
        got = output.rstrip().splitlines()
        # A command shown without output says nothing about its output.
        if shown and not matches(shown, got):
            raise DocumentError(
                f"{where}: `{command.text}` does not print what the document shows\n"
                f"--- shown\n{_quoted(shown)}\n--- printed\n{_quoted(got)}"
            )


def _bash(
    script: str, folder: Path, environment: Mapping[str, str], limit: float
) -> tuple[int, str]:
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            raw, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            # The children too: they hold the pipe open.
            os.killpg(process.pid, signal.SIGKILL)
            raise DocumentError(f"`{script}` took more than {limit:g} s") from error
    output = _ANSI.sub("", raw.decode("utf-8", "replace"))
    return process.returncode, "\n".join(line.rstrip() for line in output.splitlines())


def matches(shown: Sequence[str], got: Sequence[str]) -> bool:
    """Whether the output is what is shown: a line `...` is any lines, `...` inside one any text."""
    pattern = "".join(
        r"(?:[^\n]*\n)*?" if line.strip() == "..." else _line_pattern(line) + r"\n"
        for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in got)) is not None


def _line_pattern(line: str) -> str:
    return r"[^\n]*?".join(re.escape(part) for part in line.split("..."))


def _quoted(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"
