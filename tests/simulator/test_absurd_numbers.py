"""Caches, moves and what the router knows of them: a number that no machine has is refused by the name of its key."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from rich.console import Console

from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.kvcache.transfer_link import KvLink
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.loadgen.scenario.fleet_section import Event, event_plan
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.router.config import CacheViewConfig, MovesConfig
from prefixwatch.router.tenant_config import FairnessConfig, IsolationConfig
from prefixwatch.simulator.caches.fleet import simulate_caches
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.sessions.moving_fleet import simulate_moves
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.planning.plan import PlanOptions, run_plan
from prefixwatch.stack.simulation.caches import chosen_caches
from tests.stack.command_line import prefixwatch

LIMITS = [
    ("simulate", "--workers"), ("simulate", "--capacity-blocks"), ("simulate", "--prefill-workers"),
    ("plan", "--capacity-blocks"), ("plan", "--max-workers"), ("bench", "--workers"),
]  # fmt: skip
MODELS: tuple[type[BaseModel], ...] = (Cache, Moves, MovesConfig, CacheViewConfig, FairnessConfig, IsolationConfig)
ANY_NUMBER = {(Cache, "seed")}
ABSURD = [math.nan, math.inf, -math.inf, -1, -1e-9, 10**18, 1e300]
ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1e-4), capacity_blocks=400)
REQUESTS = session_requests(6, 3, system_blocks=8, turn_blocks=4, think_seconds=1.0, output_tokens=4)


def numeric(model: type[BaseModel]) -> list[str]:
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return [name for name, kind in kinds.items() if {int, float} & {kind, *get_args(kind)} and kind is not bool]


KEYS = [(model, key) for model in MODELS for key in numeric(model)]
numbers = st.floats() | st.integers() | st.sampled_from([0, 1, 0.001, 3600, 10**6, 2**30, 1e-300, *ABSURD])


def accepted(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """The model, or None where it refuses the values by the names of keys that were given."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        if {problem["loc"][0] for problem in error.errors()} <= set(values):
            return None
        raise


def ends(result: SimulationResult) -> None:
    times = [getattr(record, name) for record in result.records for name in ("first_token_s", "end_s")]
    assert len(result.records) == len(REQUESTS)
    assert all(math.isfinite(time) for time in times if time is not None)


@pytest.mark.parametrize(("model", "key"), KEYS, ids=[f"{model.__name__}.{key}" for model, key in KEYS])
def test_no_key_takes_a_number_that_no_machine_has(model: type[BaseModel], key: str) -> None:
    taken = [value for value in ABSURD if accepted(model, {key: value}) is not None]
    assert taken == ([10**18] if (model, key) in ANY_NUMBER else [])


@pytest.mark.parametrize("architecture", ["shared", "transfer", "tiers"])
@settings(deadline=None, max_examples=40)
@given(values=st.dictionaries(st.sampled_from(numeric(Cache)), numbers, max_size=2))
def test_whatever_a_cache_takes_its_run_ends(architecture: str, values: dict[str, Any]) -> None:
    cache = accepted(Cache, {"architecture": architecture, **values})
    if cache is not None:
        ends(simulate_caches(REQUESTS, cache, policy="round_robin", engines=[ENGINE] * 2, view="events"))


@settings(deadline=None, max_examples=40)
@given(values=st.dictionaries(st.sampled_from(numeric(Moves)), numbers, max_size=2))
def test_whatever_moves_take_the_drain_ends(values: dict[str, Any]) -> None:
    moves = accepted(Moves, values)
    if moves is not None:
        plan = event_plan([Event.model_validate({"at": 2.0, "drain": "engine-1"})], 3)
        ends(simulate_moves(REQUESTS, plan, moves, policy="score", engines=[ENGINE] * 3))


@given(values=st.dictionaries(st.sampled_from(numeric(MovesConfig)), numbers, max_size=3))
def test_whatever_the_routers_moves_take_a_transfer_has_a_time(values: dict[str, Any]) -> None:
    own = accepted(MovesConfig, {"kv_bytes_per_token": 1000, **values})
    if own is not None and own.kv_bytes_per_token is not None:
        link = KvLink(own.link_gbit_per_second * 1e9 / 8, own.kv_bytes_per_token, own.link_latency_seconds)
        assert math.isfinite(link.seconds(10_000_000))


def test_the_option_says_which_key_and_which_range() -> None:
    with pytest.raises(UsageError, match=r"--cache 'shared\{latency_ms=1e18\}': latency_ms: Input should be less"):
        chosen_caches("shared{latency_ms=1e18}")


@pytest.mark.parametrize(("command", "option"), LIMITS)
def test_no_option_takes_more_than_memory_holds(command: str, option: str) -> None:
    result = prefixwatch(command, "smoke", option, str(10**18))
    assert result.code == 2
    assert f"Invalid value for '{option}': Input should be less than or equal to" in result.err


@pytest.mark.parametrize("command", ["bench", "simulate"])
def test_a_seed_below_0_is_refused(command: str) -> None:
    result = prefixwatch(command, "smoke", "--seed", "-1")
    assert (result.code, "Invalid value for '--seed': Input should be greater than" in result.err) == (2, True)


def test_a_cache_of_a_plan_is_at_most_a_million_times_the_profiles() -> None:
    """1e308 times as much was infinitely many blocks, and a traceback."""
    with pytest.raises(UsageError, match="--cache-sizes 1e308: expected numbers above 0, up to 1,000,000"):
        run_plan(PlanOptions(source="smoke", cache_sizes="1e308"), Console(quiet=True))
