"""What it costs to know the caches, and what knowing less costs in hits: events, snapshots of key sets, history.

Virtual time. `events`: every change reaches the router at once, in vLLM's form (token ids and all), each a message.
`snapshots`: the router asks each engine for all of its keys (8 bytes each), as often as changes ask for, or every 1 to
30 s; `snapshots:5` is also what routers know that tell each other their views every 5 s. `history`: nothing is sent.
Bytes are of the encoded payloads; CPU is what the router takes to apply them (decode, hash, index), over that
of `events` in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.events.snapshot import SnapshotWriter
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic
from prefixwatch.simulator.traffic.trace import SimulatedRequest

VIEWS = ("events", "snapshots", "snapshots:1", "snapshots:5", "snapshots:30", "history")
KEY_BYTES = 8
_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Row:
    """One way to know."""

    view: str
    messages_per_second: float
    kilobytes_per_second: float
    cpu_seconds: float
    hit_ratio: float
    ttft_p95_ms: float


class PricedFleet(FleetSimulation):
    """A fleet whose engines' reports are encoded, counted, and applied once more by a router's own code, timed."""

    def __init__(self, policy: str, engine: EngineConfig, workers: int, view: str) -> None:
        super().__init__([make_policy(policy)], engine, workers, view=view)
        self.messages = 0
        self.sent_bytes = 0
        self.cpu_seconds = 0.0
        self._by_events = view == "events"
        self._second_index = BlockIndex()
        self._feeds = [WorkerFeed(name, self._second_index, engine.block_size) for name in self._names]
        self._writers = [SnapshotWriter(name, self._second_index) for name in self._names]
        self._held: list[dict[int, None]] = [{} for _ in self._names]
        self._sequences = [0] * len(self._names)
        self._polled = [0] * len(self._names)

    def _note_stored(self, number: int, blocks: Sequence[int]) -> None:
        super()._note_stored(number, blocks)
        self._held[number].update(dict.fromkeys(blocks))
        if self._by_events:
            size = self._engine.block_size
            tokens = [int(block) % _VOCABULARY for block in blocks for _ in range(size)]
            stored = {"type": "BlockStored", "block_hashes": list(blocks), "parent_block_hash": None}
            self._publish(number, stored | {"token_ids": tokens, "block_size": size, "medium": "GPU"})

    def _note_evicted(self, number: int, block: int) -> None:
        super()._note_evicted(number, block)
        self._held[number].pop(block, None)
        if self._by_events:
            self._publish(number, {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"})

    def _look(self, now_s: float) -> None:
        super()._look(now_s)
        if self._snapshots is None:
            return
        for number, name in enumerate(self._names):
            while self._polled[number] < self._snapshots.polls[name]:
                self._polled[number] += 1
                self._take_snapshot(number)

    def _publish(self, number: int, event: dict[str, object]) -> None:
        payload = msgspec.msgpack.encode([0.0, [event], 0])
        self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + len(payload)
        began = time.process_time()
        self._feeds[number].apply(self._sequences[number], payload, 0.0)
        self.cpu_seconds += time.process_time() - began
        self._sequences[number] += 1

    def _take_snapshot(self, number: int) -> None:
        keys = np.fromiter(self._held[number], dtype=np.uint64).tobytes()
        self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + len(keys)
        began = time.process_time()
        self._writers[number].report(np.frombuffer(keys, dtype=np.uint64).tolist())
        self.cpu_seconds += time.process_time() - began


def priced(scenario: Scenario, requests: Sequence[SimulatedRequest], view: str, policy: str) -> Row:
    """Serve these requests with the router knowing the caches this way."""
    hints = scenario.engine
    engine = EngineConfig(
        profile(hints.profile or DEFAULT_PROFILE).step_time,
        block_size=hints.block_size or DEFAULT_BLOCK_SIZE,
        capacity_blocks=hints.capacity_blocks,
    )
    fleet = PricedFleet(policy, engine, scenario.workers, view)
    result: SimulationResult = fleet.run(requests)
    waits = [each.ttft_s for each in result.records if each.ttft_s is not None]
    seconds = scenario.duration_seconds
    return Row(
        view,
        fleet.messages / seconds,
        fleet.sent_bytes / 1e3 / seconds,
        fleet.cpu_seconds,
        result.token_hit_ratio or 0.0,
        float(np.quantile(waits, 0.95)) * 1e3,
    )


def table(rows: Sequence[Row]) -> str:
    """In Markdown; the first row is the baseline."""
    base = rows[0]
    lines = [
        "| knows by | messages/s | kB/s | CPU, of events | hit tokens | points lost | TTFT p95 ms |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| `{own.view}` | {own.messages_per_second:.1f} | {own.kilobytes_per_second:.1f} "
        f"| {own.cpu_seconds / base.cpu_seconds:.2f} | {own.hit_ratio:.1%} "
        f"| {100 * (base.hit_ratio - own.hit_ratio):.1f} | {own.ttft_p95_ms:.0f} |"
        for own in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--scenario", default="stale-index")
    parser.add_argument("--policy", default="score", help="one that can read either kind of view")
    parser.add_argument("--views", default=",".join(VIEWS))
    given = parser.parse_args()
    scenario = load_scenario(given.scenario)
    requests = ScenarioTraffic(scenario).requests(0)
    print(table([priced(scenario, requests, view, given.policy) for view in given.views.split(",")]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
