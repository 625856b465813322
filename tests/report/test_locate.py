from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mtpconv.report.locate import find_lines, read_lines

KEYS = st.one_of(
    st.sampled_from(["a", "b", "hidden_size", "text_config", '"', "\\", "é", "{", "\n", "a.b", ""]),
    st.text(max_size=4),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=6), st.sampled_from(['"', "a\\", "{[,:"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)


def _paths(value: Any, prefix: str = "", depth: int = 1) -> list[str]:
    found = []
    if isinstance(value, dict) and depth <= 8:
        for key, inner in value.items():
            found += [prefix + key, *_paths(inner, f"{prefix}{key}.", depth + 1)]
    return found


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from([None, 1, 4]))
def test_every_key_outside_lists_has_its_line(config: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(config, indent=indent, ensure_ascii=False)
    lines = find_lines(text)
    assert set(lines) == set(_paths(config))
    written = text.split("\n")
    for path, line in lines.items():
        # The last part of a path may hold dots itself, so look for every way to cut it.
        parts = path.split(".")
        ends = [".".join(parts[n:]) for n in range(len(parts))]
        assert any(
            json.dumps(end, ensure_ascii=False) + ":" in written[line - 1] for end in ends
        ), path


def test_nested_fields_and_index_entries() -> None:
    config = '{\n "a": [1,\n  {"inside": 2}],\n "text_config": {\n  "hidden_size": 8\n }\n}'
    assert find_lines(config) == {"a": 2, "text_config": 4, "text_config.hidden_size": 5}
    index = '{"weight_map": {\n"model.norm.weight": "a",\n"lm_head.weight": "b"}}'
    assert find_lines(index)["weight_map.lm_head.weight"] == 3


def test_the_first_of_two_equal_keys_counts() -> None:
    assert find_lines('{"a": 1,\n"a": 2}') == {"a": 1}


def test_what_cannot_be_read_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "absent.json") == {}
    assert read_lines(tmp_path) == {}
    broken = tmp_path / "broken.json"
    for content in (b'{"a": ', b"\xff\xfe{", b'{"a": 1}}}', b"[" * 100_000):
        broken.write_bytes(content)
        assert read_lines(broken) == {}
    broken.write_bytes(b"[" * 500 + b"]" * 500)
    assert read_lines(broken) == {}
