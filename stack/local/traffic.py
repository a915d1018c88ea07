"""Steady chat traffic for a drill or a demo: sessions that share openings, sent at random times whatever comes back."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from prefixwatch.engines.tiny_model import MODEL_NAME, words

_ANSWER_SECONDS = 120.0


@dataclass(slots=True)
class Traffic:
    """What is sent; may be changed while it runs."""

    rate_per_second: float = 12.0
    openings: int = 6
    """Different system prompts; conversations of all tenants share them."""
    opening_words: int = 400
    turns: int = 8
    """A conversation's length; then a new one takes its place."""
    turn_words: int = 32
    output_tokens: int = 12
    conversations: int = 48
    tenants: tuple[str, ...] = ("acme", "globex", "initech")
    hot_share: float = 0.0
    """Share of the requests that open a new conversation on the first opening: one popular prompt."""
    salt_per_request: bool = False
    """Clients send a salt of their own, another one with each request."""
    salt_per_tenant: bool = False
    """Clients send their tenant's salt, for a router that doesn't know tenants."""
    flood_per_second: float = 0.0
    """Further requests of one tenant, each with a long prompt of its own."""
    flood_tenant: str = "acme"
    flood_words: int = 1200


@dataclass(slots=True)
class _Conversation:
    tenant: str
    session: str
    messages: list[dict[str, str]]
    turns: int = 0


@dataclass(slots=True)
class Sender:
    """`run` sends until cancelled; statuses are counted, answers are thrown away."""

    target: str
    traffic: Traffic
    seed: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    _idle: list[_Conversation] = field(default_factory=list)
    _started: int = 0
    """Conversations that go on."""
    _numbered: int = 0
    """Conversations in all."""

    async def run(self) -> None:
        rng = random.Random(self.seed)
        vocabulary = words()
        openings = [" ".join(rng.choices(vocabulary, k=self.traffic.opening_words)) for _ in range(64)]
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            group.create_task(self._keep_sending(group, session, rng, vocabulary, openings))
            group.create_task(self._keep_flooding(group, session, rng, vocabulary))

    async def _keep_sending(
        self,
        group: asyncio.TaskGroup,
        session: aiohttp.ClientSession,
        rng: random.Random,
        vocabulary: list[str],
        openings: list[str],
    ) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(self.traffic.rate_per_second))
            conversation = self._next(rng, openings)
            text = " ".join(rng.choices(vocabulary, k=self.traffic.turn_words))
            conversation.messages.append({"role": "user", "content": text})
            group.create_task(self._converse(session, conversation))

    async def _keep_flooding(
        self, group: asyncio.TaskGroup, session: aiohttp.ClientSession, rng: random.Random, vocabulary: list[str]
    ) -> None:
        while True:
            rate = self.traffic.flood_per_second
            await asyncio.sleep(rng.expovariate(rate) if rate else 0.2)
            if rate:
                text = " ".join(rng.choices(vocabulary, k=self.traffic.flood_words))
                self._numbered += 1
                one = _Conversation(self.traffic.flood_tenant, f"flood-{self._numbered}", [_system(text)])
                one.messages.append({"role": "user", "content": "again"})
                group.create_task(self._send(session, one))

    def _next(self, rng: random.Random, openings: list[str]) -> _Conversation:
        """A conversation to go on with, or a new one while there are too few, or none is idle."""
        traffic = self.traffic
        hot = rng.random() < traffic.hot_share
        if not hot and self._idle and self._started >= traffic.conversations:
            return self._idle.pop(rng.randrange(len(self._idle)))
        self._started += 1
        self._numbered += 1
        opening = openings[0 if hot else self._numbered // len(traffic.tenants) % traffic.openings]
        tenant = traffic.tenants[self._numbered % len(traffic.tenants)]
        return _Conversation(tenant, f"session-{self._numbered}", [_system(opening)])

    async def _converse(self, session: aiohttp.ClientSession, conversation: _Conversation) -> None:
        answer = await self._send(session, conversation)
        conversation.turns += 1
        if answer is None or conversation.turns >= self.traffic.turns:
            self._started -= 1
            return
        conversation.messages.append({"role": "assistant", "content": answer})
        self._idle.append(conversation)

    async def _send(self, session: aiohttp.ClientSession, conversation: _Conversation) -> str | None:
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": conversation.messages,
            "max_tokens": self.traffic.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.traffic.salt_per_request:
            body["cache_salt"] = secrets.token_hex(16)
        elif self.traffic.salt_per_tenant:
            body["cache_salt"] = f"salt of {conversation.tenant}"
        headers = {"x-tenant-id": conversation.tenant, "x-session-id": conversation.session}
        try:
            async with session.post(f"{self.target}/v1/chat/completions", json=body, headers=headers) as response:
                self.statuses[str(response.status)] += 1
                async for _ in response.content:
                    pass
        except (aiohttp.ClientError, TimeoutError) as error:
            self.statuses[type(error).__name__] += 1
            return None
        return "noted" if response.status == 200 else None


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}
