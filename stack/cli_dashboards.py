"""`prefixwatch dashboards …`: the dashboards written, checked and looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stack.cli_shared import JsonFlag, finish

dashboards_app = typer.Typer(no_args_is_help=True, help="Grafana dashboards: write them, check every query, preview.")


@dashboards_app.command("build")
def dashboards_build(
    out: Annotated[Path, typer.Option(help="Folder for json/, v2/ and provisioning/.")] = Path("dashboards"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; 1 if the folder is out of date.")] = False,
    runbooks: Annotated[str, typer.Option(help="Where the runbooks are served: HERE/AlertName.md.")] = "runbooks",
) -> None:
    """Write the dashboards: classic JSON, v2 manifests, provisioning files and a ConfigMap.

    Example: `prefixwatch dashboards build --out grafana --runbooks https://wiki.example.com/runbooks`
    """
    from stack.dashboards_command import run_build

    raise typer.Exit(run_build(out, Console(), check_only=check, runbooks=runbooks.rstrip("/")))


@dashboards_app.command("check")
def dashboards_check(
    prometheus: Annotated[str, typer.Option(help="A Prometheus that scrapes the exporter and has the rules.")],
    minutes: Annotated[float, typer.Option(min=0.1, help="The time shown: so many minutes up to now.")] = 15.0,
    scrape_interval: Annotated[float, typer.Option(min=0.1, help="The dashboards' variable, in seconds.")] = 15.0,
    job: Annotated[str, typer.Option(help="The exporter's job label in Prometheus.")] = "prefixwatch",
    as_json: JsonFlag = False,
) -> None:
    """Run every query of every panel, variable and annotation; 1 if one has no data and no listed reason.

    Example: `prefixwatch dashboards check --prometheus http://localhost:9090`
    """
    from dashboards.asked import Shown
    from stack.dashboards_command import print_check, run_check

    found, exit_code = run_check(prometheus, Shown(minutes * 60, scrape_interval), job)
    if not as_json:
        print_check(found, Console())
    finish(found, exit_code, as_json=as_json)


@dashboards_app.command("preview")
def dashboards_preview(
    prometheus: Annotated[str, typer.Option(help="A Prometheus that scrapes the exporter and has the rules.")],
    out: Annotated[Path, typer.Option(help="Folder for the pages.")] = Path("results/dashboards"),
    dashboard: Annotated[list[str] | None, typer.Option(help="Only this one, e.g. overview; may be repeated.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="The time shown: so many minutes up to now.")] = 15.0,
    scrape_interval: Annotated[float, typer.Option(min=0.1, help="The dashboards' variable, in seconds.")] = 15.0,
) -> None:
    """Draw the dashboards as plain pages from a Prometheus' answers, where there is no Grafana.

    Example: `prefixwatch dashboards preview --prometheus http://localhost:9090 --dashboard overview`
    """
    from dashboards.asked import Shown
    from stack.dashboards_command import run_preview

    print(run_preview(prometheus, Shown(minutes * 60, scrape_interval), out, dashboard or []))
