"""Every step's query over a fleet's pages: the answer without a Prometheus is Prometheus' own."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import yaml

from prefixwatch.runbooks.page import BEFORE, at, shipped_runbooks
from prefixwatch.runbooks.promql import Sample, evaluate
from tests.runbooks.fleet_pages import CASES, fleet, pages

pytestmark = pytest.mark.prometheus

HISTOGRAMS = {
    f'{name}_bucket{{{labels}le="{bound}"}}': (0.0, count)
    for name, labels in (
        ("router_decision_seconds", 'step="tokenize",'),
        ("prefill_wait_seconds", ""),
        ("prefix_miss_cost_ratio", ""),
        ("cold_prefill_seconds", ""),
        ("warm_prefill_seconds", ""),
    )
    for bound, count in (("0.005", 300.0), ("0.1", 985.0), ("10.0", 995.0), ("+Inf", 1000.0))
}


def _rounded(value: float) -> float:
    """As PromQL's round(v, 0.000001) does it, to the last bit: promtool compares exactly."""
    inverse = 1.0 / 0.000001
    return math.floor(value * inverse + 0.5) / inverse


def _expected(sample: Sample) -> dict[str, object]:
    labels = ", ".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items() if name != "__name__")
    return {"labels": f"{{{labels}}}", "value": _rounded(sample.value)}


def test_every_step_gives_the_same_answer(tmp_path: Path) -> None:
    tests = []
    for name, (_, changes) in CASES.items():
        series = fleet({**HISTOGRAMS, **changes})
        snapshots = pages(series)
        inputs = [
            {"series": f"prefixwatch_{key}", "values": f"{first:.12g}+{(last - first) / 5:.12g}x5"}
            for key, (first, last) in series.items()
        ]
        asked = [
            {
                "expr": f"round(({at(query, '5m')}), 0.000001)",
                "eval_time": "5m",
                "exp_samples": [_expected(sample) for sample in evaluate(at(query, "5m"), snapshots)],
            }
            for step in shipped_runbooks().steps.values()
            for _, query in step.queries
            if BEFORE not in query
        ]
        tests.append({"name": name, "interval": "1m", "input_series": inputs, "promql_expr_test": asked})
    file = tmp_path / "steps.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}), encoding="utf-8")
    ran = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
