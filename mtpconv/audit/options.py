"""What an audit is asked to do; every exception to the strict rule has a name here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Literal

from mtpconv.audit.finding import Tier
from mtpconv.errors import UsageError

if TYPE_CHECKING:
    from mtpconv.audit.waivers import Waiver

Expect = Literal["bytes", "structure"]
Profile = Literal["vllm", "sglang", "transformers"]

#: Named exceptions, off by default and recorded in the report when on.
SWITCHES: Mapping[str, str] = {
    "copies": "an MTP copy of embedding or head may be absent or added if it equals its root",
    "tied-heads": "lm_head may be absent or added if it equals embed_tokens, whatever config says",
    "upcast": "a wider float dtype is allowed if every value is exactly equal",
    "expert-layout": "packed and per-expert experts are allowed for each other if the bytes agree",
    "vocab-padding": "all-zero rows at the end of embedding and head may be added or cut",
    "index-authoritative": "files that the index does not name are ignored, as engines do",
    "config": "the two configs are not compared",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Read `take` of every `of` tensors of the trunk; root and MTP are always read."""

    take: int
    of: int

    @staticmethod
    def parse(text: str) -> Sample:
        """Reads `n/N`. Raises: UsageError unless 0 < n <= N."""
        left, slash, right = text.partition("/")
        if not slash or not left.isdecimal() or not right.isdecimal():
            raise UsageError(f"--sample {text}: must look like 1/10")
        if not 0 < int(left) <= int(right) <= 1_000_000:
            raise UsageError(f"--sample {text}: must be a fraction above 0 and at most 1")
        return Sample(int(left), int(right))


@dataclass(frozen=True, slots=True)
class Options:
    """How to audit. The defaults are the strict rule with everything read."""

    #: False: headers, index and config only (tier L0)
    read_bytes: bool = True
    expect: Expect = "bytes"
    allow: frozenset[str] = frozenset()
    sample: Sample | None = None
    require: Tier = "none"
    profile: Profile | None = None
    waivers: tuple[Waiver, ...] = ()
    #: the day against which waivers expire; None: no waiver expires
    today: date | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuse a switch that does not exist: a typo must not make an audit lenient or strict."""
        for name in sorted(self.allow - SWITCHES.keys()):
            known = ", ".join(SWITCHES)
            raise UsageError(f"--allow {name}: there is no such switch; there are {known}")
