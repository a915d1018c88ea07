"""A day of traffic under two autoscalers, in virtual time: one that knows the caches, and a utilisation HPA.

The day has the shape of the scenario `diurnal`: rates that rise and fall sevenfold, in bursts (gamma gaps), on 16
openings of Zipf popularity; here 24 hours long and with chats of several turns. Workers take three minutes to start.

hpa      Kubernetes' rule: ⌈n · utilisation / target⌉ with 10 % tolerance; down to the highest number wanted in the
         last 5 minutes; the newest worker goes; its sessions are computed again
cache    `exporters.scaling`: the governor with its hysteresis; the worker whose loss is least goes, and its sessions
         move by the cheaper way

Both have the same target, so that equal goodput can be seen. Lost hit tokens are those that an endless cache would have
given and the fleet didn't.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.plot import Curve, Panel, svg
from benchmarks.scaled_fleet import Look, Pace, ScaledFleet, Scaler
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.exporters.scaling.governor import Limits, State, advance
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.traffic.trace import SimulatedRequest

BLOCK = 64
ENGINE = EngineConfig(
    StepTime(base_s=0.012, per_prefill_token_s=1 / 6000, per_decode_sequence_s=2e-4),
    block_size=BLOCK,
    capacity_blocks=3000,
)
MOVES = Moves(link_gbit_per_second=50, kv_bytes_per_token=131_072)
HOURS, DAY_S = 24, 86_400.0
LOW, HIGH, PEAK_S = 0.1, 0.7, 14 * 3600.0
"""Sessions a second, and when they are most: as in the scenario, sevenfold."""
TURNS, THINK_S, OBJECTIVE_S = 5, 40.0, 0.5
TARGET = 1.0
"""Requests running and waiting at one worker."""
LEAST, MOST = 2, 24
FIGURE = Path("docs/figures/scaling-day.svg")


def traffic(hours: float, seed: int) -> list[SimulatedRequest]:
    """The day's requests in order of arrival."""
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, 17) ** 0.9
    popularity /= popularity.sum()
    openings = [rng.integers(0, 2**63, int(n), dtype=np.uint64) for n in rng.integers(8, 40, 16)]
    found: list[SimulatedRequest] = []
    now, number = 0.0, 0
    while now < hours * 3600:
        phase = math.cos((now - PEAK_S) / DAY_S * 2 * math.pi)
        rate = LOW + (HIGH - LOW) * (1 + phase) / 2
        now += float(rng.gamma(0.4, 1 / (0.4 * rate)))
        group = int(rng.choice(16, p=popularity))
        blocks, at = openings[group], now
        for turn in range(TURNS):
            blocks = np.concatenate([blocks, rng.integers(0, 2**63, int(rng.integers(4, 14)), dtype=np.uint64)])
            found.append(
                SimulatedRequest(
                    f"s{number}-{turn}", at, len(blocks) * BLOCK, int(rng.integers(80, 300)), blocks,
                    session=f"s{number}", turn=turn, group=f"g{group}",
                )
            )  # fmt: skip
            at += float(rng.exponential(THINK_S))
        number += 1
    return sorted(found, key=lambda request: request.arrival_s)


class UtilisationHpa:
    """Kubernetes' horizontal pod autoscaler on the mean load of a pod."""

    def __init__(self) -> None:
        self._wanted: deque[tuple[float, int]] = deque()

    def desired(self, look: Look) -> int:
        ready = len(look.loads)
        ratio = sum(look.loads.values()) / (ready * TARGET)
        wanted = look.asked if abs(ratio - 1) <= 0.1 else math.ceil(ready * ratio)
        wanted = min(max(wanted, LEAST), MOST)
        self._wanted.append((look.now_s, wanted))
        while self._wanted[0][0] < look.now_s - 300:
            self._wanted.popleft()
        highest = max(each for _, each in self._wanted)
        return wanted if wanted >= look.asked else min(look.asked, highest)

    def leaving(self, look: Look) -> str:
        return list(look.loads)[-1]  # the newest


class CacheAware:
    """The exporter's governor, and the worker whose blocks nobody else holds least."""

    def __init__(self) -> None:
        self._limits = Limits(
            TARGET, low_ratio=0.9, up_seconds=30, down_seconds=120, min_workers=LEAST, max_workers=MOST
        )
        self._state: State | None = None

    def desired(self, look: Look) -> int:
        state = self._state or State(look.asked)
        self._state = advance(state, self._limits, look.now_s, look.asked, sum(look.loads.values()))
        return self._state.desired

    def leaving(self, look: Look) -> str:
        cached = {name: look.engines[name].pool.blocks() for name in look.loads}
        holders = Counter(block for blocks in cached.values() for block in blocks)
        lost = {name: sum(holders[block] == 1 for block in blocks) for name, blocks in cached.items()}
        return min(lost, key=lost.__getitem__)


@dataclass(frozen=True)
class Day:
    """One scaler's day."""

    name: str
    records: Sequence[RequestRecord]
    gpu_hours: float
    sizes: Sequence[tuple[float, int]]

    @property
    def goodput(self) -> float:
        """Share of the requests whose first token came within the objective."""
        return sum(r.ttft_s is not None and r.ttft_s <= OBJECTIVE_S for r in self.records) / len(self.records)

    @property
    def lost_hit_tokens(self) -> int:
        """What an endless cache would have given and this fleet didn't."""
        return sum(max(0, r.planned_shared_tokens - (r.cached_tokens or 0)) for r in self.records)

    @property
    def ttft_p95(self) -> float:
        return float(np.percentile([r.ttft_s for r in self.records if r.ttft_s is not None], 95))

    @property
    def removals(self) -> int:
        return sum(max(0, a - b) for (_, a), (_, b) in zip(self.sizes, self.sizes[1:], strict=False))


def run(name: str, scaler: Scaler, moves: Moves, requests: Sequence[SimulatedRequest], policy: str) -> Day:
    """One day."""
    fleet = ScaledFleet(
        lambda: [make_policy(policy)], ENGINE, moves, scaler, workers=4, most=MOST, pace=Pace(), view="events"
    )
    records = fleet.run_day(requests).records
    return Day(name, records, fleet.worker_seconds / 3600, fleet.sizes)


def _steps(day: Day, ends_s: float) -> Curve:
    points = []
    for (at, size), (until, _) in zip(day.sizes, [*day.sizes[1:], (ends_s, 0)], strict=True):
        points += [(at / 3600, float(size)), (until / 3600, float(size))]
    return Curve(day.name, points)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling_day", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="score")
    parser.add_argument("--out", type=Path, default=FIGURE, help="the figure")
    arguments = parser.parse_args()
    requests = traffic(arguments.hours, arguments.seed)
    hard = MOVES.model_copy(update={"soft": False})
    days = [
        run("utilisation HPA", UtilisationHpa(), hard, requests, arguments.policy),
        run("HPA, sessions sent", UtilisationHpa(), MOVES, requests, arguments.policy),
        run("cache-aware", CacheAware(), MOVES, requests, arguments.policy),
    ]
    print("| autoscaler | goodput | TTFT P95 | GPU hours | lost hit tokens | workers removed |")
    print("|---|---|---|---|---|---|")
    for day in days:
        print(
            f"| {day.name} | {day.goodput:.2%} | {day.ttft_p95:.3f} s | {day.gpu_hours:.1f} | "
            f"{day.lost_hit_tokens / 1e6:.1f} million | {day.removals} |"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    curves = [_steps(day, requests[-1].arrival_s) for day in days]
    arguments.out.write_text(svg([Panel("Workers that serve or start", "hour", curves)]))
    print(f"figure: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
