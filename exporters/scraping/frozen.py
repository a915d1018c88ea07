"""Engines that a page goes on showing though they are gone, as Ray's does with replicas that exited.

A busy engine's numbers move: one that has requests and whose every series has stood still for long is gone, or hangs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from prefixwatch.exporters.scraping.exposition import Layout, Reading
from prefixwatch.exporters.scraping.window import Indices


class FrozenEngines:
    """Watches the engines of one page, told apart by `label`; samples named in `busy` count an engine's requests."""

    def __init__(self, label: str, busy: Collection[str], after_seconds: float) -> None:
        self.label = label
        self._busy = frozenset(busy)
        self._after_seconds = after_seconds
        self._layout: Layout | None = None
        self._slots: dict[str, tuple[Indices, Indices]] = {}
        """All of an engine's samples, and those that count its requests."""
        self._moved: dict[str, tuple[bytes, float]] = {}
        """An engine's numbers, and since when they are these."""

    def among(self, reading: Reading, at_seconds: float) -> frozenset[str]:
        """The engines of this page that stand still though they have requests."""
        if reading.layout is not self._layout:
            self._layout, self._slots = reading.layout, self._slots_of(reading.layout)
            self._moved = {engine: seen for engine, seen in self._moved.items() if engine in self._slots}
        frozen = set()
        for engine, (slots, busy) in self._slots.items():
            numbers = reading.values[slots].tobytes()
            before, since = self._moved.get(engine, (b"", at_seconds))
            if numbers != before:
                since = at_seconds
            self._moved[engine] = numbers, since
            if at_seconds - since >= self._after_seconds and (reading.values[busy] > 0).any():
                frozen.add(engine)
        return frozenset(frozen)

    def _slots_of(self, layout: Layout) -> dict[str, tuple[Indices, Indices]]:
        slots: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for slot, series in enumerate(layout.series):
            if self.label in series.labels:
                every, busy = slots[series.labels[self.label]]
                every.append(slot)
                if series.name in self._busy:
                    busy.append(slot)
        return {
            engine: (np.array(every, dtype=np.intp), np.array(busy, dtype=np.intp))
            for engine, (every, busy) in slots.items()
        }
