"""Rules without the exporter: engines that a Prometheus scrapes itself, under the exporter's names."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.alerts.build import build, known_metrics
from prefixwatch.alerts.engines import engine_records, worker_records
from prefixwatch.alerts.rule import AlertingRule, text
from prefixwatch.alerts.settings import RuleSettings
from tests.alerts.promtools import promtools

PROMTOOLS = promtools() or {"none": "promtool"}
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
    for file in FILES:
        (tmp_path / f"{file.name}.yaml").write_text(text(file))
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in engines().items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": at,
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for (expr, at), samples in EXPECTED.items()
        ],
    }
    document = {
        "rule_files": [f"{file.name}.yaml" for file in FILES],
        "evaluation_interval": "1m",
        "group_eval_order": [group.name for file in FILES for group in file.groups],
        "tests": [case],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))

    done = subprocess.run(
        [promtool, "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
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
