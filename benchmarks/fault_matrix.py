"""Every fault of the drill, in a stack of its own: which alerts come, and which cause the diagnosis names.

    python -m benchmarks.fault_matrix            # prints the matrix and writes benchmarks/fault_matrix.md

Needs Prometheus and Alertmanager (scripts/install-test-tools).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from prefixwatch.stack.drill.command import as_markdown, run_in_lanes
from prefixwatch.stack.drill.drill import HASTEN, SETTLE_SECONDS
from prefixwatch.stack.drill.faults import FAULTS

_HEAD = """\
# Fault matrix

Written by `python -m benchmarks.fault_matrix`. Each fault is made from outside in a stack of its own: three simulated
engines, router, exporter, a real Prometheus and Alertmanager with the shipped rules on a clock {speedup:g} times as
fast, healthy traffic first. Alerts are those that a webhook received after inhibition; symptoms are allowed, any other
alert is wrong. The diagnosis is `prefixwatch diagnose --prometheus`, without a hint; the last column is the same with
`--exporter`, from {settle:g} s of its page alone. The speed of the machine isn't a finding: thresholds on plain times
are out of reach, objectives on times aren't counted, and nobody asks how long the router takes to decide.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fault_matrix")
    parser.add_argument("faults", nargs="*", help="names; all without any, which also writes the file")
    parser.add_argument("--lanes", type=int, default=2, help="drills at a time")
    arguments = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        results = asyncio.run(run_in_lanes(arguments.faults or list(FAULTS), Path(folder), arguments.lanes))
    passed = sum(each.passed for each in results)
    closing = f"{passed} of {len(results)} as they should be, in {time.monotonic() - begun:.0f} s."
    text = "\n".join([_HEAD.format(speedup=HASTEN, settle=SETTLE_SECONDS), as_markdown(results), "", closing, ""])
    print(text)
    if not arguments.faults:
        (Path(__file__).parent / "fault_matrix.md").write_text(text, encoding="utf-8")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
