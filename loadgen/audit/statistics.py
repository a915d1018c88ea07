"""The tests of an isolation audit: are probes of what another tenant sent faster than probes of what nobody sent?

- One-sided two-sample Kolmogorov-Smirnov test, exact, as in the audit of Gu et al., "Auditing Prompt Caching in
  Language Model APIs" (ICML 2025, arXiv 2502.07776). It finds a shift of one distribution however small a part of it
  moved, and assumes nothing about latencies.
- AUC: how well one first token distinguishes a warm prompt from a cold one; interval by DeLong, DeLong and
  Clarke-Pearson (Biometrics 44, 1988) on the logit scale.
- Order of answers: the sum of a candidate's ranks in batches that are sent at once, exactly, against random order.

Pure: arrays in, numbers out. What is random takes its generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, lgamma, log, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from prefixwatch.slo.wilson import CONFIDENCE, wilson

Floats = npt.NDArray[np.float64]

LEAK_LEVEL = 1e-8
"""p-value below which a leak is certain: the level of the published audit."""
DOUBT_LEVEL = 0.01
"""p-value below which the absence of a leak can't be claimed either."""
POWER = 0.99
"""With what probability an audit must be able to find a leak before it may say that there is none."""
_POWER_TRIALS = 400
_LARGEST_GAP_SD = 12.0


@dataclass(frozen=True, slots=True)
class Separation:
    """How much faster the first sample is than the second."""

    p_value: float
    """One-sided KS: probability of such a lead, or a larger one, if both were drawn alike."""
    auc: float
    """Probability that a value of the first is below one of the second; 0.5 if they are alike."""
    auc_low: float
    auc_high: float
    """95 % interval."""
    median_first: float
    median_second: float


def separation(first: Floats, second: Floats) -> Separation:
    """Compare two samples of at least 2 values each. Raises ValueError for fewer."""
    auc, low, high = auc_interval(first, second)
    return Separation(ks_less(first, second), auc, low, high, float(np.median(first)), float(np.median(second)))


def ks_less(first: Floats, second: Floats) -> float:
    """Exact p-value of the one-sided test that the first sample is stochastically smaller.

    With ties it is conservative. The same as `scipy.stats.ks_2samp(first, second, alternative="greater")`.
    """
    n, m = len(first), len(second)
    if not n or not m:
        raise ValueError("a sample without values can't be compared")
    values = np.unique(np.concatenate([first, second]))
    below_first = np.searchsorted(np.sort(first), values, side="right")
    below_second = np.searchsorted(np.sort(second), values, side="right")
    lead = int((m * below_first - n * below_second).max())
    return _tail(n, m, lead)


def auc_interval(first: Floats, second: Floats) -> tuple[float, float, float]:
    """AUC with its 95 % interval. Raises ValueError with fewer than 2 values on a side.

    Samples that are separated completely have no variance: their interval is Wilson's of a share that is the same in
    each value of the smaller sample.
    """
    n, m = len(first), len(second)
    if min(n, m) < 2:
        raise ValueError("an AUC needs at least 2 values on each side")
    above = m - _mid_rank(np.sort(second), first)
    below = _mid_rank(np.sort(first), second)
    auc = float(above.mean() / m)
    if auc in (0.0, 1.0):
        low, high = wilson(round(auc) * min(n, m), min(n, m)) or (0.0, 1.0)
        return auc, low, high
    variance = float((above / m).var(ddof=1) / n + (below / n).var(ddof=1) / m)
    spread = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * sqrt(variance) / (auc * (1 - auc))
    logit = log(auc / (1 - auc))
    return auc, _logistic(logit - spread), _logistic(logit + spread)


def rank_sum_p(ranks: Sequence[int], batch: int) -> float:
    """Exact p-value of the sum of a candidate's ranks (1 is the first answer) in batches of this size, against an order
    that doesn't depend on what is cached."""
    ways = np.ones(1)
    for _ in ranks:
        ways = np.convolve(ways, np.full(batch, 1 / batch))
    return float(min(1.0, ways[: sum(ranks) - len(ranks) + 1].sum()))


def critical_lead(samples: int, level: float) -> int:
    """The smallest lead, in samples, that is significant at this level with equally many on each side; `samples` + 1
    where none is."""
    return next((lead for lead in range(samples + 1) if _equal_tail(samples, lead) < level), samples + 1)


def least_samples(level: float) -> int:
    """The fewest samples a side with which complete separation is significant at this level."""
    return next(n for n in range(1, 10_000) if _equal_tail(n, n) < level)


def ks_power(
    gap_sd: float,
    samples: int,
    rng: np.random.Generator,
    *,
    warm_share: float = 1.0,
    level: float = LEAK_LEVEL,
    trials: int = _POWER_TRIALS,
) -> float:
    """Share of audits that find a gap of `gap_sd` standard deviations, of which only `warm_share` of the probes show
    any: the others reached a replica that the victim didn't. Latencies are normal."""
    warm = rng.random((trials, samples)) < warm_share
    first = rng.normal(size=(trials, samples)) - gap_sd * warm
    return float((leads(first, rng.normal(size=(trials, samples))) >= critical_lead(samples, level)).mean())


def resampled_power(warm: Floats, cold: Floats, rng: np.random.Generator) -> float:
    """Share of audits that would find a leak whose probes look like `warm` beside `cold` ones, both as measured.

    Each trial draws both sides again with replacement, as many as the smaller sample has.
    """
    samples = min(len(warm), len(cold))
    first, second = (side[rng.integers(0, len(side), (_POWER_TRIALS, samples))] for side in (warm, cold))
    return float((leads(first, second) >= critical_lead(samples, LEAK_LEVEL)).mean())


def smallest_gap_sd(samples: int, warm_share: float = 1.0, level: float = LEAK_LEVEL) -> float | None:
    """The smallest gap, in standard deviations to 0.1, that is found with `POWER`; None if no gap is."""
    low, high = 0, int(_LARGEST_GAP_SD * 10)
    if not _enough(high / 10, samples, warm_share, level):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(middle / 10, samples, warm_share, level) else (middle, high)
    return high / 10


def warm_share(replicas: int, victim_requests: int) -> float:
    """Probability that a probe reaches a replica that any of the victim's requests reached, placed at random."""
    return 1 - (1 - 1 / replicas) ** victim_requests


def leads(first: Floats, second: Floats) -> npt.NDArray[np.int64]:
    """The KS lead of each row of `first` over the same row of `second`, in samples. Rows are of equal length."""
    both = np.concatenate([first, second], axis=1)
    steps = np.where(np.argsort(both, axis=1, kind="stable") < first.shape[1], 1, -1)
    found: npt.NDArray[np.int64] = np.maximum(np.cumsum(steps, axis=1).max(axis=1), 0)
    return found


def _enough(gap_sd: float, samples: int, share: float, level: float) -> bool:
    return ks_power(gap_sd, samples, np.random.default_rng(0), warm_share=share, level=level) >= POWER


def _mid_rank(ordered: Floats, values: Floats) -> Floats:
    """How many of `ordered` are below each value; ties count half."""
    ranks: Floats = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2
    return ranks


def _logistic(value: float) -> float:
    return 1 / (1 + exp(-value)) if value > -700 else 0.0


@cache
def _equal_tail(samples: int, lead: int) -> float:
    """P(lead reached) with equally many on each side, by reflection: C(2n, n + lead) / C(2n, n)."""
    if lead <= 0:
        return 1.0
    return exp(2 * lgamma(samples + 1) - lgamma(samples + lead + 1) - lgamma(samples - lead + 1))


def _tail(n: int, m: int, lead: int) -> float:
    """P(max of m·i − n·j ≥ lead) over random orders of n first and m second values.

    The order is a walk on a grid; the mass that reaches the line is summed where it first does, diagonal by diagonal,
    so that a tiny p-value isn't a difference of large numbers.
    """
    if lead <= 0:
        return 1.0
    if n == m:
        return _equal_tail(n, -(-lead // n))
    first = np.arange(n + 1)
    mass = np.zeros(n + 1)
    mass[0] = 1.0
    reached = 0.0
    for step in range(n + m):
        second = step - first
        possible = (second >= 0) & (second <= m)
        left = n + m - step
        of_first = np.where(possible, mass * (n - first) / left, 0.0)
        of_second = np.where(possible, mass * (m - second) / left, 0.0)
        mass = of_second
        mass[1:] += of_first[:-1]
        over = m * first - n * (step + 1 - first) >= lead
        reached += float(mass[over].sum())
        mass[over] = 0.0
    return min(1.0, reached)
