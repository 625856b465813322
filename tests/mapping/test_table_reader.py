"""Reading tables: every rule of form is refused with code, file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.errors import UsageError
from mtpconv.mapping.table_form import TABLE
from mtpconv.mapping.table_reader import find_table, parse_table, read_table, table_names

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
        ("ffn if is_dense", "ffn if is_dens", "M03", 3),
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
        ('model_type = "toy"', 'model_type = "toy"\ninclude = ["a\\u0000/b.toml"]', "M16", None),
        ('"d.{layer}."', '"d.{depth}."', "M04", None),
        ('"d.{layer}."', '"d.{layer:999999999}."', "M04", None),
        ('"d.{layer}."', '"d.{layer.__class__}."', "M04", None),
        ('"m.{layer}."', '"m.{layer}.{"', "M04", None),
        ('["hidden_size", "hidden_size"]', '["hidden_size", "hidden_size // 2"]', "M01", 16),
        ('["hidden_size", "hidden_size"]', '["hidden_size", "²"]', "M01", 16),
        ('["hidden_size", "hidden_size"]', f'["{"*".join(["2"] * 9)}"]', "M01", 16),
        ('["hidden_size", "hidden_size"]', f'["{"9" * 19}"]', "M01", 16),
        ('["hidden_size", "hidden_size"]', "[1, 1, 1, 1, 1, 1, 1, 1, 1]", "M01", 16),
        ('model_type = "toy"', 'model_type = "toy"\nmtp_default = 1_000_000_000', "M01", 3),
        ("[shapes]", '[dtypes]\n"q.weight" = "F32"\n"up.weight" = "FLOAT32"\n[shapes]', "M01", 16),
        ("[shapes]", '[dtypes]\n"up.weight" = ""\n[shapes]', "M01", 15),
        ('"mlp.linear_fc1.weight"', '"mlp.\\nlinear_fc1.weight"', "M01", 13),
        ('"mlp.linear_fc1.weight"', '"mlp.\\u0000linear_fc1.weight"', "M01", 13),
        ('"mlp.linear_fc1.weight"', f'"{"x" * 401}"', "M01", 13),
        ('"gate.weight", ', '"gate\\u001b.weight", ', "M01", 13),
        ('"d.{layer}."', '"d\\u007f.{layer}."', "M01", None),
        ('"m.{layer}."', '"m\\u200e.{layer}."', "M01", None),
        (
            'model_type = "toy"',
            'model_type = "toy"\ncopies = [{ each = "once", hf = "h\\r", of = "e" }]',
            "M01",
            None,
        ),
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


FORMS = {
    "3": {"mtp_default"}, "true": {"converts"}, '["x"]': {"carried", "unverified"},
    '"x"': {"model_type", "local_spec", "needs", "untried"},
    "[]": {"stacks", "copies", "discards", "include", "carried", "unverified"},
    "{}": {"groups", "blocks", "shapes", "dtypes", "parts", "releases"},
    "[{ x = 1 }]": set(), "{ x = [[]] }": set(), "1979-05-27": set(), "[1]": set(), "[[]]": set(),
    '["blocks/mla.toml"]': {"include", "carried", "unverified"},
    '{ x = ["y"] }': {"groups", "shapes"}, "{ x = [2] }": {"shapes"}, '{ x = "F32" }': {"dtypes"},
    "{ x = {} }": {"blocks", "releases"}, "{ x = { y = 1 } }": {"releases"},
    '{ x = { rows = { q = "a*b" } } }': {"parts", "releases"},
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(TABLE))
@pytest.mark.parametrize("value", FORMS)
def test_a_key_takes_its_own_form_only(tmp_path: Path, key: str, value: str) -> None:
    lines = {"format": "1", "model_type": '"toy"'} | {key: value}
    path = write(tmp_path, "".join(f"{k} = {v}\n" for k, v in lines.items()))
    faults = parse_table(path).faults
    if key in FORMS[value]:
        assert faults == ()
    else:
        line = list(lines).index(key) + 1
        assert f"toy.toml:{line}" in {f.where for f in faults}
        assert {"M01", "M02", "M12", "M16"} & {f.code for f in faults}


def test_an_unknown_dtype_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + '[dtypes]\n"up.weight" = "F4_E2M1"\n')
    (fault,) = parse_table(path).faults
    assert fault.message.startswith("up.weight: unknown dtype 'F4_E2M1'; known: BOOL, ")
    assert parse_table(path).dtypes == {}


def test_a_fault_is_one_line_whatever_it_names(tmp_path: Path) -> None:
    text = GOOD.replace('"mlp.linear_fc1.weight" = { concat', '"a\\nb\\u001b[1m" = { concta')
    faults = parse_table(write(tmp_path, text)).faults
    assert {f.code for f in faults} == {"M01", "M02"}
    assert all(str(f).isprintable() for f in faults)


def test_a_table_is_refused_in_one_line_whatever_it_holds(tmp_path: Path) -> None:
    hexadecimal, deep = "0x" + "f" * 4500, "x" + ".x" * 4000
    for text in (
        *("x = " + "[" * 5000, "x = " + "9" * 5000, "x = 1\nx = 2", "\x00"),
        *(f"model_type = {hexadecimal}", f"shapes.x = [{hexadecimal}]", f"model_type.{deep} = 1"),
    ):
        with pytest.raises(UsageError, match=r"toy\.toml: not a mapping table"):
            read_table(write(tmp_path, text))


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
