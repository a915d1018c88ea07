"""`make bench`: every quick benchmark, one after the other; each prints ratios to a baseline of the same run.

Timings on a busy machine say nothing: nothing else should run meanwhile.
"""

from __future__ import annotations

import subprocess
import sys

QUICK = {
    "router decision": ["benchmarks.router_decision"],
    "block index": ["benchmarks.index_memory"],
    "KV events": ["benchmarks.kv_events_rate", "--blocks", "50000", "--grow", "50000"],
    "TTFT added by the router": ["benchmarks.router_added_ttft"],
    "exporter CPU per scrape": ["benchmarks.exporter_scrape"],
    "load generator's TTFT error": ["benchmarks.loadgen_ttft_error", "--seconds", "4"],
}


def main() -> int:
    """Exit code 1 if any of them failed."""
    failed = []
    for title, (module, *options) in QUICK.items():
        print(f"\n== {title} ==", flush=True)
        if subprocess.run([sys.executable, "-m", module, *options], check=False).returncode:
            failed.append(title)
    for title in failed:
        print(f"failed: {title}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
