"""What the pairs of cold prompt and repeat say of a target, as flags: 1 found, 0 looked at and fine, absent unknown."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from exporters.probes.request import ProbeAnswer

SHARED_OPENING_TOKENS = 64
"""So many cached tokens of a prompt that nobody sent prove nothing: a chat template's opening is the same in all."""
_PAIRS = 3
"""Judged over this many pairs: a single repeat may have gone to another worker, or been evicted."""
_CLEARLY_FASTER = 0.8


@dataclass(frozen=True, slots=True)
class Pair:
    """A cold prompt and its repeat, both completed."""

    cold: ProbeAnswer
    repeat: ProbeAnswer

    @property
    def reported(self) -> bool:
        """The endpoint tells cached tokens. Engines that do often leave out a 0, so a number anywhere will do."""
        return self.repeat.cached_tokens is not None or self.cold.cached_tokens is not None

    @property
    def cold_tokens(self) -> int | None:
        """Cached tokens of the cold prompt: an endpoint that reports the repeat's and not these means none."""
        if self.cold.cached_tokens is None and (self.repeat.cached_tokens or 0) > 0:
            return 0
        return self.cold.cached_tokens

    @property
    def was_cold(self) -> bool:
        """No more of the first prompt was cached than any prompt's opening."""
        return (self.cold_tokens or 0) <= SHARED_OPENING_TOKENS


class Findings:
    """Of one target; the newest three pairs of each of its prompt lengths count."""

    def __init__(self, lengths: int = 1) -> None:
        self._pairs: deque[Pair] = deque(maxlen=_PAIRS * lengths)
        self._canary_hit: bool | None = None

    def add(self, pair: Pair) -> None:
        self._pairs.append(pair)

    def add_canary(self, *, hit: bool) -> None:
        """Whether the second tenant hit what the first one had sent."""
        self._canary_hit = hit

    def flags(self) -> Mapping[str, bool]:
        """The findings by name.

        caching_off               the repeats report 0 cached tokens, every one
        cached_tokens_unreported  no answer says how many tokens were cached
        repeat_not_faster         the repeats' median TTFT is more than 0.8 of the cold prompts', of the longer ones
        cold_prompt_hit           cached tokens are reported for a prompt that nobody had sent
        cross_tenant_hit          the canary of one tenant hit the cache of another

        vLLM leaves out a 0: with its caching off, cached_tokens_unreported and repeat_not_faster come together.
        """
        found = {
            "caching_off": self._caching_off(),
            "cached_tokens_unreported": self._unreported(),
            "repeat_not_faster": self._not_faster(),
            "cold_prompt_hit": any(not pair.was_cold for pair in self._pairs) if self._pairs else None,
            "cross_tenant_hit": self._canary_hit,
        }
        return {name: flag for name, flag in found.items() if flag is not None}

    def _caching_off(self) -> bool | None:
        cached = [pair.repeat.cached_tokens for pair in self._pairs if pair.reported]
        if any(cached):
            return False
        # an absent number isn't a 0; without any number nothing is known
        return True if len(cached) >= _PAIRS else None

    def _unreported(self) -> bool | None:
        if any(pair.reported for pair in self._pairs):
            return False
        return True if len(self._pairs) >= _PAIRS else None

    def _not_faster(self) -> bool | None:
        longest = max((pair.cold.prompt_tokens or 0 for pair in self._pairs), default=0)
        timed = [
            (pair.cold.ttft_seconds, pair.repeat.ttft_seconds)
            for pair in self._pairs
            if pair.cold.ttft_seconds is not None and pair.repeat.ttft_seconds is not None
            if (pair.cold.prompt_tokens or 0) >= longest / 2  # a short prompt is quick, cached or not
        ]
        if len(timed) < _PAIRS:
            return None
        return median(repeat for _, repeat in timed) > _CLEARLY_FASTER * median(cold for cold, _ in timed)
