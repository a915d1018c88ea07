"""`prefixwatch trace`: live traffic as a recording."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.stack.cli.command import JsonFlag, command, finish, load_option, new_app, output_option, plain_console
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import read_json

app = new_app(no_args_is_help=True, help="Live traffic as a recording that simulate, plan, bench and analyze read.")

POLL_SECONDS = 5.0
_TIMEOUT_SECONDS = 30.0


@app.callback()
def trace() -> None:
    """Live traffic as a recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of `prefixwatch trace export`."""

    exporter: Annotated[str, load_option(help="The exporter's URL; user and password in it, if it asks for them.")]
    out: Annotated[Path, output_option(help="The trace to write (JSON lines).")] = Path("trace.jsonl")
    seconds: Annotated[
        float, load_option(min=0, help="Go on for this long, so that more is exported than the exporter keeps.")
    ] = 0.0
    as_json: JsonFlag = False


def run_export(
    options: ExportOptions,
    console: Console,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Write the trace; returns what it holds. Raises UsageError if there is nothing, or nobody answers."""
    rows = unknown = without_length = lost = 0
    try:
        with options.out.open("w", encoding="utf-8") as file:
            for page in _pages(options, clock, sleep):
                for row in page["rows"]:
                    unknown += "shares_unknown" in row
                    file.write(json.dumps(row) + "\n")
                rows += len(page["rows"])
                without_length += page["without_length"]
                lost += page["lost"]
    except OSError as error:
        raise UsageError(f"--out {options.out}: can't be written ({error.strerror or error})") from error
    if not rows:
        options.out.unlink()
        raise UsageError(f"{options.exporter} {_what_is_missing(without_length)}")
    console.print(f"Wrote {rows:,} requests to {options.out}.", highlight=False, soft_wrap=True)
    for count, text in (
        (unknown, "have no block marks (a router without a tokenizer, or spans): they count as sharing nothing"),
        (without_length, "were left out: the length of their prompts is unknown"),
        (lost, "were gone before they were read: export more often, or with --seconds"),
    ):
        if count:
            console.print(f"{count:,} requests {text}.", highlight=False, soft_wrap=True)
    return {
        "out": str(options.out),
        "requests": rows,
        "without_blocks": unknown,
        "without_length": without_length,
        "lost": lost,
    }


def _what_is_missing(without_length: int) -> str:
    """Why an exporter has no row to give, and what to do; `without_length` requests can't be one."""
    if without_length:
        return (
            f"has {without_length:,} requests, and the length of no prompt is known: give the router a tokenizer "
            "(tokenizer.model_dir), or engines that report usage, and send traffic"
        )
    return (
        "has seen no request yet: send traffic through a prefixwatch router among its exporter.targets, or send it "
        "spans (exporter.otlp), and try again"
    )


def _pages(
    options: ExportOptions, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[dict[str, Any]]:
    ends, after, life = clock() + options.seconds, 0, None
    while True:
        page = _page(options.exporter, after)
        if life not in (None, page["life"]):
            raise UsageError(f"{options.exporter} was restarted: block ids of two lives don't agree; export again")
        page["lost"] = page["first"] - after if life is not None else 0
        life, after = page["life"], page["last"]
        yield page
        if after < page["added"]:
            continue
        if clock() >= ends:
            return
        sleep(min(POLL_SECONDS, max(0.0, ends - clock())))


def _page(exporter: str, after: int) -> dict[str, Any]:
    base = (exporter if "://" in exporter else f"http://{exporter}").rstrip("/")
    page = read_json(f"{base}/api/v1/trace?after={after}", "--exporter", timeout_seconds=_TIMEOUT_SECONDS)
    if "rows" not in page:
        raise UsageError(f"{shown_url(base)} isn't a trace: give the URL of a prefixwatch exporter")
    return page


@command(app, "export")
def export(options: ExportOptions) -> None:
    """Write the requests that an exporter has seen as a trace, without any text in it.

    Example: `prefixwatch trace export --exporter http://exporter:9477 --seconds 3600 --out hour.jsonl`

    Example: `prefixwatch plan hour.jsonl --profile h100-llama-8b --speed 1.5`
    """
    finish(run_export(options, plain_console(stderr=options.as_json)), 0, as_json=options.as_json)
