"""A worker drains and its sessions move: how many soft, how long it takes, what their next turn costs, by link.

The traffic is the scenario `drain-sessions`: about 100 chats at the worker that drains, each with some thousand tokens
of an 8B model on an H100. In virtual time: equal seeds give equal figures.
"""

from __future__ import annotations

import argparse
import sys

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.loadgen.request_log.records import table_of
from prefixwatch.loadgen.request_log.session_moves import HARD, SOFT, UNDISTURBED, MoveEffect, move_effects
from prefixwatch.loadgen.scenario.model import load_scenario
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.simulator.sessions.moving_fleet import simulate_moves
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic

SCENARIO = "drain-sessions"


def effects(links: list[float], policy: str, seed: int) -> dict[str, MoveEffect]:
    """The one drain's effect, without sending blocks and with links of these rates (Gbit/s)."""
    scenario = load_scenario(SCENARIO)
    assert scenario.moves is not None
    requests = ScenarioTraffic(scenario).requests(seed=seed)
    engine = EngineConfig(
        profile(scenario.engine.profile or "").step_time, capacity_blocks=scenario.engine.capacity_blocks
    )
    plan = scenario.event_plan()
    settings: dict[str, Moves] = {"no blocks sent": scenario.moves.model_copy(update={"soft": False})}
    settings |= {f"{link:g} Gbit/s": scenario.moves.model_copy(update={"link_gbit_per_second": link}) for link in links}
    found = {}
    for name, moves in settings.items():
        result = simulate_moves(requests, plan, moves, policy=policy, engines=[engine] * scenario.workers, seed=seed)
        [found[name]] = move_effects(table_of(result.records), [result.policy], plan)
    return found


def _times(own: MoveEffect, kind: str) -> str:
    turns = own.next_turns.get(kind)
    return "–" if turns is None else f"{turns.ttft_p50_ms:.1f} / {turns.ttft_p95_ms:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.session_moves", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--links", default="2,10,25,100", help="comma-separated rates, Gbit/s")
    parser.add_argument("--policy", default="score", help="the routing policy")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    links = [float(link) for link in arguments.links.split(",")]
    print("| link | moved | soft | hard | drained after | next turn, soft ms | hard ms | undisturbed ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, own in effects(links, arguments.policy, arguments.seed).items():
        times = " | ".join(_times(own, kind) for kind in (SOFT, HARD, UNDISTURBED))
        print(f"| {name} | {own.moved} | {own.soft} | {own.hard} | {own.seconds_to_drain:.2f} s | {times} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
