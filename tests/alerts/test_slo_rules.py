"""From one definition to its rules, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwatch.alerts.build import build, slo_file
from prefixwatch.alerts.burn_rate import burn_rates
from prefixwatch.alerts.catalogue.model import load_catalogue
from prefixwatch.alerts.rule import AlertingRule, RuleFile, prometheus_rule
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.alerts.slo_records import SloRecords
from prefixwatch.documents.errors import InputError
from prefixwatch.slo.build import load_slos
from prefixwatch.slo.read import SHIPPED
from prefixwatch.slo.rule_model import SloDefinition

MISS_COST = (SHIPPED / "miss-cost.yaml").read_text(encoding="utf-8")
CALENDAR = "isRolling: false\n      calendar:\n        startTime: '2026-01-01'\n        timeZone: UTC"


def records(definition: SloDefinition) -> dict[str, str]:
    own = SloRecords(definition, RuleSettings())
    rates = burn_rates(definition)
    return {rule.name: rule.expr for rule in [*own.short(rates), *own.long(rates, 21_600)]}


def loaded(folder: Path, text: str) -> SloDefinition:
    path = folder / "own.yaml"
    path.write_text(text)
    [definition] = load_slos([path])
    return definition


def alerts(file: RuleFile) -> dict[str, AlertingRule]:
    return {r.name: r for group in file.groups for r in group.rules if isinstance(r, AlertingRule)}


def test_requests_are_counted_by_verdict() -> None:
    [ttft] = load_slos(["ttft"])

    made = records(ttft)

    assert (
        made["prefixwatch:slo_total_events:increase5m"]
        == 'sum by (cluster) (increase(prefixwatch_slo_requests_total{slo="ttft"}[5m]))'
    )
    assert made["prefixwatch:slo_good_events:increase5m"] == (
        'sum by (cluster) (increase(prefixwatch_slo_requests_total{slo="ttft", verdict="good"}[5m]))\n'
        'or on (cluster) 0 * prefixwatch:slo_total_events:increase5m{slo="ttft"}'
    )


def test_a_long_window_is_a_sum_of_events_and_never_an_average_of_ratios() -> None:
    """slok/sloth#241, #332, #618, #656."""
    [ttft] = load_slos(["ttft"])

    made = records(ttft)

    assert made["prefixwatch:slo_bad_events:increase30d"] == (
        'sum_over_time(prefixwatch:slo_bad_events:increase5m{slo="ttft"}[29d23h59m59s:5m])'
    )
    assert made["prefixwatch:slo_bad_ratio:increase30d"] == (
        'prefixwatch:slo_bad_events:increase30d{slo="ttft"}\n'
        '/ (prefixwatch:slo_total_events:increase30d{slo="ttft"} > 0)'
    )
    assert (
        made["prefixwatch:slo_error_budget_remaining:ratio"]
        == '1 - prefixwatch:slo_bad_ratio:increase30d{slo="ttft"} / 0.05'
    )
    assert not any("avg_over_time" in expr for expr in made.values())


def test_a_histogram_is_cut_at_its_bound_classic_and_native() -> None:
    """grafana/jsonnet-libs#1121 (SL11): half of a fleet on native histograms is counted too, and none twice."""
    [miss_cost] = load_slos(["miss-cost"])

    assert records(miss_cost)["prefixwatch:slo_good_events:increase5m"] == (
        "sum by (cluster) (\n"
        '  (increase(prefixwatch_prefix_miss_cost_ratio_bucket{le="1.5"}[5m]) or ignoring (le) '
        "histogram_fraction(-Inf, 1.5, increase(prefixwatch_prefix_miss_cost_ratio[5m])) * "
        "(histogram_count(increase(prefixwatch_prefix_miss_cost_ratio[5m])) > 0))\n"
        ")"
    )


def test_an_integer_bound_matches_both_spellings(tmp_path: Path) -> None:
    """prometheus/prometheus#14485 (SL06)."""
    definition = loaded(tmp_path, MISS_COST.replace("value: 1.5", "value: 2"))

    assert 'le=~"2([.]0)?"' in records(definition)["prefixwatch:slo_good_events:increase5m"]


def test_a_calendar_month_counts_from_its_first_day(tmp_path: Path) -> None:
    text = MISS_COST.replace("duration: 30d", "duration: 1M").replace("isRolling: true", CALENDAR)

    made = records(loaded(tmp_path, text))

    assert made["prefixwatch:slo_period_start:timestamp_seconds"] == (
        "vector((time() - 300) - (time() - 300) % 86400) - (day_of_month(vector((time() - 300))) - 1) * 86400"
    )
    start = 'prefixwatch:slo_period_start:timestamp_seconds{slo="miss-cost"}'
    assert made["prefixwatch:slo_bad_events:increase_period"] == (
        f'sum_over_time((prefixwatch:slo_bad_events:increase5m{{slo="miss-cost"}} and on (slo) ({start} == '
        f"on (slo) {start} "
        "@ end()))[30d23h59m59s:5m])"
    )


def test_time_slices_are_events(tmp_path: Path) -> None:
    text = MISS_COST.replace("Occurrences", "Timeslices").replace(
        "target: 0.95", "target: 0.99\n      timeSliceTarget: 0.95\n      timeSliceWindow: 10m"
    )

    made = records(loaded(tmp_path, text))

    assert made["prefixwatch:slo_total_events:increase10m"].endswith("> 0) ^ 0")
    assert made["prefixwatch:slo_good_events:increase10m"].endswith(">= bool 0.95")
    assert made["prefixwatch:slo_bad_events:increase1h"] == (
        'sum_over_time(prefixwatch:slo_bad_events:increase10m{slo="miss-cost"}[59m59s:10m])'
    )


def test_a_burn_alert_needs_events_and_bad_events() -> None:
    """pyrra-dev/pyrra#1925 (SL03)."""
    [ttft] = load_slos(["ttft"])

    file = slo_file(ttft, load_catalogue(), RuleSettings())

    [fast, *_] = [r for group in file.groups for r in group.rules if isinstance(r, AlertingRule)]
    assert (fast.name, fast.hold) == ("SloBudgetBurnFast", "2m")
    assert fast.expr == (
        'prefixwatch:slo_bad_ratio:increase1h{slo="ttft"} > 14.4 * 0.05\n'
        'and on (slo, cluster) prefixwatch:slo_bad_ratio:increase5m{slo="ttft"} > 14.4 * 0.05\n'
        'and on (slo, cluster) prefixwatch:slo_total_events:increase1h{slo="ttft"} >= 100\n'
        'and on (slo, cluster) prefixwatch:slo_bad_events:increase1h{slo="ttft"} >= 5\n'
        'and on (slo, cluster) prefixwatch:slo_history:seconds{slo="ttft"} >= 2880'
    )
    assert fast.labels == {
        "severity": "page",
        "cause": "false",
        "group": "slo",
        "slo": "ttft",
        "service": "llm-serving",
        "window": "1h",
        "exhaustion": "2d2h",
    }


def test_nothing_is_counted_while_the_data_are_known_to_mislead(tmp_path: Path) -> None:
    """vllm-project/vllm#6337 (EM20): an SLO over a broken clock is unknown, not 100 % good."""
    flags = "  annotations:\n    prefixwatch.dev/unknown-while: implausible_latency, stuck_in_one_bucket\n"

    made = records(loaded(tmp_path, MISS_COST.replace("  annotations:\n", flags)))

    unless = (
        "\nunless on (cluster) max by (cluster) "
        '(prefixwatch_data_quality{flag=~"implausible_latency|stuck_in_one_bucket"}) == 1\n)'
    )
    assert made["prefixwatch:slo_good_events:increase5m"].endswith(unless)
    assert made["prefixwatch:slo_total_events:increase5m"].endswith(unless)


def test_what_must_never_happen_has_no_burn_rate() -> None:
    [isolation] = load_slos(["isolation"])

    found = alerts(slo_file(isolation, load_catalogue(), RuleSettings()))

    assert set(found) == {"SloZeroToleranceBroken", "SloMetricAbsent", "SloGoodExceedsTotal"}


def test_absence_alerts_can_be_switched_off(tmp_path: Path) -> None:
    off = MISS_COST.replace("  annotations:\n", "  annotations:\n    prefixwatch.dev/absent-alert: 'off'\n")

    assert "SloMetricAbsent" not in alerts(slo_file(loaded(tmp_path, off), load_catalogue(), RuleSettings()))
    [slo] = load_slos(["ttft"])
    assert "SloMetricAbsent" not in alerts(slo_file(slo, load_catalogue(), RuleSettings(absent_alerts=False)))


def test_rules_for_drills_are_sped_up_throughout() -> None:
    files = {file.name: file for file in build(settings=RuleSettings(speedup=60))}

    [fast, *_] = [r for group in files["slo-ttft"].groups for r in group.rules if isinstance(r, AlertingRule)]
    hotspot = alerts(files["affinity"])["TenantFlood"]
    assert fast.hold == "2s"
    assert "[5s] offset 1m" in hotspot.expr
    assert {group.interval for file in files.values() for group in file.groups} == {"1s", "2s"}
    remaining = next(
        r for g in files["slo-ttft"].groups for r in g.rules if r.name == "prefixwatch:slo_bad_events:increase1h"
    )
    assert remaining.expr == 'sum_over_time(prefixwatch:slo_bad_events:increase5m{slo="ttft"}[59s983ms:5s])'


def test_a_scrape_interval_too_long_for_the_ranges_is_refused() -> None:
    with pytest.raises(InputError, match=r"a scrape interval of 90 s leaves too few samples: .* scrape every 75 s"):
        RuleSettings(scrape_interval_seconds=90)


def test_a_window_of_hours_is_refused(tmp_path: Path) -> None:
    definition = loaded(tmp_path, MISS_COST.replace("duration: 30d", "duration: 2h"))

    with pytest.raises(InputError, match=r"own.yaml:\d+: a window of 2h is too short to alert on: use 1d or more"):
        slo_file(definition, load_catalogue(), RuleSettings())


def test_a_prometheus_rule_object_has_the_same_rules() -> None:
    [file] = [file for file in build() if file.name == "slo-ttft"]

    made = prometheus_rule(file)

    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert made["metadata"]["name"] == "prefixwatch-slo-ttft"
    assert [len(group["rules"]) for group in made["spec"]["groups"]] == [len(group.rules) for group in file.groups]


def test_two_objectives_never_share_a_file(tmp_path: Path) -> None:
    """Objectives of one SLO are numbered, and another may bear such a name: one would silently replace the other."""
    two = MISS_COST + "    - op: lte\n      value: 3\n      target: 0.99\n"
    (tmp_path / "own.yaml").write_text(two + "---\n" + MISS_COST.replace("name: miss-cost", "name: miss-cost-0", 1))

    with pytest.raises(
        InputError, match=r"own.yaml:\d+: miss-cost-0 would have the file of miss-cost/0 .*: rename one"
    ):
        build([tmp_path / "own.yaml"])


def test_words_of_a_document_are_no_templates(tmp_path: Path) -> None:
    text = MISS_COST.replace("displayName: Cost of a miss", "displayName: 'Cost of {{ a }} miss'", 1)

    found = alerts(slo_file(loaded(tmp_path, text), load_catalogue(), RuleSettings()))

    assert found["SloBudgetExhausted"].annotations["summary"] == (
        'Cost of {{ "{{" }} a }} miss: the error budget is used up'
    )
