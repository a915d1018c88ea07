"""The noise budget: an hour of a healthy, bursty fleet of 200 with one death and one rolling deploy wakes nobody.

And what must wake somebody: minutes of an outage until its page. Rules of a real promtool over made-up series; loads
are Poisson around a level that bursts, as queues of independent users are.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwatch.alerts.build import RULES
from tests.alerts.promtools import promtools

pytestmark = pytest.mark.prometheus

PROMTOOL = next(iter(promtools().values()), "promtool")
MINUTES = 75
WORKERS = {"small": (100, 12.0), "medium": (60, 8.0), "large": (40, 5.0)}
"""Of three models: how many, and the mean load of each."""
DEAD, DEAD_FROM = "medium-017", 15
DEPLOY_FROM, DEPLOYED_AT_ONCE, RESTART = 20, 5, 4
"""Of the model `large`, how many restart at once, and for how many minutes each is down."""
CHECKED = [path.name for path in sorted(RULES.glob("*.yaml")) if path.stem in {
    "affinity", "cache-health", "cold-prefill", "pipeline", "router-topology", "slo", "slo-availability", "slo-ttft",
    "slo-goodput"
}]  # fmt: skip


def values(numbers: Iterable[float]) -> str:
    return " ".join("_" if np.isnan(number) else f"{number:g}" for number in numbers)


def counted(per_minute: Iterable[float]) -> str:
    return values(np.concatenate([[0.0], np.cumsum(np.round(list(per_minute)))]))


def downtime(workers: Mapping[str, tuple[int, float]]) -> dict[str, tuple[int, int]]:
    found = {DEAD: (DEAD_FROM, MINUTES + 1)}
    for position in range(workers["large"][0]):
        begun = DEPLOY_FROM + (position // DEPLOYED_AT_ONCE) * (RESTART + 1)
        found[f"large-{position:03}"] = (begun, begun + RESTART)
    return found


def healthy_fleet(workers: Mapping[str, tuple[int, float]] = WORKERS) -> dict[str, str]:
    chance = np.random.default_rng(7)
    minutes = np.arange(MINUTES + 1)
    down = downtime(workers)
    series = {}
    for model, (count, mean) in workers.items():
        level = mean * (1 + 0.6 * ((minutes % 20) < 4))  # a burst of 4 minutes every 20
        for position in range(count):
            name = f"{model}-{position:03}"
            begun, end = down.get(name, (MINUTES + 9, 0))
            up = (minutes < begun) | (minutes >= end)
            own = f'target="{name}", model="{model}"'
            gone = np.where(up, 1.0, np.nan)
            load = chance.poisson(level) * gone
            usage = np.clip(chance.normal(0.35 + 0.02 * level, 0.12), 0.02, 0.97) * gone
            series[f'prefixwatch_target_up{{{own}, system="vllm", version="0.32+"}}'] = values(up.astype(float))
            series[f"prefixwatch_worker_load_requests{{{own}}}"] = values(load)
            series[f"prefixwatch_kv_usage_ratio{{{own}}}"] = values(usage)
            series[f"prefixwatch_scrapes_total{{{own}}}"] = counted([12.0] * MINUTES)
            series[f'prefixwatch_scrape_failures_total{{{own}, reason="unreachable"}}'] = counted(12.0 * ~up[1:])
            tokens = chance.poisson(2000 * level[1:]) * up[1:]
            series[f"prefixwatch_prefix_query_tokens_total{{{own}}}"] = counted(tokens)
            series[f'prefixwatch_prefix_hit_tokens_total{{{own}, tier="gpu"}}'] = counted(0.75 * tokens)
            # A warm cache: full, evicting, and hardly anything is wanted again.
            series[f"prefixwatch_kv_blocks_resident{{{own}}}"] = values(990 * gone)
            series[f"prefixwatch_kv_capacity_blocks{{{own}}}"] = values(1000 * gone)
            series[f"prefixwatch_kv_blocks_evicted_total{{{own}}}"] = counted(tokens / 100)
            series[f"prefixwatch_kv_blocks_regretted_total{{{own}}}"] = counted(tokens / 10_000)
            stale = np.where(~up, 1.0, np.nan)
            series[f'prefixwatch_data_quality{{target="{name}", flag="stale"}}'] = values(stale)
        requests = chance.poisson(60 * level[1:] * count / 10)
        series |= requests_of(model, requests, bad=0.01)
    series['up{job="prefixwatch", instance="a"}'] = values([1.0] * (MINUTES + 1))
    series["prefixwatch_config_last_reload_successful"] = values([1.0] * (MINUTES + 1))
    for name in ("r1", "r2"):
        series[f'prefixwatch_target_up{{target="{name}", system="production-stack"}}'] = values([1.0] * (MINUTES + 1))
    return series


def requests_of(model: str, requests: Any, bad: float) -> dict[str, str]:
    own = f'model="{model}"'
    made = {
        f'prefixwatch_requests_total{{{own}, class="chat", outcome="completed"}}': counted(0.999 * requests),
        f'prefixwatch_requests_total{{{own}, class="chat", outcome="failed"}}': counted(0.001 * requests),
        f'prefixwatch_session_migrations_total{{{own}, scope="worker"}}': counted(0.05 * requests),
    }
    for slo, share in (("ttft", bad), ("goodput", bad), ("availability", 0.0001)):
        made[f'prefixwatch_slo_requests_total{{{own}, slo="{slo}", verdict="good"}}'] = counted((1 - share) * requests)
        made[f'prefixwatch_slo_requests_total{{{own}, slo="{slo}", verdict="bad"}}'] = counted(share * requests)
    return made


def fired(folder: Path, series: dict[str, str], expected: list[tuple[str, str, int]], at: int) -> None:
    """Assert which alerts fired until then, by severity, and for how many series at the most."""
    firing = f'max_over_time(ALERTS{{alertstate="firing", severity!="none"}}[{at}m])'
    query = f"count by (severity, alertname) ({firing})"
    document = {
        "rule_files": [str(RULES / name) for name in CHECKED],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": samples} for name, samples in series.items()],
                "promql_expr_test": [
                    {
                        "expr": query,
                        "eval_time": f"{at}m",
                        "exp_samples": [
                            {"labels": f'{{severity="{severity}", alertname="{name}"}}', "value": count}
                            for severity, name, count in expected
                        ],
                    }
                ],
            }
        ],
    }
    (folder / "noise.yaml").write_text(json.dumps(document))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "noise.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_a_healthy_hour_wakes_nobody_and_writes_one_ticket(tmp_path: Path) -> None:
    """Before: two pages and two tickets without end in twelve minutes of such a fleet, and 200 tickets a deploy."""
    # `DataQualityMisleading` of the same worker is silenced by its `TargetDown` (test_inhibition).
    tickets = [("ticket", "DataQualityMisleading", 1), ("ticket", "TargetDown", 1)]
    fired(tmp_path, healthy_fleet(), tickets, at=MINUTES)


@pytest.mark.parametrize("minutes", [12])
def test_a_total_outage_of_first_tokens_pages_within_12_minutes(tmp_path: Path, minutes: int) -> None:
    """All answers complete, each first token late: the burn rate alone took 43 minutes."""
    quiet = 30
    bad = np.where(np.arange(1, quiet + minutes + 1) > quiet, 1.0, 0.0)
    requests = np.full(quiet + minutes, 200.0)
    series = {
        'prefixwatch_slo_requests_total{slo="ttft", verdict="good"}': counted((1 - bad) * requests),
        'prefixwatch_slo_requests_total{slo="ttft", verdict="bad"}': counted(bad * requests),
        'up{job="prefixwatch", instance="a"}': values([1.0] * (quiet + minutes + 1)),
    }

    fired(tmp_path, series, [("page", "SloMostlyBad", 1)], at=quiet + minutes)


def test_a_dead_model_pages_within_5_minutes(tmp_path: Path) -> None:
    up = values(np.where(np.arange(36) > 30, 0.0, 1.0))
    series = {
        f'prefixwatch_target_up{{target="w{position}", model="m", system="vllm"}}': up for position in range(3)
    } | {'prefixwatch_target_up{target="other", model="n", system="vllm"}': values([1.0] * 36)}
    series['up{job="prefixwatch", instance="a"}'] = values([1.0] * 36)

    fired(tmp_path, series, [("page", "ModelWithoutWorkers", 1)], at=35)
