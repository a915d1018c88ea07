"""The `prefixwatch` command, run in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from typer.main import get_command

from prefixwatch.stack.cli.main import COMMANDS, app, load_command, main


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


def prefixwatch(*arguments: str) -> Ended:
    """Run the command in this process, which saves it the imports."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return Ended(code, out.getvalue(), err.getvalue())


def prefixwatch_process(*arguments: str) -> Ended:
    """Run the command in a process, as services need that listen and log."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "prefixwatch", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@cache
def whole_command() -> Any:
    """The command with all its subcommands loaded."""
    command: Any = get_command(app)
    command.commands = {name: load_command(name) for names in COMMANDS.values() for name in names}
    return command
