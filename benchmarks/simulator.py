"""The simulator beside Dynamo's offline replay, and how its cost grows with workers and requests.

    python -m benchmarks.simulator TRACE [--replay PYTHON] [--workers 1,64] [--grow] [--million] [--json]

TRACE is a file in Mooncake's format. Each figure is the CPU time and peak memory of a whole process, start included;
both tools replay the same trace on engines of 10,000 blocks of 512 tokens with 8,192 tokens a step. `--replay` names
the Python that has `ai-dynamo` (default: .bench-peers/dynamo-replay/bin/python, by scripts/install-bench-peers);
without it that column is left out, with the reason. Their step times are their own polynomial, ours the profile's: hit
ratios are comparable, latencies aren't. `--grow` measures growth with workers, requests and cache, `--million`
1,000,000 requests (the trace 84 times, with fresh ids) on 1,000 engines with the KV blocks that the profile states.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest, read_trace

REPLAY = Path(".bench-peers/dynamo-replay/bin/python")
CAPACITY_BLOCKS, BLOCK_TOKENS, STEP_TOKENS = 10_000, 512, 8192
POLICIES = {"round_robin": "round_robin", "dynamo_kv": "kv_router"}
"""Ours, and the replay's router mode."""
PROFILE = "h100-llama-8b"


class Fleet(NamedTuple):
    workers: int
    times: int
    """How often the trace is repeated with fresh block ids."""
    capacity_blocks: int = CAPACITY_BLOCKS


GROWTH = (
    *(Fleet(workers, 1) for workers in (64, 250, 1000)),
    *(Fleet(64, times) for times in (2, 4)),
    *(Fleet(64, 1, blocks) for blocks in (1_000, 3_000)),
)
GROWTH_POLICIES = ("round_robin", "prefix_hash", "cache_aware", "dynamo_kv")
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """One process. Ratios are of prompt tokens reused to all."""

    workers: int
    capacity_blocks: int
    policy: str
    requests: int
    cpu_seconds: float
    peak_mb: float
    hit_ratio: float | None


def tiled(requests: Sequence[SimulatedRequest], times: int) -> list[SimulatedRequest]:
    """The requests this many times over, at the same moments, with block ids of their own: the rate grows."""
    top = 1 + max(int(request.blocks.max()) for request in requests)
    copies = [
        replace(request, id=f"{request.id}-{copy}", blocks=request.blocks + top * copy)
        for copy in range(times)
        for request in requests
    ]
    return sorted(copies, key=lambda request: request.arrival_s)


def simulate_here(trace: Path, workers: int, policy: str, requests: int, capacity_blocks: int) -> None:
    """The child: simulate this number of requests, and print the hit ratio."""
    recorded = read_trace(trace).requests
    served = tiled(recorded, -(-requests // len(recorded)))[:requests]
    engine = EngineConfig(
        profile(PROFILE).step_time,
        block_size=BLOCK_TOKENS,
        capacity_blocks=capacity_blocks,
        max_num_batched_tokens=STEP_TOKENS,
    )
    result = simulate_requests(
        served, policy=policy, workers=workers, engine=engine, arrivals="trace", keeps_scores=False
    )
    print(json.dumps({"hit_ratio": result.token_hit_ratio}))


def measured(command: Sequence[str], environment: dict[str, str] | None = None) -> tuple[float, float, str]:
    """CPU seconds, peak megabytes and output of a process. Raises SystemExit if it fails."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


def ours(trace: Path, fleet: Fleet, policy: str, requests: int) -> Run:
    child = f"{fleet.workers},{policy},{requests},{fleet.capacity_blocks}"
    cpu, memory, output = measured([sys.executable, "-m", "benchmarks.simulator", str(trace), "--child", child])
    return Run(fleet.workers, fleet.capacity_blocks, policy, requests, cpu, memory, json.loads(output)["hit_ratio"])


def theirs(python: Path, trace: Path, workers: int, policy: str) -> Run:
    arguments = {
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks": CAPACITY_BLOCKS,
        "max_num_seqs": 256,
        "max_num_batched_tokens": STEP_TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(python), "-m", "dynamo.replay", str(trace), "--extra-engine-args", json.dumps(arguments)]
        command += ["--num-workers", str(workers), "--router-mode", POLICIES[policy]]
        command += ["--trace-block-size", str(BLOCK_TOKENS), "--report-json", str(report)]
        cpu, memory, _ = measured(command, {**os.environ, "DYN_LOG": "error"})
        found = json.loads(report.read_text(encoding="utf-8"))
    ratio = found["first_admission_prefix_cache_reused_ratio"]
    return Run(workers, CAPACITY_BLOCKS, policy, found["completed_requests"], cpu, memory, ratio)


def compare(trace: Path, python: Path, workers: Sequence[int], requests: int) -> list[dict[str, object]]:
    """A row per fleet and policy; the replay's kv_router needs more than one worker."""
    rows: list[dict[str, object]] = []
    for count in workers:
        for policy in POLICIES:
            if count == 1 and policy != "round_robin":
                continue
            row: dict[str, object] = {
                "workers": count,
                "policy": policy,
                "ours": asdict(ours(trace, Fleet(count, 1), policy, requests)),
            }
            if python.exists():
                row["theirs"] = asdict(theirs(python, trace, count, policy))
            rows.append(row)
    return rows


def as_markdown(rows: Sequence[dict[str, object]], grown: Sequence[Run]) -> str:
    lines = ["| workers | policy | CPU s ours / replay | ratio | MB ours / replay | hit ratio ours / replay |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        a, b = row["ours"], row.get("theirs")
        assert isinstance(a, dict)
        if isinstance(b, dict):
            cpu = f"{a['cpu_seconds']:.1f} / {b['cpu_seconds']:.1f} | {a['cpu_seconds'] / b['cpu_seconds']:.2f}"
            rest = f"{a['peak_mb']:.0f} / {b['peak_mb']:.0f} | {a['hit_ratio']:.1%} / {b['hit_ratio']:.1%}"
        else:
            cpu, rest = f"{a['cpu_seconds']:.1f} / – | –", f"{a['peak_mb']:.0f} / – | {a['hit_ratio']:.1%} / –"
        lines.append(f"| {row['workers']} | {row['policy']} | {cpu} | {rest} |")
    if grown:
        lines += ["", "| workers | blocks | policy | requests | CPU s | µs per request | MB |", "|---" * 7 + "|"]
    for run in grown:
        cpu = f"{run.cpu_seconds:.1f} | {run.cpu_seconds / run.requests * 1e6:.0f}"
        lines.append(
            f"| {run.workers} | {run.capacity_blocks:,} | {run.policy} | {run.requests:,} | {cpu} | {run.peak_mb:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="trace file in Mooncake's format")
    parser.add_argument("--replay", type=Path, default=REPLAY, help="Python with ai-dynamo 1.4.2")
    parser.add_argument("--workers", default="1,64", help="fleet sizes to compare, comma-separated; empty: none")
    parser.add_argument("--grow", action="store_true", help="also measure growth with workers and requests")
    parser.add_argument("--million", action="store_true", help="also 1,000,000 requests on 1,000 engines")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.trace.is_file():
        print(f"error: {options.trace}: no such file; name a trace in Mooncake's format", file=sys.stderr)
        return 2
    if options.child:
        workers, policy, requests, blocks = options.child.split(",")
        simulate_here(options.trace, int(workers), policy, int(requests), int(blocks))
        return 0
    if not options.replay.exists():
        print(f"note: {options.replay} is missing: run scripts/install-bench-peers to compare", file=sys.stderr)
    recorded = len(read_trace(options.trace).requests)
    rows = compare(options.trace, options.replay, [int(each) for each in options.workers.split(",") if each], recorded)
    sizes = GROWTH if options.grow else ()
    grown = [
        ours(options.trace, fleet, policy, fleet.times * recorded) for fleet in sizes for policy in GROWTH_POLICIES
    ]
    if options.million:
        hardware = profile(PROFILE)
        assert hardware.capacity_blocks is not None
        fleet = Fleet(1000, 1, hardware.capacity_blocks * hardware.block_size // BLOCK_TOKENS)
        grown.append(ours(options.trace, fleet, "dynamo_kv", MILLION))
    if options.json:
        print(json.dumps({"compared": rows, "growth": [asdict(run) for run in grown]}, indent=1))
    else:
        print(as_markdown(rows, grown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
