"""An SLO's recording rules: good, bad and all events in pieces, longer windows as sums of them, the budget left.

A window's bad share is its bad events over all its events. An average of ratios would give an idle night's three
requests the weight of a rush hour's thousands (sloth#241, SL01). Windows without events record nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefixwatch.alerts.burn_rate import BASE_SECONDS, BurnRate
from prefixwatch.alerts.calendar_records import PERIOD_START, period_start_rules
from prefixwatch.alerts.replicas import once
from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.documents.durations import promql
from prefixwatch.slo.buckets import le_matcher
from prefixwatch.slo.rule_model import HistogramIndicator, RatioIndicator, SloDefinition, ValueIndicator

PERIOD = "_period"
"""Stands for the window of a calendar period: prefixwatch:slo_bad_events:increase_period."""
REMAINING = "prefixwatch:slo_error_budget_remaining:ratio"
EXHAUSTION = "prefixwatch:slo_error_budget_exhaustion:seconds"
BUDGET = "prefixwatch:slo_error_budget:ratio"
"""The share of events that may be bad, a constant: a bad share over it is a burn rate, which compares objectives."""
OBJECTIVE = "prefixwatch:slo_objective:ratio"
DAYS = "prefixwatch:slo_period:days"
CURRENT_BURN_RATE = "prefixwatch:slo_current_burn_rate:ratio"
PERIOD_BURN_RATE = "prefixwatch:slo_period_burn_rate:ratio"
HISTORY = "prefixwatch:slo_history:seconds"
"""For how much of the SLO's window its events have been counted: nothing is judged by a window of a few minutes."""
INFO = "prefixwatch:slo:info"


class SloRecords:
    """The recording rules of one SLO."""

    def __init__(self, slo: SloDefinition, settings: RuleSettings) -> None:
        self.slo = slo
        self.settings = settings
        self.base = slo.slices.seconds if slo.slices else BASE_SECONDS
        self.labels = {"slo": slo.name, "service": slo.service}
        self.period = PERIOD if slo.calendar else promql(slo.window_seconds)
        self.by = ", ".join(settings.by)
        self.on = ", ".join(("slo", *settings.by))
        """Labels that join two series of the SLO."""

    def series(self, kind: str, window: str | int) -> str:
        """A series such as `prefixwatch:slo_bad_events:increase1h{…}`: good, bad and total events, or the bad ratio."""
        return self.recorded(self._name(kind, window))

    def recorded(self, name: str) -> str:
        """A recorded name with the matcher of this SLO."""
        return f'{name}{{slo="{self.slo.name}"}}'

    def sum(self, series: str) -> str:
        """Series of one instant added up by the labels that split the SLO."""
        return f"sum by ({self.by}) ({series})"

    def short(self, rates: Sequence[BurnRate]) -> list[RecordingRule]:
        """Events in pieces, and the windows below a day."""
        lengths = [length for length in _lengths(rates) if self.base < length < 86_400]
        return [*self._pieces(), *self._windows(lengths)]

    def long(self, rates: Sequence[BurnRate], pace_seconds: int) -> list[RecordingRule]:
        """The windows of a day or more, the budget's period, what is left and when it is gone.

        `pace_seconds` is the window that the present pace is taken from.
        """
        lengths = [length for length in _lengths(rates) if length >= 86_400]
        return [*self._windows(lengths), *self._period(), *self._budget(pace_seconds), *self._metadata()]

    def _pieces(self) -> Iterable[RecordingRule]:
        good, bad, total = self._events()
        yield self._record("total_events", self.base, total)
        if bad is not None:
            yield self._record("bad_events", self.base, bad)
            good = f"{self.series('total_events', self.base)} - {self.series('bad_events', self.base)}"
            yield self._record("good_events", self.base, good)
        else:
            yield self._record("good_events", self.base, good or "")
            # A scrape may come between the two rules; good > total for good is an alert of its own.
            bad = f"clamp_min({self.series('total_events', self.base)} - {self.series('good_events', self.base)}, 0)"
            yield self._record("bad_events", self.base, bad)
        yield self._ratio(self.base)

    def _events(self) -> tuple[str | None, str | None, str]:
        """Good or bad, and all events of a piece."""
        slo, window = self.slo, promql(self.base)
        if isinstance(slo.indicator, ValueIndicator):
            value = slo.indicator
            count = f"count by ({self.by})"
            held = f"{count} (({value.query}) {value.op} {value.value:g})"
            return f"{held}\nor 0 * {count} ({value.query})", None, f"{count} ({value.query})"
        good, bad, total = self._counted(slo.indicator, window)
        if slo.slices is None:
            none = f"0 * {self.series('total_events', self.base)}"
            if isinstance(slo.indicator, HistogramIndicator):
                return good, None, total
            side = good or bad or ""
            counted = f"{side}\nor on ({self.by}) {none}"
            return (counted, None, total) if good else (None, counted, total)
        none = f"or 0 * ({total})"  # a counter that doesn't exist before its first event
        share = f"({good} {none})\n/ (({total}) > 0)" if good else f"1 - (({bad} {none})\n/ (({total}) > 0))"
        whole = f"(({total}) > 0) ^ 0"
        if slo.method == "timeslices":
            return f"({share}) >= bool {slo.slices.target:g}", None, whole
        return share, None, whole

    def _counted(
        self, indicator: RatioIndicator | HistogramIndicator, window: str
    ) -> tuple[str | None, str | None, str]:
        """Good, bad and all events in `window`; one of the first two is None."""
        if isinstance(indicator, RatioIndicator):
            return (
                None if indicator.good is None else self._increase(str(indicator.good), window),
                None if indicator.bad is None else self._increase(str(indicator.bad), window),
                self._increase(str(indicator.total), window),
            )
        within, total = self._histogram(indicator, window)
        return (None, within, total) if indicator.above else (within, None, total)

    def _increase(self, selector: str, window: str) -> str:
        return self.sum(self._once(f"increase({selector}[{window}])") + self._unless_unknown())

    def _once(self, series: str) -> str:
        return once(series, self.settings.replica_labels)

    def _histogram(self, indicator: HistogramIndicator, window: str) -> tuple[str, str]:
        """Observations up to the bound, and all; of classic and native histograms, each series counted once (SL11)."""
        histogram, bound, unless = indicator.histogram, indicator.bound, self._unless_unknown()
        bucket = self._once(f"increase({histogram.with_suffix('_bucket', le_matcher(bound))}[{window}])")
        counted = self._once(f"increase({histogram.with_suffix('_count')}[{window}])")
        if not self.settings.native:
            return self.sum(f"{bucket}{unless}"), self.sum(f"{counted}{unless}")
        native = f"increase({histogram}[{window}])"
        fraction = self._once(f"histogram_fraction(-Inf, {bound:g}, {native}) * (histogram_count({native}) > 0)")
        count = self._once(f"histogram_count({native})")
        return (
            self.sum(f"\n  ({bucket} or ignoring (le) {fraction}){unless}\n"),
            self.sum(f"\n  ({counted} or {count}){unless}\n"),
        )

    def _unless_unknown(self) -> str:
        if not self.slo.unknown_while:
            return ""
        flags = "|".join(self.slo.unknown_while)
        fleet = ", ".join(label for label in self.settings.by if label != "model")
        return f'\nunless on ({fleet}) max by ({fleet}) (prefixwatch_data_quality{{flag=~"{flags}"}}) == 1'

    def _windows(self, lengths: Iterable[int]) -> Iterable[RecordingRule]:
        for length in lengths:
            for kind in ("bad_events", "total_events"):
                yield self._record(kind, length, self._sum(kind, length))
            yield self._ratio(length)

    def _sum(self, kind: str, length: int) -> str:
        """Pieces that don't overlap, `length / base` of them.

        A piece misses what grows between the last sample before it and its first, and extrapolation adds as much on
        the average: sums over many pieces are right, a single event may be missed. The range is a second short:
        Prometheus 2 counts a piece on its left edge, Prometheus 3 doesn't.
        """
        return f"sum_over_time({self.series(kind, self.base)}[{promql(length - 1)}:{promql(self.base)}])"

    def _ratio(self, window: str | int) -> RecordingRule:
        bad, total = self.series("bad_events", window), self.series("total_events", window)
        return self._record("bad_ratio", window, f"{bad}\n/ ({total} > 0)")

    def _period(self) -> Iterable[RecordingRule]:
        if self.slo.calendar is None:
            yield from self._windows([self.slo.window_seconds])
            return
        matcher = f'{{slo="{self.slo.name}"}}'
        for name, expr in period_start_rules(self.slo.calendar, self.base, matcher):
            yield RecordingRule(name, expr, self.labels)
        start = self.recorded(PERIOD_START)
        longest = self.slo.calendar.longest_seconds
        for kind in ("bad_events", "total_events"):
            pieces = f"({self.series(kind, self.base)} and on (slo) ({start} == on (slo) {start} @ end()))"
            yield self._record(kind, PERIOD, f"sum_over_time({pieces}[{promql(longest - 1)}:{promql(self.base)}])")
        yield self._ratio(PERIOD)

    def _budget(self, pace_seconds: int) -> Iterable[RecordingRule]:
        budget = f"{self.slo.budget:g}"
        yield self._constant(BUDGET, budget)
        yield RecordingRule(REMAINING, f"1 - {self.series('bad_ratio', self.period)} / {budget}", self.labels)
        left = f"clamp_min({self.recorded(REMAINING)}, 0) * {budget} * {self.series('total_events', self.period)}"
        pace = f"({self.series('bad_events', pace_seconds)} / {pace_seconds} > 0)"
        yield RecordingRule(EXHAUSTION, f"{left}\n/ {pace}", self.labels)

    def _metadata(self) -> Iterable[RecordingRule]:
        """What tools ask of any SLO, as Sloth records it under names of its own."""
        slo, budget = self.slo, f"{self.slo.budget:g}"
        yield self._constant(OBJECTIVE, f"{slo.target:g}")
        yield self._constant(DAYS, f"{slo.window_seconds / 86_400:g}")
        yield RecordingRule(CURRENT_BURN_RATE, f"{self.series('bad_ratio', self.base)} / {budget}", self.labels)
        yield RecordingRule(PERIOD_BURN_RATE, f"{self.series('bad_ratio', self.period)} / {budget}", self.labels)
        pieces = f"{self.series('total_events', self.base)}[{promql(slo.window_seconds - 1)}:{promql(self.base)}]"
        yield RecordingRule(HISTORY, f"count_over_time({pieces}) * {self.base}", self.labels)
        facts = {
            "objective": f"{slo.target * 100:g}",
            "period": promql(slo.window_seconds),
            "method": slo.method,
            "severity": self.settings.severity(slo.severity_max),
        }
        yield RecordingRule(INFO, "vector(1)", {**self.labels, **facts})

    def _constant(self, name: str, value: str) -> RecordingRule:
        """With the labels that split the SLO, so that whoever selects a cluster finds it."""
        return RecordingRule(name, f"0 * {self.series('total_events', self.base)} + {value}", self.labels)

    def _record(self, kind: str, window: str | int, expr: str) -> RecordingRule:
        return RecordingRule(self._name(kind, window), expr, self.labels)

    def _name(self, kind: str, window: str | int) -> str:
        return f"prefixwatch:slo_{kind}:increase{window if isinstance(window, str) else promql(window)}"


def _lengths(rates: Sequence[BurnRate]) -> list[int]:
    return sorted({length for rate in rates for length in (rate.short_seconds, rate.long_seconds)})
