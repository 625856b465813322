"""The saved `hf_source`: found wherever it is meant, read without trust, told when stale."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.convert.shards import write_shards
from mtpconv.errors import UnreadableError, UsageError
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.dist_metadata_writer import write_common
from mtpconv.store.hf import open_hf
from mtpconv.store.legacy import MegatronCheckpoint, open_megatron
from mtpconv.store.objects import read_common
from mtpconv.store.source import find_source, read_source
from mtpconv.tensors import TensorSpec
from tests.convert.folders import exchanged_table, file_hashes, make_hf, tensors_of, write_hf
from tests.mapping.toy import config

Tensors = dict[str, tuple[TensorSpec, bytes]]
COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")


def other(tensors: Tensors, *names: str) -> Tensors:
    """The same tensors, some of them with other bytes."""
    changed = {n: (tensors[n][0], bytes(b ^ 1 for b in tensors[n][1])) for n in names}
    return {**tensors, **changed}


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    """Of a DeepSeek-V3 whose MTP has an embedding and a head of its own."""
    return other(tensors_of(make_hf(tmp_path / "plain", config("deepseek_v3"))), *COPIES)


def trained(tmp_path: Path, tensors: Tensors, *names: str) -> Path:
    """A checkpoint whose `names` went on, with the source of the one that it began as."""
    raw = config("deepseek_v3")
    hf2mcore(write_hf(tmp_path / "hf", tensors, raw), tmp_path / "before")
    after = write_hf(tmp_path / "after", other(tensors, *names), raw)
    hf2mcore(after, tmp_path / "mcore")
    shutil.rmtree(tmp_path / "mcore/hf_source")
    shutil.copytree(tmp_path / "before/hf_source", tmp_path / "mcore/hf_source")
    return tmp_path / "mcore"


def test_a_trunk_that_went_on_without_mtp_is_said_to(tmp_path: Path, tensors: Tensors) -> None:
    names = [f"model.layers.{i}.input_layernorm.weight" for i in range(3)]
    done = mcore2hf(trained(tmp_path, tensors, *names), tmp_path / "back")
    assert done.unchanged == done.tensors - 3
    assert done.unchanged_mtp == done.mtp_tensors
    assert done.changed == ("model.layers.{0..2}.input_layernorm.weight",)
    (stale,) = [n for n in done.notes if "drafts are those of before training" in n]
    assert "3 tensors of the trunk changed" in stale
    (carried,) = [n for n in done.notes if "come from before training" in n]
    assert all(name in carried for name in COPIES)


def test_mtp_that_was_trained_too_is_not_stale(tmp_path: Path, tensors: Tensors) -> None:
    names = ("model.norm.weight", "model.layers.3.enorm.weight")
    done = mcore2hf(trained(tmp_path, tensors, *names), tmp_path / "back")
    assert (done.unchanged, done.unchanged_mtp) == (done.tensors - 2, done.mtp_tensors - 1)
    assert sorted(done.changed) == sorted(names)
    assert not [n for n in done.notes if "drafts" in n]
    assert [n for n in done.notes if "come from before training" in n]


def test_copies_that_follow_the_trunk_do_not_make_mtp_trained(tmp_path: Path) -> None:
    tensors = tensors_of(make_hf(tmp_path / "plain", config("deepseek_v3")))
    names = ("model.embed_tokens.weight", COPIES[0])
    done = mcore2hf(trained(tmp_path, tensors, *names), tmp_path / "back")
    assert done.changed == names
    assert [n for n in done.notes if "drafts are those of before training" in n]
    assert not [n for n in done.notes if "carried" in n]


def test_a_config_that_contradicts_the_args_is_said_to(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    assert not [n for n in mcore2hf(tmp_path / "mcore", tmp_path / "a").notes if "args" in n]
    raw = config(num_experts_per_tok=3, rms_norm_eps=1e-3, max_position_embeddings=8192)
    like = make_hf(tmp_path / "like", raw)
    for dry in (True, False):
        done = mcore2hf(tmp_path / "mcore", tmp_path / "b", like=like, dry_run=dry)
        said = [n for n in done.notes if "Megatron's args" in n]
        assert [n.split(";")[0] for n in said] == [
            f"warning: {field} is {there} in Megatron's args and {here} by the config.json that is"
            " written"
            for field, there, here in (("norm_epsilon", 1e-05, 0.001), ("moe_router_topk", 1, 3))
        ]
        assert all("--like" in n for n in said)
    assert json.loads((tmp_path / "b/config.json").read_text())["num_experts_per_tok"] == 3
    common = read_common(tmp_path / "mcore/release")
    del common["args"]
    write_common(tmp_path / "mcore/release", common)
    done = mcore2hf(tmp_path / "mcore", tmp_path / "c", like=like)
    assert not [n for n in done.notes if "args" in n], "there are none"


def test_nothing_is_said_of_weights_that_did_not_change(tmp_path: Path, tensors: Tensors) -> None:
    done = mcore2hf(trained(tmp_path, tensors), tmp_path / "back")
    assert (done.unchanged, done.changed, done.notes) == (done.tensors, (), ())
    unseen = mcore2hf(tmp_path / "mcore", tmp_path / "unseen", verify=False)
    (note,) = unseen.notes
    assert "2 carried tensors are as hf2mcore saved them" in note


@pytest.mark.parametrize("place", ["mcore", "mcore/release"])
def test_the_source_is_found_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    monkeypatch.chdir(tmp_path / place)
    mcore2hf(Path(), tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


@pytest.mark.parametrize("named", ["", "iter_0000005"])
def test_the_source_is_found_through_a_link(tmp_path: Path, named: str) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/iter_0000005").symlink_to("../mcore/release")
    mcore2hf(tmp_path / "runs" / named, tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_a_folder_given_with_like_is_what_it_is(tmp_path: Path) -> None:
    """Not the `hf_source` that happens to lie beside it."""
    hf = make_hf(tmp_path / "mcore/../hf", config())
    hf2mcore(make_hf(tmp_path / "older", config(), seed=1), tmp_path / "mcore")
    shutil.move(tmp_path / "mcore/hf_source", tmp_path / "hf_source")
    assert read_source(hf).path == hf


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _text(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(len(text).to_bytes(8, "little") + text)


def _strings(path: Path) -> None:
    entry = {"dtype": "BF16", "shape": [1], "data_offsets": ["a", "b"]}
    _text(json.dumps({"x": entry}).encode())(path)


HEADER = "headers/model.safetensors.header"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (HEADER, _fifo),
        (HEADER, _folder),
        (HEADER, _strings),
        (HEADER, _text(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")),
        (HEADER, _text(b'{"a":' + b" " * 3_000_000 + b"[" * 200_000 + b"]" * 200_000 + b"}")),
        (HEADER, lambda p: p.write_bytes(b"")),
        (HEADER, lambda p: p.write_bytes(p.read_bytes()[:-1])),
        (HEADER, lambda p: p.write_bytes(p.read_bytes() + b" ")),
        (HEADER, lambda p: p.rename(p.with_suffix(".old"))),
        ("headers", shutil.rmtree),
        ("files/config.json", _fifo),
        ("files/config.json", _folder),
        ("files/config.json", lambda p: p.unlink()),
        ("files", shutil.rmtree),
        ("manifest.json", _folder),
        ("manifest.json", lambda p: p.unlink()),
        ("manifest.json", _fifo),
        ("carried/model.safetensors", _fifo),
        ("carried/model.safetensors", lambda p: os.truncate(p, 40)),
        ("carried", lambda p: p.rename(p.with_name("old")) and p.write_text("x")),
        ("left_behind.json", _fifo),
        ("left_behind.json", lambda p: p.write_text('{"left_behind": ["x"]}')),
        ("left_behind.json", lambda p: p.write_text("[" * 100_000)),
        # What can be read, and is not what was saved.
        ("files/generation_config.json", lambda p: p.unlink()),
        ("files/generation_config.json", _fifo),
        ("files/generation_config.json", lambda p: p.write_bytes(p.read_bytes() + b" ")),
        ("files/config.json", lambda p: p.write_bytes(p.read_bytes() + b" ")),
        ("carried", shutil.rmtree),
        ("carried/model.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1] + b"?")),
        ("left_behind.json", lambda p: p.unlink()),
    ],
)
def test_a_source_that_was_tampered_with_is_one_clear_line(
    tmp_path: Path, tensors: Tensors, file: str, damage: Callable[[Path], object]
) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config("deepseek_v3"))
    (hf / "old.bin").write_bytes(b"x")
    (hf / "generation_config.json").write_text("{}")
    hf2mcore(hf, tmp_path / "mcore")
    mcore = tmp_path / "mcore"
    assert all(said == [] for said in _audited(hf, mcore))
    damage(mcore / "hf_source" / file)
    with pytest.raises(UnreadableError) as caught:
        mcore2hf(mcore, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    for said in ([str(caught.value)], *_audited(hf, mcore)):
        assert any(Path(file).parts[0] in line and "hf_source" in line for line in said)
        assert not any("\n" in line for line in said)


def _audited(hf: Path, mcore: Path) -> Iterator[list[str]]:
    """What audits say that have a Megatron checkpoint on the right, one list for each."""
    for before in (None, hf, mcore):
        sides = open_sides(before, mcore)
        errors = [f for f in audit(sides.before, sides.after).findings if f.severity == "error"]
        assert not errors or "source_damaged" in {f.kind for f in errors}
        yield [f.message for f in errors]


def test_only_what_is_verified_needs_the_digests_of_the_source(
    tmp_path: Path, tensors: Tensors
) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config("deepseek_v3"))
    hf2mcore(hf, tmp_path / "mcore")
    manifest = tmp_path / "mcore/hf_source/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"blake3":"', b'"blake3":"0', 1))
    for dry_run in (True, False):
        with pytest.raises(UnreadableError, match=r"manifest\.json: .*no valid"):
            mcore2hf(tmp_path / "mcore", tmp_path / "back", dry_run=dry_run)
    done = mcore2hf(tmp_path / "mcore", tmp_path / "back", verify=False)
    assert done.unchanged is None
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "files/../../outside"])
def test_digests_of_files_elsewhere_are_refused_unread(
    tmp_path: Path, tensors: Tensors, name: str
) -> None:
    hf2mcore(write_hf(tmp_path / "hf", tensors, config("deepseek_v3")), tmp_path / "mcore")
    (tmp_path / "mcore/outside").write_bytes(b"")
    manifest = tmp_path / "mcore/hf_source/manifest.json"
    entry = f'"files":{{"{name}":"{"0" * 64}",'
    manifest.write_text(manifest.read_text().replace('"files":{', entry, 1))
    with pytest.raises(UnreadableError, match=rf"manifest\.json: names {name}; copy"):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")


def test_only_headers_that_are_equal_to_known_ones_are_not_parsed(
    tmp_path: Path, tensors: Tensors
) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config("deepseek_v3"))
    hf2mcore(hf, tmp_path / "mcore")
    known = open_hf(hf).shards
    found = find_source(tmp_path / "mcore", known)
    assert found is not None
    (name,) = known
    assert found.headers[name].tensors is known[name].tensors
    header = next((tmp_path / "mcore/hf_source/headers").iterdir())
    header.write_bytes(header.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    found = find_source(tmp_path / "mcore", known)
    assert found is not None
    assert {s.dtype for s in found.headers[name].tensors.values()} >= {"F16", "BF16"}


def test_weights_that_were_put_beside_are_not_exported(tmp_path: Path, tensors: Tensors) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config("deepseek_v3"))
    (hf / "adapter").mkdir()
    shutil.copy(hf / "model.safetensors", hf / "adapter")  # travels: no index names it
    hf2mcore(hf, tmp_path / "mcore")
    assert mcore2hf(tmp_path / "mcore", tmp_path / "back", verify=False).tensors
    stray = tmp_path / "mcore/hf_source/files/stray.safetensors"
    shutil.copy(hf / "model.safetensors", stray)
    for verify in (True, False):
        with pytest.raises(UnreadableError, match=r"stray\.safetensors: would become a shard"):
            mcore2hf(tmp_path / "mcore", tmp_path / "again", verify=verify)
        assert not (tmp_path / "again").exists()


def test_an_iteration_that_appears_while_another_one_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "run", iteration=10)
    shutil.copytree(tmp_path / "run/iter_0000010", tmp_path / "run/iter_0000020")

    def opened(path: Path) -> MegatronCheckpoint:
        (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("20")
        return open_megatron(path)

    monkeypatch.setattr("mtpconv.convert.export.open_megatron", opened)
    with pytest.raises(UnreadableError, match="iter_0000020: became the latest iteration while"):
        mcore2hf(tmp_path / "run", tmp_path / "back")
    assert mcore2hf(tmp_path / "run", tmp_path / "back").verified


def test_the_wrong_direction_names_the_other_command(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    for folder in (tmp_path / "mcore", tmp_path / "mcore/release"):
        with pytest.raises(UsageError, match="is a Megatron checkpoint; mcore2hf"):
            hf2mcore(folder, tmp_path / "target")
    with pytest.raises(UsageError, match="is a HuggingFace folder; hf2mcore"):
        mcore2hf(hf, tmp_path / "target")
    for file in hf.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UsageError, match="is a HuggingFace folder; hf2mcore"):
        mcore2hf(hf, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "file", ["release/__0_0.distcp", "release/.metadata", "hf_source/carried/model.safetensors",
             "hf_source/files/generation_config.json"],
)  # fmt: skip
def test_a_checkpoint_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config("deepseek_v3"))
    (hf / "generation_config.json").write_text("{}")
    hf2mcore(hf, tmp_path / "mcore")
    path = tmp_path / "mcore" / file

    def write(*words: object, **options: object) -> object:
        done = write_shards(*words, **options)  # type: ignore[arg-type,func-returns-value]
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
        return done

    monkeypatch.setattr("mtpconv.convert.mcore_to_hf.write_shards", write)
    with pytest.raises(UnreadableError, match=rf"{path.name}: was written to while it was read"):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_shard_in_a_subfolder_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    shard = sorted(hf.glob("*.safetensors"))[0]
    (hf / "sub").mkdir()
    index = hf / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{shard.name}"', f'"sub/{shard.name}"'))
    shard = shard.rename(hf / "sub" / shard.name)

    def write(folder: Path) -> None:
        os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 1))
        write_config(folder)

    from mtpconv.store.dist_metadata_writer import write_config

    monkeypatch.setattr("mtpconv.convert.hf_to_mcore.write_config", write)
    with pytest.raises(UnreadableError, match="was written to while it was read"):
        hf2mcore(hf, tmp_path / "mcore")


def test_a_checkpoint_of_another_table_goes_back_through_that_one_only(tmp_path: Path) -> None:
    """Rows of another table would give tensors of equal shapes each other's names."""
    hf = make_hf(tmp_path / "hf", config())
    table = tmp_path / "own.toml"
    text = find_table("glm_moe_dsa").path.read_text()
    text += '\n[blocks.glue]\n"enorm.weight" = "enorm.weight"\n"hnorm.weight" = "hnorm.weight"\n'
    text += '"eh_proj.weight" = "eh_proj.weight"\n"other.weight" = "shared_head.norm.weight"\n'
    table.write_text(text.replace('"mtp_glue"', '"glue"'))
    hf2mcore(hf, tmp_path / "mcore", mapping=table)
    with pytest.raises(UsageError, match=r"table of your own, own\.toml; name it with --mapping"):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert mcore2hf(tmp_path / "mcore", tmp_path / "back", mapping=table).verified
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    table.write_text("# spelled otherwise\n\n" + table.read_text())
    assert mcore2hf(tmp_path / "mcore", tmp_path / "again", mapping=table).verified
    table.write_text(table.read_text().replace('"other.weight"', '"another.weight"'))
    with pytest.raises(UsageError, match=r"own\.toml says something else"):
        mcore2hf(tmp_path / "mcore", tmp_path / "third", mapping=table)


def test_another_table_is_refused_whatever_the_like(tmp_path: Path) -> None:
    """What lies beside the checkpoint says which table it was made with, not what `like` names."""
    hf = make_hf(tmp_path / "hf", config())
    table = exchanged_table(tmp_path / "tables")
    hf2mcore(hf, tmp_path / "own", mapping=table)
    hf2mcore(hf, tmp_path / "shipped")
    for like in (hf, tmp_path / "shipped/hf_source"):
        with pytest.raises(UsageError, match=r"own/hf_source: hf2mcore used a mapping table of"):
            mcore2hf(tmp_path / "own", tmp_path / "back", like=like)
    for named in (None, hf):
        with pytest.raises(
            UsageError, match=r"the table that mtpconv ships, .*leave --mapping out"
        ):
            mcore2hf(tmp_path / "shipped", tmp_path / "back", like=named, mapping=table)
    assert mcore2hf(tmp_path / "own", tmp_path / "back", like=hf, mapping=table).verified
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    for mapping in (None, table):
        found = open_sides(hf, tmp_path / "own", mapping=mapping)
        report = audit(found.before, found.after)
        assert (report.verdict == "pass") is (mapping is not None)
        said = " ".join(report.compared.notes)
        assert ("with a mapping table of your own, glm_moe_dsa.toml" in said) is (mapping is None)
    shipped = find_table("glm_moe_dsa").path
    assert mcore2hf(tmp_path / "shipped", tmp_path / "again", mapping=shipped).verified
