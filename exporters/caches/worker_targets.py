"""Whom a router means: its name of a worker, found among the targets."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from prefixwatch.exporters.scraping.target import Target


class WorkerTargets:
    """Engine targets by what routers call them: the target's own name, its address as URL or as host:port."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self._by_name: dict[str, Target] = {}
        self._by_address: dict[str, Target | None] = {}
        for target in targets:
            if target.system is not None and target.system.role == "engine":
                self._by_name[target.name] = target
                address = address_of_worker(target.config.url)
                # Two targets behind one address can't be told apart by it.
                self._by_address[address] = None if address in self._by_address else target

    def name_of(self, worker: str) -> str:
        """What the worker is called in all metrics: its target's name, otherwise the name that routers give it."""
        target = self.find(worker)
        return target.name if target else worker

    def find(self, worker: str) -> Target | None:
        """None where it isn't among the targets, or could be several."""
        return self._by_name.get(worker) or self._by_address.get(address_of_worker(worker))


@lru_cache(4096)
def address_of_worker(url: str) -> str:
    """host:port of a worker, given as that or as a URL."""
    return urlsplit(url if "://" in url else f"//{url}").netloc.rpartition("@")[2]
