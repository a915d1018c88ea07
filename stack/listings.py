"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def policies_table(policies: Sequence[Mapping[str, Any]]) -> Table:
    """What `prefixwatch policies` shows; `policies` as `router.policies.describe` answers it."""
    table = Table("policy", "what it does, and whose it is", "needs", caption="Defaults and reasons: --json")
    for policy in policies:
        needs = ", ".join(name for name, needed in policy["needs"].items() if needed)
        table.add_row(policy["name"], f"{policy['summary']}\n[dim]{policy['source']}[/dim]", needs or "nothing")
    return table
