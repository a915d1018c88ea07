"""`prefixwatch drill`: make a fault in a small stack of your own and see what alerts and diagnosis make of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from stack.diagnosis_report import print_report
from stack.drill import DrillResult, run_drill
from stack.drill_faults import FAULTS
from stack.drill_report import as_document, print_results
from stack.errors import UsageError


def run_drills(names: Sequence[str], console: Console, *, as_json: bool) -> tuple[list[dict[str, Any]], int]:
    """Run these drills, all without a name; answers a document a drill and 1 if one went wrong. Raises UsageError."""
    unknown = sorted(set(names) - set(FAULTS))
    if unknown:
        raise UsageError(f"no fault '{unknown[0]}': there are {', '.join(FAULTS)}")
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:  # short, for the sockets' sake
        results = []
        for name in names or FAULTS:
            with console.status(f"{name}: {FAULTS[name].title} …"):
                results.append(asyncio.run(run_drill(name, FAULTS[name], Path(folder) / name)))
            if not as_json and len(names) == 1:
                print_report(results[-1].diagnosis, "the drill's Prometheus", None, results[-1].firing, console)
    if not as_json:
        print_results(results, console)
    return [as_document(each) for each in results], 0 if all(each.passed for each in results) else 1


async def run_in_lanes(names: Sequence[str], folder: Path, lanes: int) -> list[DrillResult]:
    """So many drills at a time; results in the order of the names."""
    free = asyncio.Semaphore(lanes)

    async def one(name: str) -> DrillResult:
        async with free:
            return await run_drill(name, FAULTS[name], folder / name)

    return list(await asyncio.gather(*(one(name) for name in names)))
