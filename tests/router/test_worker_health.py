from __future__ import annotations

import errno

import aiohttp
from aiohttp.client_reqrep import ConnectionKey

from prefixwatch.router.config import HealthConfig, WorkerConfig
from prefixwatch.router.serving.health import Fault, HealthMonitor, connect_fault


class Watched:
    """A monitor of one worker, and what it told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.monitor = HealthMonitor(
            [WorkerConfig(name="a", url="http://engine/v1/")],
            HealthConfig(),
            on_up=lambda name: self.told.append(f"{name} up"),
            on_gone=lambda name: self.told.append(f"{name} gone"),
        )


def test_a_worker_is_down_until_it_answers() -> None:
    watched = Watched()
    assert watched.monitor.up() == {"a": False}
    watched.monitor.passed("a")
    watched.monitor.passed("a")
    assert watched.monitor.up() == {"a": True}
    assert watched.told == ["a up"]


def test_a_failed_request_takes_it_out_at_once_and_has_it_probed() -> None:
    """ai-dynamo/dynamo#11646 (RT19)"""
    watched = Watched()
    watched.monitor.passed("a")
    watched.monitor.failed("a", Fault.RESET, "reset")
    state = watched.monitor.states["a"]
    assert (state.up, state.reason, state.kick.is_set()) == (False, "reset", True)
    assert watched.told == ["a up"]  # unwell, but its cache may still be there


def test_a_refused_connection_means_that_its_cache_is_gone() -> None:
    """sgl-project/sglang#39822 (RT17)"""
    watched = Watched()
    watched.monitor.passed("a")
    watched.monitor.failed("a", Fault.REFUSED, "refused")
    watched.monitor.passed("a")
    assert watched.told == ["a up", "a gone", "a up"]


def test_one_slow_probe_is_forgiven_and_two_are_not() -> None:
    watched = Watched()
    watched.monitor.passed("a")
    watched.monitor.slow("a")
    assert watched.monitor.is_up("a")
    watched.monitor.slow("a")
    assert not watched.monitor.is_up("a")


def test_the_base_address_is_taken_with_or_without_v1() -> None:
    assert WorkerConfig(name="a", url="http://engine:8000/v1/").url == "http://engine:8000"


def test_running_out_of_file_descriptors_is_not_the_workers_fault() -> None:
    """A router at its limit must not empty its own fleet."""
    watched = Watched()
    watched.monitor.passed("a")
    key = ConnectionKey("engine", 80, False, True, None, None, None)
    error = aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, "Too many open files"))
    watched.monitor.failed("a", connect_fault(error), str(error))
    assert watched.monitor.is_up("a")
    assert watched.told == ["a up"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def monitor(clock: Clock, **settings: float) -> HealthMonitor:
    workers = [WorkerConfig(name="a", url="http://engine")]
    config = HealthConfig.model_validate(settings)
    return HealthMonitor(workers, config, on_up=lambda name: None, on_gone=lambda name: None, clock=clock)


def test_n_failures_in_a_row_to_leave_and_m_successes_to_return() -> None:
    health = monitor(Clock(), failures_to_leave=3, successes_to_return=2)
    health.passed("a")  # a worker that is new needs one
    assert health.is_up("a")
    for failures in (2, 3):
        for _ in range(failures):
            assert health.is_up("a")
            health.failed("a", Fault.RESET, "reset")
        if failures == 2:
            health.heard("a")  # a request that it answers ends the row
    assert not health.is_up("a")
    health.passed("a")
    health.failed("a", Fault.RESET, "reset")
    health.passed("a")
    assert not health.is_up("a")
    health.passed("a")
    assert (health.is_up("a"), health.flaps()) == (True, {"a": 1})


def test_a_refused_connection_needs_no_second_one() -> None:
    health = monitor(Clock(), failures_to_leave=3)
    health.passed("a")
    health.failed("a", Fault.REFUSED, "refused")
    assert not health.is_up("a")


def test_a_silent_worker_stays_out_for_a_while_whatever_its_health_says() -> None:
    clock = Clock()
    health = monitor(clock, silent_seconds=30)
    health.passed("a")
    clock.now = 100.0
    health.timed_out("a", 40.0, "no answer within 60 s")
    health.passed("a")
    assert (health.is_up("a"), health.states["a"].reason) == (False, "no answer within 60 s")
    clock.now = 130.0
    health.passed("a")
    assert health.is_up("a")


def test_a_worker_that_answers_others_meanwhile_is_slow_and_not_silent() -> None:
    """Under overload all workers are slow: taking them out would make it worse."""
    clock = Clock()
    health = monitor(clock)
    health.passed("a")
    clock.now = 50.0
    health.heard("a")
    health.timed_out("a", 40.0, "no answer within 60 s")
    assert (health.is_up("a"), health.flaps()) == (True, {"a": 0})


def test_a_draining_worker_gets_no_requests_until_its_process_has_ended() -> None:
    watched = Watched()
    watched.monitor.passed("a")
    watched.monitor.states["a"].draining = True
    watched.monitor.passed("a")
    assert (watched.monitor.is_up("a"), watched.monitor.up()) == (False, {"a": True})
    watched.monitor.failed("a", Fault.REFUSED, "stopped")
    watched.monitor.passed("a")
    assert watched.monitor.is_up("a")
