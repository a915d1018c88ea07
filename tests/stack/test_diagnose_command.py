"""`prefixwatch diagnose`: its report, its exit codes, and what it says when nobody can be asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from runbooks.page import shipped_runbooks
from stack.cli import app
from stack.diagnose_command import DiagnoseOptions, find
from stack.diagnosis_report import as_markdown, with_unit
from tests.runbooks.fleet_pages import CASES, Pair, fleet


@asynccontextmanager
async def an_exporter(series: dict[str, Pair]) -> AsyncIterator[str]:
    """Serves the first page once and the second from then on."""
    moments: Iterator[int] = iter([0])

    async def metrics(_: web.Request) -> web.Response:
        moment = next(moments, 1)
        return web.Response(text="".join(f"prefixwatch_{name} {pair[moment]}\n" for name, pair in series.items()))

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_an_exporter_alone_is_enough_for_a_diagnosis() -> None:

    cause, changes = CASES["vllm-project/production-stack#1035 (RT01): a popular prefix"]
    async with an_exporter(fleet(changes)) as url:
        finding = await find(DiagnoseOptions(exporter=url, seconds=0.2), shipped_runbooks())
    assert finding.diagnosis.found is not None
    assert finding.diagnosis.found.id == cause
    ticket = as_markdown(finding.diagnosis, finding.source, "WorkerHotspot", finding.firing)
    assert ticket.startswith("## Diagnosis of WorkerHotspot: One popular prefix draws the traffic")
    assert "- for: One worker gets 1.9 times its fair share of the requests." in ticket
    assert "- **do**: Let load weigh against cache match" in ticket
    rows = [line.split("|")[1].strip() for line in ticket.splitlines() if line.startswith("| ")]
    assert rows == sorted(rows, key=["", "✗", "!", "✓"].index), "the worst first"
    assert ticket.splitlines()[-1].startswith("Not known: "), "what nobody measures is one line, not forty rows"


async def test_an_exporter_whose_discovery_finds_nothing_is_an_exporter() -> None:
    """kubeai-project/kubeai#391 (SL18): a selector that matches nothing leaves a page without a single target."""
    async with an_exporter({'discovered_targets{discovery="kubernetes"}': (0, 0)}) as url:
        finding = await find(DiagnoseOptions(exporter=url, seconds=0.1), shipped_runbooks())
    assert finding.diagnosis.found is not None
    assert finding.diagnosis.found.id == "exporter_blind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --prometheus URL and --exporter URL"),
        (["--prometheus", "http://a", "--exporter", "http://b"], "give one of"),
        (["NoSuchAlert", "--exporter", "http://127.0.0.1:1"], "no runbook for an alert 'NoSuchAlert'"),
        (["--exporter", "http://127.0.0.1:1"], "its metrics can't be read"),
        (["--prometheus", "http://127.0.0.1:1"], "can't be asked"),
        (["--exporter", "http://127.0.0.1:1", "--window", "soon"], "--window: 'soon' is no range such as 5m or 90s"),
        (["--preflight"], "needs something to judge by"),
    ],
)
def test_wrong_input_is_one_message(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["diagnose", *arguments])
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.584, "ratio", "58.4 %"),
        (0.0123, "seconds", "12.3 ms"),
        (12.3, "seconds", "12.3 s"),
        (1.0, "bool", "yes"),
        (1234.5, "tokens", "1234 tokens"),
        (1.86, "factor", "1.86"),
        (0.05, "usd", "$0.05"),
        (None, "ratio", "–"),
    ],
)
def test_values_are_written_as_people_write_them(value: float | None, unit: str, text: str) -> None:
    assert with_unit(value, unit) == text


def test_a_preflight_on_a_configuration_alone_verifies_what_that_shows_and_no_more(tmp_path: Path) -> None:
    config = tmp_path / "prefixwatch.yaml"
    config.write_text("router: {policy: {name: score}}\n")
    result = CliRunner().invoke(app, ["diagnose", "--preflight", "--config", str(config), "--json"])
    states = {item["name"]: item["state"] for item in json.loads(result.stdout)["items"]}
    assert [name for name, state in states.items() if state != "not verifiable here"] == [
        "The router considers load and memory"
    ]
    assert (len(states), result.exit_code) == (12, 0)
