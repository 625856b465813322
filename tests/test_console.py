from __future__ import annotations

from pathlib import Path

import pytest

from tests.console import Block, DocumentError, blocks, matches, run

FENCE = "```"


def _only(text: str) -> Block:
    (block,) = blocks("page.md", text)
    return block


def _page(*lines: str, above: str = "") -> str:
    return "\n".join(["# Title", "", above, f"{FENCE}console", *lines, FENCE, "after", ""])


def test_commands_and_their_output_are_found_with_their_lines() -> None:
    block = _only(_page("$ mtpconv plan x \\", ">   --rows", "a", "", "b", "$ echo two"))
    assert [c.text for c in block.commands] == ["mtpconv plan x --rows", "echo two"]
    assert block.commands[0].expected == ("a", "", "b")
    assert [c.line for c in block.commands] == [5, 10]


def test_a_block_in_a_list_loses_its_indentation() -> None:
    block = _only(f"1. do\n\n   {FENCE}console\n   $ echo x\n   x\n   {FENCE}\n")
    assert (block.commands[0].text, block.commands[0].expected) == ("echo x", ("x",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{FENCE}bash\nmtpconv plan x\n{FENCE}\n", "page.md:2: a command outside"),
        (f"{FENCE}\n$ make demo\n{FENCE}\n", "page.md:2: a command outside"),
        (_page("output"), "output without"),
        (_page(""), "without a `\\$ ` command"),
        (_page("$ make demo", above="<!-- skip: -->"), "needs a reason"),
        (f"{FENCE}console\n$ echo x\n", "no end"),
        (_page("$ make test", "200 passed"), "cannot be shown"),
    ],
)
def test_what_would_stay_unchecked_is_refused(text: str, says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        blocks("page.md", text)


def test_the_commands_of_ci_are_left_to_it() -> None:
    block = _only(_page("$ make demo", "...", "$ make test", '$ make test ARGS="-k x"'))
    assert [c.text for c in block.commands] == ["make demo"]


def test_only_the_comment_right_above_a_block_counts() -> None:
    skipped = _page("$ false", above="<!-- skip: needs 8 GPUs -->")
    apart = _page("$ false", above="<!-- skip: needs 8 GPUs -->\n\nSome text.\n")
    assert _only(skipped).skip == "needs 8 GPUs"
    assert _only(apart).skip == ""


def test_setup_runs_first_and_is_not_shown(tmp_path: Path) -> None:
    text = _page("$ cat hidden", "42", above="<!-- setup:\necho 42 > hidden\n-->")
    run(_only(text), tmp_path, {}, 10)
    broken = _page("$ true", above="<!-- setup:\nfalse\ntrue\n-->")
    with pytest.raises(DocumentError, match="the setup failed with 1"):
        run(_only(broken), tmp_path, {}, 10)


@pytest.mark.parametrize(
    ("shown", "got", "verdict"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        (["a", "b"], ["a"], False),
        (["a", "..."], ["a"], True),
        (["a", "..."], ["a", "b", "c"], True),
        (["...", "c"], ["a", "b", "c"], True),
        (["...", "c"], ["a", "b"], False),
        (["a", "  ...", "c"], ["a", "", "c"], True),
        (["took ... s"], ["took 1.25 s"], True),
        (["took ... s"], ["took 1.25 min"], False),
        (["took ... s"], ["took", "1.25 s"], False),
        (["a.c (x)"], ["abc (x)"], False),
    ],
)
def test_dots_stand_for_lines_or_for_text_in_a_line(
    shown: list[str], got: list[str], verdict: bool
) -> None:
    assert matches(shown, got) is verdict


def test_other_output_is_reported_with_both_sides(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"(?s)page.md:5: .*shown.*1 tensor.*printed.*2 tens"):
        run(_only(_page("$ echo 2 tensors", "1 tensor")), tmp_path, {}, 10)


def test_stderr_counts_and_colours_do_not(tmp_path: Path) -> None:
    run(_only(_page(r"$ printf '\033[31mred\033[0m  \n' >&2", "red")), tmp_path, {}, 10)


def test_a_failure_must_be_shown(tmp_path: Path) -> None:
    run(_only(_page("$ (exit 3)", "$ echo $?", "3")), tmp_path, {}, 10)
    with pytest.raises(DocumentError, match="failed with 3"):
        run(_only(_page("$ (exit 3)", "$ echo done", "done")), tmp_path, {}, 10)
    with pytest.raises(DocumentError, match="failed with 3"):
        run(_only(_page("$ echo x; (exit 3)", "x")), tmp_path, {}, 10)


def test_a_hanging_command_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"more than 0\.2 s"):
        run(_only(_page("$ sleep 20 | cat; true")), tmp_path, {}, 0.2)
