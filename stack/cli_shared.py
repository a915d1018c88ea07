"""What the command lines of all groups share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def names(given: str) -> list[str]:
    """Of a comma-separated option."""
    return [name.strip() for name in given.split(",") if name.strip()]


def plain_console(*, stderr: bool = False) -> Console:
    """For texts that name files, targets and what users wrote: brackets in them are no markup."""
    return Console(stderr=stderr, markup=False)


def print_error(message: str) -> None:
    """On standard error, a line for each of the message's."""
    console = Console(stderr=True, soft_wrap=True)
    for line in message.splitlines():
        console.print(Text.assemble(("error:", "red"), " ", line))


def finish(summary: dict[str, Any], exit_code: int, *, as_json: bool) -> None:
    """End the command with this exit code, after its result as JSON if that was asked for."""
    if as_json:
        print(json.dumps(summary, indent=2))
    raise typer.Exit(exit_code)
