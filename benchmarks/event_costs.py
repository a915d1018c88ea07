"""What growth, restart and drain of a fleet cost by routing policy: a bench on engines that it starts, as a table.

    python -m benchmarks.event_costs --engine vllm          # two real engines on this machine's CPU, under 12 minutes
    python -m benchmarks.event_costs                        # the same traffic and events on simulated engines

Each policy serves the same chats: one engine, to which a second is added; that one is killed and starts again with an
empty cache; the first one drains. Before: from the event before (or `warm_up_seconds`) to the event; after: from the
event to the next one, the start-up time of an engine included. Hits: cached / prompt tokens of what completed. A time
to first token counts from the schedule; one that never came is in the column of lost requests instead.

Exit code 1 where the runs aren't valid: the reasons are below the table.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, read_requests

POLICIES = "session,modulo:session{placement=modulo},cache_aware,dynamo_kv"
LIMIT_SECONDS = 680.0
"""Then the bench is asked to end: what was measured by then is graded and shown."""
END_SECONDS = 30.0
DURATION_SECONDS = 120.0
"""Four policies, the start of two engines and the restart of those that an event stopped take 11 minutes."""
TRAFFIC: dict[str, Any] = {
    "name": "event-costs",
    "duration_seconds": DURATION_SECONDS,
    "warm_up_seconds": 5,
    "arrivals": {"kind": "poisson", "rate_per_second": 1.5},
    "groups": {
        "count": 8,
        "shared_tokens": {"min": 400, "max": 500},
        "unique_tokens": {"min": 30, "max": 60},
        "output_tokens": {"min": 4, "max": 8},
    },
    "sessions": {"turns": {5: 1}, "think_seconds": {"min": 3, "mean": 6}, "later_tokens": {"min": 20, "max": 40}},
    "timeouts": {"first_token_seconds": 30, "inter_token_seconds": 15, "total_seconds": 60},
    "extra_body": {"ignore_eos": True},
    "engine": {"workers": 1},
    "slo": ["ttft", "availability"],
    "request_class": "interactive",
}
EVENTS: tuple[tuple[float, dict[str, Any]], ...] = (
    (20, {"add": 1}),
    (58, {"kill": "engine-1"}),
    (60, {"start": "engine-1"}),
    (98, {"drain": "engine-0"}),
)
"""At these seconds of 120."""


class Effect(NamedTuple):
    """One event under one policy; before and after it."""

    hit_ratio: tuple[float | None, float | None]
    ttft_p50_ms: tuple[float | None, float | None]
    ttft_p95_ms: tuple[float | None, float | None]
    lost: int
    """Requests that came due after the event and did not complete."""


def scenario(seconds: float) -> dict[str, Any]:
    """The traffic and its events, all times in proportion to a run of this length."""
    scale = seconds / DURATION_SECONDS
    events = [{"at": round(at * scale, 1), **what} for at, what in EVENTS]
    return {**TRAFFIC, "duration_seconds": seconds, "events": events}


def effect_of(records: Sequence[RequestRecord], at: float, before: float, after: float) -> Effect:
    """What an event at `at` did to one policy's requests: those due from `before` to it, and from it to `after`."""
    parts = [[r for r in records if start <= r.scheduled_s < end] for start, end in ((before, at), (at, after))]
    (hits_before, hits), (early, late) = ([reuse(part) for part in parts], [quantiles_ms(part) for part in parts])
    lost = sum(record.outcome is not Outcome.COMPLETED for record in parts[1])
    return Effect((hits_before, hits), (early[0], late[0]), (early[1], late[1]), lost)


def reuse(records: Sequence[RequestRecord]) -> float | None:
    """Cached / prompt tokens of the completed answers that report both; None without one."""
    known = [
        (record.cached_tokens, record.prompt_tokens)
        for record in records
        if record.outcome is Outcome.COMPLETED and record.cached_tokens is not None and record.prompt_tokens
    ]
    return sum(cached for cached, _ in known) / sum(prompt for _, prompt in known) if known else None


def quantiles_ms(records: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    """TTFT p50 and p95 from the schedule; None without a first token."""
    times = [record.first_token_s - record.scheduled_s for record in records if record.first_token_s is not None]
    if not times:
        return None, None
    p50, p95 = np.quantile(times, (0.5, 0.95)) * 1000
    return float(p50), float(p95)


def rows(log: Sequence[RequestRecord], summary: dict[str, Any]) -> Iterator[str]:
    """The table's rows: event by event, policy by policy, as the summary has the events."""
    effects = summary["events"]
    times = sorted({own["at_s"] for own in effects})
    for place, at in enumerate(times):
        before = times[place - 1] if place else float(TRAFFIC["warm_up_seconds"])
        after = times[place + 1] if place + 1 < len(times) else float("inf")
        for own in (own for own in effects if own["at_s"] == at):
            mine = [record for record in log if record.policy == own["policy"]]
            found = effect_of(mine, at, before, after)
            said = "invalid" if _reasons(summary, own["policy"]) else "valid"
            moved = "unknown" if own["moved_share"] is None else f"{own['moved_share']:.0%}".replace("%", " %")
            yield (
                f"| {own['event']} | {own['policy']} | {_pair(found.hit_ratio, 100)} | {_pair(found.ttft_p50_ms)} | "
                f"{_pair(found.ttft_p95_ms)} | {moved} | {found.lost} | {said} |"
            )


def _reasons(summary: dict[str, Any], policy: str) -> list[str]:
    """Why this policy's runs aren't valid: its own reasons, and those of the whole bench."""
    others = tuple(f"{name}: " for name in summary["policies"] if name != policy)
    return [why for why in summary["validity"]["reasons"] if not why.startswith(others)]


def _pair(values: tuple[float | None, float | None], scale: float = 1.0) -> str:
    return " → ".join("unknown" if value is None else f"{value * scale:,.0f}" for value in values)


def table(log: Sequence[RequestRecord], summary: dict[str, Any]) -> str:
    """The Markdown table, and why the runs it comes from aren't valid."""
    reasons = summary["validity"]["reasons"]
    return "\n".join(
        [
            "| event | policy | hit tokens %, before → after | TTFT p50 ms | TTFT p95 ms | sessions moved | "
            "not completed | run |",
            "|---|---|---|---|---|---|---|---|",
            *rows(log, summary),
            *(["", "Invalid:", "", *(f"- {why}" for why in reasons)] if reasons else []),
        ]
    )


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Run the bench in `folder`; its exit code. Asked to end after LIMIT_SECONDS, it keeps what it has."""
    file = folder / "event-costs.yaml"
    file.write_text(yaml.safe_dump(scenario(options.seconds)))
    command = [sys.executable, "-P", "-m", "prefixwatch", "bench", str(file), "--policy", options.policies]
    command += ["--engine", options.engine, "--repeats", "1", "--seed", str(options.seed), "--out", str(folder / "out")]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        return process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait(END_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["simulated", "vllm"], default="simulated")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--seconds", type=float, default=DURATION_SECONDS, help="length of each policy's run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="keep the bench's folder here; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        code = measure(options, folder)
        finished = folder / "out" / "summary.json"
        if not finished.is_file():
            print(f"the bench ended with exit code {code} and without a result: see above", file=sys.stderr)
            return 2
        summary = json.loads(finished.read_text())
        print(table(read_requests(folder / "out" / "requests.parquet"), summary))
    return 0 if summary["validity"]["valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
