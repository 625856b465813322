"""The modules that a quantisation config leaves alone, held against what is there.

Engines build a module from the config, not from its tensors: codes in a module that the config
leaves alone, or plain numbers in one that it does not, are loaded into the wrong shape.
Source: sgl-project/sglang PR 36158 and vllm-project/vllm PR 49187, read 2026-11-29: releases whose
MTP is BF16 while their list does not name it fail to load.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from fnmatch import fnmatchcase
from typing import Any

from mtpconv.audit.codes import finding
from mtpconv.audit.companions import FLOATS, companion_base, config_groups
from mtpconv.audit.finding import Finding, Severity
from mtpconv.audit.names import namesake
from mtpconv.audit.subject import Subject
from mtpconv.ranges import compress
from mtpconv.tensors import Region

#: Where quantisers list the modules that they left alone.
#: Source: transformers 5.24 utils/quantization_config.py, compressed-tensors `ignore`, modelopt
#: `exclude_modules` (hf_quant_config.json), quark `exclude`, vLLM's name `ignored_layers`.
_LISTS = (
    "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude",
    "llm_int8_skip_modules",
)  # fmt: skip
#: Entries with wildcards beyond this are not looked at: the config is untrusted.
_MAX_PATTERNS = 1000
_REGEX = "re:"


def left_alone_findings(
    subject: Subject,
    config: Mapping[str, Any] | None,
    codes: Set[str],
    regions: Mapping[str, Region],
) -> Iterator[Finding]:
    """Weights that are codes and should not be, and MTP weights that are not and should be."""
    yield from _two_configs(subject, config)
    if config is None:
        return
    listed = _Listed(config)
    wrong = sorted(n for n in codes if listed.surely(n))
    if wrong:
        yield contradiction(
            "error",
            f"quantization_config leaves alone {len(wrong)} weights that are stored as codes: "
            f"{compress(wrong, 4)}; engines expect plain numbers there",
        )
    plain = _plain_mtp(subject, codes, regions)
    unnamed = [n for n in plain if listed.is_targeted(n) and not listed.maybe(n)]
    if unnamed:
        yield contradiction(
            "warning",
            f"{len(unnamed)} MTP weights hold plain numbers, the trunk's are quantised, and "
            f"quantization_config does not leave them alone: {compress(unnamed, 4)}; engines that "
            "go by the config cannot load them, add them to its list",
        )


def _two_configs(subject: Subject, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    beside = subject.quant_config
    if config is None or beside is None or config is beside:
        return
    algorithms = [c.get("quant_algo") for c in (config, beside)]
    if None not in algorithms and algorithms[0] != algorithms[1]:
        yield contradiction(
            "warning",
            f"quantization_config says quant_algo {algorithms[0]}, hf_quant_config.json "
            f"{algorithms[1]}; engines read one or the other",
        )


def contradiction(severity: Severity, what: str) -> Finding:
    """A finding about what config.json says of quantisation."""
    return finding(
        "config_contradiction", severity, f"config.json: {what}",
        field="quantization_config", file="config.json",
    )  # fmt: skip


def _plain_mtp(subject: Subject, codes: Set[str], regions: Mapping[str, Region]) -> list[str]:
    """MTP weights in plain numbers whose namesakes in the trunk are codes, all of them."""
    quantised: set[str] = set()
    plain: dict[str, list[str]] = defaultdict(list)
    trunk_plain: set[str] = set()
    for name in codes:
        quantised.add(namesake(name))
    for name, spec in subject.tensors.items():
        if spec.dtype not in FLOATS or len(spec.shape) < 2 or companion_base(name) is not None:
            continue
        if regions[name].kind == "mtp":
            plain[namesake(name)].append(name)
        elif regions[name].kind == "trunk":
            trunk_plain.add(namesake(name))
    return sorted(n for k in plain.keys() & quantised - trunk_plain for n in plain[k])


class _Listed:
    """A config's list of modules, whose entries every quantiser reads in its own way."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        entries = [e for key in _LISTS for e in _strings(config.get(key))]
        dynamic = config.get("dynamic")  # GPTQ: `-:` before a regular expression
        entries += [
            _REGEX + e.removeprefix("-:")
            for e in (dynamic if isinstance(dynamic, Mapping) else ())
            if isinstance(e, str) and e.startswith("-:")
        ]
        patterns = [e for e in entries if e.startswith(_REGEX) or "*" in e]
        self._words = {e for e in entries if e and not e.startswith(_REGEX) and "*" not in e}
        globs = [_as_glob(p) for p in patterns[:_MAX_PATTERNS]]
        self._globs = [g for g in globs if g is not None]
        #: whether some entries are not understood
        self._vague = None in globs or len(patterns) > _MAX_PATTERNS
        #: compressed-tensors names modules, never what contains them
        self._exact = config.get("quant_method") == "compressed-tensors"
        self._only = config.get("quantized_layers")  # modelopt, mixed precision
        self._targets = [t for g in config_groups(config) for t in _strings(g.get("targets"))]

    def surely(self, weight: str) -> bool:
        """Whether the list names the module of a weight by any reading."""
        module = weight.removesuffix(".weight")
        parts = module.split(".")
        names = [module] if self._exact else [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        return any(n in self._words for n in names) or any(
            fnmatchcase(module, glob) for glob in self._globs
        )

    def maybe(self, weight: str) -> bool:
        """Whether the list names it by some reading: as a part of a name, or not understood."""
        return (
            self._vague
            or self.surely(weight)
            or any(word in weight for word in self._words)
            or any(fnmatchcase(weight, f"*{glob}*") for glob in self._globs)
        )

    def is_targeted(self, weight: str) -> bool:
        """Whether the config quantises the module unless its list says otherwise."""
        module = weight.removesuffix(".weight")
        if isinstance(self._only, Mapping):
            return module in self._only
        globs = [_as_glob(t) for t in self._targets if t.startswith(_REGEX)]
        if not self._targets:
            return True
        # A class of modules, such as Linear, or names.
        return any("." not in t and not t.startswith(_REGEX) for t in self._targets) or any(
            g is not None and fnmatchcase(module, g) for g in globs[:_MAX_PATTERNS]
        )


def _strings(value: object) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _as_glob(entry: str) -> str | None:
    """An entry as a pattern with `*` only; None for a regular expression that says more.

    Expressions from an untrusted config are never run: some take for ever.
    """
    if not entry.startswith(_REGEX):
        return re.sub(r"([\[?])", r"[\1]", entry)
    text = entry.removeprefix(_REGEX)
    ends = text.endswith("$")
    text = text.removeprefix("^").removesuffix("$")
    text = re.sub(r"\.\*|\.\+|\[0-9\]\+|\\d\+", "*", text).replace("\\.", ".")
    if re.search(r"[\\()\[\]{}|+?^$]", text):
        return None
    return text if ends else text + "*"  # matched from the start, wherever it ends
