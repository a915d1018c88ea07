"""The variant for VictoriaMetrics on a real one: every rule runs, and vmalert records what Prometheus records."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwatch.alerts.build import build
from prefixwatch.alerts.rule import RecordingRule, text
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.engines.process import free_port
from tests.alerts.promtools import ROOT

pytestmark = pytest.mark.victoriametrics

SETTINGS = RuleSettings(dialect="victoriametrics")
MINUTES = 60


def binary(name: str) -> str:
    return shutil.which(name) or str(ROOT / ".promtools" / "victoria-metrics" / name)


def get(url: str, **parameters: str) -> str:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        return str(answer.read().decode())


def until_it_answers(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            get(url)
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An address with an hour of a fleet's series."""
    folder = tmp_path_factory.mktemp("victoriametrics")
    url = f"http://127.0.0.1:{free_port()}"
    command = [binary("victoria-metrics"), f"-storageDataPath={folder}", f"-httpListenAddr={url[7:]}",
               "-search.latencyOffset=0s", "-search.disableCache"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_it_answers(f"{url}/health")
        request = urllib.request.Request(
            f"{url}/api/v1/import/prometheus", "\n".join(samples()).encode(), method="POST"
        )
        urllib.request.urlopen(request, timeout=30).close()
        get(f"{url}/internal/force_flush")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


END = int(time.time()) // 60 * 60 - 300


def samples() -> Iterator[str]:
    for minute in range(MINUTES + 1):
        at = (END - (MINUTES - minute) * 60) * 1000
        for name, value in {
            'prefixwatch_prefix_query_tokens_total{cluster="a",model="m",target="w"}': 10_000 * minute,
            'prefixwatch_prefix_hit_tokens_total{cluster="a",model="m",target="w",tier="gpu"}': 2_000 * minute,
            'prefixwatch_slo_requests_total{cluster="a",slo="ttft",verdict="good"}': 90 * minute,
            'prefixwatch_slo_requests_total{cluster="a",slo="ttft",verdict="bad"}': 10 * minute,
            'prefixwatch_prefix_miss_cost_ratio_bucket{cluster="a",le="1.5"}': 60 * minute,
            'prefixwatch_prefix_miss_cost_ratio_bucket{cluster="a",le="+Inf"}': 100 * minute,
            'prefixwatch_prefix_miss_cost_ratio_count{cluster="a"}': 100 * minute,
            'prefixwatch_target_up{cluster="a",model="m",target="w",system="vllm"}': 1,
            'up{job="prefixwatch",instance="e"}': 1,
        }.items():
            yield f"{name} {value} {at}"


def test_every_rule_is_one_that_victoriametrics_can_run(database: str) -> None:
    """Six rules failed at run time for `histogram_count` and `histogram_fraction`, and their objectives were dark."""
    failed = []
    rules = [rule for file in build(settings=SETTINGS) for group in file.groups for rule in group.rules]
    for rule in rules:
        try:
            answer = json.loads(get(f"{database}/api/v1/query", query=rule.expr, time=str(END)))
        except urllib.error.HTTPError as error:
            answer = {"status": error.read().decode()}
        if answer["status"] != "success":
            failed.append(f"{rule.name}: {answer['status']}")

    assert len(rules) > 500
    assert failed == []
    assert not any("histogram_fraction" in rule.expr for rule in rules if isinstance(rule, RecordingRule))


WANTED = {
    "prefixwatch:prefix_hit:ratio_rate5m",
    "PrefixHitRateLow",
    *(f"prefixwatch:slo_{kind}:increase5m" for kind in ("total_events", "good_events", "bad_events", "bad_ratio")),
}


def test_vmalert_records_hits_and_burnt_budgets_and_raises_alerts(database: str, tmp_path: Path) -> None:
    """Rule by rule: in a replay vmalert doesn't wait until the database can be asked for what the last rule wrote."""
    for file in build(["ttft", "miss-cost"], SETTINGS):
        for group in file.groups:
            for rule in (rule for rule in group.rules if rule.name in WANTED):
                alone = replace(file, groups=(replace(group, rules=(rule,)),))
                (tmp_path / "rule.yaml").write_text(text(alone))
                replayed(database, tmp_path / "rule.yaml")

    assert value(database, "prefixwatch:prefix_hit:ratio_rate5m") == pytest.approx(0.2, abs=0.001)
    assert value(database, 'prefixwatch:slo_bad_ratio:increase5m{slo="ttft"}') == pytest.approx(0.1, abs=0.001)
    assert value(database, 'prefixwatch:slo_bad_ratio:increase5m{slo="miss-cost"}') == pytest.approx(0.4, abs=0.001)
    # A replay of this version leaves an alert pending however long it holds.
    assert value(database, 'count(ALERTS{alertname="PrefixHitRateLow", cluster="a", model="m"})') == 1


def replayed(database: str, rules: Path) -> None:
    command = [binary("vmalert"), f"-rule={rules}", f"-datasource.url={database}",
               f"-remoteWrite.url={database}", f"-remoteRead.url={database}",
               f"-httpListenAddr=127.0.0.1:{free_port()}", f"-replay.timeFrom={stamp(END - 2400)}",
               f"-replay.timeTo={stamp(END)}", "-replay.rulesDelay=0s"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    get(f"{database}/internal/force_flush")


def stamp(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def value(database: str, query: str) -> float:
    answer = json.loads(get(f"{database}/api/v1/query", query=query, time=str(END)))
    [series] = answer["data"]["result"]
    return float(series["value"][1])
