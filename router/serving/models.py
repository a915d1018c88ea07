"""Which worker serves which model, by configuration or by the engines' own `/v1/models`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from prefixwatch.router.bounded import TooLong, read_at_most

_LISTING_BYTES = 4 * 2**20
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class _Listing(msgspec.Struct):
    data: list[dict[str, Any]] = []


Listing = list[dict[str, Any]]


class ServedModels:
    """The names that each worker serves: models, aliases and adapters. A worker whose names are unknown may serve any.

    `configured` names win over what an engine lists: some engines list one name and take any.
    """

    def __init__(self, configured: Mapping[str, Sequence[str] | None]) -> None:
        self._configured = {worker for worker, names in configured.items() if names is not None}
        self._names = {worker: frozenset(names or ()) for worker, names in configured.items()}
        self._unknown = frozenset(self._names.keys() - self._configured)
        self._workers: dict[str, frozenset[str]] = {}
        self._index()

    def learn(self, worker: str, listing: Listing | None) -> None:
        """The worker listed these models; None, or an empty list, changes nothing: the engine didn't say."""
        names = frozenset(str(model["id"]) for model in listing or () if "id" in model)
        if names and worker not in self._configured:
            self._names[worker] = names
            self._unknown -= {worker}
            self._index()

    def workers(self, model: str) -> frozenset[str] | None:
        """The workers that may serve this model; None for all, where the request names no model."""
        if not model:
            return None
        return self._workers.get(model, self._unknown)

    def names(self) -> list[str]:
        """All names that are known, sorted."""
        return sorted(self._workers)

    def _index(self) -> None:
        models = {name for names in self._names.values() for name in names}
        self._workers = {
            model: self._unknown | {worker for worker, names in self._names.items() if model in names}
            for model in models
        }


async def fetch_models(
    session: aiohttp.ClientSession, urls: Iterable[str], headers: Mapping[str, str] | None = None
) -> list[Listing | None]:
    """What each of these engines lists; None for one that doesn't answer with a list."""
    return await asyncio.gather(*(_models_of(session, url, headers or {}) for url in urls))


def merged(listings: Sequence[Listing | None]) -> Listing:
    """One entry per id, in order of first appearance."""
    by_id: dict[str, dict[str, Any]] = {}
    for listing in listings:
        for model in listing or ():
            by_id.setdefault(str(model.get("id")), model)
    return list(by_id.values())


async def _models_of(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Listing | None:
    try:
        async with session.get(f"{url}/v1/models", headers=headers, timeout=_TIMEOUT) as answer:
            if answer.status != 200:
                return None
            return msgspec.json.decode(await read_at_most(answer.content, _LISTING_BYTES), type=_Listing).data
    except (aiohttp.ClientError, TimeoutError, TooLong, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
