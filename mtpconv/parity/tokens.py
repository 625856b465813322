"""The tokens that both sides run: prompts of the user, or seeded random ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError, UnsupportedError, UsageError
from mtpconv.geometry import Geometry
from mtpconv.parity.settings import Settings

#: Tokens of a random row, and how far it reaches beyond what a layer takes in at once.
LENGTH = 64
BEYOND = 64

#: Tokens that a gated delta net takes in at a time; what is before is one state to it.
#: Source: `chunk_size` in transformers 5.24 and megatron-core 0.16.1 and 0.19.2.
DELTA_CHUNK = 64

#: Longest prompt that is read, in characters; parity is no benchmark of long contexts.
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Tokens:
    """Rows of token ids, each a torch tensor, and where they come from."""

    rows: list[Any]
    source: str

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return max(len(row) for row in self.rows)


def choose_tokens(
    settings: Settings,
    hf_folder: Path,
    prompts: Path | None = None,
    length: int | None = None,
    rows: int = 1,
    seed: int = 0,
) -> Tokens:
    """The rows to run; random ones go beyond what a layer takes in at once.

    That is a sparse attention's choice, a window, or a delta net's chunk.

    Raises: UsageError if a row would be too short to compare, or longer than the model allows.
    """
    geometry = settings.geometry
    limit = geometry.dim("max_position_embeddings")
    least = geometry.depths + 2
    reach = settings.transformer.get("dsa_indexer_topk", _window(settings))
    if settings.delta_nets:
        reach = DELTA_CHUNK
    usual = min(limit, reach + BEYOND if reach else LENGTH)
    found = token_rows(geometry, hf_folder, prompts, length or usual, rows, seed)
    if prompts is not None and length is not None:
        found = Tokens([row[:length] for row in found.rows], found.source)
    for number, row in enumerate(found.rows):
        if len(row) < least:
            raise UsageError(
                f"row {number} has {len(row)} tokens; {geometry.depths} MTP depths need at least "
                f"{least}"
            )
        if len(row) > limit:
            raise UsageError(
                f"row {number} has {len(row)} tokens, the model's max_position_embeddings is "
                f"{limit}; use --length"
            )
    return found


def _window(settings: Settings) -> int:
    """How many tokens a sliding layer sees, the current one included; 0 if no layer slides."""
    size = settings.transformer.get("window_size")
    return int(size[0]) + 1 if size else 0


def token_rows(
    geometry: Geometry, files: Path, prompts: Path | None, length: int, rows: int, seed: int
) -> Tokens:
    """Tokenised prompts, or seeded random rows of a length.

    Raises: UnreadableError, UsageError, UnsupportedError if there is no tokenizer.
    """
    import torch

    vocabulary = geometry.dim("vocab_size")
    if prompts is None:
        random = torch.Generator().manual_seed(seed)
        found = [torch.randint(vocabulary, (length,), generator=random) for _ in range(rows)]
        return Tokens(found, f"{rows} rows of {length} random tokens, seed {seed}")
    encoded = _tokenized(files, prompts)
    for ids in encoded:
        if any(token >= vocabulary for token in ids):
            raise UsageError(
                f"{files}: the tokenizer gives token {max(ids)}, the model knows {vocabulary}"
            )
    return Tokens(
        [torch.tensor(ids) for ids in encoded], f"{len(encoded)} prompts of {prompts.name}"
    )


def has_tokenizer(files: Path) -> bool:
    """Whether a folder has a tokenizer that transformers can load without running code."""
    return any((files / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def _tokenized(hf_folder: Path, prompts: Path) -> list[list[int]]:
    try:
        lines = prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{prompts}: cannot be read as text: {error}") from error
    wanted = [line for line in lines if line.strip()]
    if not wanted:
        raise UsageError(f"{prompts}: no prompt in it; one prompt a line")
    if any(len(line) > LONGEST_LINE for line in wanted):
        raise UsageError(f"{prompts}: a prompt is longer than {LONGEST_LINE} characters")
    if not has_tokenizer(hf_folder):
        raise UnsupportedError(
            f"{hf_folder}: no tokenizer.json, so prompts cannot be tokenised; leave --prompts out "
            "to run random tokens"
        )
    tokenizer = load_tokenizer(hf_folder)
    ids: list[list[int]] = [tokenizer(line)["input_ids"] for line in wanted]
    return ids


def load_tokenizer(files: Path) -> Any:
    """The tokenizer of a folder, without code from it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(files, local_files_only=True)


def coverage_notes(settings: Settings, tokens: Tokens, stored_rows: int | None) -> list[str]:
    """What a run with these tokens and this checkpoint cannot show."""
    notes = []
    transformer: Mapping[str, Any] = settings.transformer
    keys = transformer.get("dsa_indexer_topk")
    if keys and tokens.longest <= keys:
        notes.append(
            f"the longest row has {tokens.longest} tokens, not more than index_topk {keys}: every "
            "key is chosen, so the indexer was not exercised"
        )
    window = _window(settings)
    if window and tokens.longest <= window:
        notes.append(
            f"the longest row has {tokens.longest} tokens, not more than the window of {window}: "
            "windows were not exercised"
        )
    if settings.delta_nets and tokens.longest <= DELTA_CHUNK:
        notes.append(
            f"the longest row has {tokens.longest} tokens, one chunk of a gated delta net: the "
            "state that it carries from chunk to chunk was not exercised"
        )
    if not settings.geometry.depths:
        notes.append("the config promises no MTP depth: only the trunk was compared")
    vocabulary = settings.geometry.dim("vocab_size")
    if stored_rows is not None and stored_rows == vocabulary:
        notes.append("the embedding has no padding rows: padding was not exercised")
    return notes
