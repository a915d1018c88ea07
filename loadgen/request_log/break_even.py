"""From which prefix length on pulling KV is sooner than computing it: modelled, and as a run measured it. Pure.

A pull pays where it takes less than what it saves of the prefill. The shortest prefix for which it does is the
break-even length; for an affine prefill of s seconds a token and a pull of r (`kvcache.transfer_link`), it is
latency / (s − r) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

PrefillSeconds = Callable[[int, int], float]
"""Of (prompt tokens, cached tokens), on an idle engine."""
LONGEST_TOKENS = 131_072
"""Prefixes up to here are looked at for the break-even."""
_FEWEST_SAMPLES = 8


class Affine(NamedTuple):
    """Seconds for n tokens: start_s + n · token_s."""

    start_s: float
    token_s: float


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
    pull_s: Callable[[int], float], prefill_s: PrefillSeconds, *, step: int = 16, longest: int = LONGEST_TOKENS
) -> int | None:
    """The shortest prefix, in steps of `step` tokens, that is pulled sooner than computed; None: none up to
    `longest`. The prompt has one token more; `pull_s` gives the time of a pull over idle links."""
    for tokens in range(step, longest + 1, step):
        if pull_s(tokens) + prefill_s(tokens + 1, tokens) < prefill_s(tokens + 1, 0):
            return tokens
    return None


def fitted(samples: Sequence[tuple[float, float]]) -> Affine | None:
    """The affine time, nowhere negative, that fits these (tokens, seconds) with the least squares.

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
    return Affine(float(base), float(slope))


def crossing_tokens(pull: Affine | None, prefill: Affine | None) -> float | None:
    """The break-even length of two fitted times: the pull's start / (s − r). None where one isn't known, or they never
    cross."""
    if pull is None or prefill is None or prefill.token_s <= pull.token_s:
        return None
    return pull.start_s / (prefill.token_s - pull.token_s)
