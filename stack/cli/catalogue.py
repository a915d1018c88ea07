"""`prefixwatch exporter catalogue`: look at the systems that the exporter knows, and try a file of one's own."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from prefixwatch.documents import load
from prefixwatch.exporters.catalogue.check import Check, check
from prefixwatch.exporters.catalogue.model import Catalogue, System, shipped_catalogue
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.scraping.exposition import looks_like_metrics


def run_check(file: str, against: Path, console: Console, *, as_json: bool) -> int:
    """Hold a catalogue file, or a shipped system's name, against a page; 0 when nothing looks wrong, else 1."""
    shipped = shipped_catalogue()
    if file not in shipped.names and not Path(file).exists():
        raise ExporterError(f"{file}: no such file, and no system of this name; known: {', '.join(shipped.names)}")
    system = shipped.get(file) if file in shipped.names else load(file, System)
    others = Catalogue([system, *(shipped.get(name) for name in shipped.names)])
    found = check(system, _page(against), others)
    if as_json:
        print(json.dumps({"schema": 1, "ok": found.ok, **asdict(found)}, indent=2))
    else:
        _show(found, console)
    return 0 if found.ok else 1


def _page(path: Path) -> bytes:
    try:
        body = path.read_bytes()
        body = gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body
    except (OSError, EOFError, zlib.error) as error:
        raise ExporterError(f"--against {path}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    if not looks_like_metrics(body):
        begins = f"it begins {body[:40].decode(errors='replace')!r}" if body else "it is empty"
        raise ExporterError(f"--against {path}: not a metrics page: no line has the form of a sample; {begins}")
    return body


def _show(found: Check, console: Console) -> None:
    version = f" {found.version}" if found.version else ""
    console.print(f"[bold]{escape(found.system)}[/bold]{escape(version)}")
    if not found.detected:
        console.print("[red]the page is not taken for this system: no name of detect.any_of is on it, "
                      "or one of none_of is[/red]")  # fmt: skip
    if found.also:
        console.print(f"[red]the page is also taken for: {', '.join(found.also)}[/red]")
    rows = [("signal", "kind", "unit", "series", "value", "read from")]
    for one in found.mapped:
        value = "" if one.value is None else f"{one.value:g}"
        rows.append((one.signal, one.kind, one.unit, str(one.series), value, ", ".join(one.families)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # not a table of the terminal's width: names are to be found again, whole
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        console.print(line, soft_wrap=True, markup=False, highlight=False, style="bold" if row is rows[0] else None)
    for warning in found.warnings:
        console.print(f"[red]! {escape(warning)}[/red]", soft_wrap=True)
    for signal, families in found.unmatched.items():
        console.print(f"not on the page: {signal} ({escape(', '.join(families))})", soft_wrap=True)
    if found.unused:
        console.print(f"families that no signal reads: {len(found.unused)}")
        for name, kind in found.unused.items():
            console.print(f"  {escape(name)} ({kind})")
