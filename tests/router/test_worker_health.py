from __future__ import annotations

import errno

import aiohttp
from aiohttp.client_reqrep import ConnectionKey

from router.config import HealthConfig, WorkerConfig
from router.health import Fault, HealthMonitor, connect_fault


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
