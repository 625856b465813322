from __future__ import annotations

from pathlib import Path

from mtpconv.mapping.families import Family, Release, families, page
from mtpconv.mapping.table_reader import table_names
from mtpconv.parity.families import FAMILIES, NOT_RUN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"


def test_every_table_is_a_row() -> None:
    rows = {row.model_type: row for row in families(NOT_RUN)}
    assert sorted(rows) == table_names()
    assert rows["glm_moe_dsa"].mtp == "by config"
    assert rows["mimo_v2_flash"].mtp == "by checkpoint, else 3"
    assert rows["llama"].mtp == "none"
    assert rows["deepseek_v3"].copies == (
        "model.layers.{layer}.embed_tokens.weight",
        "model.layers.{layer}.shared_head.head.weight",
    )
    assert rows["glm_moe_dsa"].copies == ()
    assert rows["deepseek_v4"].directions == "inventory, audit"
    assert not rows["deepseek_v4"].loads
    assert {name for name, row in rows.items() if row.parity} == set(FAMILIES) - set(NOT_RUN)


def test_a_size_that_follows_from_others_is_no_published_one() -> None:
    assert Release("a", 1, 2, None, ("tensors",)).is_published
    assert not Release("a", 1, 2, None, ("elements",)).is_published
    assert not Release("a", 1, None, None, ()).is_published


def test_the_page_says_what_is_computed_needed_and_unverified() -> None:
    text = page(
        [
            Family(
                "x", "by config", ("copy",), False, "no nails", "a hammer", None,
                (Release("X-1", 1000, 2000000, None, ("tensors",)),), ("all of it",),
            ),
            Family("y", "none", (), True, None, None, None, (), ()),
            Family("z", "none", (), True, None, None, "no time", (), ()),
        ]
    )  # fmt: skip
    assert "| `x` | X-1 | *1,000* | 2,000,000 | - |" in text
    assert "- not converted: it needs a hammer" in text
    assert "- no parity: no nails" in text
    assert "- not verified: all of it" in text
    assert "### y" not in text
    assert "| `y` | none | - | both ways, audit | yes | yes |" in text
    assert "- no test loads it into Megatron: no time" in text


def test_the_page_in_docs_is_that_of_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(families(NOT_RUN)), (
        "docs/families.md is out of date; write it anew with "
        "mtpconv families --format markdown > docs/families.md"
    )
