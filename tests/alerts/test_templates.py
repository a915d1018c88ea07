"""Notifications as a real Alertmanager sends them to Slack and PagerDuty with the shipped template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from prefixwatch.alerts.alertmanager import TEMPLATE
from prefixwatch.alerts.build import build
from prefixwatch.alerts.rule import AlertingRule
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.stack.local.monitoring import alertmanager_command, binary

pytestmark = pytest.mark.alertmanager

ROOT = Path(__file__).parents[2]


def documented() -> dict[str, Any]:
    """The receivers that docs/slo.md shows."""
    text = (ROOT / "docs" / "slo.md").read_text(encoding="utf-8")
    block = text.partition("```yaml\ntemplates:")[2].partition("```")[0]
    found: dict[str, Any] = yaml.safe_load("templates:" + block)
    return found


@asynccontextmanager
async def sink() -> AsyncIterator[tuple[str, asyncio.Queue[tuple[str, dict[str, Any]]]]]:
    """Takes what is sent to anybody; its address, and what came by path."""
    got: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        await got.put((request.path, json.loads(await request.text())))
        return web.Response(status=202 if request.path == "/pagerduty" else 200)

    app = web.Application()
    app.router.add_post("/{name}", take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        await runner.cleanup()


async def rendered(alerts: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """What Slack and PagerDuty get of these alerts."""
    config = documented()
    config["templates"] = [str(TEMPLATE)]
    async with sink() as (url, got):
        receivers = {one["name"]: one for one in config["receivers"]}
        for slack in receivers["tickets"]["slack_configs"]:
            slack |= {"api_url": f"{url}/slack"}
            slack.pop("api_url_file")
        for pager in receivers["pages"]["pagerduty_configs"]:
            pager |= {"url": f"{url}/pagerduty", "routing_key": "key"}
            pager.pop("routing_key_file")
        config["route"] = {"receiver": "pages", "group_by": ["alertname"], "group_wait": "2s",
                           "routes": [{"receiver": name, "matchers": ['severity!=""'], "continue": True}
                                      for name in ("tickets", "pages")]}  # fmt: skip
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        command = alertmanager_command(binary("alertmanager") or "alertmanager", folder, address)
        process = ManagedProcess("alertmanager", command, folder / "log")
        try:
            await process.wait_ready(f"http://{address}/-/ready", 120.0)
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://{address}/api/v2/alerts", json=alerts) as response,
            ):
                assert response.status == 200, await response.text()
            found: dict[str, dict[str, Any]] = {}
            while len(found) < 2:
                path, body = await asyncio.wait_for(got.get(), 120.0)
                found[path] = body
            return found
        finally:
            process.kill()


def shipped(name: str, **labels: str) -> dict[str, Any]:
    """The alert as Prometheus sends it, its own templates not yet filled in."""
    rules = (r for file in build(["ttft"]) for group in file.groups for r in group.rules)
    rule = next(r for r in rules if isinstance(r, AlertingRule) and r.name == name)
    texts = {
        key: text.replace("{{ $labels.target }}", labels.get("target", "")) for key, text in rule.annotations.items()
    }
    return {
        "labels": {"alertname": name, **rule.labels, **labels},
        "annotations": texts,
        "generatorURL": "http://prometheus.example:9090/graph?g0.expr=up&g0.tab=1",
    }


async def test_slack_and_pagerduty_get_the_workers_the_command_and_the_links(tmp_path: Path) -> None:
    alerts = [shipped("TargetDown", target=f"worker-{k:03}", cluster="eu") for k in range(7)]

    found = await rendered(alerts, tmp_path)

    slack = found["/slack"]["attachments"][0]
    assert slack["title"] == "[FIRING 7] TargetDown in eu: worker-000 is down"
    assert slack["title_link"] == "http://prefixwatch:9477/runbooks/TargetDown"
    lines = slack["text"].splitlines()
    assert "Workers: worker-000, worker-001, worker-002, worker-003, worker-004 and others, 7 in all" in lines
    assert "Diagnose: prefixwatch diagnose TargetDown --prometheus http://prometheus.example:9090" in lines
    assert "Runbook: http://prefixwatch:9477/runbooks/TargetDown" in lines
    assert any(line.startswith("Dashboard: http://grafana:3000/d/prefixwatch-pipeline") for line in lines)
    pager = found["/pagerduty"]
    assert pager["payload"]["summary"] == slack["title"]
    assert pager["payload"]["custom_details"]["diagnose"] == lines[-4].removeprefix("Diagnose: ")
    assert pager["links"][0]["href"] == "http://prefixwatch:9477/runbooks/TargetDown"


async def test_an_objectives_page_has_no_line_on_workers(tmp_path: Path) -> None:
    found = await rendered([shipped("SloMostlyBad", model="llama")], tmp_path)

    slack = found["/slack"]["attachments"][0]
    assert slack["title"].startswith("[FIRING 1] SloMostlyBad llama: ")
    assert "Workers" not in slack["text"]


async def test_each_model_of_a_notification_has_its_own_line(tmp_path: Path) -> None:
    """One alert of three models is one notification; the first one's text said nothing of the others."""
    alerts = [shipped("RequestsRefused", model=f"llama-{size}b") for size in (8, 70, 405)]

    found = await rendered(alerts, tmp_path)

    text = found["/slack"]["attachments"][0]["text"].splitlines()
    described = [line for line in text if "of the requests were refused" in line]
    assert {line.partition(":")[0] for line in described} == {"llama-8b", "llama-70b", "llama-405b"}
    assert text[len(described)].startswith("Diagnose: prefixwatch diagnose RequestsRefused ")
