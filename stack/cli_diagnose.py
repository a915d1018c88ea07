"""`prefixwatch diagnose` and `drill`: the runbooks asked, and faults to practise on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stack.cli_shared import JsonFlag, finish

diagnose_app = typer.Typer()


@diagnose_app.command()
def diagnose(
    alert: Annotated[
        str | None, typer.Argument(help="The alert that fired; its page's questions come first.", show_default=False)
    ] = None,
    prometheus: Annotated[str | None, typer.Option(help="URL of the Prometheus that scrapes the exporter.")] = None,
    exporter: Annotated[
        str | None, typer.Option(help="URL of the exporter itself, where there is no Prometheus.")
    ] = None,
    window: Annotated[str, typer.Option(help="Range that is looked at, e.g. 5m; with --prometheus.")] = "5m",
    seconds: Annotated[float, typer.Option(min=1, help="How long to watch; with --exporter.")] = 10.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for an incident ticket.")] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="The checklist before a launch instead; 1 if an item failed.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="With --preflight: endpoint that gets about a dozen small chats.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="With --preflight: prefixwatch.yaml of the fleet.")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="Sent with every question, as 'Name: value'; ${VARIABLE} is filled in. May be repeated."),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificates that Prometheus' or the exporter's own is checked with.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Ask the runbooks' questions in order, and name the likeliest cause: 0 nothing wrong, 1 found, 3 inconclusive.

    Example: `prefixwatch diagnose PrefixHitRateLow --prometheus http://127.0.0.1:9090`

    Example: `prefixwatch diagnose --exporter http://127.0.0.1:9477 --markdown`

    Example: `prefixwatch diagnose --prometheus https://mimir.example/prometheus --header 'X-Scope-OrgID: llm'`

    Example: `prefixwatch diagnose --preflight --target http://127.0.0.1:8000 --config prefixwatch.yaml`
    """
    from stack.access import access

    asked_with = access(header or [], ca_file)
    if preflight:
        from stack.preflight_command import PreflightOptions, run_preflight

        facts = PreflightOptions(target, config, prometheus, exporter, window, seconds, asked_with)
        finish(*run_preflight(facts, Console(stderr=as_json), markdown=markdown, as_json=as_json), as_json=as_json)
    from stack.diagnose_command import DiagnoseOptions, run_diagnose

    options = DiagnoseOptions(alert, prometheus, exporter, window, seconds, asked_with)
    console = Console(stderr=as_json or markdown)
    finish(*run_diagnose(options, console, markdown=markdown, as_json=as_json), as_json=as_json)


@diagnose_app.command()
def drill(
    fault: Annotated[
        list[str] | None, typer.Argument(help="Faults by name; all of them without any.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Practise: make a fault in a small local stack, and see which alerts come and what the diagnosis says.

    Starts simulated engines, a router, the exporter, Prometheus and Alertmanager; under a minute a fault. 1 when an
    alert or the named cause isn't the right one.

    Example: `prefixwatch drill hot-prefix`
    """
    from stack.drill_command import run_drills

    results, exit_code = run_drills(fault or [], Console(stderr=as_json), as_json=as_json)
    finish({"drills": results}, exit_code, as_json=as_json)
