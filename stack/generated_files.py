"""Files that a command writes, and `--check`: do those on disk equal them?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console


def report_outdated(wanted: Mapping[Path, str], present: Iterable[Path], remedy: str, console: Console) -> int:
    """Says which files a build would add or change, and which of those `present` it no longer makes: 1 if any."""
    wrong = [f"{path}: {'differs' if path.is_file() else 'missing'}" for path in wanted if _text(path) != wanted[path]]
    wrong += [f"{path}: no longer made, delete it" for path in sorted(set(present) - wanted.keys())]
    for line in wrong:
        console.print(line, highlight=False, soft_wrap=True)
    if wrong:
        console.print(f"out of date: {remedy}", highlight=False, soft_wrap=True)
    return 1 if wrong else 0


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
