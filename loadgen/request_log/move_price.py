"""What moving KV costs against computing it again. Pure.

    T_pull(n) = latency + n · bytes a token / (compression · rate)            an affine function of the tokens n

A pull pays where T_pull is shorter than what it saves of the prefill. The shortest prefix for which it does is the
break-even length; for an affine prefill of s seconds a token and a pull of r, it is latency / (s − r) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

PrefillSeconds = Callable[[int, int], float]
"""Of (prompt tokens, cached tokens), on an idle engine."""
LONGEST_TOKENS = 131_072
"""Prefixes up to here are looked at for the break-even."""
_FEWEST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class MovePrice:
    """What moving tokens costs where nothing queues."""

    latency_s: float
    token_s: float

    @classmethod
    def of_link(
        cls, *, latency_s: float, gbit_per_second: float | None, bytes_per_token: float, compression: float = 1.0
    ) -> MovePrice:
        """Of a link of this rate; None: as fast as its latency."""
        rate = None if gbit_per_second is None else gbit_per_second * 1e9 / 8
        return cls(latency_s, 0.0 if rate is None else bytes_per_token / compression / rate)

    def seconds(self, tokens: int) -> float:
        """For this number of tokens; 0 for none."""
        return self.latency_s + tokens * self.token_s if tokens > 0 else 0.0


def cheapest_pull(local_tokens: int, runs: Sequence[tuple[int, float]], prefill_s: Callable[[int], float]) -> int:
    """How many of these runs to pull, from the first on; 0 where computing everything is as fast.

    `runs` follow the local tokens: for each the prompt tokens that are there once it has come, and the seconds until
    it has. `prefill_s` gives the prefill with this number of tokens cached. Runs come side by side, so the last one
    counts.
    """
    best, best_s, waits_s = 0, prefill_s(local_tokens), 0.0
    for count, (tokens, arrives_s) in enumerate(runs, start=1):
        waits_s = max(waits_s, arrives_s)
        if (total_s := waits_s + prefill_s(tokens)) < best_s:
            best, best_s = count, total_s
    return best


def break_even_tokens(
    price: MovePrice, prefill_s: PrefillSeconds, *, step: int = 16, longest: int = LONGEST_TOKENS
) -> int | None:
    """The shortest prefix, in steps of `step` tokens, that is pulled sooner than computed; None: none up to
    `longest`. The prompt has one token more."""
    for tokens in range(step, longest + 1, step):
        if price.seconds(tokens) + prefill_s(tokens + 1, tokens) < prefill_s(tokens + 1, 0):
            return tokens
    return None


def fitted_price(samples: Sequence[tuple[float, float]]) -> MovePrice | None:
    """The affine price, nowhere negative, that fits these (tokens, seconds) with the least squares.

    None for fewer than 8 samples, or samples of one length only.
    """
    if len(samples) < _FEWEST_SAMPLES or len({tokens for tokens, _ in samples}) < 2:
        return None
    tokens, seconds = np.array(samples, dtype=float).T
    slope, base = np.polyfit(tokens, seconds, 1)
    if slope < 0:
        slope, base = 0.0, seconds.mean()
    elif base < 0:
        slope, base = float(tokens @ seconds / (tokens @ tokens)), 0.0
    return MovePrice(float(base), float(slope))


def crossing_tokens(pull: MovePrice | None, prefill: MovePrice | None) -> float | None:
    """The break-even length of two fitted prices: latency / (s − r). None where one isn't known, or they never
    cross."""
    if pull is None or prefill is None or prefill.token_s <= pull.token_s:
        return None
    return pull.latency_s / (prefill.token_s - pull.token_s)
