"""What the workers of a distributed run send to their master, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prefixwatch.loadgen.sending.distributed import Worker


class Runner:
    """Keeps the order of what a worker sends."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.handlers: dict[str, Callable[..., None]] = {}

    def register_message(self, name: str, handler: Callable[..., None], **_: Any) -> None:
        self.handlers[name] = handler

    def send_message(self, name: str, data: Any) -> None:
        self.sent.append(data.get("state", name))

    def _send_stats(self) -> None:
        self.sent.append("stats")


def test_locusts_statistics_are_sent_before_the_worker_says_it_is_done() -> None:
    """The master ends the test as soon as all workers are done: statistics that came later would be lost."""
    runner = Runner()
    run = SimpleNamespace(measure=lambda listener: None, records=[], report=dict)
    Worker(runner, lambda config, position, count: run, lambda record, exchange: None)  # type: ignore[arg-type,return-value]
    config = {"config": '{"target": "http://h", "model": "m"}', "share": [0, 1]}
    runner.handlers["prefixwatch_prepare"](None, SimpleNamespace(data=config))
    runner.handlers["prefixwatch_measure"](None, SimpleNamespace(data={}))

    assert runner.sent == ["prepared", "stats", "done"]
