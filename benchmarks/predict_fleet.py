"""Does the simulator predict a running fleet? Calibrated on one scenario, it foretells another; both are then compared.

    python -m benchmarks.predict_fleet [--engine vllm] [--seconds 60] [--out FOLDER] [--json]

`--engine vllm`: two real vLLM engines on the CPU serve a calibration scenario (prompts of 100 to 1,700 tokens, few at a
time). `engines calibrate` fits a profile to it. Then they serve `shared-prefix-cpu` under `round_robin` and
`cache_aware`, and the simulator serves the same requests, sent at the same moments, with that profile. Nothing of the
second run is fitted.

`--engine simulated`: two simulated engines, whose step times are known, so nothing is calibrated: what differs then is
the clock, HTTP and the work of the machine.

The rows of the table: what was measured, what was predicted, the difference, and how much is allowed (15 %, hit tokens
2 %). The exit code is 1 where a difference is larger. `--seconds` shortens both scenarios, to try the command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.engines.vllm.install import status
from prefixwatch.engines.vllm.server import VllmOptions
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, read_requests
from prefixwatch.loadgen.scenario.model import load_scenario
from prefixwatch.simulator.balance import max_over_mean_in_flight
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic
from prefixwatch.simulator.traffic.trace import SimulatedRequest

WORKERS, SEED = 2, 1
POLICIES = ("round_robin", "cache_aware")
PREDICTED = "shared-prefix-cpu"
CALIBRATION = {
    "name": "calibration",
    "description": "Prompts of many lengths, some reused; mostly one or two requests at a time.",
    "duration_seconds": 90,
    "arrivals": {"kind": "poisson", "rate_per_second": 1.5},
    "groups": {
        "count": 40,
        "popularity": {"zipf": 0.5},
        "shared_tokens": {"min": 80, "max": 1400},
        "unique_tokens": {"min": 20, "max": 300},
        "output_tokens": {"min": 8, "max": 32},
    },
    "tenants": [{"name": "acme", "salt": "acme-7f3a"}],
    "timeouts": {"first_token_seconds": 60, "inter_token_seconds": 30, "total_seconds": 120},
    "extra_body": {"ignore_eos": True},
    "engine": {"workers": WORKERS},
    "slo": ["ttft", "tpot"],
    "request_class": "interactive",
}
ALLOWED, ALLOWED_HITS = 0.15, 0.02
_SENT = frozenset({0, 1, 3})
"""Exit codes of a bench that has its results: also where an objective is missed or the machine was too busy."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one policy; None where it has none."""

    policy: str
    figure: str
    measured: float | None
    predicted: float | None
    allowed: float

    @property
    def difference(self) -> float | None:
        """Relative to what was measured."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted != 0)

    @property
    def holds(self) -> bool:
        return self.difference is not None and abs(self.difference) <= self.allowed


def prefixwatch(*arguments: str, allowed: frozenset[int] = frozenset({0})) -> int:
    """Run a command of ours; its exit code. Raises SystemExit for one that isn't allowed."""
    done = subprocess.run([sys.executable, "-m", "prefixwatch", *arguments], stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in allowed:
        raise SystemExit(f"prefixwatch {' '.join(arguments)} ended with exit code {done.returncode}")
    return done.returncode


def bench(scenario: str, engine: str, policies: Sequence[str], seconds: float | None, out: Path) -> list[RequestRecord]:
    arguments = ["bench", scenario, "--engine", engine, "--workers", str(WORKERS), "--policy", ",".join(policies)]
    arguments += ["--repeats", "1", "--seed", str(SEED), "--out", str(out)]
    prefixwatch(*arguments, *(["--duration", str(seconds)] if seconds else []), allowed=_SENT)
    return [record for record in read_requests(out / "requests.parquet") if record.phase == "measured"]


def calibrated(engine: str, seconds: float | None, out: Path) -> tuple[str, bool]:
    """The profile's file, and whether it describes all parts of the calibration's work."""
    scenario, fitted = out / "calibration.yaml", out / "fitted.yaml"
    scenario.write_text(yaml.safe_dump(CALIBRATION, sort_keys=False), encoding="utf-8")
    bench(str(scenario), engine, POLICIES[:1], seconds, out / "calibration")
    arguments = ["engines", "calibrate", str(out / "calibration"), "--out", str(fitted)]
    return str(fitted), prefixwatch(*arguments, allowed=frozenset({0, 3})) == 0


def predict(
    measured: Sequence[RequestRecord], policy: str, engine: EngineConfig, seconds: float | None
) -> Sequence[RequestRecord]:
    """The same requests, sent at the same moments, by the simulator."""
    scenario = load_scenario(PREDICTED)
    if seconds:
        scenario = scenario.model_copy(update={"duration_seconds": seconds})
    planned = {int(each.id[1:]): each for each in ScenarioTraffic(scenario, engine.block_size).requests(SEED)}
    sent = sorted((record for record in measured if record.sent_s is not None), key=lambda record: record.sent_s or 0.0)
    requests = [_as_sent(planned[record.index], record) for record in sent]
    return simulate_requests(
        requests, policy=policy, workers=WORKERS, engine=engine, seed=SEED, arrivals="trace", view="events"
    ).records


def _as_sent(planned: SimulatedRequest, record: RequestRecord) -> SimulatedRequest:
    assert record.sent_s is not None
    if record.prompt_tokens not in {None, planned.prompt_tokens}:
        raise SystemExit(
            f"request {record.index} had {record.prompt_tokens} prompt tokens, {planned.prompt_tokens} were planned"
        )
    return replace(planned, arrival_s=record.sent_s)


def figures(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Times in ms, counted from the moment each request was sent."""
    done = [record for record in records if record.outcome == Outcome.COMPLETED]
    ttft = [1e3 * (each.first_token_s - each.sent_s) for each in done if each.first_token_s and each.sent_s is not None]
    tpot = [1e3 * each.tpot_s for each in done if each.tpot_s is not None]
    workers = sorted({record.worker for record in done})
    return {
        "TTFT p50, ms": float(np.percentile(ttft, 50)) if ttft else None,
        "TTFT p95, ms": float(np.percentile(ttft, 95)) if ttft else None,
        "TPOT p50, ms": float(np.percentile(tpot, 50)) if tpot else None,
        "most loaded / mean": max_over_mean_in_flight(done, workers),
        "hit tokens": float(sum(record.cached_tokens or 0 for record in done)),
    }


def compare(policy: str, measured: Sequence[RequestRecord], predicted: Sequence[RequestRecord]) -> list[Row]:
    ours, theirs = figures(predicted), figures(measured)
    return [
        Row(policy, name, theirs[name], ours[name], ALLOWED_HITS if name == "hit tokens" else ALLOWED) for name in ours
    ]


def as_markdown(rows: Sequence[Row]) -> str:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    lines = ["| policy | figure | measured | predicted | difference | allowed |", "|---" * 6 + "|"]
    for row in rows:
        off = "–" if row.difference is None else f"{row.difference:+.1%}"
        cells = [row.policy, row.figure, number(row.measured), number(row.predicted)]
        lines.append("| " + " | ".join([*cells, off if row.holds else f"**{off}**", f"{row.allowed:.0%}"]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm", help="what serves (default: vllm)")
    parser.add_argument("--seconds", type=float, help="length of both scenarios; default: their own")
    parser.add_argument("--out", type=Path, help="keep the benches and the profile in this folder")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    if options.seconds is not None and not options.seconds >= 5:
        parser.error(f"--seconds {options.seconds:g}: at least 5 are needed for requests to come")
    if options.engine == "vllm" and not (found := status()).installed:
        print(f"skipped: no vLLM in {found.folder} ({found.reason}): prefixwatch engines install vllm", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out: Path = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        rows, fits = run(options.engine, options.seconds, out)
    if options.json:
        print(json.dumps([{**asdict(row), "difference": row.difference, "holds": row.holds} for row in rows], indent=1))
    else:
        print(as_markdown(rows))
    if not fits:
        print("The profile doesn't describe all of the calibration's work well (engines calibrate).", file=sys.stderr)
    return 0 if all(row.holds for row in rows) else 1


def run(engine: str, seconds: float | None, out: Path) -> tuple[list[Row], bool]:
    """The rows of both policies, and whether the profile fits what it was calibrated on."""
    hints = load_scenario(PREDICTED).engine
    if engine == "vllm":
        name, fits = calibrated(engine, seconds, out)
        limits = VllmOptions()
        config = EngineConfig(
            profile(name).step_time,
            block_size=limits.block_size,
            capacity_blocks=limits.capacity_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
    else:
        fits = True
        config = EngineConfig(
            profile(hints.profile or DEFAULT_PROFILE).step_time, capacity_blocks=hints.capacity_blocks or 4096
        )
    records = bench(PREDICTED, engine, POLICIES, seconds, out / "predicted")
    rows = []
    for policy in POLICIES:
        own = [record for record in records if record.policy == policy]
        rows += compare(policy, own, predict(own, policy, config, seconds))
    return rows, fits


if __name__ == "__main__":
    sys.exit(main())
