"""What the pairs of cold prompt and repeat say of a target, as flags: 1 found, 0 looked at and fine, absent unknown."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from prefixwatch.exporters.probes.request import ProbeAnswer

SHARED_OPENING_TOKENS = 64
"""This many cached tokens of a prompt that nobody sent prove nothing: a chat template's opening is the same in all."""
_PAIRS = 3
"""Judged over this many pairs: a single repeat may have gone to another worker, or been evicted."""
_CLEARLY_FASTER = 0.8
_SCRAPED_WITHIN_SECONDS = 30.0
"""What was cached for a probe is in the engine's counter, as scraped, after this time."""
_MISSED_RATIO = 0.5
"""A counter that grew by less than this share of the probes' own hits counts something else."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A cold prompt and its repeat, both completed."""

    cold: ProbeAnswer
    repeat: ProbeAnswer

    @property
    def reported(self) -> bool:
        """The endpoint reports cached tokens. Engines that do often leave out a 0, so a number anywhere will do."""
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


class CountedHits:
    """Cached tokens that the repeats report, beside what the same engine's hit counter grew by meanwhile."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._counted: float | None = None
        self._reported: list[tuple[float, int]] = []
        self._settled_tokens = self._settled = 0

    def counted(self, total: float | None, now_seconds: float) -> None:
        """The counter's value by the last scrape, None where it isn't known."""
        if total is None or (self._counted is not None and total < self._counted):  # another engine, or none
            self._first, self._settled_tokens, self._settled = total, 0, 0
            self._reported.clear()
        self._first = total if self._first is None else self._first
        self._counted = total
        while self._reported and now_seconds - self._reported[0][0] >= _SCRAPED_WITHIN_SECONDS:
            self._settled_tokens += self._reported.pop(0)[1]
            self._settled += 1

    def reported(self, cached_tokens: int | None, now_seconds: float) -> None:
        """A repeat's cached tokens, reported at this moment."""
        if cached_tokens and self._first is not None:
            self._reported.append((now_seconds, cached_tokens))

    @property
    def both(self) -> tuple[float, float] | None:
        """Tokens that repeats reported and tokens that the counter grew by, once three repeats can be judged."""
        if self._settled < _PAIRS or self._first is None or self._counted is None:
            return None
        return self._settled_tokens, self._counted - self._first


class Findings:
    """Of one target; the newest three pairs of each of its prompt lengths count."""

    def __init__(self, lengths: int = 1) -> None:
        self._pairs: deque[Pair] = deque(maxlen=_PAIRS * lengths)
        self._canary_hit: bool | None = None
        self.counted_hits = CountedHits()

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
        hits_not_faster           the same, though the repeats report cached tokens: they say hit, the clock says miss
        hits_not_counted          the engine's hit counter grew by less than half of what the repeats report as cached
        cold_prompt_hit           cached tokens are reported for a prompt that nobody had sent
        cross_tenant_hit          the canary of one tenant hit the cache of another

        vLLM leaves out a 0: with its caching off, cached_tokens_unreported and repeat_not_faster come together.
        """
        not_faster, counted = self._not_faster(), self.counted_hits.both
        hits = any((pair.repeat.cached_tokens or 0) > SHARED_OPENING_TOKENS for pair in self._pairs)
        found = {
            "caching_off": self._caching_off(),
            "cached_tokens_unreported": self._unreported(),
            "repeat_not_faster": not_faster,
            "hits_not_faster": not_faster and hits if not_faster is not None and hits else None,
            "hits_not_counted": None if counted is None else counted[1] < _MISSED_RATIO * counted[0],
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
