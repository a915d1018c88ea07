"""SLO documents for rules: what of OpenSLO is read, and how every fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwatch.alerts.build import known_metrics
from prefixwatch.documents import DocumentError
from prefixwatch.slo.build import load_objectives, load_request_objectives, load_slos
from prefixwatch.slo.read import SHIPPED, shipped_names
from prefixwatch.slo.rule_model import HistogramIndicator, RatioIndicator, ValueIndicator
from tests.slo.written import FOREIGN, one, write

MISS_COST = (SHIPPED / "miss-cost.yaml").read_text(encoding="utf-8")
SESSION = (SHIPPED / "session-hit-rate.yaml").read_text(encoding="utf-8")


def test_the_shipped_slos() -> None:
    found = {slo.name: (slo.target, slo.rule) for slo in load_slos(shipped_names(), known_metrics())}

    assert found["goodput"] == (0.95, "95 % of requests: TTFT ≤ 0.5 s and TPOT ≤ 0.05 s and completed")
    assert found["ttft-very-long"][1] == "95 % of requests of prompts of 8192-32768 tokens: TTFT ≤ 5 s"
    assert found["session-hit-rate"][0] == 0.85
    assert found["miss-cost"] == (0.95, "95 % of prefixwatch_prefix_miss_cost_ratio ≤ 1.5")
    assert found["router-decision"][1].endswith('{step="total"} ≤ 0.012 s')
    assert found["prefix-tree-walk"] == (0.99, '99 % of prefixwatch_router_decision_seconds{step="lookup"} ≤ 0.005 s')
    assert found["isolation"][0] == 0.99999
    assert len(found) == 14


def test_slos_on_requests_are_graded_and_the_others_only_alerted_on() -> None:
    graded = {objective.name for objective in load_request_objectives(shipped_names())}

    assert graded == {
        *("ttft", "tpot", "goodput", "availability"),
        *("ttft-short", "ttft-medium", "ttft-long", "ttft-very-long", "ttft-huge"),
    }
    with pytest.raises(DocumentError, match="it can be used for rules but not to grade"):
        load_objectives(["miss-cost"])


def test_documents_of_others_are_read_with_what_they_refer_to(tmp_path: Path) -> None:
    slo = one(tmp_path, FOREIGN)

    assert isinstance(slo.indicator, RatioIndicator)
    assert (str(slo.indicator.bad), str(slo.indicator.total)) == (
        'http_requests_total{code=~"5.."}',
        "http_requests_total",
    )
    [condition] = slo.conditions
    assert (condition.factor, condition.long_seconds, condition.hold_seconds, condition.severity) == (
        *(10, 7200, 300),
        "page",
    )
    with pytest.raises(DocumentError, match="can be used for rules but not to grade"):
        load_objectives([tmp_path / "own.yaml"])


def test_a_value_is_compared_in_time_slices(tmp_path: Path) -> None:
    text = MISS_COST.replace("prefixwatch_prefix_miss_cost_ratio", "max(queue_depth)").replace(
        "Occurrences", "Timeslices"
    )
    text = text.replace("target: 0.95", "target: 0.99\n      timeSliceTarget: 0.9\n      timeSliceWindow: 5m")

    slo = one(tmp_path, text)

    assert slo.indicator == ValueIndicator("max(queue_depth)", "<=", 1.5)
    assert slo.slices is not None
    assert (slo.slices.seconds, slo.slices.target) == (300, 0.9)


def test_a_histogram_of_another_exporter_is_cut_at_the_bounds_it_names(tmp_path: Path) -> None:
    text = MISS_COST.replace("query: prefixwatch_prefix_miss_cost_ratio", "query: http_seconds_bucket").replace(
        "  annotations:\n", '  annotations:\n    prefixwatch.dev/buckets: "0.5, 1.5, 3"\n'
    )

    indicator = one(tmp_path, text).indicator

    assert isinstance(indicator, HistogramIndicator)
    assert (str(indicator.histogram), indicator.bound) == ("http_seconds", 1.5)


OFFICIAL = """\
apiVersion: openslo/v1
kind: SLO
metadata:
  name: service-availability
spec:
  service: web-availability
  indicator:
    metadata:
      name: web-availability
    spec:
      ratioMetric:
        good:
          metricSource:
            type: Prometheus
            spec:
              query: sum(rate(http_requests_total{code!~"5.."}[5m])) or vector(0)
        total:
          metricSource:
            type: Prometheus
            spec:
              query: http_requests_total
  timeWindow:
    - duration: 1w
      calendar:
        startTime: 2022-01-01 12:00:00
        timeZone: America/New_York
  budgetingMethod: Timeslices
  objectives:
    - displayName: Objective
      op: gt
      target: 0.9995
      timeSliceTarget: 0.95
      timeSliceWindow: 1
  alertPolicies: # none yet
"""
"""As OpenSLO's own examples are written: no counter, no isRolling, an unquoted time, bare minutes, an empty list."""


def test_a_list_of_documents_is_read_as_its_items(tmp_path: Path) -> None:
    listed = "- " + OFFICIAL.rstrip().replace("\n", "\n  ")

    assert one(tmp_path, f"{listed}\n").name == "service-availability"
    with pytest.raises(DocumentError, match=r":4: metadata\.name: .*got 'my service'"):
        one(tmp_path, listed.replace("service-availability", "my service"))


def test_openslos_own_examples_are_read(tmp_path: Path) -> None:
    slo = one(tmp_path, OFFICIAL)

    assert slo.rule.startswith("99.95 % of time slices of 1m, each good from 95 % of http_requests_total")
    assert isinstance(slo.indicator, RatioIndicator)
    assert str(slo.indicator.good) == 'http_requests_total{code!~"5.."}'
    assert slo.slices is not None
    assert (slo.slices.seconds, slo.slices.target) == (60, 0.95)
    assert slo.calendar is not None
    assert (slo.calendar.days, slo.calendar.start_local_seconds, slo.calendar.offset_seconds) == (
        *(7, 1_641_038_400),
        -18_000,
    )


def test_counter_false_is_right_of_a_rate_and_wrong_of_a_gauge(tmp_path: Path) -> None:
    """The rate of a counter goes up and down; the counter within it is what rules count."""
    rates = FOREIGN.replace("counter: true", "counter: false")

    assert isinstance(one(tmp_path, rates).indicator, RatioIndicator)
    with pytest.raises(DocumentError, match=r"count events, counter: true \(of total: 'http_requests_total'\)"):
        one(tmp_path, rates.replace("sum(rate(http_requests_total[5m]))", "http_requests_total"))


def test_a_condition_that_asks_for_little_burning_is_read_as_meant_and_said_so(tmp_path: Path) -> None:
    """OpenSLO's own example of a condition has `op: lte`."""
    slo = one(tmp_path, FOREIGN.replace("op: gte", "op: lte"))

    assert slo.conditions[0].factor == 10
    [note] = slo.notes
    assert note.startswith(f"{tmp_path / 'own.yaml'}:")
    assert note.endswith("op lte is read as gte, as a budget that isn't spent needs no alert")


def test_weights_of_a_composite_slo_are_said_not_to_count(tmp_path: Path) -> None:
    text = FOREIGN.replace("    - target: 0.99\n", "    - target: 0.99\n      compositeWeight: 2\n")

    assert one(tmp_path, text).notes == (
        "web-availability: compositeWeight is not used: every objective has a budget and alerts of its own",
    )


def test_a_bound_in_a_query_is_matched_as_every_version_writes_it(tmp_path: Path) -> None:
    """prometheus/prometheus#14485 (SL06): le="5" of others' documents would count nothing under Prometheus 3."""
    text = OFFICIAL.replace('http_requests_total{code!~"5.."}', 'http_seconds_bucket{le="5", verb="GET"}')

    indicator = one(tmp_path, text.replace("query: http_requests_total", "query: http_seconds_count")).indicator

    assert isinstance(indicator, RatioIndicator)
    assert str(indicator.good) == 'http_seconds_bucket{le=~"5([.]0)?", verb="GET"}'


def test_another_version_is_refused_in_one_message(tmp_path: Path) -> None:
    alpha = OFFICIAL.replace("openslo/v1", "openslo/v1alpha").replace("timeWindow:", "timeWindows:")

    with pytest.raises(DocumentError) as caught:
        one(tmp_path, alpha)

    assert str(caught.value) == (
        f"{tmp_path / 'own.yaml'}:1: apiVersion: should be 'openslo/v1', got 'openslo/v1alpha': in v1 queries are in "
        "indicator.spec (ratioMetric, thresholdMetric), and timeWindows {count: 30, unit: Day} is timeWindow "
        "{duration: 30d, isRolling: true}: rewrite it"
    )


QUERY = "query: prefixwatch_prefix_miss_cost_ratio"
HITS = "query: prefixwatch_session_hit_tokens_total"

FAULTS = [
    # document, old text, new text, text on the line that is named, message
    (MISS_COST, "value: 1.5", "value: 1.4", "value: 1.4",
     "1.4 is not a bucket bound of prefixwatch_prefix_miss_cost_ratio: use 1.25 or 1.5 (its bounds: 0.5, 0.75"),
    (MISS_COST, "value: 1.5", "value: 30", "value: 30",
     "30 is not a bucket bound of prefixwatch_prefix_miss_cost_ratio: use 20 "),
    (MISS_COST, QUERY, "query: prefixwatch_prefix_mis_cost_ratio_bucket", "query:",
     "no metric prefixwatch_prefix_mis_cost_ratio_bucket: did you mean 'prefixwatch_prefix_miss_cost_ratio_bucket'?"),
    (MISS_COST, QUERY, "query: 'up +'", "spec:", "not PromQL"),
    (MISS_COST, QUERY, "query: prefixwatch_sessions", "spec:", "gives values, not events"),
    (MISS_COST, "isRolling: true", "isRolling: false", "duration:", "a calendar window needs a calendar"),
    (MISS_COST, "duration: 30d", "duration: 1M", "duration:", "1M differs in length: a rolling window is given in m"),
    (MISS_COST, "target: 0.95", "target: 1.0", "op: lte", "a target of 100 % leaves no error budget"),
    (MISS_COST, "Occurrences", "Timeslices", "op: lte", "Timeslices needs timeSliceWindow here"),
    (MISS_COST, "target: 0.95", "target: 0.95\n      timeSliceWindow: 5m", "op: lte", "belong to Timeslices"),
    (SESSION, "counter: true", "counter: false", "counter:", "gauges can't be added up over time"),
    (SESSION, HITS, f'{HITS}{{tenant="a"}}', "query:", "has no label 'tenant': its labels are model,"),
    (SESSION, HITS, "query: a_total / b_total", "spec:", "is more than a counter"),
    (SESSION, HITS, f"{HITS} offset 1h", "spec:", "has offset or @: remove it, as rules put their own"),
    (SESSION, HITS, 'query: prefixwatch_prefix_miss_cost_ratio_bucket{le="1.4"}', "query:",
     "1.4 is not a bucket bound of prefixwatch_prefix_miss_cost_ratio_bucket: use 1.25 or 1.5"),
    (SESSION, "type: Prometheus", "type: Datadog", "type: Datadog", "datadog is not supported: rules are written for"),
    (SESSION, 'minimum-events: "100000"', 'minimum-events: "none"', "minimum-events", "'none' is not a number"),
    (SESSION, "prefixwatch.dev/switch", "prefixwatch.dev/swich", "annotations:", "unknown annotation"),
    (FOREIGN, "indicatorRef: web-success", "indicatorRef: web-succes", "indicatorRef:",
     "no SLI named 'web-succes': did you mean 'web-success'?"),
    (FOREIGN, "    - web-burn", "    - burn", "- burn", "no AlertPolicy named 'burn'"),
    (FOREIGN, "conditionRef: fast", "conditionRef: slow", "conditionRef: slow", "no AlertCondition named 'slow'"),
    (FOREIGN, "lookbackWindow: 2h", "lookbackWindow: 28d", "lookbackWindow", "28d is as long as the SLO's window"),
    (FOREIGN, "  name: our-prometheus", "  name: theirs", "metricSourceRef", "no DataSource named 'our-prometheus'"),
    (FOREIGN, "kind: AlertPolicy", "kind: AlertPolice", "kind: AlertPolice",
     "kind: 'AlertPolice' isn't supported in this file: did you mean 'AlertPolicy'?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "at", "message"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_fault_names_file_line_and_remedy(
    tmp_path: Path, *, text: str, old: str, new: str, at: str, message: str
) -> None:
    assert old in text
    path = write(tmp_path, text.replace(old, new, 1))

    with pytest.raises(DocumentError) as caught:
        load_slos([path], known_metrics())

    [told] = [line for line in str(caught.value).splitlines() if message in line]
    file, number, _ = told.split(":", 2)
    assert file == str(path)
    assert at in path.read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize(
    ("zone", "start", "duration", "message"),
    [
        ("Europe/Bonn", "2026-01-01", "1M", "'Europe/Bonn' is not an IANA time zone"),
        ("UTC", "2026-01-31", "1M", "can't start on day 31, which some months lack: use 1 to 28"),
        ("UTC", "2026-02-30", "1M", "'2026-02-30' day is out of range"),
        ("UTC", "2026-01-01", "36h", "36h is not a calendar window: use d, w, M"),
    ],
)
def test_calendar_windows_that_cannot_be_kept_are_refused(
    tmp_path: Path, *, zone: str, start: str, duration: str, message: str
) -> None:
    calendar = f"isRolling: false\n      calendar:\n        startTime: '{start}'\n        timeZone: {zone}"
    text = MISS_COST.replace("isRolling: true", calendar).replace("30d", duration)

    with pytest.raises(DocumentError, match=message):
        load_slos([write(tmp_path, text)])


def test_a_request_slo_may_have_any_threshold(tmp_path: Path) -> None:
    """It is counted request by request, so 0.42 s need not be a bucket bound."""
    text = (SHIPPED / "ttft.yaml").read_text().replace("value: 0.5", "value: 0.42")

    slo = one(tmp_path, text)

    assert isinstance(slo.indicator, RatioIndicator)
    assert str(slo.indicator.good) == 'prefixwatch_slo_requests_total{slo="ttft", verdict="good"}'
