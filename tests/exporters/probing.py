"""A prober whose rounds are run by hand, what it recorded, and endpoints to probe."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from prefixwatch.exporters.http.credentials import Credentials
from prefixwatch.exporters.probes.config import ProbeConfig
from prefixwatch.exporters.probes.prober import Prober
from prefixwatch.kvcache.request_record import RequestRecord


class Ledger:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.second = asyncio.Event()

    def record(self, record: RequestRecord, source: str) -> None:
        assert source == "probes"
        self.records.append(record)
        if len(self.records) == 2:
            self.second.set()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Probes:
    """A prober of one target with a clock of its own; rounds are run by hand, and `seed` makes their prompts."""

    def __init__(
        self, url: str, seed: str = "", waiting: float | None = None, target: Any = None, **config: Any
    ) -> None:
        targets = [{"name": "w", "url": url, **(target or {})}]
        self.ledger, self.clock, self.waiting = Ledger(), Clock(), waiting
        self.prober = Prober(
            ProbeConfig.model_validate({"prompt_tokens": [500], **config, "targets": targets}),
            self.ledger.record,
            lambda _: self.waiting,
            Credentials(),
            clock=self.clock,
            rng=random.Random(seed),
        )
        self.state = self.prober.targets["w"]

    async def rounds(self, count: int) -> None:
        """As many rounds, a minute apart."""
        for _ in range(count):
            await self.prober.round(self.state)
            self.clock.now += 60

    def samples(self) -> dict[tuple[str, str], float]:
        """Samples of the metrics page by name and the labels' values, without buckets."""
        return {
            (sample.name.removeprefix("prefixwatch_"), "/".join(sample.labels.values())): sample.value
            for family in self.prober.metrics(0)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }


MakeProbes = Callable[..., Probes]
Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Endpoint], Awaitable[str]]


def streaming(*events: object) -> Endpoint:
    """An endpoint that sends these events, and the end of the stream where there is a `None`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            data = "[DONE]" if event is None else event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        return response

    return answer


TEXT = {"choices": [{"text": "a"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 500, "completion_tokens": 1}}
