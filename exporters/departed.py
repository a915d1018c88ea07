"""What targets that are gone had counted: sums over the fleet keep it, so they never go backwards."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from exporters.catalogue import System
from exporters.scraping.signals import SignalStore

_MOST_KINDS = 100
_MOST_RECENT = 200


@dataclass(frozen=True, slots=True)
class Gone:
    """Stands for a target that is gone, or for all of one kind: their counts together."""

    store: SignalStore


class Departed:
    """Lifetime counts of targets that are gone.

    The last 200 are kept apart by address, for a target that discovery loses and finds again is often the same process:
    its counters go on where they were and count nothing twice. Older ones are added up by system and bucket bounds;
    beyond a hundred such kinds, which only a hostile target makes, nothing is kept.
    """

    def __init__(self, label_limit: int) -> None:
        self._label_limit = label_limit
        self._recent: OrderedDict[tuple[str, str], Gone] = OrderedDict()
        self._kinds: dict[tuple[str, frozenset[tuple[str, tuple[float, ...]]]], Gone] = {}

    def take(self, store: SignalStore, url: str) -> None:
        """Remember the counts of what ran at this address."""
        store.rest()
        before = self._recent.pop((url, store.system.system), None)
        self._recent[url, store.system.system] = Gone(store)
        if before is None and len(self._recent) > _MOST_RECENT:
            _, before = self._recent.popitem(last=False)
        if before is not None:
            self._add_up(before.store)

    def back(self, url: str, system: System) -> SignalStore | None:
        """The counts of what ran at this address as this system, to go on with; they are no more among those gone.

        None if there are none, or when the catalogue reads the system otherwise now: then they are dropped, for the
        page tells them anew.
        """
        gone = self._recent.pop((url, system.system), None)
        if gone is None or gone.store.system != system:
            return None
        gone.store.system = system
        return gone.store

    def holders(self) -> list[Gone]:
        """As if targets, to whoever asks them for their stores."""
        return [*self._kinds.values(), *self._recent.values()]

    def _add_up(self, store: SignalStore) -> None:
        kind = store.system.system, store.bucket_bounds
        if kind not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                return
            self._kinds[kind] = Gone(SignalStore(store.system, 1.0, self._label_limit))
        self._kinds[kind].store.absorb(store)
