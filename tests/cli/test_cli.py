"""The command line as a user meets it: exit codes, one clear line, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import NamedTuple

import pytest

from mtpconv.cli import main
from mtpconv.mapping.table_reader import find_table
from mtpconv.report import FORMATS
from mtpconv.store.crew import Crew
from mtpconv.store.files import OnRead
from tests.convert.folders import make_hf, tensors_of, write_hf
from tests.mapping.toy import config


class Said(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["mtpconv", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        code = stop.value.code
        return Said(code if isinstance(code, int) else 0 if code is None else 1, said.out, said.err)

    return call


def one_line(said: Said) -> str:
    lines = [line for line in said.err.splitlines() if line.startswith("mtpconv: ")]
    assert len(lines) == 1, said.err
    assert "Traceback" not in said.err
    return lines[0]


def test_convert_audit_and_plan(run: Run, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    assert run("hf2mcore", hf, tmp_path / "mcore", "--quiet") == (0, "", "")
    said = run("mcore2hf", tmp_path / "mcore", tmp_path / "back")
    assert said.code == 0
    assert "every tensor read back and equal" in said.out
    said = run("audit", hf, tmp_path / "back", "--format", "json", "--quiet")
    report = json.loads(said.out)
    assert said.code == 0
    assert (report["verdict"], report["tier"], report["mtp"]["status"]) == (
        "pass", "L2", "preserved",
    )  # fmt: skip
    assert run("audit", hf, tmp_path / "mcore", "-q").code == 0
    said = run("plan", hf)
    assert "mtp depth 0" in said.out
    rows = run("plan", hf, "--rows").out.splitlines()
    assert len(rows) == len(tensors_of(hf))


def test_families_and_a_padded_vocabulary(run: Run, tmp_path: Path) -> None:
    said = run("families")
    assert "glm_moe_dsa" in said.out
    assert "GLM-5.2, GLM-5.1" in said.out
    rows = {row["model_type"]: row for row in json.loads(run("families", "--format", "json").out)}
    assert (rows["llama"]["directions"], rows["llama"]["loads"]) == ("both ways, audit", True)
    assert run("families", "--format", "yaml").code == 2
    hf = make_hf(tmp_path / "hf", config())
    assert run("hf2mcore", hf, tmp_path / "mcore", "--pad-vocab", "1000", "-q").code == 0
    assert run("audit", hf, tmp_path / "mcore", "-q").code == 0
    assert run("mcore2hf", tmp_path / "mcore", tmp_path / "back", "-q").code == 0
    assert run("audit", hf, tmp_path / "back", "-q").code == 0


def test_audit_exit_codes(run: Run, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    tensors = tensors_of(hf)
    lost = write_hf(
        tmp_path / "lost", {n: t for n, t in tensors.items() if ".layers.3." not in n}, config()
    )
    said = run("audit", hf, lost)
    assert said.code == 1
    assert "MTP       dropped" in said.out
    assert run("audit", lost, "-q").code == 1  # alone: its own config promises MTP
    manifest = tmp_path / "m.json"
    assert run("inventory", hf, "-o", manifest, "-q").code == 0
    assert run("audit", manifest, hf, "-q").code == 0
    assert run("audit", manifest, hf, "-q", "--require", "L2").code == 3
    assert run("audit", hf, hf, "-q", "--headers-only", "--require", "L2").code == 3
    said = run("audit", tmp_path / "nowhere", hf)
    assert said.code == 3
    assert "nowhere" in one_line(said)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("audit", empty, empty).code == 3


@pytest.mark.parametrize(
    ("command", "place"),
    [("inventory", "mtpconv.store.manifest.Crew"), ("audit", "mtpconv.audit.compare.Crew")],
)
def test_jobs_are_the_threads_that_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    sides = (hf, copytree(hf, tmp_path / "twin")) if command == "audit" else (hf,)
    seen: list[int] = []

    class Watched(Crew):
        def __init__(self, jobs: int | None = None, on_read: OnRead | None = None) -> None:
            super().__init__(jobs, on_read)
            seen.append(self.jobs)

    monkeypatch.setattr(place, Watched)
    printed = {run(command, *sides, "-j", str(jobs)).out for jobs in (1, 3)}
    assert seen == [1, 3]
    assert len(printed) == 1
    assert run(command, *sides, "--jobs", "0").code == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["audit", "HF", "HF", "--allow", "everything"], "everything"),
        (["audit", "HF", "HF", "--require", "L9"], "L9"),
        (["audit", "HF", "HF", "--format", "pdf"], "pdf"),
        (["audit", "HF", "HF", "--report", "html"], "html"),
        (["audit", "HF", "HF", "--sample", "2/1"], "2/1"),
        (["audit", "HF", "--sample", "1/2"], "--sample"),
        (["audit", "HF", "--expect", "structure"], "--expect structure"),
        (["audit", "HF", "HF", "--attest", "x.json"], "--manifest"),
        (["hf2mcore", "HF", "NEW", "--layout", "sideways"], "sideways"),
        (["check", "no_such_model"], "no_such_model"),
        (["check", "glm_moe_dsa", "--inventory", "x.json"], "--config"),
        (["args", "HF", "--format", "xml"], "xml"),
    ],
)
def test_usage_errors_are_2_and_name_the_word(
    run: Run, tmp_path: Path, words: list[str], named: str
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    places = {"HF": str(hf), "NEW": str(tmp_path / "new")}
    said = run(*(places.get(w, w) for w in words))
    assert said.code == 2
    assert named in one_line(said)
    assert not (tmp_path / "new").exists()


def test_a_base_of_one_checkpoint_is_looked_at(run: Run, tmp_path: Path) -> None:
    base = make_hf(tmp_path / "base", config())
    after = {
        n: (spec, data if n.startswith("model.layers.3.") else bytes(b ^ 1 for b in data))
        for n, (spec, data) in tensors_of(base).items()
    }
    said = run("audit", write_hf(tmp_path / "after", after, config()), "--base", base)
    assert (said.code, "V05 stale_mtp" in said.out) == (1, True)


def test_an_unknown_option_is_usage(run: Run) -> None:
    assert run("hf2mcore", "--surprise").code == 2


def test_refused_conversions_are_1_and_broken_files_3(run: Run, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=1)
    lies = write_hf(tmp_path / "lies", tensors_of(hf), config(num_nextn_predict_layers=0))
    said = run("hf2mcore", lies, tmp_path / "m")
    assert said.code == 1
    assert "--drop-mtp" in one_line(said)
    os.truncate(hf / "model.safetensors", 1000)
    said = run("hf2mcore", hf, tmp_path / "m")
    assert said.code == 3
    assert "model.safetensors" in one_line(said)
    assert not (tmp_path / "m").exists()


def test_check_prints_faults_with_file_and_line(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "toy.toml"
    table.write_text(
        'format = 1\nmodel_type = "toy"\nstacks = [{ each = "once", mcore = "", hf = "", '
        'use = ["root"] }]\n[blocks.root]\n"a.weight" = "b.weight"\n'
    )
    said = run("check", table)
    assert said.code == 1
    assert "toy.toml:5: M15" in said.out


def test_too_little_memory_is_no_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mtpconv.cli.convert.hf2mcore", fail)
    said = run("hf2mcore", "a", "b")
    assert said.code == 3
    assert "there is not enough memory" in one_line(said)


def test_a_bug_is_70_and_asks_for_a_report(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mtpconv.cli.convert as module

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(module, "hf2mcore", broken)
    said = run("hf2mcore", tmp_path, tmp_path / "m")
    assert said.code == 70
    assert "please report it" in one_line(said)


def test_interrupt_is_130_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtpconv.store.torch_dist_writer import TorchDistWriter

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hf = make_hf(tmp_path / "hf", config())
    monkeypatch.setattr(TorchDistWriter, "close", stop)
    said = run("hf2mcore", hf, tmp_path / "m")
    assert said.code == 130
    assert "interrupted" in one_line(said)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    "command",
    ["plan", "check", "inventory", "audit", "hf2mcore", "mcore2hf", "roundtrip", "synth",
     "selftest", "parity", "args"],
)  # fmt: skip
def test_every_command_explains_itself(run: Run, command: str) -> None:
    said = run(command, "--help")
    assert said.code == 0
    assert "Usage:" in said.out


def test_light_commands_import_nothing_heavy(tmp_path: Path) -> None:
    """The base install must do: no torch, transformers or megatron in any of these."""
    hf = make_hf(tmp_path / "hf", config())
    script = (
        "import sys\n"
        "from mtpconv.cli.app import app\n"
        f"for words in (['plan', {str(hf)!r}], ['check', 'glm_moe_dsa'],\n"
        f"  ['inventory', {str(hf)!r}, '-q', '-o', {str(tmp_path / 'm.json')!r}],\n"
        f"  ['hf2mcore', {str(hf)!r}, {str(tmp_path / 'mcore')!r}, '-q'],\n"
        f"  ['mcore2hf', {str(tmp_path / 'mcore')!r}, {str(tmp_path / 'back')!r}, '-q'],\n"
        f"  ['audit', {str(hf)!r}, {str(tmp_path / 'mcore')!r}, '-q'], ['selftest', '-q'],\n"
        f"  ['args', {str(hf)!r}]):\n"
        "    assert app(words, standalone_mode=False) in (0, None), words\n"
        "heavy = {'torch', 'transformers', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_table_of_ones_own_keeps_the_rules_or_is_not_used(run: Run, tmp_path: Path) -> None:
    """A swap of enorm and hnorm survives every round trip: only the table shows it."""
    hf = make_hf(tmp_path / "hf", config())
    assert run("hf2mcore", hf, tmp_path / "mcore", "-q").code == 0
    shipped = find_table("glm_moe_dsa").path.read_text().replace('"mtp_glue"', '"own_glue"')
    own = """
[blocks.own_glue]
"enorm.weight" = "enorm.weight"
"hnorm.weight" = "hnorm.weight"
"eh_proj.weight" = "eh_proj.weight"
"final_layernorm.weight" = "shared_head.norm.weight"
"""
    table = tmp_path / "own.toml"
    table.write_text(shipped + own)
    assert run("hf2mcore", hf, tmp_path / "right", "--mapping", table, "-q").code == 0
    assert run("mcore2hf", tmp_path / "right", tmp_path / "back", "-q").code == 0
    table.write_text(
        shipped
        + re.sub('= "([eh])norm', r'= "\1\1norm', own)
        .replace('= "eenorm', '= "hnorm')
        .replace('= "hhnorm', '= "enorm')
    )
    for command in (
        ("hf2mcore", hf, tmp_path / "out"), ("mcore2hf", tmp_path / "mcore", tmp_path / "out"),
        ("audit", hf, tmp_path / "mcore"), ("audit", hf, hf), ("roundtrip", hf),
        ("plan", hf), ("args", hf), ("synth", hf / "config.json", tmp_path / "out"),
    ):  # fmt: skip
        said = run(*command, "--mapping", table)
        assert said.code == 2, command
        assert "M14 enorm.weight is paired with hnorm.weight" in one_line(said)
        assert not (tmp_path / "out").exists()


def test_a_checkpoint_far_away_is_audited_by_its_headers(run: Run, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    memory = fsspec.filesystem("memory")
    for path in hf.iterdir():
        memory.pipe(f"/hub/model/{path.name}", path.read_bytes())
    said = run("audit", "memory://hub/model")
    assert said.code == 0
    assert "memory://hub/model" in said.out
    assert "only headers are read" in one_line(said)
    assert run("audit", hf, "memory://hub/model", "-q").code == 0
    assert run("audit", hf, "memory://hub/model", "-q", "--require", "L2").code == 3
    memory.rm(f"/hub/model/{sorted(p.name for p in hf.glob('*.safetensors'))[0]}")
    said = run("audit", "memory://hub/model")
    assert said.code == 1
    assert "F02" in said.out


def test_an_attestation_names_only_the_checkpoints_own_manifest(run: Run, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    other = make_hf(tmp_path / "other", config(), seed=1)
    for folder in (hf, other):
        assert run("inventory", folder, "-o", folder.with_suffix(".json"), "-q").code == 0
    out = tmp_path / "statement.json"
    words = ("audit", hf, hf, "-q", "--attest", out, "--manifest")
    said = run(*words, other.with_suffix(".json"))
    assert said.code == 1
    assert "is not the manifest of" in one_line(said)
    assert not out.exists()
    assert run(*words, hf.with_suffix(".json")).code == 0
    assert json.loads(out.read_text())["predicate"]["result"] == "PASSED"


def test_an_attestation_holds_the_files_of_its_manifest_too(run: Run, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    (hf / "tokenizer.json").write_text("{}")
    assert run("inventory", hf, "-o", tmp_path / "m.json", "--files", "-q").code == 0
    words = ("audit", hf, hf, "-q", "--attest", tmp_path / "out.json", "--manifest")
    assert run(*words, tmp_path / "m.json").code == 0
    (tmp_path / "out.json").unlink()
    (hf / "tokenizer.json").write_text("{ }")
    said = run(*words, tmp_path / "m.json")
    assert (said.code, "tokenizer.json is not what it was" in one_line(said)) == (1, True)
    assert not (tmp_path / "out.json").exists()


def test_a_base_far_away_is_said_not_to_be_checked(run: Run, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    hf = make_hf(tmp_path / "hf", config(), shards=3)
    memory = fsspec.filesystem("memory")
    for path in hf.iterdir():
        memory.pipe(f"/hub/base/{path.name}", path.read_bytes())
    lone = {n: t for n, t in tensors_of(hf).items() if n == "lm_head.weight"}
    write_hf(tmp_path / "lone", lone, {})
    twice = (tmp_path / "lone" / "model.safetensors").read_bytes()
    memory.pipe("/hub/base/zz.safetensors", twice)
    local = json.loads(run("audit", hf, hf, "--base", "memory://hub/base", "--format=json").out)
    assert (local["verdict"], local["tier"]) == ("pass", "L2")
    afar = json.loads(run("audit", "memory://hub/base", "--base", hf, "--format", "json").out)
    for report in (local, afar):
        assert "stale_mtp" not in report["checked"]
        assert any("stale was not checked" in f["message"] for f in report["findings"])
    assert any("the bytes were not compared" in f["message"] for f in afar["findings"])
    assert not any("the same bytes" in f["message"] for f in afar["findings"])


def test_a_statement_that_cannot_be_made_is_refused_before_anything_is_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    monkeypatch.setattr("mtpconv.cli.audit.run_with_progress", lambda *_: 1 / 0)
    (tmp_path / "garbage.json").write_text("x")
    words = ("audit", hf, hf, "--attest", tmp_path / "out.json", "--manifest")
    for manifest, code in (
        (tmp_path / "nope.json", 3), (tmp_path / "garbage.json", 3), (hf, 3),
    ):  # fmt: skip
        said = run(*words, manifest)
        assert said.code == code
        assert str(manifest) in one_line(said)
    assert not (tmp_path / "out.json").exists()
    url = ("audit", "memory://hub/model", "--attest", tmp_path / "out.json", "--manifest")
    said = run(*url, tmp_path / "nope.json")
    assert said.code == 2
    assert "memory://hub/model" in one_line(said)


@pytest.mark.parametrize("where", ["a folder", "nowhere"])
def test_a_summary_that_cannot_be_written_changes_no_verdict(
    where: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    page = tmp_path if where == "a folder" else tmp_path / "no" / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    said = run("audit", hf, hf)
    assert said.code == 0
    assert "warning" in one_line(said)
    assert str(page) in one_line(said)
    (hf / "config.json").write_text("{")
    assert run("audit", hf, hf).code in (1, 3)
    assert run("audit", hf).code == 1


def test_help_lists_what_an_option_takes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = " ".join(run("audit", "--help").out.split())
    assert ", ".join(FORMATS) in said
    assert "bytes|structure" in said
    assert "[default: bytes]" in said
    assert "L0|L1|L2" in said
