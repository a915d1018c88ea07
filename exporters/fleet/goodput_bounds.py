"""Goodput as the interval that single shares allow, where no request records say which requests met all objectives.

Engines count how many requests met each threshold, not which. Of shares p₁ … pₖ at least Σpᵢ − (k − 1) and at most the
smallest are of the same requests (Fréchet's bounds). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.scraping.histogram import Histogram, merge
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.slo.objective import SIGNS, Condition, Objective, RequestField

_SIGNALS: Mapping[RequestField, str] = {
    RequestField.TTFT_SECONDS: "ttft_seconds",
    RequestField.TPOT_SECONDS: "tpot_seconds",
    RequestField.E2E_SECONDS: "e2e_seconds",
}
"""Histograms with one observation a request."""

_NOT_COMPLETED = frozenset({"abort", "error"})
"""Reasons with which vLLM's requests end before their answer does."""


@dataclass(frozen=True, slots=True)
class GoodputBounds:
    """Between which shares of the window's requests goodput is, as engines measure it."""

    low: float
    high: float
    unknown: tuple[str, ...]
    """Conditions whose share no engine gives: they could lower goodput to 0."""


def goodput_bounds(given: Iterable[SignalStore], objectives: Sequence[Objective]) -> GoodputBounds | None:
    """The bounds for the objectives that decide on goodput; None where no share is known."""
    stores = list(given)
    joined = [objective for objective in objectives if len(objective.conditions) > 1]
    conditions = dict.fromkeys(condition for objective in joined or objectives for condition in objective.conditions)
    shares = {condition: _share(stores, condition) for condition in conditions}
    known = [share for share in shares.values() if share is not None]
    if not known:
        return None
    unknown = tuple(str(condition) for condition, share in shares.items() if share is None)
    low = sum(share[0] for share in known) - (len(known) - 1)
    return GoodputBounds(0.0 if unknown else max(0.0, low), min(share[1] for share in known), unknown)


def _share(stores: Sequence[SignalStore], condition: Condition) -> tuple[float, float] | None:
    """Least and largest share of the window's requests that may have met a condition."""
    if condition.field is RequestField.COMPLETED:
        return _completed(stores)
    signal = _SIGNALS.get(condition.field)
    if signal is None or not SIGNS[condition.op].startswith(("<", "≤")):
        return None
    merged = merge(one for store in stores if (one := store.merged(signal, grown=True)) is not None)
    if merged is None or merged.count < MIN_OBSERVATIONS:
        return None
    return within(merged, condition.value)


def within(histogram: Histogram, threshold: float) -> tuple[float, float]:
    """Least and largest share of the observations that are at most `threshold`: they differ where it isn't a bound."""
    least = max(
        (c for bound, c in zip(histogram.bounds, histogram.counts, strict=True) if bound <= threshold), default=0
    )
    most = next(c for bound, c in zip(histogram.bounds, histogram.counts, strict=True) if bound >= threshold)
    return least / histogram.count, most / histogram.count


def _completed(stores: Sequence[SignalStore]) -> tuple[float, float] | None:
    finished = [store.grown_by("finished_requests", "reason") for store in stores]
    total = sum(sum(each.values()) for each in finished)
    if total < MIN_OBSERVATIONS or not any(reason for each in finished for (reason,) in each):
        return None
    bad = sum(count for each in finished for (reason,), count in each.items() if reason in _NOT_COMPLETED)
    return (1.0 - bad / total,) * 2
