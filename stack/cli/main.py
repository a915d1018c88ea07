"""`prefixwatch`: the table of its commands. A command's module is imported only when that command runs.

Exit codes: 0 ok · 1 an objective or check failed · 2 the input or the environment was wrong · 3 inconclusive.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand

from prefixwatch.stack.cli.command import Group, new_app, print_error
from prefixwatch.stack.cli.extras import remedy

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Try": {
        "bench": (
            "stack.bench.bench",
            "Start engines and a router, send a scenario under each policy, compare.",
        ),
        "simulate": ("stack.bench.simulate", "Run the same policies and engine model in virtual time."),
        "plan": ("stack.planning.plan", "Find the smallest fleet that meets the objectives, by simulation."),
        "up": ("stack.local.up", "Run the whole stack until Ctrl-C."),
        "drill": (
            "stack.drill.command",
            "Practise: inject a fault into a local stack and see which alerts fire.",
        ),
    },
    "Observe": {
        "exporter": ("stack.cli.exporter", "Scrape routers and engines and serve prefix-cache metrics at /metrics."),
        "diagnose": ("stack.diagnose.command", "Run the runbooks' steps in order and name the most likely cause."),
        "status": ("stack.cli.status", "Print the fleet's figures by model, from an exporter or a Prometheus."),
        "scale-advice": (
            "stack.scaling.command",
            "Say how many workers the load needs, which of them may go, and who takes over.",
        ),
        "audit": ("stack.audit.command", "Find out by probes whether one tenant can see what another sent."),
        "slo": ("stack.cli.slo", "SLO documents (OpenSLO): check them, write rules and alerts, grade a request log."),
        "dashboards": ("stack.cli.dashboards", "Grafana dashboards: write them, check every query, preview them."),
    },
    "Results and traffic": {
        "compare": ("stack.bench.compare", "Compare two runs; exit code 1 if the second is worse."),
        "report": ("stack.bench.report", "Grade a finished run again from its request log and rewrite its report."),
        "analyze": ("stack.traffic.analyze", "What a prefix cache could reuse of some traffic, and what breaks reuse."),
        "trace": ("stack.traffic.trace", "Write an exporter's live requests as a trace that simulate and plan read."),
        "scenarios": ("stack.cli.listings:scenarios_app", "List the shipped scenarios."),
    },
    "Parts": {
        "router": ("stack.cli.router", "Run the router alone, in front of the engines in `fleet.targets`."),
        "engine": ("stack.cli.engines:engine_app", "Run one simulated engine alone."),
        "config": ("stack.cli.config", "Check prefixwatch.yaml, or print its JSON schema."),
        "engines": ("stack.cli.engines", "Install and list real engines; make the tiny model."),
        "policies": ("stack.cli.listings:policies_app", "List the routing policies."),
    },
}
"""Heading → command → module of the `app` (or `module:attribute`), and its line in `prefixwatch --help`."""


class _LazyGroup(Group):
    """Has stand-ins with the commands' names and help; `resolve_command` imports the command itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        lines = {name: text for commands in COMMANDS.values() for name, (_, text) in commands.items()}
        self.commands = {name: TyperCommand(name, help=text, rich_markup_mode=None) for name, text in lines.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(str(name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, commands in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])


def load_command(name: str) -> Any:
    """The command itself."""
    target = next(commands[name][0] for commands in COMMANDS.values() if name in commands)
    module, _, attribute = target.partition(":")
    app = getattr(importlib.import_module(f"prefixwatch.{module}"), attribute or "app")
    command = typer.main.get_command(app)
    command.name = name
    return command


app = new_app(
    cls=_LazyGroup,
    add_completion=True,
    help=(
        "Observability, SLOs and a benchmark harness for LLM serving fleets that reuse prefix KV caches.\n\n"
        "Start here: `prefixwatch bench shared-prefix --policy round_robin,cache_aware`"
    ),
    no_args_is_help=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from prefixwatch import __version__

        print(f"prefixwatch {__version__}")
        raise typer.Exit


@app.callback()
def prefixwatch(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: wrong input or environment becomes one message and exit code 2."""
    try:
        app(arguments)
    except ModuleNotFoundError as error:
        text = remedy(error)
        if text is None:
            raise
        print_error(text)
        sys.exit(2)
    except Exception as error:
        from prefixwatch.documents.errors import InputError  # brings pydantic, which --help has no use for

        if not isinstance(error, InputError):
            raise
        print_error(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
