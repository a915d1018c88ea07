"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def policies_table(policies: Sequence[Mapping[str, Any]]) -> Table:
    """What `prefixwatch policies` shows; `policies` as `router.policies.describe` answers it."""
    table = Table("policy", "what it does", "needs", "defaults", "source")
    for policy in policies:
        needs = ", ".join(name for name, needed in policy["needs"].items() if needed)
        defaults = ", ".join(f"{key}={value}" for key, value in policy["defaults"].items())
        table.add_row(policy["name"], policy["summary"], needs or "nothing", defaults or "–", policy["source"])
    return table
