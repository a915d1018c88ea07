"""Rules over several clusters, HA pairs and shards, under real promtools; and what `slo build` adds to every rule."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.alerts.build import build
from prefixwatch.alerts.replicas import deduplicated
from prefixwatch.alerts.rule import AlertingRule, RecordingRule, Rule, text
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.documents.errors import InputError
from tests.alerts.promtools import ends

PROMTOOLS = ends() or {"none": "promtool"}
promtool_of_each = pytest.mark.parametrize("promtool", PROMTOOLS.values(), ids=PROMTOOLS)


def ask(
    promtool: str,
    folder: Path,
    files: Sequence[str],
    series: dict[str, str],
    expected: dict[tuple[str, str], list[tuple[str, float]]],
    *,
    settings: RuleSettings | None = None,
) -> None:
    """The named rule files over `series`, a sample a minute: each (expression, time) has exactly these samples."""
    made = [file for file in build(["ttft", "availability"], settings) if file.name in files]
    assert [file.name for file in made] == list(files)
    for file in made:
        (folder / f"{file.name}.yaml").write_text(text(file))
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": at,
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for (expr, at), samples in expected.items()
        ],
    }
    document = {
        "rule_files": [f"{name}.yaml" for name in files],
        "evaluation_interval": "1m",
        "group_eval_order": [group.name for file in made for group in file.groups],
        "tests": [case],
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [promtool, "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


FIRING = 'sum by (alertname, cluster, model) (ALERTS{alertstate="firing"} > 0)'


@pytest.mark.prometheus
@promtool_of_each
def test_two_clusters_in_one_ruler_are_judged_apart(promtool: str, tmp_path: Path) -> None:
    """B7, N22: a cluster at 10 % hits beside one at 90 % came out as one series at 82.7 %, and no alert."""
    series = {
        'prefixwatch_prefix_query_tokens_total{cluster="a", model="m", target="w"}': "0+10000x60",
        'prefixwatch_prefix_hit_tokens_total{cluster="a", model="m", target="w", tier="gpu"}': "0+1000x60",
        'prefixwatch_prefix_query_tokens_total{cluster="b", model="m", target="w"}': "0+100000x60",
        'prefixwatch_prefix_hit_tokens_total{cluster="b", model="m", target="w", tier="gpu"}': "0+90000x60",
        'prefixwatch_slo_requests_total{cluster="a", slo="ttft", verdict="bad"}': "0+100x60",
        'prefixwatch_slo_requests_total{cluster="b", slo="ttft", verdict="good"}': "0+100x60",
    }

    ask(
        promtool,
        tmp_path,
        ["cache-health", "slo-ttft"],
        series,
        {
            ("round(prefixwatch:prefix_hit:ratio_rate5m, 0.001)", "40m"): [
                ('{cluster="a", model="m"}', 0.1),
                ('{cluster="b", model="m"}', 0.9),
            ],
            ('prefixwatch:slo_bad_ratio:increase5m', "40m"): [
                (f'prefixwatch:slo_bad_ratio:increase5m{{cluster="{name}", service="llm-serving", slo="ttft"}}', bad)
                for name, bad in (("a", 1), ("b", 0))
            ],
            (FIRING, "40m"): [
                ('{alertname="PrefixHitRateLow", cluster="a", model="m"}', 1),
                ('{alertname="SloMostlyBad", cluster="a"}', 1),
            ],
        },
    )  # fmt: skip


@pytest.mark.prometheus
@promtool_of_each
def test_an_ha_pair_counts_once_and_shards_add_up(promtool: str, tmp_path: Path) -> None:
    """B5: two exporters over one fleet doubled every count. Shards have different targets, and must add up."""
    slo = 'prefixwatch_slo_requests_total{shard="%s", replica="%s", slo="ttft", verdict="good"}'
    hits = 'prefixwatch_prefix_hit_tokens_total{shard="%s", replica="%s", target="w%s", tier="gpu"}'
    series = {slo % (shard, replica): "0+60x30" for shard in "12" for replica in "ab"}
    series |= {hits % (shard, replica, shard): "0+600x30" for shard in "12" for replica in "ab"}
    query = {
        name.replace("_hit_", "_query_").replace(', tier="gpu"', ""): "0+1000x30" for name in series if "hit" in name
    }

    ask(
        promtool,
        tmp_path,
        ["cache-health", "slo-ttft"],
        series | query,
        {
            ("round(sum(prefixwatch:slo_total_events:increase5m))", "20m"): [("{}", 600)],
            ("round(prefixwatch:prefix_hit:ratio_rate5m, 0.001)", "20m"): [("{}", 0.6)],
        },
        settings=RuleSettings(replica_labels=("replica",)),
    )


@pytest.mark.prometheus
@promtool_of_each
def test_a_budget_is_split_by_the_labels_asked_for(promtool: str, tmp_path: Path) -> None:
    """B2: one TTFT objective over three models hides the one that is missed."""
    series = {
        'prefixwatch_slo_requests_total{model="small", slo="ttft", verdict="good"}': "0+1000x30",
        'prefixwatch_slo_requests_total{model="large", slo="ttft", verdict="bad"}': "0+20x30",
    }
    firing = 'sum by (alertname, model) (ALERTS{alertstate="firing", severity="page"} > 0)'

    ask(promtool, tmp_path, ["slo-ttft"], series, {(firing, "20m"): []})
    ask(
        promtool,
        tmp_path,
        ["slo-ttft"],
        series,
        {(firing, "20m"): [('{alertname="SloMostlyBad", model="large"}', 1)]},
        settings=RuleSettings(by=("cluster", "model")),
    )


def rules(settings: RuleSettings) -> list[Rule]:
    return [rule for file in build(["ttft"], settings) for group in file.groups for rule in group.rules]


def test_labels_and_severities_of_the_organisation_are_on_every_alert() -> None:
    settings = RuleSettings(labels={"team": "inference"}, severities={"page": "critical", "ticket": "warning"})

    alerts = [rule for rule in rules(settings) if isinstance(rule, AlertingRule)]

    assert {alert.labels["team"] for alert in alerts} == {"inference"}
    assert {alert.labels["severity"] for alert in alerts} == {"critical", "warning", "none"}


def test_only_what_users_feel_pages() -> None:
    pages = {
        (rule.name, rule.labels.get("slo"))
        for file in build()
        for group in file.groups
        for rule in group.rules
        if isinstance(rule, AlertingRule) and rule.labels["severity"] == "page"
    }

    objectives = {"availability", "goodput", "tpot", "ttft"}
    assert pages == {
        *((name, slo) for name in ("SloBudgetBurnFast", "SloMostlyBad") for slo in objectives),
        *((name, None) for name in ("ModelWithoutWorkers", "WorkersDown", "RouterDown", "ExporterDown")),
        ("IsolationViolation", None),
    }


@pytest.mark.parametrize("source", ["exporter", "engines"])
def test_mimirs_default_limits_are_kept(source: str) -> None:
    """ruler_max_rules_per_rule_group is 20, ruler_max_rule_groups_per_tenant 70."""
    groups = [group for file in build(settings=RuleSettings(source=source)) for group in file.groups]

    assert max(len(group.rules) for group in groups) <= 20
    assert len(groups) <= 70


def test_series_that_sloth_has_are_recorded_under_our_own_names() -> None:
    records = {rule.name: rule for rule in rules(RuleSettings()) if isinstance(rule, RecordingRule)}

    assert records["prefixwatch:slo:info"].labels == {
        "slo": "ttft",
        "service": "llm-serving",
        "objective": "95",
        "period": "30d",
        "method": "occurrences",
        "severity": "page",
    }
    assert records["prefixwatch:slo_objective:ratio"].expr.endswith(" + 0.95")
    assert records["prefixwatch:slo_period:days"].expr.endswith(" + 30")
    assert records["prefixwatch:slo_current_burn_rate:ratio"].expr == (
        'prefixwatch:slo_bad_ratio:increase5m{slo="ttft"} / 0.05'
    )
    assert all(name.startswith("prefixwatch:") and name.count(":") == 2 for name in records)


def test_what_a_pager_cannot_open_or_prometheus_does_not_keep_is_refused() -> None:
    with pytest.raises(InputError, match="--runbooks runbooks: a pager needs an absolute address"):
        RuleSettings(runbook_base="runbooks")
    with pytest.raises(InputError, match="--dashboards /d: a pager needs an absolute address"):
        RuleSettings(dashboard_base="/d")
    with pytest.raises(
        InputError, match=r"ttft.yaml:\d+: a window of 30d is longer than Prometheus keeps samples \(15d\)"
    ):
        build(["ttft"], RuleSettings(retention_seconds=15 * 86_400))
    with pytest.raises(InputError, match="'team-name' is not a label name"):
        RuleSettings(labels={"team-name": "x"})
    with pytest.raises(InputError, match="--severity-map info=…: the severities are page and ticket"):
        RuleSettings(severities={"info": "x"})


@pytest.mark.parametrize(
    ("expr", "once"),
    [
        ("sum by (a) (rate(x_total[5m]))", "sum by (a) (max without (replica) (rate(x_total[5m])))"),
        ('sum(increase(x{m=")"}[5m]) unless y)', 'sum(max without (replica) (increase(x{m=")"}[5m])) unless y)'),
        # both replicas' probes are sent
        ("sum(increase(prefixwatch_probe_tokens_total[5m]))", "sum(increase(prefixwatch_probe_tokens_total[5m]))"),
        ("count by (a) (prefixwatch_target_up)", "count by (a) (max without (replica) (prefixwatch_target_up))"),
        ("max by (a) (prefixwatch_kv_usage_ratio)", "max by (a) (prefixwatch_kv_usage_ratio)"),
    ],
)
def test_what_two_replicas_count_is_taken_once(expr: str, once: str) -> None:
    assert deduplicated(expr, ["replica"]) == once
    assert deduplicated(expr, []) == expr
