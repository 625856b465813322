"""Reading tables: every rule of form is refused with code, file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.errors import UsageError
from mtpconv.mapping.table import find_table, parse_table, read_table, table_names

GOOD = """\
format = 1
model_type = "toy"
groups.decoder = ["attn", "ffn if is_dense"]
stacks = [
  { each = "once", mcore = "", hf = "", use = ["root"] },
  { each = "layer in trunk", mcore = "d.{layer}.", hf = "m.{layer}.", use = ["decoder"] },
]
[blocks.root]
"embedding.word_embeddings.weight" = { pad_rows = "model.embed_tokens.weight" }
[blocks.attn]
"self_attention.linear_qkv.weight" = { qkv = ["q.weight", "k.weight", "v.weight"] }
[blocks.ffn]
"mlp.linear_fc1.weight" = { concat = ["gate.weight", "up.weight"] }
[shapes]
"model.embed_tokens.weight" = ["vocab_size", "hidden_size"]
"q.weight" = ["hidden_size", "hidden_size"]
"k.weight" = ["hidden_size", "hidden_size"]
"v.weight" = ["hidden_size", "hidden_size"]
"gate.weight" = ["intermediate_size", "hidden_size"]
"up.weight" = ["intermediate_size", "hidden_size"]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "toy.toml"
    path.write_text(text)
    return path


def test_a_good_table_has_no_faults(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, GOOD))
    assert table.model_type == "toy"
    assert [r.hf for r in table.blocks["ffn"]] == [("gate.weight", "up.weight")]
    assert table.blocks["attn"][0].where == "toy.toml:11"


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("format = 1", "format = 2", "M01", 1),
        ('model_type = "toy"', 'model_type = "toy"\nsurprise = 1', "M01", 3),
        ("{ qkv = ", "{ qvk = ", "M02", 11),
        ("ffn if is_dense", "ffn if is_dens", "M03", None),
        (
            'model_type = "toy"',
            'model_type = "toy"\ncopies = [{ each = "once", hf = "h", of = "e", if = "is_tide" }]',
            "M03",
            None,
        ),
        ('["gate.weight", "up.weight"] }', "[] }", "M01", 13),
        ('each = "once"', 'each = "twice"', "M01", None),
        ('model_type = "toy"', 'model_type = "toy"\ndiscards = [{ hf = "x" }]', "M12", None),
        ('model_type = "toy"', 'model_type = "toy"\ninclude = ["../toy.toml"]', "M16", None),
    ],
)
def test_faults_have_code_and_line(
    tmp_path: Path, old: str, new: str, code: str, line: int | None
) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    faults = parse_table(path).faults
    assert code in {f.code for f in faults}
    if line is not None:
        assert f"toy.toml:{line}" in {f.where for f in faults}
    with pytest.raises(UsageError, match=code):
        read_table(path)


def test_a_row_written_twice_is_refused(tmp_path: Path) -> None:
    row = '"mlp.linear_fc1.weight" = { concat = ["gate.weight", "up.weight"] }\n'
    with pytest.raises(UsageError, match="not a mapping table"):
        read_table(write(tmp_path, GOOD.replace(row, row + row)))


def test_a_missing_table_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="glm_moe_dsa"):
        find_table("no_such_model")
    with pytest.raises(UsageError, match="no mapping table"):
        find_table("../glm_moe_dsa")


@pytest.mark.parametrize("name", table_names())
def test_shipped_tables_read_and_say_their_own_name(name: str) -> None:
    assert find_table(name).model_type == name
