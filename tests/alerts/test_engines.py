"""Rules without the exporter: engines that a Prometheus scrapes itself, under the exporter's names."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.alerts.build import build, known_metrics
from prefixwatch.alerts.engines.records import engine_records, worker_records
from prefixwatch.alerts.rule import AlertingRule, text
from prefixwatch.alerts.settings import RuleSettings
from tests.alerts.promtools import ends

PROMTOOLS = ends() or {"none": "promtool"}
FILES = build(settings=RuleSettings(source="engines"))

VLLM = 'model_name="llama", engine="%s", instance="v%s", job="vllm"'
SGLANG = 'model_name="qwen", dp_rank="0", pp_rank="0", instance="s1", job="sglang"'


def engines() -> dict[str, str]:
    series = {'up{job="sglang", instance="s1"}': "1x60", 'up{job="vllm", instance="v3"}': "1x20 0x40"}
    for instance in "12":
        series[f'up{{job="vllm", instance="v{instance}"}}'] = "1x60"
        for engine in "01":
            own = VLLM % (engine, instance)
            series |= {
                f"vllm:num_requests_running{{{own}}}": "4x60",
                f"vllm:num_requests_waiting{{{own}}}": "1x60",
                f"vllm:kv_cache_usage_perc{{{own}}}": "0.5x60" if engine == "0" else "0.7x60",
                f"vllm:prefix_cache_queries_total{{{own}}}": "0+10000x60",
                f"vllm:prefix_cache_hits_total{{{own}}}": "0+3000x60",
                # An older name beside the new one, as some releases write both: it must not count twice.
                f"vllm:gpu_prefix_cache_queries_total{{{own}}}": "0+10000x60",
                f'vllm:time_to_first_token_seconds_bucket{{{own}, le="1.0"}}': "0+80x60",
                f'vllm:time_to_first_token_seconds_bucket{{{own}, le="+Inf"}}': "0+100x60",
                f"vllm:time_to_first_token_seconds_count{{{own}}}": "0+100x60",
                f'vllm:request_success_total{{{own}, finished_reason="stop"}}': "0+99x60",
                f'vllm:request_success_total{{{own}, finished_reason="error"}}': "0+1x60",
            }
    series |= {
        f"sglang:num_running_reqs{{{SGLANG}}}": "6x60",
        f"sglang:num_queue_reqs{{{SGLANG}}}": "0x60",
        f"sglang:token_usage{{{SGLANG}}}": "0.4x60",
        f"sglang:prompt_tokens_total{{{SGLANG}}}": "0+10000x60",
        f'sglang:cached_tokens_total{{{SGLANG}, cache_source="device"}}': "0+9000x60",
        f"vllm:num_requests_running{{{VLLM % ('0', '3')}}}": "2x20 stale",
    }
    return series


EXPECTED: dict[tuple[str, str], list[tuple[str, float]]] = {
    ("round(prefixwatch:prefix_hit:ratio_rate5m, 0.001)", "30m"): [('{model="llama"}', 0.3), ('{model="qwen"}', 0.9)],
    ("prefixwatch_kv_usage_ratio", "30m"): [
        ('prefixwatch_kv_usage_ratio{engine="0", model="llama", target="v1"}', 0.5),
        ('prefixwatch_kv_usage_ratio{engine="0", model="llama", target="v2"}', 0.5),
        ('prefixwatch_kv_usage_ratio{engine="1", model="llama", target="v1"}', 0.7),
        ('prefixwatch_kv_usage_ratio{engine="1", model="llama", target="v2"}', 0.7),
        ('prefixwatch_kv_usage_ratio{engine="0", model="qwen", target="s1"}', 0.4),
    ],
    ("sum by (model) (prefixwatch_worker_load_requests)", "30m"): [('{model="llama"}', 20), ('{model="qwen"}', 6)],
    ("round(rate(prefixwatch_prefix_hit_tokens_total{model=\"qwen\"}[5m]) * 60)", "30m"): [
        ('{model="qwen", target="s1", tier="gpu"}', 9000)
    ],
    ('round(prefixwatch:slo_bad_ratio:increase5m{slo="engine-ttft"}, 0.001)', "30m"): [
        ('{service="llm-serving", slo="engine-ttft"}', 0.2)
    ],
    ('round(prefixwatch:slo_bad_ratio:increase5m{slo="engine-availability"}, 0.001)', "30m"): [
        ('{service="llm-serving", slo="engine-availability"}', 0.01)
    ],
    ('prefixwatch_target_up{model="llama"}', "30m"): [
        (f'prefixwatch_target_up{{model="llama", system="vllm", target="{name}"}}', up)
        for name, up in (("v1", 1), ("v2", 1), ("v3", 0))
    ],
    ('sum by (alertname, model) (ALERTS{alertstate="firing", alertname!~"Watchdog|Slo.*"} > 0)', "50m"): [
        ('{alertname="PrefixHitRateLow", model="llama"}', 1),
        ('{alertname="TargetDown"}', 1),
    ],
}  # fmt: skip


@pytest.mark.prometheus
@pytest.mark.parametrize("promtool", PROMTOOLS.values(), ids=PROMTOOLS)
def test_engines_alone_give_hit_rate_usage_load_objectives_and_alerts(promtool: str, tmp_path: Path) -> None:
    check(promtool, tmp_path, engines(), EXPECTED)


def figures_of(instance: str, **a_minute: float) -> dict[str, str]:
    """A vLLM page whose counters grow so much a minute."""
    own = f'model_name="llama", engine="0", instance="{instance}", job="vllm"'
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    series = {f'up{{job="vllm", instance="{instance}"}}': "1x60"}
    series |= {f"vllm:{name}{{{own}}}": "0.5x60" for name in gauges}
    return series | {f"vllm:{name}{{{own}}}": f"0+{step}x60" for name, step in a_minute.items()}


HONEST = {
    "prefix_cache_queries_total": 1000, "prefix_cache_hits_total": 900, "request_success_total": 10,
    "generation_tokens_total": 1000, "time_to_first_token_seconds_count": 10, "time_to_first_token_seconds_sum": 5,
    "e2e_request_latency_seconds_count": 10, "e2e_request_latency_seconds_sum": 30,
    "request_queue_time_seconds_count": 10, "request_queue_time_seconds_sum": 1,
}  # fmt: skip
LIES: dict[str, dict[str, float]] = {
    "impossible_ratio": {"prefix_cache_hits_total": 1100},
    "missing_observations": {"time_to_first_token_seconds_count": 9, "time_to_first_token_seconds_sum": 4.5},
    "ttft_is_whole_answer": {"time_to_first_token_seconds_sum": 30},
    "ttft_without_queue": {"request_queue_time_seconds_sum": 6},
    "implausible_latency": {"time_to_first_token_seconds_sum": 0.0005, "request_queue_time_seconds_sum": 0.0001},
}


@pytest.mark.prometheus
@pytest.mark.parametrize("promtool", PROMTOOLS.values(), ids=PROMTOOLS)
def test_engines_alone_raise_the_flags_that_their_sums_show(promtool: str, tmp_path: Path) -> None:
    """Each flag at the engine whose figures lie so, and none at an honest one; one that lost a metric misses it."""
    series = figures_of("honest", **HONEST)
    for flag, lie in LIES.items():
        series |= figures_of(flag, **(HONEST | lie))
    lost = figures_of("lost", **HONEST)
    series |= {name: values for name, values in lost.items() if "kv_cache_usage" not in name}
    series |= {f'process_start_time_seconds{{job="vllm", instance="{name}"}}': f"{at}x60"
               for name, at in (("honest", 1000), ("lost", 1200))}  # fmt: skip
    series |= {
        'process_start_time_seconds{job="node", instance="n1"}': "5000x60",
        'up{job="node", instance="n1"}': "1x60",
    }
    raised = sorted([*((flag, flag) for flag in LIES), ("missing_family", "lost")])
    check(promtool, tmp_path, series, {
        ("sum by (flag, target) (prefixwatch_data_quality)", "30m"): [
            (f'{{flag="{flag}", target="{target}"}}', 1) for flag, target in raised
        ],
        ("prefixwatch_data_quality_checks", "30m"): [("prefixwatch_data_quality_checks{}", 6 * (len(LIES) + 2))],
        ("prefixwatch_discovered_targets", "30m"): [
            ('prefixwatch_discovered_targets{discovery="vllm"}', len(LIES) + 2)
        ],
        ("prefixwatch_engine_started_seconds", "30m"): [('prefixwatch_engine_started_seconds{model="llama"}', 1200)],
    })  # fmt: skip


def check(
    promtool: str, folder: Path, series: dict[str, str], expected: dict[tuple[str, str], list[tuple[str, float]]]
) -> None:
    """The rules from engines give these samples of these series, by expression and time."""
    for file in FILES:
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
        "rule_files": [f"{file.name}.yaml" for file in FILES],
        "evaluation_interval": "1m",
        "group_eval_order": [group.name for file in FILES for group in file.groups],
        "tests": [case],
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))

    done = subprocess.run(
        [promtool, "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_every_series_has_a_name_of_the_exporters() -> None:
    names = [rule.name for rule in (*engine_records(("cluster",)), *worker_records(("cluster",)))]

    assert len(names) == len(set(names))
    assert set(names) <= set(known_metrics())


def test_alerts_that_only_records_or_events_can_raise_are_left_out() -> None:
    alerts = {r.name for file in FILES for group in file.groups for r in group.rules if isinstance(r, AlertingRule)}

    assert {"PrefixHitRateLow", "WorkerHotspot", "WorkerKvSkew", "KvCacheNearlyFull", "ModelWithoutWorkers"} <= alerts
    assert not {"ExporterDown", "IsolationViolation", "EvictionChurn", "TenantFlood", "RequestsRefused"} & alerts
