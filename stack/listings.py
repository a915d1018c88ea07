"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from loadgen.scenario import load_scenario, shipped_scenarios


def policies_table(policies: Sequence[Mapping[str, Any]]) -> Table:
    """What `prefixwatch policies` shows; `policies` as `router.policies.describe` answers it."""
    table = Table("policy", "what it does, and whose it is", "needs", caption="Defaults and reasons: --json")
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
