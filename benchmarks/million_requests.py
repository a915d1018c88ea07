"""A million requests of log, graded, compared and reported: how long it takes and how much memory.

    python -m benchmarks.million_requests [--requests 1000000]

A synthetic log of two policies is written, then `prefixwatch report` reads, grades, compares and draws it in a
process of its own. Aim: under a minute, within 2 GB. The baseline of the same run is reading the log with
pyarrow's own `to_pylist`, which alone is what a row-by-row grader would have to do first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from prefixwatch.loadgen.grading.summary import RunFacts, build_summary, write_summary
from prefixwatch.loadgen.request_log.records import schema

POLICIES = ("round_robin", "cache_aware")
OBJECTIVES = ["ttft", "tpot", "goodput", "availability"]
_MEASURE = (
    "import resource, sys\n"
    "from prefixwatch.stack.cli.main import app\n"
    "try: app(sys.argv[1:])\n"
    "except SystemExit: pass\n"
    "scale = 1 if sys.platform == 'darwin' else 1024\n"
    "print('rss', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)\n"
)
_ROWS = "import sys, pyarrow.parquet as pq; print('rows', len(pq.read_table(sys.argv[1]).to_pylist()))"


def write_run(folder: Path, requests: int) -> None:
    """A finished bench's folder with a log of this many requests, half of them under each policy."""
    rng = np.random.default_rng(0)
    tables = [_policy(policy, requests // len(POLICIES), rng) for policy in POLICIES]
    pq.write_table(pa.concat_tables(tables), folder / "requests.parquet")
    (folder / "config.yaml").write_text(yaml.safe_dump({"scenario": {"slo": OBJECTIVES}, "runs": []}))
    facts = RunFacts(scenario="million", engine="synthetic", workers=8, policies=POLICIES)
    write_summary(folder / "summary.json", build_summary(tables[0].slice(0, 100), [], facts))


def _policy(policy: str, requests: int, rng: np.random.Generator) -> pa.Table:
    at = np.sort(rng.uniform(0, requests / 100, requests))
    first = at + rng.lognormal(-1.5, 0.6, requests)
    tokens = rng.integers(2, 64, requests)
    gaps = [rng.uniform(5, 20, min(count, 16) - 1).astype(np.float32) for count in tokens.tolist()]
    known = {
        "id": [f"{policy}-{i}" for i in range(requests)],
        "policy": [policy] * requests,
        "repeat": np.zeros(requests, np.int64),
        "index": np.arange(requests),
        "phase": ["measured"] * requests,
        "tenant": [f"t{i % 7}" for i in range(requests)],
        "session": [f"s{i // 3}" for i in range(requests)],
        "turn": np.arange(requests) % 3,
        "group": [f"g{i % 50}" for i in range(requests)],
        "request_class": ["interactive" if i % 3 else "batch" for i in range(requests)],
        "scheduled_s": at,
        "sent_s": at + 0.0005,
        "first_token_s": first,
        "end_s": first + tokens * 0.015,
        "outcome": ["completed"] * requests,
        "planned_prompt_tokens": np.full(requests, 2000),
        "planned_shared_tokens": np.full(requests, 1500),
        "prompt_tokens": np.full(requests, 2000),
        "cached_tokens": rng.choice([0, 800, 1488], requests),
        "output_tokens": tokens,
        "chunk_gaps_ms": gaps,
        "worker": [f"w{i % 8}" for i in range(requests)],
        "decision_us": rng.uniform(20, 200, requests),
    }
    columns = [
        pa.array(known[f.name], f.type) if f.name in known else _empty(f.type, requests) for f in schema()
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, schema=schema())


def _empty(kind: pa.DataType, count: int) -> pa.Array:
    return pa.array([""] * count, kind) if pa.types.is_string(kind) else pa.nulls(count, kind)


def _timed(arguments: Sequence[str]) -> tuple[float, str]:
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begun, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    requests: int = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_run(folder, requests)
        log = folder / "requests.parquet"
        print(f"{requests:,} requests, {log.stat().st_size / 2**20:.0f} MB of Parquet")
        seconds, output = _timed([_MEASURE, "report", str(folder)])
        rss = int(output.rsplit("rss ", 1)[1])
        graded = json.loads((folder / "summary.json").read_text())["policies"]
        assert sum(own["requests"]["scheduled"] for own in graded.values()) == requests
        print(f"prefixwatch report: {seconds:.1f} s, {rss / 2**30:.2f} GB at most", flush=True)
        rows_seconds, _ = _timed([_ROWS, str(log)])
        print(f"reading it row by row: {rows_seconds:.1f} s; ratio {seconds / rows_seconds:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
