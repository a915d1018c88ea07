"""`/v1/models`: what the healthy engines serve, as one list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class _Listing(msgspec.Struct):
    data: list[dict[str, Any]] = []


async def fetch_models(
    session: aiohttp.ClientSession, urls: Iterable[str], headers: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The models of these engines, each id once, first engine first; one that doesn't answer adds nothing."""
    return merged(await asyncio.gather(*(_models_of(session, url, headers or {}) for url in urls)))


def merged(listings: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One entry an id, in order of first appearance."""
    by_id: dict[str, dict[str, Any]] = {}
    for listing in listings:
        for model in listing:
            by_id.setdefault(str(model.get("id")), model)
    return list(by_id.values())


async def _models_of(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    try:
        async with session.get(f"{url}/v1/models", headers=headers, timeout=_TIMEOUT) as answer:
            return msgspec.json.decode(await answer.read(), type=_Listing).data if answer.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return []
