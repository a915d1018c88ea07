"""What the command lines of all groups share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def names(given: str) -> list[str]:
    """Of a comma-separated option."""
    return [name.strip() for name in given.split(",") if name.strip()]


def finish(summary: dict[str, Any], exit_code: int, *, as_json: bool) -> None:
    """End the command with this exit code, after its result as JSON if that was asked for."""
    if as_json:
        print(json.dumps(summary, indent=2))
    raise typer.Exit(exit_code)
