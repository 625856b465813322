"""Files that a HuggingFace folder has besides weights, where a server gives no listing.

What is not asked for by name stays behind there, so whoever reads such a folder says that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError
from mtpconv.store.hf import CONFIG_NAME
from mtpconv.store.json_text import read_json

#: What loaders look for in an HF folder besides config and weights.
LOADED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "tokenizer.model.v3", "tiktoken.model", "tekken.json", "spiece.model",
    "sentencepiece.bpe.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "params.json",
)  # fmt: skip
#: What else releases usually have.
USUAL = (
    *LOADED, "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "USE_POLICY.md",
    ".gitattributes", "configuration.json", "recipe.yaml", "SYSTEM_PROMPT.txt",
)  # fmt: skip
#: Where transformers looks for `auto_map`.
_NAMING = (
    CONFIG_NAME, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
#: Names of classes in a module beside the config; those with `--` are in another repository.
_CLASS = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99})\.[A-Za-z_][A-Za-z0-9_]*")
#: transformers fetches what a module imports from beside it, too.
_IMPORT = re.compile(
    rb"^[ \t]*from[ \t]+\.([A-Za-z_][A-Za-z0-9_]{0,99})[ \t]+import\b", re.MULTILINE
)


def named_code(folder: Path) -> set[str]:
    """Python files that the configs in a folder name, and that those in it import."""
    modules = {module for name in _NAMING for module in _mapped(folder / name)}
    for path in folder.glob("*.py"):
        modules.update(found.decode() for found in _IMPORT.findall(path.read_bytes()))
    return {f"{module}.py" for module in modules}


def _mapped(config: Path) -> Iterator[str]:
    """Modules in the `auto_map` of a config; of one that cannot be read none."""
    if not config.is_file():
        return
    try:
        value = read_json(config).value
    except UnreadableError:
        return  # it travels as it is; whoever needs it says what is wrong
    mapped = value.get("auto_map") if isinstance(value, Mapping) else None
    for entry in mapped.values() if isinstance(mapped, Mapping) else ():
        classes: list[Any] = entry if isinstance(entry, list) else [entry]  # slow and fast
        for name in classes:
            found = _CLASS.fullmatch(name) if isinstance(name, str) else None
            if found is not None:
                yield found[1]
