"""An SLO's alerts: several windows and burn rates, with the guards that keep few events from paging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefixwatch.alerts.burn_rate import BurnRate
from prefixwatch.alerts.catalogue.model import Alert, Catalogue
from prefixwatch.alerts.replicas import once
from prefixwatch.alerts.rule import AlertingRule
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.alerts.slo_records import HISTORY, REMAINING, SloRecords
from prefixwatch.documents.durations import promql
from prefixwatch.slo.buckets import le_matcher
from prefixwatch.slo.rule_model import HistogramIndicator, RatioIndicator, SloDefinition, ValueIndicator

SANITY_RATIO = 1.01
"""Good (or bad) events over all events; a little over 1 is extrapolation."""
SANITY_EVENTS = 20
MOSTLY_BAD = 0.5
MOSTLY_BAD_HOLD = "7m"
"""With the half of a 5-minute piece before it and a minute of evaluation, an outage pages after some 11 minutes."""
MOSTLY_BAD_EVENTS = 20
HISTORY_SHARE = 0.8
BUDGET_HISTORY = 1 / 30
"""A budget is judged only when this share of its window is known: a day of 30."""


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

    @property
    def on(self) -> str:
        """Labels that join two series of the SLO."""
        return self.records.on

    def rules(self) -> list[AlertingRule]:
        if self.slo.zero_tolerance:
            own: Iterable[AlertingRule] = [self._zero_tolerance()]
        else:
            burns = (self._burn(rate) for rate in self.rates)
            own = [*burns, *self._mostly_bad(), self._exhausted(), self._too_few()]
        return [*own, *self._absent(), *self._insane()]

    def _burn(self, rate: BurnRate) -> AlertingRule:
        line = f"{rate.factor:g} * {self.slo.budget:g}"
        long, short = rate.long_seconds, rate.short_seconds
        expr = (
            f"{self.records.series('bad_ratio', long)} > {line}\n"
            f"and on ({self.on}) {self.records.series('bad_ratio', short)} > {line}\n"
            f"and on ({self.on}) {self.records.series('total_events', long)} >= {self.slo.minimum_events:g}\n"
            f"and on ({self.on}) {self.records.series('bad_events', long)} >= {self.slo.minimum_bad_events:g}\n"
            f"and on ({self.on}) {self._known_for(long)}"
        )
        exhaustion = promql(round(self.slo.window_seconds / rate.factor))
        words = {
            "$long_window": promql(long),
            "$short_window": promql(short),
            "$factor": f"{rate.factor:g}",
            "$exhaustion": exhaustion,
            "$line": f"{rate.line(self.slo.budget) * 100:g} %",
        }
        name = "SloBudgetBurnFast" if rate.severity == "page" else "SloBudgetBurnSlow"  # by speed, not by severity
        labels = {"window": promql(long), "exhaustion": exhaustion}
        return self._rule(name, expr, rate.hold, words, labels)

    def _known_for(self, length_seconds: int) -> str:
        """The events have been counted for most of this time: "58 % of the last 6 h" means little after 7 minutes.

        Most, as pieces go missing while Prometheus itself restarts.
        """
        return f"{self.records.recorded(HISTORY)} >= {round(length_seconds * HISTORY_SHARE)}"

    def _mostly_bad(self) -> Iterable[AlertingRule]:
        """An outage spends 5 % of a budget of 5 % only after 36 minutes; nobody should wait for that."""
        if self.slo.severity_max != "page" or self.slo.slices is not None or self.slo.budget >= MOSTLY_BAD / 2:
            return
        if isinstance(self.slo.indicator, ValueIndicator):
            return
        base = self.records.base
        least = max(MOSTLY_BAD_EVENTS, self.slo.minimum_bad_events)
        expr = (
            f"{self.records.series('bad_ratio', base)} > {MOSTLY_BAD:g}\n"
            f"and on ({self.on}) {self.records.series('bad_events', base)} >= {least:g}"
        )
        yield self._rule("SloMostlyBad", expr, MOSTLY_BAD_HOLD, {"$mostly": f"{MOSTLY_BAD:.0%}"})

    def _exhausted(self) -> AlertingRule:
        total = self.records.series("total_events", self.records.period)
        expr = (
            f"{self.records.recorded(REMAINING)} <= 0\n"
            f"and on ({self.on}) {total} >= {self.slo.minimum_events:g}\n"
            f"and on ({self.on}) {self._known_for(round(self.slo.window_seconds * BUDGET_HISTORY))}"
        )
        return self._rule("SloBudgetExhausted", expr, "15m", {})

    def _too_few(self) -> AlertingRule:
        """What a burn alert would page on if there were more events: a ticket, so that an outage of a service with a
        trickle of traffic doesn't go unseen for days (SL04)."""
        rate = judging_rate(self.rates)
        long = rate.long_seconds
        bad, total = self.records.series("bad_events", long), self.records.series("total_events", long)
        line = f"{rate.factor:g} * {self.slo.budget:g}"
        guard = f"{total} < {self.slo.minimum_events:g}\n  or on ({self.on}) {bad} < {self.slo.minimum_bad_events:g}"
        expr = (
            f"{bad} > 0.5\n"
            f"and on ({self.on}) {self.records.series('bad_ratio', long)} > {line}\n"
            f"and on ({self.on}) (\n  {guard}\n)"
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
            replicas = self.settings.replica_labels
            grown, value = once(f"increase({bad}[1h])", replicas), once(str(bad), replicas)
            new = f"{self.records.sum(value)} unless {self.records.sum(f'{bad} offset 1h')}"
            expr = f"{self.records.sum(grown)} > 0\nor ({new}) > 0"
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
        fleet = ", ".join(self.settings.fleet)
        expr = (
            f"count by ({fleet}) ({alive} == 1)\n"
            f"and on ({fleet}) count by ({fleet}) ({alive} offset 30m == 1)\n"
            f"unless on ({fleet}) count by ({fleet}) (present_over_time({metric}[15m]))"
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
        severity = alert.severity if alert.severity != "page" else self.slo.severity_max
        made = self.settings.labels_of(alert, severity)
        made |= {"slo": self.slo.name, "service": self.slo.service, **(labels or {})}
        return AlertingRule(name, expr, hold, made, _annotations(alert, self.settings, {**words, **common}))


def judging_rate(rates: Sequence[BurnRate]) -> BurnRate:
    """The page alert with the longest window: what it can't judge for want of events gets a ticket."""
    pages = [rate for rate in rates if rate.severity == "page"] or list(rates)
    return max(pages, key=lambda rate: rate.long_seconds)


def _annotations(alert: Alert, settings: RuleSettings, words: Mapping[str, str]) -> dict[str, str]:
    return {key: _filled(text, words) for key, text in settings.annotations(alert).items()}


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
