"""Goodput between two bounds, as a source of the exporter: where no request record gives it exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.fleet.goodput_bounds import GoodputBounds, goodput_bounds
from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.slo.objective import Objective


class EngineGoodput:
    """The interval of each model, by `objectives`, while `recorded` says that no request record was read."""

    name = "engine_goodput"

    def __init__(
        self,
        targets: Callable[[], Sequence[Target]],
        objectives: Sequence[Objective],
        recorded: Callable[[], bool],
    ) -> None:
        self._targets = targets
        self._objectives = objectives
        self._recorded = recorded

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        least, most = rows("goodput_least_ratio"), rows("goodput_most_ratio")
        for model, found in self._bounds().items():
            least.add_metric([model], found.low)
            most.add_metric([model], found.high)
        return [least, most]

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        return {
            model: {"least": found.low, "most": found.high, "not_counted": list(found.unknown)}
            for model, found in self._bounds().items()
        }

    def _bounds(self) -> Mapping[str, GoodputBounds]:
        if not self._objectives or self._recorded():
            return {}
        found = {model: goodput_bounds(engines, self._objectives) for model, engines in self._engines().items()}
        return {model: bounds for model, bounds in found.items() if bounds is not None}

    def _engines(self) -> Mapping[str, list[SignalStore]]:
        """Engines that are up, by model."""
        found: dict[str, list[SignalStore]] = defaultdict(list)
        for target in self._targets():
            if target.up and target.store and target.store.system.role == "engine":
                found[target.identity.get("model", "")].append(target.store)
        return found
