"""One knob for each dimension of locality, and by how much it moves: expected by the definition, and measured.

Shipped scenario `locality`, virtual time. Expected: temporal 1 - 2 T / L for sessions with an opening of their own and
two turns T seconds apart in a run of L; spatial 1 / n for n equally popular prefixes; identity 1 - U / S for S sessions
of U users in turn; topological 1 / W for turns spread evenly over W workers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.kvcache.locality import DIMENSIONS, NORM
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.reuse.grade import grade_reuse
from prefixwatch.loadgen.scenario.model import SHIPPED_FOLDER, Scenario
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic

OWN_OPENINGS = {"groups.count": 0}


@dataclass(frozen=True, slots=True)
class Turn:
    """A knob at one position."""

    dimension: str
    knob: str
    changes: Mapping[str, Any]
    expected: float
    policy: str = "session"
    workers: int = 4


@dataclass(frozen=True, slots=True)
class Moved:
    """What it gave."""

    turn: Turn
    locality: Mapping[str, float]
    hit_ratio: float


def turns(scenario: Scenario, sessions: int) -> list[Turn]:
    """Every knob at two positions."""
    seconds = scenario.duration_seconds
    return [
        *(
            Turn("temporal", f"think {t} s", {**OWN_OPENINGS, "sessions.think_seconds": t}, 1 - 2 * t / seconds)
            for t in (20, 4)
        ),
        *(Turn("spatial", f"{n} prefixes", {"groups.count": n}, 1 / n) for n in (16, 4)),
        *(Turn("identity", f"{u} users", {"sessions.users": u}, max(0.0, 1 - u / sessions)) for u in (240, 40)),
        *(
            Turn("topological", f"{w} worker{'s in turn' if w > 1 else ''}", OWN_OPENINGS, 1 / w, "round_robin", w)
            for w in (4, 1)
        ),
    ]


def run(turn: Turn, seed: int) -> Moved:
    """Simulate the scenario with this knob turned."""
    scenario = changed(turn.changes)
    engine = EngineConfig(profile(scenario.engine.profile or "").step_time, capacity_blocks=20_000)
    requests = ScenarioTraffic(scenario).requests(seed)
    result = simulate_requests(requests, policy=turn.policy, workers=turn.workers, engine=engine, seed=seed)
    found = grade_reuse(Measured(Columns.of(result.records)))
    assert found is not None
    return Moved(turn, found.locality, result.token_hit_ratio or 0.0)


def changed(changes: Mapping[str, Any]) -> Scenario:
    """The shipped scenario with these keys, as `section.key`."""
    content = deepcopy(yaml.safe_load((SHIPPED_FOLDER / "locality.yaml").read_text(encoding="utf-8")))
    for path, value in changes.items():
        section, key = path.split(".")
        content[section][key] = value
    return Scenario.model_validate(content)


def sessions_of(seed: int) -> int:
    """How many sessions the scenario has with this seed."""
    return len({request.session for request in ScenarioTraffic(changed({})).requests(seed)})


def moved(seed: int) -> list[Moved]:
    """Every row of the table."""
    return [run(turn, seed) for turn in turns(changed({}), sessions_of(seed))]


def table(rows: Sequence[Moved]) -> str:
    """In Markdown."""
    header = ["moves", "knob", "expected", *DIMENSIONS, NORM, "hit tokens"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        cells = [f"{row.locality[name]:.2f}" if name in row.locality else "–" for name in (*DIMENSIONS, NORM)]
        place = DIMENSIONS.index(row.turn.dimension)
        cells[place] = f"**{cells[place]}**"
        lines.append([row.turn.dimension, row.turn.knob, f"{row.turn.expected:.2f}", *cells, f"{row.hit_ratio:.1%}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.locality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    print(table(moved(parser.parse_args().seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
