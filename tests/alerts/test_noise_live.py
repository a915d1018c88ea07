"""The noise hour and the outages in a real Prometheus and a real Alertmanager, on a clock 60 times as fast.

Four clusters share both: a healthy one with a death and a rolling deploy, one whose first tokens all come late, one
that loses a model, and one with an HA pair of exporters of which one stops. Their pages are scraped, the shipped rules
judge them, and a webhook takes what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.alerts.build import build, rendered
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.documents.durations import promql, seconds
from prefixwatch.engines.process import ManagedProcess, free_ports
from prefixwatch.stack.local.monitoring import (
    alertmanager_command,
    alertmanager_config,
    binary,
    prometheus_command,
    routes,
)
from tests.alerts.test_noise import healthy_fleet, values

pytestmark = [pytest.mark.prometheus, pytest.mark.alertmanager, pytest.mark.timeout(400)]

SPEED = 60
MINUTES = 75
OUTAGE_FROM = 30
WORKERS = {"small": (30, 12.0), "medium": (20, 8.0), "large": (15, 5.0)}
Page = Mapping[str, list[float]]
"""Series → a sample a minute, NaN where it has none."""


def outage(slo_bad_from: int) -> dict[str, str]:
    """All answers complete; from this minute on each first token comes late."""
    good = [200.0 * min(minute, slo_bad_from) for minute in range(MINUTES + 1)]
    bad = [200.0 * max(0, minute - slo_bad_from) for minute in range(MINUTES + 1)]
    return {
        'prefixwatch_slo_requests_total{slo="ttft", verdict="good"}': values(good),
        'prefixwatch_slo_requests_total{slo="ttft", verdict="bad"}': values(bad),
    }


def dead_model() -> dict[str, str]:
    up = [float(minute < OUTAGE_FROM) for minute in range(MINUTES + 1)]
    return {f'prefixwatch_target_up{{target="w{k}", model="m", system="vllm"}}': values(up) for k in range(3)} | {
        'prefixwatch_target_up{target="other", model="n", system="vllm"}': values([1.0] * len(up))
    }


def watched_twice() -> dict[str, str]:
    """What each exporter of a pair shows: ten workers of which one dies."""
    series = outage(MINUTES)
    for k in range(10):
        up = [float(k > 0 or minute < OUTAGE_FROM) for minute in range(MINUTES + 1)]
        series[f'prefixwatch_target_up{{target="w{k}", model="m", system="vllm"}}'] = values(up)
    return series


@dataclass(slots=True)
class Clock:
    """The fleet's minutes; they begin with the first scrape, however long the start took."""

    begun: float | None = None

    def minute(self, at: float | None = None) -> float:
        now = time.time() if at is None else at
        if self.begun is None:
            self.begun = now
        return (now - self.begun) * SPEED / 60


@dataclass(slots=True)
class Fleets:
    """The pages by cluster and replica, and what the webhook got."""

    clock: Clock
    pages: Mapping[str, Page]
    ends: dict[str, float]
    """Page → the minute at which its exporter stops."""
    notices: list[Mapping[str, str]] = field(default_factory=list)

    def page(self, name: str) -> str | None:
        minute = self.clock.minute()
        if minute >= self.ends.get(name, MINUTES * 9):
            return None
        now = min(int(minute), MINUTES)
        lines = [
            f"{series} {samples[now]}" for series, samples in self.pages[name].items() if samples[now] == samples[now]
        ]
        return "\n".join([*lines, ""])

    def sent(self, cluster: str, severity: str) -> set[tuple[str, str]]:
        """Alerts and the target that each is about."""
        return {
            (one["alertname"], one.get("target", ""))
            for one in self.notices
            if one.get("cluster") == cluster and one["severity"] == severity
        }


def samples(text: str) -> list[float]:
    return [float("nan") if word == "_" else float(word) for word in text.split()]


@contextlib.contextmanager
def served(fleets: Fleets) -> Iterator[int]:
    """Answer scrapes and take notifications; the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = fleets.page(self.path.strip("/"))
            self.send_response(200 if page is not None else 503)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write((page or "").encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fleets.notices += [one["labels"] for one in body["alerts"] if one["status"] == "firing"]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()


@contextlib.asynccontextmanager
async def monitored(fleets: Fleets, port: int, folder: Path) -> AsyncIterator[str]:
    """A Prometheus with the shipped rules on the fast clock, and its Alertmanager; Prometheus' address."""
    ports = free_ports(2)
    prometheus, alertmanager = (f"127.0.0.1:{each}" for each in ports)
    (folder / "rules").mkdir()
    # The pages have what the hour is about, not what every objective counts.
    settings = RuleSettings(speedup=SPEED, replica_labels=("replica",), absent_alerts=False)
    for name, text in rendered(build(["ttft", "availability", "goodput"], settings)).items():
        (folder / "rules" / name).write_text(text)
    targets = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {"__metrics_path__": f"/{name}", "cluster": name.partition("-")[0], "replica": name},
        }
        for name in fleets.pages
    ]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": [f"{folder}/rules/*.yaml"],
        "scrape_configs": [{"job_name": "prefixwatch", "static_configs": targets}],
        "alerting": {
            "alert_relabel_configs": [{"action": "labeldrop", "regex": "replica"}],
            "alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}],
        },
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def receiver(name: str) -> dict[str, Any]:
        return {"name": name, "webhook_configs": [{"url": f"http://127.0.0.1:{port}/"}]}

    manager = alertmanager_config(receiver)
    for route in routes(manager["route"]):
        for key in ("group_wait", "group_interval", "repeat_interval"):
            if key in route:
                route[key] = promql(max(0.001, seconds(route[key]) / SPEED))
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(manager))
    found = {name: binary(name) or name for name in ("prometheus", "alertmanager")}
    fast = ["--query.lookback-delta=5s", "--rules.alert.resend-delay=1s"]
    commands = [
        ("alertmanager", alertmanager_command(found["alertmanager"], folder, alertmanager), alertmanager),
        ("prometheus", [*prometheus_command(found["prometheus"], folder, prometheus), *fast], prometheus),
    ]
    with contextlib.ExitStack() as cleanup:
        for name, command, address in commands:
            process = ManagedProcess(name, command, folder / f"{name}.log")
            cleanup.callback(process.kill)
            await process.wait_ready(f"http://{address}/-/ready", 120.0)
        yield f"http://{prometheus}"


def asked(prometheus: str, query: str, **at: float) -> list[dict[str, Any]]:
    path = "query_range" if "step" in at else "query"
    with urllib.request.urlopen(
        f"{prometheus}/api/v1/{path}?{urlencode({'query': query, **at})}", timeout=60
    ) as answer:
        return list(json.load(answer)["data"]["result"])


def missed(prometheus: str) -> float:
    """Evaluations that it left out, of the group that it left out most of."""
    with urllib.request.urlopen(f"{prometheus}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        name = "prometheus_rule_group_iterations_missed"
        return max((s.value for family in families if family.name == name for s in family.samples), default=0.0)


@dataclass(frozen=True, slots=True)
class Hour:
    """What was seen of the hour."""

    fleets: Fleets
    first: Mapping[tuple[str, str], float]
    """(cluster, alert) → the minute at which it began to fire."""
    missed_minutes: float
    """Evaluations that this machine left out; they delay an alert, and the rules can't help it."""
    events: Mapping[str, float]
    """Cluster → events of the TTFT objective in the last five minutes, as the rules count them."""


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Hour:
    return asyncio.run(_hour(tmp_path_factory.mktemp("hour")))


async def _hour(folder: Path) -> Hour:
    texts = {"healthy": healthy_fleet(WORKERS), "late": outage(OUTAGE_FROM), "gone": dead_model()}
    texts |= {f"pair-{replica}": watched_twice() for replica in "ab"}
    pages = {name: {series: samples(text) for series, text in page.items()} for name, page in texts.items()}
    fleets = Fleets(Clock(), pages, ends={"pair-b": OUTAGE_FROM + 10.0})
    with served(fleets) as port:
        async with monitored(fleets, port, folder) as prometheus:
            begun = time.time()
            while fleets.clock.begun is None or fleets.clock.minute() < OUTAGE_FROM - 2:
                assert time.time() < begun + 120, "nothing was scraped"
                await asyncio.sleep(0.2)
            counted = asked(prometheus, "prefixwatch:slo_total_events:increase5m")
            events = {
                one["metric"]["cluster"]: float(one["value"][1]) for one in counted if one["metric"]["slo"] == "ttft"
            }
            await asyncio.sleep((MINUTES - fleets.clock.minute()) * 60 / SPEED)
            end = time.time()
            start = fleets.clock.begun
            firing = asked(prometheus, 'ALERTS{alertstate="firing"}', start=start, end=end, step=0.25)
            lost = missed(prometheus)
    first: dict[tuple[str, str], float] = {}
    for one in firing:
        key = one["metric"].get("cluster", ""), one["metric"]["alertname"]
        minute = fleets.clock.minute(one["values"][0][0])
        first[key] = min(first.get(key, minute), minute)
    return Hour(fleets, first, lost, events)


def test_a_healthy_hour_wakes_nobody_and_writes_one_ticket(hour: Hour) -> None:
    assert hour.fleets.sent("healthy", "page") == set()
    assert hour.fleets.sent("healthy", "ticket") == {("TargetDown", "medium-017")}


def test_late_first_tokens_page_within_12_minutes(hour: Hour) -> None:
    assert hour.fleets.sent("late", "page") == {("SloMostlyBad", "")}
    assert hour.first["late", "SloMostlyBad"] - OUTAGE_FROM <= 12 + hour.missed_minutes


def test_a_dead_model_pages_within_5_minutes(hour: Hour) -> None:
    assert hour.fleets.sent("gone", "page") == {("ModelWithoutWorkers", "")}
    assert hour.first["gone", "ModelWithoutWorkers"] - OUTAGE_FROM <= 5 + hour.missed_minutes


def test_a_pair_counts_once_and_the_death_of_one_exporter_is_no_news(hour: Hour) -> None:
    assert hour.events["pair"] == pytest.approx(hour.events["late"], rel=0.3)
    assert hour.fleets.sent("pair", "page") == set()
    assert hour.fleets.sent("pair", "ticket") == {("TargetDown", "w0")}
