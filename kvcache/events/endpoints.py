"""The KV-event endpoints of one worker: one per data-parallel rank.

Engines with several data-parallel ranks behind one HTTP address publish the events of each rank on a port of its own
(vLLM and SGLang: base port + rank). Each rank has a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EventStream:
    """One rank's events. `cache` names its cache: the worker itself where it has one rank."""

    worker: str
    cache: str
    endpoint: str
    replay_endpoint: str | None


def endpoint_list(given: Any) -> Any:
    """Endpoints as a configuration gives them: none, one, several separated by commas, or a list."""
    if given is None:
        return ()
    return tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given


def check_endpoints(endpoints: Sequence[str], replays: Sequence[str]) -> None:
    """Raise ValueError for an endpoint that is given twice, or for replays that don't belong to the endpoints."""
    twice = next((each for each in endpoints if list(endpoints).count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"kv_events lists {twice} twice: give each rank's endpoint once")
    if replays and len(replays) != len(endpoints):
        raise ValueError(
            f"kv_replay has {len(replays)} endpoints and kv_events {len(endpoints)}: give one replay per endpoint, in "
            "the same order, or none"
        )


def event_streams(worker: str, endpoints: Sequence[str], replays: Sequence[str] = ()) -> list[EventStream]:
    """The streams of one worker, rank by rank."""
    return [
        EventStream(
            worker,
            worker if len(endpoints) == 1 else f"{worker}/{rank}",
            endpoint,
            replays[rank] if replays else None,
        )
        for rank, endpoint in enumerate(endpoints)
    ]
