"""Figures of a summary.json by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def value(policy: Mapping[str, Any], name: str) -> Any:
    """The value of a policy's figure."""
    [found] = [figure["value"] for figure in policy["figures"] if figure["name"] == name]
    return found
