"""How near reuse is, in four senses, each a share from 0 to 1 of what is known; from request records and the tree."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

import numpy as np
from prometheus_client.core import Metric

from exporters.requests.seen import SeenRequest
from exporters.requests.sessions import PlaceOf, nowhere
from kvcache.prefix_tree import PrefixTree

TEMPORAL_SECONDS = 60.0
"""A session's prompt that follows within this time was used just now."""

SPATIAL_PREFIXES = 20

_REMEMBERED_REQUESTS = 100_000

DIMENSIONS = ("temporal", "identity", "topological")
"""Those that request records give; the fourth, spatial, is of the tree."""


class Locality:
    """The window's hit tokens and placements, by dimension.

    * temporal: of the hit tokens of sessions' later requests, those of requests that came within 60 s of the session's
      last one. High: a small cache would do. Reuse between sessions has no known last use and is left out.
    * identity: of the same hit tokens, those at the worker that served the session last. High: affinity works, or
      there is one worker.
    * topological: of the requests whose prefix some worker held, those that were placed in the zone where it lies, or
      on the node if zones aren't known. High: no prefix is moved far or computed twice.
    """

    def __init__(self, window_seconds: float, most_sessions: int, place_of: PlaceOf = nowhere) -> None:
        self._window_seconds = window_seconds
        self._most_sessions = most_sessions
        self._place_of = place_of
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._recent: deque[tuple[float, int, float, float]] = deque(maxlen=_REMEMBERED_REQUESTS)

    def record(self, seen: SeenRequest) -> None:
        record, at = seen.record, seen.at_seconds
        if record.held_tokens and record.worker:
            near = self._near(record.held_by, record.worker)
            if near is not None:
                self._recent.append((at, _TOPOLOGICAL, near, 1.0))
        if not (record.session and record.worker and seen.completed):
            return
        last = self._sessions.pop(record.session, None)
        self._sessions[record.session] = record.worker, record.ended_unix_seconds
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)
        if last is not None and seen.cached_tokens:
            worker, ended = last
            soon = record.ended_unix_seconds - ended <= TEMPORAL_SECONDS
            self._recent.append((at, _TEMPORAL, seen.cached_tokens * soon, seen.cached_tokens))
            self._recent.append((at, _IDENTITY, seen.cached_tokens * (worker == record.worker), seen.cached_tokens))

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        """None: `ratios` are shown together with what the tree gives."""
        return ()

    def ratios(self, now_seconds: float) -> Mapping[str, float]:
        """By dimension; one of which nothing is known in the window is left out."""
        while self._recent and self._recent[0][0] < now_seconds - self._window_seconds:
            self._recent.popleft()
        near, all_of = [0.0] * len(DIMENSIONS), [0.0] * len(DIMENSIONS)
        for _, dimension, part, whole in self._recent:
            near[dimension] += part
            all_of[dimension] += whole
        return {name: near[k] / all_of[k] for k, name in enumerate(DIMENSIONS) if all_of[k]}

    def _near(self, holder: str, chosen: str) -> bool | None:
        if holder == chosen:
            return True if self._place_of(chosen).zone or self._place_of(chosen).node else None
        one, other = self._place_of(holder), self._place_of(chosen)
        if one.zone and other.zone:
            return one.zone == other.zone
        return one.node == other.node if one.node and other.node else None


_TEMPORAL, _IDENTITY, _TOPOLOGICAL = range(3)


def spatial_ratio(tree: PrefixTree) -> float | None:
    """Share of the cached tokens, copies counted, that lie in the 20 largest runs of blocks without a branch.

    High: a few long prefixes fill the caches. Low: many different prompts do.
    """
    total = int(tree.copied_tokens.sum())
    largest = tree.copied_tokens
    if len(tree) > SPATIAL_PREFIXES:
        largest = np.partition(largest, -SPATIAL_PREFIXES)[-SPATIAL_PREFIXES:]
    return int(largest.sum()) / total if total else None
