"""`prefixwatch config`: a configuration file checked, and its schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixwatch.stack.cli.command import JsonFlag, command, new_app, print_json
from prefixwatch.stack.config import load_config
from prefixwatch.stack.config_reference import schema

app = new_app(no_args_is_help=True, help="Check prefixwatch.yaml, or print its JSON schema.")


@command(app, "check")
def config_check(
    file: Annotated[Path | None, typer.Argument(help="prefixwatch.yaml; default: the environment alone.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a configuration file and the environment that overrides it; exit code 2 if something is wrong.

    Example: `prefixwatch config check prefixwatch.yaml`
    """
    config = load_config(file)
    config.exporter_config(config.fleet.targets, "http://127.0.0.1" if config.fleet.targets else None)
    given = config.model_dump(mode="json", exclude_unset=True)
    if as_json:
        print_json(given)
        return
    print(f"{file or 'environment'}: valid; it sets {', '.join(given) or 'nothing'}")


@command(app, "schema")
def config_schema() -> None:
    """Print the JSON schema of prefixwatch.yaml, for editors.

    Example: `prefixwatch config schema > prefixwatch.schema.json`
    """
    print_json(schema())
