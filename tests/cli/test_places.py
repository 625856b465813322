"""Places, streams and signals as a user meets them: nothing is lost, and what is said is true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.store.torch_dist_writer import TorchDistWriter
from tests.cli.test_cli import Run, one_line, run
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf
from tests.mapping.toy import config

__all__ = ["run"]

FULL = Path("/dev/full")
full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_hf(tmp_path / "hf", config())


def spawn(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "mtpconv", *map(str, words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, check=False, **options)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("inventory", "HF", "-o", "HF/config.json"),
        ("inventory", "HF", "-o", "HF/shard"),
        ("inventory", "HF", "-o", "LINK"),
        ("audit", "HF", "--report", "json=HF/config.json"),
        ("audit", "M.json", "HF", "--report", "json=M.json"),
        ("audit", "OTHER", "HF", "--report", "html=OTHER/config.json"),
        ("audit", "HF", "--base", "OTHER", "--report", "html=OTHER/config.json"),
        ("audit", "HF", "--report", "json=BLOB"),
        ("audit", "M.json", "HF", "--manifest", "M.json", "--attest", "M.json"),
        ("audit", "M.json", "HF", "--manifest", "M.json", "--attest", "HF/config.json"),
    ],
)
def test_reports_do_not_overwrite_what_is_read(
    run: Run, hf: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    make_hf(tmp_path / "other", config())
    assert run("inventory", hf, "-o", tmp_path / "m.json", "-q").code == 0
    shard = hf / "model-00001-of-00003.safetensors"
    (tmp_path / "blobs").mkdir()
    shard.rename(tmp_path / "blobs/1")
    shard.symlink_to(tmp_path / "blobs/1")
    (tmp_path / "link").symlink_to(hf / "config.json")
    before = file_hashes(tmp_path)
    places = {
        "HF/shard": str(shard), "BLOB": str(tmp_path / "blobs/1"), "LINK": str(tmp_path / "link"),
        "M.json": str(tmp_path / "m.json"), "HF": str(hf), "OTHER": str(tmp_path / "other"),
    }  # fmt: skip
    filled = []
    for word in words:
        for name, place in places.items():
            word = word.replace(name, place)
        filled.append(word)
    said = run(*filled)
    assert said.code == 2
    assert "would be overwritten; name another file" in one_line(said)
    assert file_hashes(tmp_path) == before


def test_parity_does_not_overwrite_what_is_read(run: Run, hf: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert run("hf2mcore", hf, tmp_path / "mcore", "-q").code == 0
    said = run("parity", hf, tmp_path / "mcore", "--html", hf / "config.json")
    assert said.code == 2
    assert "would be overwritten" in one_line(said)


def test_new_files_may_lie_anywhere(run: Run, hf: Path, tmp_path: Path) -> None:
    assert run("inventory", hf, "-o", hf / "manifest.json", "-q").code == 0
    assert run("audit", hf, "-q", "--report", f"json={tmp_path / 'r.json'}").code == 0
    for place in ("/", tmp_path, tmp_path / "nowhere" / "m.json"):
        said = run("inventory", hf, "-o", place)
        assert said.code == 2
        assert "name a file in an existing folder" in one_line(said)


def test_devices_and_links_are_written_through(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    (tmp_path / "real.json").touch()
    assert spawn("inventory", hf, "-q", "-o", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert spawn("audit", tmp_path / "real.json", hf, "-q").returncode == 0
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert spawn("inventory", hf, "-q", "-o", pipe).returncode == 0
        assert reader.communicate()[0] == (tmp_path / "real.json").read_bytes()
    assert pipe.is_fifo()


@full
@pytest.mark.parametrize("command", ["hf2mcore", "audit", "inventory", "plan"])
def test_standard_output_that_is_full_is_3(hf: Path, tmp_path: Path, command: str) -> None:
    target = tmp_path / "mcore"
    with FULL.open("w") as out:
        words = [target] if command == "hf2mcore" else []
        said = spawn(command, hf, *words, stdout=out)
    assert said.returncode == 3
    line = one_line(run_of(said))
    assert "standard output: cannot be written: No space left" in line
    assert ("is written and whole" in line) == (command == "hf2mcore")
    assert target.exists() == (command == "hf2mcore")


def run_of(said: subprocess.CompletedProcess[str]) -> Any:
    from tests.cli.test_cli import Said

    return Said(said.returncode, said.stdout or "", said.stderr or "")


@pytest.mark.parametrize("how", ["closed", "broken"])
def test_standard_output_that_is_closed_is_3(hf: Path, tmp_path: Path, how: str) -> None:
    if how == "closed":
        said = spawn("hf2mcore", hf, tmp_path / "mcore", preexec_fn=lambda: os.close(1))
    else:
        read, write = os.pipe()
        os.close(read)
        said = spawn("hf2mcore", hf, tmp_path / "mcore", stdout=write)
        os.close(write)
    assert said.returncode == 3
    assert "mcore is written and whole" in one_line(run_of(said))
    assert spawn("audit", hf, tmp_path / "mcore", "-q").returncode == 0


@pytest.mark.parametrize("how", ["closed", pytest.param("full", marks=full)])
def test_standard_error_changes_nothing(hf: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "empty").mkdir()
    for code, words in ((0, ("hf2mcore", hf, tmp_path / "m")), (3, ("audit", tmp_path / "empty"))):
        if how == "closed":
            said = spawn(*words, preexec_fn=lambda: os.close(2))
        else:
            with FULL.open("w") as err:
                said = spawn(*words, stderr=err)
        assert said.returncode == code
    assert spawn("audit", hf, tmp_path / "m", "-q").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["hf2mcore", "roundtrip"])
def test_signals_leave_nothing(
    run: Run, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, command: str
) -> None:
    real = TorchDistWriter.close

    def stop(writer: TorchDistWriter) -> Any:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # they come in twos
        return real(writer)

    monkeypatch.setattr(TorchDistWriter, "close", stop)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    words = [tmp_path / "m"] if command == "hf2mcore" else ["--workdir", tmp_path]
    said = run(command, hf, *words)
    assert said.code == 128 + number
    assert "interrupted" in one_line(said)
    assert names(tmp_path) == ["hf"]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_is_ignored_stays_ignored(
    run: Run, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TorchDistWriter.close

    def hang_up(writer: TorchDistWriter) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return real(writer)

    monkeypatch.setattr(TorchDistWriter, "close", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run("hf2mcore", hf, tmp_path / "m", "-q").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_inside_exec_has_its_exit_code(hf: Path, tmp_path: Path) -> None:
    """Such as those of dataclasses; Python would end itself by SIGINT afterwards."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'mtpconv.cli.plan':\n"
        "            exec('while True: os.kill(os.getpid(), signal.SIGTERM)')\n"
        "sys.meta_path.insert(0, Impatient())\n"
    )
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    said = spawn("plan", hf, env={**os.environ, "PYTHONPATH": path})
    assert said.returncode == 128 + signal.SIGTERM
    assert "interrupted" in one_line(run_of(said))


@pytest.mark.parametrize("module", ["mtpconv.cli.app", "typer", "mtpconv.cli.signals"])
def test_an_interrupt_during_start_up_is_130(module: str) -> None:
    script = (
        "import sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "from mtpconv.cli import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", script, "plan", "x"]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    assert said.returncode == 130
    assert "Traceback" not in said.stderr


def test_bad_places_are_one_line(run: Run, hf: Path, tmp_path: Path) -> None:
    for words in (
        ("hf2mcore", hf, "/"),
        ("hf2mcore", hf, tmp_path),
        ("roundtrip", hf, "--workdir", tmp_path / "nowhere"),
        ("roundtrip", hf, "--workdir", hf / "config.json"),
        ("synth", hf / "config.json", hf),
        ("synth", hf / "config.json", hf / "config.json"),
    ):
        said = run(*words)
        assert said.code == 2, words
        one_line(said)
    assert names(tmp_path) == ["hf"]


def test_synth_on_a_full_disk_leaves_nothing(
    run: Run, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., int] = os.write
    left = [5000]

    def write(fd: int, data: bytes) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(28, os.strerror(28))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    said = run("synth", hf / "config.json", tmp_path / "deep" / "new")
    monkeypatch.undo()
    assert said.code == 3
    assert "No space left on device" in one_line(said)
    assert "nothing was left behind" in one_line(said)
    assert names(tmp_path) == ["hf"]


def test_names_that_are_not_utf8(hf: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    hf.rename(odd)
    (odd / os.fsdecode(b"\xff.txt")).write_text("a note")
    mcore, back = tmp_path / os.fsdecode(b"m\xff"), tmp_path / "back"
    for words in (
        ("hf2mcore", odd, mcore),
        ("mcore2hf", mcore, back, "--log-format", "json"),
        ("audit", odd, back),
        ("audit", odd, back, "--format", "json", "--report", f"html={tmp_path / 'r.html'}"),
        ("inventory", odd, "--files", "-o", tmp_path / "m.json"),
        ("audit", tmp_path / "m.json", odd),
        ("plan", odd),
        ("roundtrip", odd),
    ):
        said = spawn(*words, errors="replace")
        assert said.returncode == 0, (words, said.stderr)
    assert file_hashes(back) == file_hashes(odd)
    lost = {n: t for n, t in tensors_of(odd).items() if n != "model.norm.weight"}
    said = spawn("hf2mcore", write_hf(odd / os.fsdecode(b"l\xe9"), lost, config()), tmp_path / "x")
    assert said.returncode == 1
    assert "M06" in one_line(run_of(said))


@pytest.mark.parametrize("command", ["inventory", "audit"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_read(
    run: Run, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    monkeypatch.setattr("mtpconv.cli.inventory.take_manifest", None)
    monkeypatch.setattr("mtpconv.cli.audit.audit", None)
    words = ("-o", "") if command == "inventory" else ("--report", "json=")
    said = run(command, hf, words[0], f"{words[1]}{tmp_path / 'm.json'}")
    assert said.code == 3
    assert f"m.json: nothing can be written into {tmp_path}" in one_line(said)
