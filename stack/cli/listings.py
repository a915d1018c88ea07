"""`prefixwatch scenarios` and `policies`: what is shipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from rich.text import Text

from prefixwatch.loadgen.scenario.model import load_scenario, shipped_scenarios
from prefixwatch.router.policies import describe
from prefixwatch.stack.cli.command import JsonFlag, command, new_app, output_option, plain_console, print_json

scenarios_app = new_app()
policies_app = new_app()


def policies_table(policies: Sequence[Mapping[str, Any]]) -> Table:
    """What `prefixwatch policies` shows; `policies` as returned by `router.policies.describe`."""
    table = Table("policy", "description and origin", "needs", caption="Defaults and reasons: --json")
    for policy in policies:
        needs = ", ".join(name for name, needed in policy["needs"].items() if needed)
        table.add_row(
            policy["name"], Text.assemble(policy["summary"], "\n", (policy["source"], "dim")), needs or "nothing"
        )
    return table


def described_scenarios() -> list[dict[str, Any]]:
    """Name, description and objectives of every shipped scenario."""
    found = {name: load_scenario(name) for name in shipped_scenarios()}
    return [
        {"name": name, "description": scenario.description.strip(), "slo": [Path(slo).stem for slo in scenario.slo]}
        for name, scenario in found.items()
    ]


def scenarios_table(scenarios: Sequence[Mapping[str, Any]]) -> Table:
    """What `prefixwatch scenarios` shows."""
    table = Table(
        "scenario", "what it shows", caption="Every key of a scenario file: docs/scenarios.md", show_lines=True
    )
    for scenario in scenarios:
        table.add_row(scenario["name"], scenario["description"])
    return table


@command(scenarios_app, "scenarios")
def scenarios(
    schema: Annotated[bool, output_option("--schema", help="Print the JSON schema of a scenario file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the shipped scenarios and what each shows; every key of a scenario file is in docs/scenarios.md.

    Example: `prefixwatch scenarios --schema > scenario.schema.json`
    """
    if schema:
        from prefixwatch.loadgen.scenario.reference import schema as scenario_schema

        print_json(scenario_schema())
    elif as_json:
        print_json(described_scenarios())
    else:
        plain_console().print(scenarios_table(described_scenarios()))


@command(policies_app, "policies")
def policies(as_json: JsonFlag = False) -> None:
    """List the routing policies: where each comes from, what it needs to know, its defaults.

    Example: `prefixwatch policies --json`
    """
    found = describe()
    if as_json:
        print_json(found)
    else:
        plain_console().print(policies_table(found))
