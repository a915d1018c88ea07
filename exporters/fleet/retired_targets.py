"""Lifetime counts of targets that were removed. Sums over the fleet keep them, so counters never go backwards."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from prefixwatch.exporters.catalogue.model import System
from prefixwatch.exporters.scraping.signals import SignalStore

_MOST_KINDS = 100
_MOST_RECENT = 200


@dataclass(frozen=True, slots=True)
class Retired:
    """The counts of one removed target, or of all older ones of a kind."""

    store: SignalStore


_Kind = tuple[str, frozenset[tuple[str, tuple[float, ...]]], tuple[tuple[str, str], ...]]
"""System, bucket bounds, and the configured identity."""


class RetiredTargets:
    """Keeps the counts of removed targets, in bounded memory.

    The last 200 are kept one by one by address: a target that discovery loses and finds again is often the same
    process, so its counters continue and nothing is counted twice. Older ones are summed by system, bucket bounds and
    place.
    Beyond 100 such kinds, which only a hostile target produces, nothing is kept.
    """

    def __init__(self, label_limit: int) -> None:
        self.label_limit = label_limit
        self._recent: OrderedDict[tuple[str, str], Retired] = OrderedDict()
        self._kinds: dict[_Kind, Retired] = {}

    def take(self, store: SignalStore, url: str) -> None:
        """Keep the counts of the process that ran at this address."""
        store.rest()
        before = self._recent.pop((url, store.system.system), None)
        self._recent[url, store.system.system] = Retired(store)
        if before is None and len(self._recent) > _MOST_RECENT:
            _, before = self._recent.popitem(last=False)
        if before is not None:
            self._add_up(before.store)

    def back(self, url: str, system: System) -> SignalStore | None:
        """Remove and return the counts of this system at this address, to continue them.

        None if there are none, or if the catalogue entry has changed: then they are dropped, because the page will be
        read again from the start.
        """
        found = self._recent.pop((url, system.system), None)
        if found is None or found.store.catalogued != system:
            return None
        found.store.system = found.store.catalogued = system
        return found.store

    def holders(self) -> list[Retired]:
        """Everything that is kept; each item has a `store` as a target has."""
        return [*self._kinds.values(), *self._recent.values()]

    def _add_up(self, store: SignalStore) -> None:
        kind = store.system.system, store.bucket_bounds, tuple(store.place.items())
        if kind not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                return
            self._kinds[kind] = Retired(SignalStore(store.system, 1.0, self.label_limit, store.place))
        self._kinds[kind].store.absorb(store)
