"""Nothing that a conversion did not make is lost, whatever happens around the target."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mtpconv.convert.hf_to_mcore as to_mcore
import mtpconv.convert.output as output_module
import mtpconv.convert.target as target_module
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.convert.output import Output
from mtpconv.convert.verify import verify_digests
from mtpconv.errors import RefusedError, UnreadableError, UsageError, WriteError
from mtpconv.mapping.table_reader import find_table
from mtpconv.ranks import Ranks
from mtpconv.store.places import places_read
from mtpconv.store.torch_dist import open_torch_dist
from tests.convert.folders import file_hashes, make_hf
from tests.mapping.toy import config


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_hf(tmp_path / "hf", config())


def precious(folder: Path) -> Path:
    """A folder with a file that nobody may lose."""
    folder.mkdir(parents=True)
    (folder / "precious").write_text("keep")
    return folder


def kept(folder: Path) -> bool:
    return (folder / "precious").read_text() == "keep"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def during(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Something happens after everything is written and before it is committed."""
    real = verify_digests

    def verify(*args: Any, **options: Any) -> None:
        real(*args, **options)
        do()

    monkeypatch.setattr(to_mcore, "verify_digests", verify)


def test_a_target_that_appears_meanwhile_is_left_alone(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    during(monkeypatch, lambda: precious(target))
    with pytest.raises(UsageError, match="appeared there meanwhile"):
        hf2mcore(hf, target)
    assert kept(target)
    assert names(tmp_path) == ["hf", "target"]
    monkeypatch.undo()
    target.rename(tmp_path / "moved")
    during(monkeypatch, target.touch)
    with pytest.raises(UsageError, match="is a file"):
        hf2mcore(hf, target, overwrite=True)
    assert target.is_file()
    assert names(tmp_path) == ["hf", "moved", "target"]


def test_a_target_finished_by_another_process_is_left_alone(hf: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    second = Output(target, places_read(hf), overwrite=False, need=0)  # has checked
    hf2mcore(hf, target)  # the first process begins, finishes and gives up the lock
    before = file_hashes(target)
    with pytest.raises(UsageError, match="--overwrite"), second:
        raise AssertionError("the second process must not begin")
    assert file_hashes(target) == before
    assert names(tmp_path) == ["hf", "target"]


@pytest.mark.parametrize("swaps", [True, False])
def test_overwriting_leaves_the_new_target_alone(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(output_module, "_exchange", lambda *_: False)
    target = precious(tmp_path / "target")
    hf2mcore(hf, target, overwrite=True)
    assert names(target) == ["hf_source", "latest_checkpointed_iteration.txt", "release"]
    assert names(tmp_path) == ["hf", "target"]


def test_two_folders_are_swapped_at_once(tmp_path: Path) -> None:
    one, other = precious(tmp_path / "one"), tmp_path / "other"
    other.mkdir()
    if not output_module._exchange(one, other):
        pytest.skip("this filesystem cannot swap")
    assert kept(other)
    assert names(one) == []
    assert not output_module._exchange(one, tmp_path / "nowhere")


KILLED = """
import os, signal, sys
from pathlib import Path
import mtpconv.convert.output as module
from mtpconv.convert import hf2mcore
module._exchange = lambda *_: False
module.Output._appear = lambda self: os.kill(os.getpid(), signal.SIGKILL)
hf2mcore(Path(sys.argv[1]), Path(sys.argv[2]), overwrite=True)
"""


@pytest.fixture
def killed(hf: Path, tmp_path: Path) -> Path:
    """A target whose old folder was moved aside by a run that was killed then."""
    target = precious(tmp_path / "target")
    words = [sys.executable, "-c", KILLED, str(hf), str(target)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    return target


def test_killed_while_replacing_gives_the_old_target_back(killed: Path, hf: Path) -> None:
    with pytest.raises(UsageError, match="--overwrite"):
        hf2mcore(hf, killed)
    assert kept(killed)
    hf2mcore(hf, killed, overwrite=True)
    assert "release" in names(killed)
    assert names(killed.parent) == ["hf", "target"]


def test_killed_while_replacing_and_something_new_lies_there(killed: Path, hf: Path) -> None:
    killed.mkdir()
    (killed / "new").touch()
    aside = killed.parent / ".target.partial/replaced"
    for overwrite, why in ((False, "--overwrite"), (True, "killed run .*move one of them")):
        with pytest.raises(UsageError, match=why):
            hf2mcore(hf, killed, overwrite=overwrite)
        assert kept(aside)
        assert names(killed) == ["new"]
    shutil.rmtree(killed)
    with pytest.raises(UsageError, match="--overwrite"):
        hf2mcore(hf, killed, resume=True)
    assert kept(killed)


def test_failing_while_replacing_gives_the_old_target_back(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Output) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(output_module, "_exchange", lambda *_: False)
    monkeypatch.setattr(Output, "_appear", fail)
    target = precious(tmp_path / "target")
    with pytest.raises(WriteError, match=r"Input/output error; nothing was left behind"):
        hf2mcore(hf, target, overwrite=True)
    assert kept(target)
    assert names(tmp_path) == ["hf", "target"]


def test_an_interrupt_that_comes_after_the_commit_changes_nothing(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Output.commit

    def late(out: Output) -> None:
        real(out)
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "commit", late)
    target = precious(tmp_path / "target")
    assert hf2mcore(hf, target, overwrite=True).verified
    assert "release" in names(target)
    assert names(tmp_path) == ["hf", "target"]


def mcore_of(hf: Path) -> Path:
    hf2mcore(hf, hf.parent / "mcore")
    return hf.parent / "mcore"


@pytest.mark.parametrize("target", ["like", "like/inside", "around", "mcore/hf_source", "real"])
def test_everything_that_is_read_is_safe(hf: Path, tmp_path: Path, target: str) -> None:
    mcore = mcore_of(hf)
    like = tmp_path / "around" / "like"
    shutil.copytree(hf, like)
    (tmp_path / "like").symlink_to(like)
    (tmp_path / "real").mkdir()
    for shard in like.glob("*.safetensors"):
        shutil.move(shard, tmp_path / "real" / shard.name)
        shard.symlink_to(tmp_path / "real" / shard.name)
    before = file_hashes(tmp_path)
    source = mcore / "release" if target == "mcore/hf_source" else mcore
    options: dict[str, Any] = {"like": None if source != mcore else like, "overwrite": True}
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"lies inside|holds"):
            mcore2hf(source, tmp_path / target, **options, dry_run=dry_run)
    assert file_hashes(tmp_path) == before


def test_what_links_lead_to_is_safe(hf: Path, tmp_path: Path) -> None:
    blobs = precious(tmp_path / "hub" / "blobs")
    shutil.move(hf / "tokenizer_config.json", blobs / "1234")
    (hf / "tokenizer_config.json").symlink_to(blobs / "1234")
    (hf / "circle").symlink_to(hf)
    more = precious(tmp_path / "elsewhere")
    (hf / "more").symlink_to(more)
    for target in (blobs, tmp_path / "hub", more, more / "new"):
        with pytest.raises(UsageError, match=r"holds|lies inside"):
            hf2mcore(hf, target, overwrite=True)
    assert kept(blobs)
    table = tmp_path / "tables" / "own.toml"
    table.parent.mkdir()
    shutil.copy(Path(find_table("glm_moe_dsa").path), table)
    with pytest.raises(UsageError, match=r"holds .*own\.toml"):
        hf2mcore(hf, table.parent, mapping=table, overwrite=True)
    shutil.copytree(hf, tmp_path / ".t.partial" / "target", symlinks=True)
    with pytest.raises(UsageError, match="holds the source"):  # where it would be prepared
        hf2mcore(tmp_path / ".t.partial" / "target", tmp_path / "t")
    hf2mcore(hf, tmp_path / "fine")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_written_where_it_leads(hf: Path, tmp_path: Path, there: bool) -> None:
    link, real = tmp_path / "link", tmp_path / "disk" / "real"
    link.symlink_to(real)
    if there:
        precious(real)
        with pytest.raises(UsageError, match="--overwrite"):
            hf2mcore(hf, link)
        assert kept(real)
    hf2mcore(hf, link, overwrite=there)
    assert link.is_symlink()
    assert names(real) == ["hf_source", "latest_checkpointed_iteration.txt", "release"]
    assert names(tmp_path) == ["disk", "hf", "link"]
    assert names(real.parent) == ["real"]


def test_a_link_to_itself_is_named(hf: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(UsageError, match="leads to itself"):
        hf2mcore(hf, link)


def test_a_mount_point_is_refused_at_once(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "mounted"
    target.mkdir()
    (tmp_path / "mount info").mkdir()
    real = Path.read_bytes

    def mountinfo(path: Path) -> bytes:
        if path != Path("/proc/self/mountinfo"):
            return real(path)
        inner = str(tmp_path).replace(" ", "\\040").encode()
        return (
            b"31 23 0:27 / " + inner + b"/mounted rw shared:5 - tmpfs tmpfs rw\n"
            b"32 23 0:28 / " + inner + b"/mount\\040info/deep rw - tmpfs tmpfs rw\n"
        )

    monkeypatch.setattr(Path, "read_bytes", mountinfo)
    monkeypatch.setattr(to_mcore, "plan_hf2mcore", lambda *_, **__: pytest.fail("not at once"))
    with pytest.raises(UsageError, match=r"is a mount point.*name a folder inside it"):
        hf2mcore(hf, target)
    with pytest.raises(UsageError, match=r"holds the mount point .*mount info/deep"):
        hf2mcore(hf, tmp_path / "mount info", overwrite=True)
    monkeypatch.undo()
    monkeypatch.setattr(target_module, "_mounts", lambda: iter(()))
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    with pytest.raises(UsageError, match="is a mount point"):
        hf2mcore(hf, target)


def test_the_disk_that_is_measured_is_the_one_written_to(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    real = shutil.disk_usage

    def usage(path: Path) -> Any:
        asked.append(path)
        return real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "deep")
    (tmp_path / "disk").mkdir()
    hf2mcore(hf, tmp_path / "target", dry_run=True)
    hf2mcore(hf, tmp_path / "link")
    assert asked == [tmp_path, tmp_path / "disk"]


def test_errors_do_not_point_to_what_was_deleted(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "deep" / "target"

    def damage() -> None:
        folder = target.parent / ".target.partial" / "target" / "release"
        open_torch_dist(folder)
        raise UnreadableError(f"{folder}/__0_0.distcp: is truncated")

    during(monkeypatch, damage)
    with pytest.raises(UnreadableError) as caught:
        hf2mcore(hf, target)
    assert str(caught.value) == f"{target}/release/__0_0.distcp: is truncated"
    assert names(tmp_path) == ["hf"]  # nor is the folder left that was made for the target


@pytest.mark.parametrize("suffix", ["partial", "lock", "ranks"])
def test_folders_and_files_of_others_are_left_alone(hf: Path, tmp_path: Path, suffix: str) -> None:
    theirs = tmp_path / f".target.{suffix}"
    ranks = Ranks(0, 2, patience=0.1) if suffix == "ranks" else None
    if suffix == "lock":
        theirs.write_text("keep")
    else:
        precious(theirs)
    before = file_hashes(tmp_path)
    with pytest.raises(UsageError, match=rf"\.target\.{suffix}: is in the way.*move it elsewhere"):
        hf2mcore(hf, tmp_path / "target", ranks=ranks)
    assert file_hashes(tmp_path) == before


def test_leftovers_of_killed_runs_are_ours(hf: Path, tmp_path: Path) -> None:
    work = tmp_path / ".target.partial"
    work.mkdir()  # killed before anything was in it
    hf2mcore(hf, tmp_path / "target")
    words = KILLED.replace("_appear", "commit")
    target = tmp_path / "other"
    done = subprocess.run([sys.executable, "-c", words, str(hf), str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".other.partial").is_dir()
    hf2mcore(hf, target)
    assert names(tmp_path) == ["hf", "other", "target"]


def test_what_cannot_be_removed_is_said(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    target = precious(tmp_path / "target")
    with pytest.raises(WriteError, match=r"is written and whole, but .*delete .*\.target\.partial"):
        hf2mcore(hf, target, overwrite=True)
    assert "release" in names(target)
    monkeypatch.undo()
    hf2mcore(hf, target, overwrite=True)  # it is still known to be ours
    assert names(tmp_path) == ["hf", "target"]


def test_file_names_that_are_not_utf8_travel(hf: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (hf / name).write_text("a note")
    before = file_hashes(hf)
    target = tmp_path / os.fsdecode(b"t\xff")
    hf2mcore(hf, target)
    mcore2hf(target, tmp_path / "back")
    assert file_hashes(tmp_path / "back") == before


def test_refusals_come_before_the_target_is_touched(hf: Path, tmp_path: Path) -> None:
    raw = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 0}))
    target = precious(tmp_path / "target")
    with pytest.raises(RefusedError):
        hf2mcore(hf, target, overwrite=True)
    assert kept(target)
    assert names(tmp_path) == ["hf", "target"]


@pytest.mark.parametrize("below", [".", "sub"])
def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """After that no relative path leads anywhere, the source's among them."""
    hf = make_hf(tmp_path / "hf", config())
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "mine").write_text("kept")
    monkeypatch.chdir(out / below)
    with pytest.raises(UsageError, match="is or holds the current folder"):
        hf2mcore(Path(os.path.relpath(hf)), out, overwrite=True)
    assert (out / "mine").read_text() == "kept"
    monkeypatch.chdir(tmp_path)
    assert hf2mcore(Path("hf"), Path("out"), overwrite=True).verified


@pytest.mark.parametrize("trained", ["iter_0000100", "release"])
def test_iterations_that_were_trained_into_the_target_are_not_replaced(
    hf: Path, tmp_path: Path, trained: str
) -> None:
    """Training loads what hf2mcore wrote and saves beside it: `--load mcore --save mcore`."""
    target = tmp_path / "mcore"
    hf2mcore(hf, target, iteration=7)
    hf2mcore(hf, target, iteration=8, overwrite=True)  # its own may go
    precious(target / trained)
    with pytest.raises(UsageError, match=r"holds what was trained there .*name another folder"):
        hf2mcore(hf, target, overwrite=True)
    shutil.rmtree(target / "iter_0000008")
    shutil.rmtree(target / "hf_source")  # nothing says that hf2mcore wrote what is left
    with pytest.raises(UsageError, match="holds what was trained there"):
        hf2mcore(hf, target, overwrite=True)
    assert kept(target / trained)
