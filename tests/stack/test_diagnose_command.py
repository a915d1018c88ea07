"""`prefixwatch diagnose`: its report, its exit codes, and what it says when nobody can be asked."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from prefixwatch.runbooks.diagnosis import Answer, Diagnosis, diagnose, observe
from prefixwatch.runbooks.page import shipped_runbooks
from prefixwatch.runbooks.promql import Sample
from prefixwatch.stack.cli.main import app
from prefixwatch.stack.diagnose.command import DiagnoseOptions, find
from prefixwatch.stack.diagnose.report import as_markdown, print_report, with_unit
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
    lines = ticket.splitlines()
    assert lines[0] == "## Diagnosis of WorkerHotspot: One popular prefix draws the traffic to the worker that holds it"
    assert lines[2:4] == [
        "- **concerns**: the fleet",
        "- **for**: One worker gets 1.9 times its fair share of the requests.",
    ]
    assert "- **do**: Let load weigh against cache match" in ticket
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert rows == sorted(rows, key=["", "✗", "!", "✓"].index), "the worst first"
    assert re.fullmatch(r"\d+ of \d+ steps had no answer\.", lines[-1]), (
        "what nobody measures is one line, not forty rows"
    )


def _shown(diagnosis: Diagnosis) -> list[str]:
    console = Console(record=True, width=140, file=StringIO())
    print_report(diagnosis, "Prometheus http://p", None, ["TargetDown"], console)
    return console.export_text().splitlines()


def test_the_answer_stands_first_and_unknown_steps_are_a_count_per_section() -> None:
    steps = shipped_runbooks().steps
    down = Answer((Sample({"target": "w1"}, 1.0), *(Sample({"target": f"v{n}"}, 0.0) for n in range(199))))
    answers = {"targets-down": down, "fleet-hit-ratio": Answer((Sample({}, 0.41),)), "events-lag": Answer()}
    observed = [
        observe(step, shipped_runbooks().group_of(step.id), answers.get(step.id, Answer((), "no data", failed=True)))
        for step in steps.values()
    ]

    lines = _shown(diagnose(observed, shipped_runbooks()))

    assert lines[0].startswith("╭─ cause found")
    assert "An engine or router can't be reached" in lines[1]
    text = "\n".join(lines)
    assert "concerns       0.5% of the workers, not the fleet" in text
    assert "w1 can't be reached. (1 of 200 workers)" in text
    assert "not explained  Only 41 % of the looked-up tokens were reused." in text
    assert "of 36 causes" in text or "not checked" in text
    cache = lines.index("1 Cache health")
    assert lines[cache + 1].strip().startswith("✗ Only 41 %")
    assert re.fullmatch(r"\s+\? \d+ of \d+ without an answer\s*", lines[cache + 2])


def test_an_inconclusive_answer_names_what_is_possible_and_what_would_decide() -> None:
    steps = shipped_runbooks().steps
    answers = {"collision-ratio": Answer((Sample({}, 0.4),))}
    observed = [
        observe(step, shipped_runbooks().group_of(step.id), answers.get(step.id, Answer((), "no data", failed=True)))
        for step in steps.values()
    ]

    text = "\n".join(_shown(diagnose(observed, shipped_runbooks())))

    assert "Inconclusive; possible: The router scatters what belongs together" in text
    shown = " ".join(text.replace("│", " ").split())
    unknown = "The branch of the policy that gained most against the last hour; Workers that joined or left"
    assert f"Not known: {unknown}" in shown
    assert "not checked" in text


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
        (["--exporter", "http://127.0.0.1:1", "--window", "soon"], "--window: 'soon' is not a duration"),
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
    assert [name for name, state in states.items() if state != "not verifiable here"] == ["The router considers load"]
    assert (len(states), result.exit_code) == (14, 0)
