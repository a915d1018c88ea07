"""An SLO's alerts: several windows and burn rates, with the guards that keep few events from paging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alerts.burn_rate import BurnRate
from alerts.catalogue import Alert, Catalogue
from alerts.labels import Labels
from alerts.rule import AlertingRule
from alerts.settings import RuleSettings
from alerts.slo_records import REMAINING, SloRecords
from slo.buckets import le_matcher
from slo.definition import HistogramIndicator, RatioIndicator, SloDefinition, ValueIndicator
from slo.window import promql

SANITY_RATIO = 1.01
"""Good (or bad) events over all events; a little over 1 is extrapolation."""
SANITY_EVENTS = 20


@dataclass(frozen=True, slots=True)
class SloAlerts:
    """The alerting rules of one SLO."""

    records: SloRecords
    rates: Sequence[BurnRate]
    catalogue: Catalogue
    settings: RuleSettings

    @property
    def slo(self) -> SloDefinition:
        return self.records.slo

    def rules(self) -> list[AlertingRule]:
        if self.slo.zero_tolerance:
            own: Iterable[AlertingRule] = [self._zero_tolerance()]
        else:
            own = [*(self._burn(rate) for rate in self.rates), self._exhausted(), self._too_few()]
        return [*own, *self._absent(), *self._insane()]

    def _burn(self, rate: BurnRate) -> AlertingRule:
        line = f"{rate.factor:g} * {self.slo.budget:g}"
        long, short = rate.long_seconds, rate.short_seconds
        expr = (
            f"{self.records.series('bad_ratio', long)} > {line}\n"
            f"and on (slo) {self.records.series('bad_ratio', short)} > {line}\n"
            f"and on (slo) {self.records.series('total_events', long)} >= {self.slo.minimum_events:g}\n"
            f"and on (slo) {self.records.series('bad_events', long)} >= {self.slo.minimum_bad_events:g}"
        )
        exhaustion = promql(self.slo.window_seconds / rate.factor)
        words = {
            "$long_window": promql(long),
            "$short_window": promql(short),
            "$factor": f"{rate.factor:g}",
            "$exhaustion": exhaustion,
            "$line": f"{rate.line(self.slo.budget) * 100:g} %",
        }
        name = "SloBudgetBurnFast" if rate.severity == "page" else "SloBudgetBurnSlow"
        labels = {"window": promql(long), "exhaustion": exhaustion}
        return self._rule(name, expr, rate.hold, words, labels)

    def _exhausted(self) -> AlertingRule:
        total = self.records.series("total_events", self.records.period)
        expr = f"{self.records.budget_series(REMAINING)} <= 0\nand on (slo) {total} >= {self.slo.minimum_events:g}"
        return self._rule("SloBudgetExhausted", expr, "15m", {})

    def _too_few(self) -> AlertingRule:
        """What a burn alert would page on if there were more events: a ticket, so that an outage of a service with a
        trickle of traffic doesn't go unseen for days (SL04)."""
        rate = judging_rate(self.rates)
        long = rate.long_seconds
        bad, total = self.records.series("bad_events", long), self.records.series("total_events", long)
        line = f"{rate.factor:g} * {self.slo.budget:g}"
        guard = f"{total} < {self.slo.minimum_events:g}\n  or on (slo) {bad} < {self.slo.minimum_bad_events:g}"
        expr = (
            f"{bad} > 0.5\nand on (slo) {self.records.series('bad_ratio', long)} > {line}\nand on (slo) (\n  {guard}\n)"
        )
        words = {
            "$long_window": promql(long),
            "$minimum": f"{self.slo.minimum_events:g}",
            "$least_bad": f"{self.slo.minimum_bad_events:g}",
        }
        return self._rule("SloTooFewEventsToJudge", expr, "15m", words, {"window": promql(long)})

    def _zero_tolerance(self) -> AlertingRule:
        """A counter that is born with its first event has no increase, so a new series counts by its value."""
        indicator = self.slo.indicator
        if isinstance(indicator, RatioIndicator) and indicator.bad is not None:
            bad = indicator.bad
            expr = f"sum(increase({bad}[1h])) > 0\nor (sum({bad}) unless sum({bad} offset 1h)) > 0"
        else:
            expr = f"sum_over_time({self.records.series('bad_events', self.records.base)}[59m59s:5m]) > 0"
        return self._rule("SloZeroToleranceBroken", expr, "0m", {})

    def _absent(self) -> Iterable[AlertingRule]:
        """Not on a fresh deploy: counters may only exist after the first request (SL05)."""
        if not (self.slo.absent_alert and self.settings.absent_alerts) or isinstance(
            self.slo.indicator, ValueIndicator
        ):
            return
        metric = _needed(self.slo.indicator)
        alive = "prefixwatch_target_up" if metric.startswith("prefixwatch_") else "up"
        expr = (
            f"absent_over_time({metric}[15m])\n"
            f"and on () count({alive} == 1) > 0\n"
            f"and on () count({alive} offset 30m == 1) > 0"
        )
        yield self._rule("SloMetricAbsent", expr, "15m", {"$metric": metric, "$switch": self.slo.switch})

    def _insane(self) -> Iterable[AlertingRule]:
        if self.slo.slices is not None:
            return
        side = "bad" if isinstance(self.slo.indicator, RatioIndicator) and self.slo.indicator.bad else "good"
        part, total = (
            self.records.series(f"{side}_events", self.records.base),
            self.records.series("total_events", self.records.base),
        )
        expr = f"{part} / ({total} >= {SANITY_EVENTS}) > {SANITY_RATIO}"
        yield self._rule("SloGoodExceedsTotal", expr, "10m", {"$side": side})

    def _rule(
        self, name: str, expr: str, hold: str, words: Mapping[str, str], labels: Mapping[str, str] | None = None
    ) -> AlertingRule:
        alert = self.catalogue.alert(name)
        common = {"$title": self.slo.title, "$rule": self.slo.rule, "$window": promql(self.slo.window_seconds)}
        made = Labels(self.settings).of(alert)
        made |= {"slo": self.slo.name, "service": self.slo.service, **(labels or {})}
        return AlertingRule(name, expr, hold, made, _annotations(alert, self.settings, {**words, **common}))


def judging_rate(rates: Sequence[BurnRate]) -> BurnRate:
    """The page alert with the longest window: what it can't judge for want of events gets a ticket."""
    pages = [rate for rate in rates if rate.severity == "page"] or list(rates)
    return max(pages, key=lambda rate: rate.long_seconds)


def _annotations(alert: Alert, settings: RuleSettings, words: Mapping[str, str]) -> dict[str, str]:
    return {key: _filled(text, words) for key, text in Labels(settings).annotations(alert).items()}


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Longest names first, as one may begin with another. What looks like a template in a document's words is none."""
    for name in sorted(words, key=len, reverse=True):
        text = text.replace(name, words[name].replace("{{", '{{ "{{" }}'))
    return text


def _needed(indicator: RatioIndicator | HistogramIndicator) -> str:
    """The series without which nothing is counted. A histogram without the bucket would count nothing as good."""
    if isinstance(indicator, HistogramIndicator):
        return indicator.histogram.with_suffix("_bucket", le_matcher(indicator.bound))
    return str(indicator.total)
