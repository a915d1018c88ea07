"""How commands are declared: options as a dataclass, help grouped by panel, results and errors printed one way."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

Options = TypeVar("Options")

target_option = partial(typer.Option, rich_help_panel="Target")
load_option = partial(typer.Option, rich_help_panel="Load")
output_option = partial(typer.Option, rich_help_panel="Output")

JsonFlag = Annotated[bool, output_option("--json", help="Print the result as JSON on standard output.")]

_WIDTH = 110


class Command(TyperCommand):
    """Help as plain text, options under the headings of their panels; numbers are finite."""

    def invoke(self, ctx: Any) -> Any:
        """Raises UsageError for nan and infinity: no lower bound stops infinity, and no comparison with nan holds."""
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not isfinite(value):
                from prefixwatch.stack.errors import UsageError  # brings pydantic, which --help has no use for

                raise UsageError(f"{parameter.opts[0]} {value}: give a finite number")
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """The same for a group, then its commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Target": [], "Load": [], "Output": [], "Options": []}
    for parameter in command.get_params(ctx):
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        record = parameter.get_help_record(ctx)
        if record is not None:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
    for name, rows in panels.items():
        if rows:
            with formatter.section(name):
                formatter.write_dl(rows)


def new_app(*, cls: type[Group] = Group, add_completion: bool = False, **settings: Any) -> typer.Typer:
    """A group of commands, or a single one. Help is plain text: it starts faster than Rich and wraps names nowhere."""
    return typer.Typer(
        cls=cls,
        rich_markup_mode=None,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": _WIDTH},
        **settings,
    )


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command.

    Its parameters are the command's; or, if its only one is a dataclass, the fields of that are.
    """

    def register(run: Callable[..., None]) -> Callable[..., None]:
        registered = app.command(name, cls=Command, context_settings={"max_content_width": _WIDTH})
        hints = list(get_type_hints(run, include_extras=True).items())
        if hints and dataclasses.is_dataclass(hints[0][1]):
            registered(_with_fields_of(hints[0][1], run))
        else:
            registered(run)
        return run

    return register


def _with_fields_of(options: Any, run: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(options, include_extras=True)

    def from_fields(**given: Any) -> None:
        run(options(**given))

    from_fields.__doc__ = run.__doc__
    from_fields.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in dataclasses.fields(options)
        ]
    )
    return from_fields


def names(given: str) -> list[str]:
    """The parts of a comma-separated option."""
    return [name.strip() for name in given.split(",") if name.strip()]


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints brackets in file names and user text as they are."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False)


def print_error(message: str) -> None:
    """Each line of a message on standard error."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    for line in message.splitlines():
        console.print(Text.assemble(("error:", "red"), " ", line))


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def finish(summary: Any, exit_code: int, *, as_json: bool) -> None:
    """End the command with this exit code, after its result as JSON if that was asked for."""
    if as_json:
        print_json(summary)
    raise typer.Exit(exit_code)
