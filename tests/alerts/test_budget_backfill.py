"""30-day budgets over backfilled data, in a real Prometheus: event-weighted, they equal the exact count.

The traffic is uneven on purpose: a rush hour each day with few bad events, and nights of three requests of which one is
bad. An average of hourly ratios gives a night as much weight as the rush, and calls the budget spent.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from prefixwatch.alerts.build import build
from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.engines.process import free_port

pytestmark = pytest.mark.prometheus

DAYS = 30
END = 1_767_225_600
"""2026-01-01 00:00 UTC; a multiple of 5 minutes."""
START = END - DAYS * 86_400
STEP = 60
RUSH, NIGHT = (12, 14), (0, 8)
COUNTER = "prefixwatch_slo_requests_total"


def increments() -> Iterator[tuple[int, int, int]]:
    """Time, good and bad events since the minute before."""
    for minute in range(DAYS * 1440):
        hour, of_hour = minute // 60 % 24, minute % 60
        # Not where two pieces meet: Prometheus 3 doesn't see what grows there.
        if RUSH[0] <= hour < RUSH[1]:
            good, bad = 1000, 2
        elif NIGHT[0] <= hour < NIGHT[1]:
            good, bad = int(of_hour in (13, 33)), int(of_hour == 43)
        else:
            good, bad = 100, 0
        yield START + (minute + 1) * STEP, good, bad


def exact_remaining(budget: float) -> float:
    good = sum(one[1] for one in increments())
    bad = sum(one[2] for one in increments())
    return 1 - bad / (good + bad) / budget


def average_of_hourly_ratios() -> float:
    hours: dict[int, list[int]] = {}
    for at, good, bad in increments():
        hour = hours.setdefault((at - 1) // 3600, [0, 0])
        hour[0] += good
        hour[1] += bad
    return sum(bad / (good + bad) for good, bad in hours.values()) / len(hours)


def counters() -> str:
    """OpenMetrics of the exporter's counters, a sample a minute."""
    lines: dict[str, list[str]] = {"good": [], "bad": []}
    count = {"good": 0, "bad": 0}
    for at, good, bad in increments():
        for verdict, more in (("good", good), ("bad", bad)):
            count[verdict] += more
            lines[verdict].append(f'{COUNTER}{{slo="ttft",verdict="{verdict}"}} {count[verdict]} {at}')
    first = [f'{COUNTER}{{slo="ttft",verdict="{verdict}"}} 0 {START}' for verdict in ("good", "bad")]
    samples = [first[0], *lines["good"], first[1], *lines["bad"]]
    return "\n".join([f"# TYPE {COUNTER.removesuffix('_total')} counter", *samples, "# EOF", ""])


def inlined(rules: Mapping[str, str], name: str) -> str:
    """A rule's expression with those of the rules that it reads in their places."""
    expr = rules[name]
    for other in sorted(rules, key=len, reverse=True):
        series = f'{other}{{slo="ttft"}}'
        if series in expr:
            expr = expr.replace(series, f"({inlined(rules, other)})")
    return expr


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """Address of a Prometheus over the backfilled blocks."""
    (tmp_path / "counters.om").write_text(counters())
    (tmp_path / "prometheus.yml").write_text("global: {scrape_interval: 1m}\n")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=744h", "-q"]
    subprocess.run([*command, str(tmp_path / "counters.om"), str(tmp_path / "data")], check=True, capture_output=True)
    port = free_port()
    process = subprocess.Popen(
        [
            shutil.which("prometheus") or "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            "--storage.tsdb.retention.time=20y",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def ask(url: str, query: str) -> float:
    """The one value of an instant query at the end of the data."""
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query, 'time': END})}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        [result] = json.load(answer)["data"]["result"]
    return float(result["value"][1])


def test_the_budget_equals_the_exact_count_and_not_the_average_of_ratios(prometheus: str) -> None:
    rules = {
        rule.name: rule.expr
        for file in build(["ttft"])
        if file.name == "slo-ttft"
        for group in file.groups
        for rule in group.rules
        if isinstance(rule, RecordingRule)
    }
    bad = ask(prometheus, inlined(rules, "prefixwatch:slo_bad_events:increase30d"))
    total = ask(prometheus, inlined(rules, "prefixwatch:slo_total_events:increase30d"))
    counted = [sum(one[2] for one in increments()), sum(one[1] + one[2] for one in increments())]

    average = 1 - average_of_hourly_ratios() / 0.05

    # Prometheus 3 extrapolates over a sample that 2 counts on the left edge of a range.
    tolerance = 1e-9 if prometheus_major() < 3 else 0.01
    assert [bad, total] == pytest.approx(counted, rel=tolerance)
    assert 1 - bad / total / 0.05 == pytest.approx(exact_remaining(0.05), rel=tolerance)
    assert exact_remaining(0.05) > 0.9
    assert average < 0, "the average of ratios would call the budget spent"


def prometheus_major() -> int:
    told = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True)
    return int((told.stdout or told.stderr).split()[2].split(".")[0])
