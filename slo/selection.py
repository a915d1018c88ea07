"""Which requests an objective is about: request class, tenant class, prompt length, cache class, session turn."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

CACHE_CLASSES = ("hit", "partial", "miss")
TURNS = ("first", "later")

_LENGTH = re.compile(r"^(?P<low>\d+)(?:-(?P<high>\d+)|\+)$")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known about one request when it is selected; None is unknown."""

    request_class: str = ""
    tenant: str = ""
    prompt_tokens: float | None = None
    cache: str | None = None
    """`hit`, `partial` or `miss`."""
    turn: Literal["first", "later"] | None = None
    """Whether its session was seen before."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that must all hold; the default takes every request."""

    tenants: tuple[str, ...] = ("*",)
    """Shell-style patterns."""
    above_tokens: float = -1.0
    up_to_tokens: float = math.inf
    """Prompt lengths n with above_tokens < n ≤ up_to_tokens."""
    caches: tuple[str, ...] = ()
    """Empty: all."""
    turn: Literal["first", "later"] | None = None

    @property
    def by_length(self) -> bool:
        return self.above_tokens >= 0 or not math.isinf(self.up_to_tokens)

    def covers(self, facts: RequestFacts) -> bool:
        """Also False when a fact that a condition needs is unknown: the request can't be judged."""
        if not any(fnmatchcase(facts.tenant, pattern) for pattern in self.tenants):
            return False
        if self.by_length and (
            facts.prompt_tokens is None or not self.above_tokens < facts.prompt_tokens <= self.up_to_tokens
        ):
            return False
        return (not self.caches or facts.cache in self.caches) and self.turn in (None, facts.turn)

    def __str__(self) -> str:
        """` of …`, or nothing when every request is meant."""
        parts = []
        if self.tenants != ("*",):
            parts.append(f"tenants {', '.join(self.tenants)}")
        if self.by_length and math.isinf(self.up_to_tokens):
            parts.append(f"prompts over {self.above_tokens:g} tokens")
        elif self.by_length:
            parts.append(f"prompts of {self.above_tokens:g}-{self.up_to_tokens:g} tokens")
        if self.caches:
            parts.append(f"cache class {' or '.join(self.caches)}")
        if self.turn:
            parts.append(f"{self.turn} turns")
        return f" of {', '.join(parts)}" if parts else ""


ALL_REQUESTS = Selection()


def parse_length(text: str) -> tuple[float, float]:
    """`512-2048` → (512, 2048): above the first, up to the second; `32768+` has no end. Raises ValueError."""
    match = _LENGTH.match(text.strip())
    low = float(match["low"]) if match else 0.0
    high = float(match["high"]) if match and match["high"] else math.inf
    if match is None or low >= high:
        raise ValueError(f"{text!r} is not a range of tokens: write 512-2048, or 32768+")
    return low, high
