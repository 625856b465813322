"""The CI templates, run as far as a machine without network can: their scripts, with the real
command where they call mtpconv, and only the installation left out."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.options import SWITCHES
from tests.conftest import ROOT

yaml = pytest.importorskip("yaml")

COMMAND = "import sys; from mtpconv.cli import main; sys.exit(main())"


def _program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with `bin/mtpconv` that is the checkout's command."""
    python = f"{shlex.quote(sys.executable)} -c {shlex.quote(COMMAND)}"
    _program(tmp_path / "bin/mtpconv", f'exec {python} "$@"')
    return tmp_path


@pytest.fixture
def recorder(work: Path) -> Path:
    """`bin/mtpconv` only writes down its arguments, one a line, and exits as STATUS says."""
    _program(work / "bin/mtpconv", f'printf "%s\\n" "$@" > {work}/arguments; exit "${{STATUS:-0}}"')
    return work


def _environment(work: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    kept["PATH"] = f"{work / 'bin'}{os.pathsep}{kept['PATH']}"
    return {**kept, "PYTHONPATH": str(ROOT), **more}


# --- GitHub ------------------------------------------------------------------------------


def _action() -> dict[str, Any]:
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    return action


def _run_action(work: Path, inputs: Mapping[str, str], **more: str) -> tuple[int, str]:
    """Run the audit step as the runner does: inputs filled in, `bash -e`, a fresh output file."""
    action = _action()
    given = {name: str(entry.get("default", "")) for name, entry in action["inputs"].items()}
    assert inputs.keys() <= given.keys()
    given.update(inputs)
    step = next(s for s in action["runs"]["steps"] if s.get("id") == "audit")
    assert step["shell"] == "bash"
    environment = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: given[m[1]], value)
        for name, value in step["env"].items()
    }
    (work / "mtpconv").mkdir(exist_ok=True)
    link = work / "mtpconv/bin"
    if not link.exists():
        link.symlink_to(work / "bin")
    runner = {
        "RUNNER_TEMP": str(work),
        "GITHUB_OUTPUT": str(work / "output"),
        "GITHUB_STEP_SUMMARY": str(work / "summary.md"),
        "GITHUB_ACTIONS": "true",
    }
    script = work / "step.sh"
    script.write_text(step["run"], "utf-8")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
        cwd=work,
        env=_environment(work, **runner, **environment, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_action_has_what_github_asks_for() -> None:
    action = _action()
    assert action["runs"]["using"] == "composite"
    assert action["name"]
    assert action["description"]
    for entry in action["inputs"].values():
        assert entry["description"]
        assert entry.get("required") or "default" in entry
    for entry in action["outputs"].values():
        assert re.fullmatch(r"\$\{\{ steps\.audit\.outputs\.\w+ \}\}", entry["value"])
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "uses" not in step  # nothing of others is pulled in
        # Text from a user never becomes part of a script.
        assert "${{" not in step["run"]
    for name in re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text("utf-8")):
        assert name in action["inputs"]


def test_the_action_installs_the_checkout_it_came_with() -> None:
    install = _action()["runs"]["steps"][0]["run"]
    assert "-m venv" in install
    assert '"$GITHUB_ACTION_PATH"' in install


@pytest.mark.parametrize(
    ("case", "status"), [("same_identical_dir_ok", 0), ("mtp_layer_dropped", 1)]
)
def test_the_action_audits_and_reports(shared: Path, work: Path, case: str, status: int) -> None:
    folder = shared / "cases" / case
    got, log = _run_action(
        work, {"before": str(folder / "before"), "after": str(folder / "after"), "require": "L2"}
    )
    assert got == status, log
    outputs = dict(line.split("=", 1) for line in (work / "output").read_text().splitlines())
    verdict = "fail" if status else "pass"
    assert outputs == {
        "verdict": verdict, "reports": "mtpconv-reports", "sarif": "mtpconv-reports/mtpconv.sarif",
    }  # fmt: skip
    reports = work / "mtpconv-reports"
    assert json.loads((reports / "mtpconv.json").read_text())["verdict"] == verdict
    assert json.loads((reports / "mtpconv.sarif").read_text())["version"] == "2.1.0"
    assert ET.parse(reports / "mtpconv.xml").getroot().tag == "testsuites"
    assert (reports / "mtpconv.html").read_text().startswith("<!DOCTYPE html>")
    assert (work / "summary.md").read_text().startswith("## mtpconv audit:")
    annotations = [line for line in log.splitlines() if line.startswith("::")]
    assert 1 <= len(annotations) <= 10
    assert any(line.startswith("::error") for line in annotations) == bool(status)


def test_the_action_says_error_when_nothing_could_be_checked(work: Path) -> None:
    got, _ = _run_action(work, {"after": str(work / "absent")})
    assert got == 3
    assert "verdict=error\n" in (work / "output").read_text()


HOSTILE = "a b;$(touch owned)`touch owned`'\"*\n--help"


def test_the_action_passes_paths_as_data(recorder: Path) -> None:
    got, log = _run_action(
        recorder,
        {
            "after": HOSTILE,
            "before": "--version",
            "allow": "copies\n  upcast\n",
            "profile": "vllm",
            "waivers": "my waivers.toml",
            "headers-only": "true",
            "reports": "out dir",
        },
    )
    assert got == 0, log
    assert not (recorder / "owned").exists()
    assert (recorder / "arguments").read_text() == "\n".join(
        [
            "audit",
            "--headers-only",
            "--profile=vllm",
            "--waivers=my waivers.toml",
            "--allow=copies",
            "--allow=upcast",
            "--report=json=out dir/mtpconv.json",
            "--report=junit=out dir/mtpconv.xml",
            "--report=sarif=out dir/mtpconv.sarif",
            "--report=markdown=out dir/mtpconv.md",
            "--report=html=out dir/mtpconv.html",
            "--",
            "--version",
            HOSTILE,
            "",
        ]
    )


@pytest.mark.parametrize(("status", "verdict"), [("1", "fail"), ("3", "error"), ("70", "error")])
def test_the_action_exits_as_the_audit_did(recorder: Path, status: str, verdict: str) -> None:
    got, _ = _run_action(recorder, {"after": "x"}, STATUS=status)
    assert got == int(status)
    assert f"verdict={verdict}\n" in (recorder / "output").read_text()


def test_the_action_refuses_an_empty_checkpoint(recorder: Path) -> None:
    got, log = _run_action(recorder, {"after": ""})
    assert got == 2
    assert "::error" in log
    assert not (recorder / "arguments").exists()


# --- GitLab ------------------------------------------------------------------------------


def _gitlab(inputs: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The component's inputs, and its job with the inputs filled in as GitLab does."""
    text = (ROOT / "templates/mtpconv-audit.yml").read_text("utf-8")
    header, body = text.split("\n---\n")
    spec: dict[str, Any] = yaml.safe_load(header)["spec"]["inputs"]
    given = {name: str(entry["default"]) for name, entry in spec.items() if "default" in entry}
    assert inputs.keys() <= spec.keys()
    given.update(inputs)

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {fill(key): fill(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [fill(inner) for inner in value]
        if isinstance(value, str):
            return re.sub(r"\$\[\[ inputs\.(\w+) \]\]", lambda m: given[m[1]], value)
        return value

    job: dict[str, Any] = fill(yaml.safe_load(body))[given["job_name"]]
    return spec, job


def _run_gitlab(work: Path, inputs: Mapping[str, str], **more: str) -> tuple[int, str]:
    _, job = _gitlab(inputs)
    variables = {name: entry["value"] for name, entry in job["variables"].items()}
    script = work / "job.sh"
    script.write_text("\n".join(job["script"]), "utf-8")
    done = subprocess.run(
        ["sh", "-e", str(script)],
        cwd=work,
        env=_environment(work, CI="true", GITLAB_CI="true", **variables, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_component_has_what_gitlab_asks_for() -> None:
    spec, job = _gitlab({"after": "x"})
    for entry in spec.values():
        assert entry["description"]
    assert [name for name, entry in spec.items() if "default" not in entry] == ["after"]
    assert job["artifacts"]["when"] == "always"
    assert job["artifacts"]["reports"]["junit"] == "mtpconv-reports/mtpconv.xml"
    assert job["artifacts"]["paths"] == ["mtpconv-reports/"]
    for entry in job["variables"].values():
        assert entry["expand"] is False
    assert not any("$[[" in line for line in job["script"] + job["before_script"])


@pytest.mark.parametrize(
    ("case", "status"), [("same_identical_dir_ok", 0), ("mtp_layer_dropped", 1)]
)
def test_the_component_audits_and_reports(shared: Path, work: Path, case: str, status: int) -> None:
    folder = shared / "cases" / case
    got, log = _run_gitlab(
        work, {"before": str(folder / "before"), "after": str(folder / "after"), "require": "L2"}
    )
    assert got == status, log
    _, job = _gitlab({"after": "x"})
    junit = ET.parse(work / job["artifacts"]["reports"]["junit"]).getroot()
    assert (int(junit.get("failures") or 0) > 0) == bool(status)
    assert {p.name for p in (work / "mtpconv-reports").iterdir()} == {
        "mtpconv.json", "mtpconv.xml", "mtpconv.md", "mtpconv.html",
    }  # fmt: skip


def test_the_component_passes_paths_as_data(recorder: Path) -> None:
    got, log = _run_gitlab(
        recorder,
        {"after": HOSTILE, "before": "--version", "allow": "copies upcast", "reports": "out dir"},
    )
    assert got == 0, log
    assert not (recorder / "owned").exists()
    assert (recorder / "arguments").read_text() == "\n".join(
        [
            "audit",
            "--allow=copies",
            "--allow=upcast",
            "--report=json=out dir/mtpconv.json",
            "--report=junit=out dir/mtpconv.xml",
            "--report=markdown=out dir/mtpconv.md",
            "--report=html=out dir/mtpconv.html",
            "--",
            "--version",
            HOSTILE,
            "",
        ]
    )


@pytest.mark.parametrize("status", ["1", "3", "70"])
def test_the_component_exits_as_the_audit_did(recorder: Path, status: str) -> None:
    assert _run_gitlab(recorder, {"after": "x"}, STATUS=status)[0] == int(status)


# --- pre-commit --------------------------------------------------------------------------


def _hook() -> dict[str, Any]:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert [hook["id"] for hook in hooks] == ["mtpconv-audit"]
    hook: dict[str, Any] = hooks[0]
    return hook


def test_the_hook_has_what_pre_commit_asks_for() -> None:
    hook = _hook()
    assert {"id", "name", "entry", "language"} <= hook.keys()
    assert hook["language"] == "python"
    assert hook["pass_filenames"] is False
    assert (ROOT / "pyproject.toml").is_file()  # what `language: python` installs


def test_the_hook_runs_when_a_checkpoint_changes() -> None:
    pattern = _hook()["files"]
    for name in (
        "config.json", "models/glm/config.json", "model.safetensors",
        "a/model-00001-of-00002.safetensors", "a/model.safetensors.index.json",
    ):  # fmt: skip
        assert re.search(pattern, name), name
    for name in ("my_config.json.bak", "notconfig.json", "README.md", "tokenizer.json"):
        assert not re.search(pattern, name), name


@pytest.mark.parametrize(
    ("case", "status"), [("mtp_none_declared_none_present_ok", 0), ("cfg_mtp_orphan_single", 1)]
)
def test_the_hook_gates_a_commit_without_reading_bytes(
    shared: Path, work: Path, case: str, status: int
) -> None:
    folder = shared / "cases" / case
    checkpoint = next(p for p in (folder / "ckpt", folder / "after") if p.is_dir())
    done = subprocess.run(
        [*shlex.split(_hook()["entry"]), str(checkpoint)],
        cwd=work,
        env=_environment(work),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "tier L0" in done.stdout


def test_switches_that_a_template_can_name_exist() -> None:
    assert {"copies", "upcast"} <= SWITCHES.keys()
