"""What targets that are gone had counted: sums over the fleet keep it, so they never go backwards."""

from __future__ import annotations

from dataclasses import dataclass

from exporters.scraping.signals import SignalStore

_MOST_KINDS = 100


@dataclass(frozen=True, slots=True)
class Gone:
    """Stands for all targets of one kind that are gone: their counts together."""

    store: SignalStore


class Departed:
    """Lifetime counts of targets that are gone, added up by system and bucket bounds.

    Bounded, however many come and go: beyond a hundred kinds, which only a hostile target makes, nothing is kept.
    """

    def __init__(self, label_limit: int) -> None:
        self._label_limit = label_limit
        self._kinds: dict[tuple[str, frozenset[tuple[str, tuple[float, ...]]]], Gone] = {}

    def take(self, store: SignalStore) -> None:
        """Remember a store's counts; the store itself isn't kept."""
        kind = store.system.system, store.bucket_bounds
        if kind not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                return
            self._kinds[kind] = Gone(SignalStore(store.system, 1.0, self._label_limit))
        self._kinds[kind].store.absorb(store)

    def holders(self) -> list[Gone]:
        """As if targets, to whoever asks them for their stores."""
        return list(self._kinds.values())
