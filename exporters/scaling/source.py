"""Advice on the size of the fleet, from what the exporter knows: as families, and at `/api/v1/scaling`.

Workers are advised by group of peers: those of one model, role and pool. Where an input isn't known there is no advice,
and the reason instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client.core import Metric

from prefixwatch.exporters.caches.prefixes import PrefixSource, TreeView
from prefixwatch.exporters.fleet.derivation import Peers, peers_of, worker_loads
from prefixwatch.exporters.metrics_page.families import IDENTITY
from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.scaling.config import ScalingSettings
from prefixwatch.exporters.scaling.governor import Limits, Rule, State, advance
from prefixwatch.exporters.scaling.losses import Loss, absorber, losses
from prefixwatch.exporters.scraping.target import Target

SecondsPerToken = Callable[[str], float | None]
"""Time of a prompt token's prefill on a worker of this model; None where it isn't known."""

NO_TARGET = (
    "set exporter.scaling.target_load_requests: how many requests a worker takes within its objectives; "
    "`prefixwatch plan` finds it"
)
NO_LOAD = "no engine or router reports its load yet"
NO_EVENTS = "no KV events: set kv_events of the targets, to know what their caches hold"
NOT_SCRAPED = "some workers can't be scraped, so their load isn't known: prefixwatch_target_up says which"
NO_SECONDS = "the time of a prefill isn't known: set exporter.probes, or scrape prefixwatch's router"


_GONE = "refused"
"""Why a scrape failed where nothing listens: that engine's process is gone, and its load is known to be none."""


@dataclass(frozen=True, slots=True)
class _Group:
    peers: Peers
    loads: Mapping[str, float]
    state: State
    losses: Mapping[str, Loss]
    gpu_seconds: Mapping[str, float | None]
    gate: Rule | None
    unheard: tuple[str, ...]
    """Workers whose caches aren't known."""

    @property
    def drain_order(self) -> list[str]:
        """The cheapest to lose first; workers whose caches aren't known are last."""

        def price(name: str) -> tuple[bool, float, float]:
            loss = self.losses.get(name)
            return loss is None, 0 if loss is None else loss.lost_hit_tokens, self.loads[name]

        return sorted(self.loads, key=price)


class ScalingSource:
    """One of the exporter's sources. `now_seconds` of every call is the same monotonic clock."""

    name = "scaling"

    def __init__(
        self,
        settings: ScalingSettings,
        targets: Callable[[], Sequence[Target]],
        prefixes: PrefixSource,
        seconds_per_token: SecondsPerToken,
        *,
        gpus_per_worker: float = 1.0,
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._prefixes = prefixes
        self._seconds_per_token = seconds_per_token
        self._gpus = gpus_per_worker
        self._states: dict[Peers, State] = {}
        self._of_view: tuple[TreeView | None, Mapping[str, Loss]] = (None, {})

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        desired, lost, price = (
            rows(name) for name in ("scaling_desired_workers", "worker_loss_hit_tokens", "worker_loss_gpu_seconds")
        )
        shown = set[str]()
        for group in self._groups(now_seconds, self._settings.target_load_requests):
            identity = dict(group.peers)
            if self._settings.target_load_requests is not None:
                desired.add_metric([identity.get(label, "") for label in IDENTITY], group.state.desired)
            for name, loss in group.losses.items():
                if name not in shown:  # an endpoint of several models is in several groups
                    shown.add(name)
                    lost.add_metric([name], loss.lost_hit_tokens)
                    price.add_metric([name], group.gpu_seconds[name])
        yield from (desired, lost, price)

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        """Of the fleet API: a pointer, and what is missing."""
        return {"details": "/api/v1/scaling", "absent": self._absent()}

    def advice(self, now_seconds: float, target_load: float | None = None) -> dict[str, Any]:
        """The whole advice, `{"schema": 1, "groups": […]}`; `target_load` replaces the configured one, and then
        nothing is waited for."""
        target = target_load if target_load is not None else self._settings.target_load_requests
        groups = self._groups(now_seconds, target, at_once=target_load is not None)
        return {
            "schema": 1,
            "target_load_requests": target,
            "groups": [self._group_document(group, target) for group in groups],
            **({} if groups else {"why": NO_LOAD}),
        }

    def _groups(self, now: float, target: float | None, *, at_once: bool = False) -> list[_Group]:
        by_peers: defaultdict[Peers, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for worker in worker_loads(self._targets()):
            by_peers[worker.peers][worker.target] += worker.load
        found, known, missing = [], self._losses(), self._missing()
        for peers, loads in by_peers.items():
            own = {name: loss for name, loss in known.items() if name in loads}
            per_token = self._seconds_per_token(dict(peers).get("model", ""))
            prices = {name: loss.gpu_seconds(per_token, self._gpus) for name, loss in own.items()}
            gate = Rule.LOAD_UNKNOWN if missing.get(peers, set()) - {_GONE} else self._gate(prices, len(loads))
            state = self._states.get(peers) or State(desired=len(loads))
            there = state.desired if peers in missing else len(loads)
            if target is not None:
                limits = self._limits(target, at_once=at_once)
                start = State(desired=len(loads)) if at_once else state
                state = advance(start, limits, now, there, sum(loads.values()), gate=gate)
                if not at_once:
                    self._states[peers] = state
            unheard = tuple(sorted(set(loads) - set(own)))
            found.append(_Group(peers, dict(loads), state, own, prices, gate, unheard))
        return found

    def _missing(self) -> Mapping[Peers, set[str]]:
        """Groups of which some engine was scraped before and can't be now, with the reasons. They keep their size."""
        found = defaultdict[Peers, set[str]](set)
        for target in self._targets():
            if target.store is not None and target.store.system.role == "engine" and not target.up:
                found[peers_of(target)].add(target.reason)
        return found

    def _limits(self, target: float, *, at_once: bool) -> Limits:
        own = self._settings
        return Limits(
            target,
            own.low_ratio,
            0.0 if at_once else own.up_seconds,
            0.0 if at_once else own.down_seconds,
            own.min_workers,
            own.max_workers,
        )

    def _gate(self, prices: Mapping[str, float | None], workers: int) -> Rule | None:
        """Why no worker may go: the price of some isn't known, or none is worth it."""
        known = [price for price in prices.values() if price is not None]
        if len(known) < workers:
            return Rule.LOSS_UNKNOWN
        return None if min(known) < self._settings.horizon_seconds * self._gpus else Rule.CACHE_WORTH_MORE

    def _losses(self) -> Mapping[str, Loss]:
        view = self._prefixes.view
        if view is None:
            return {}
        if self._of_view[0] is not view:
            self._of_view = view, losses(view.tree, view.traffic)
        return self._of_view[1]

    def _group_document(self, group: _Group, target: float | None) -> dict[str, Any]:
        order, workers = group.drain_order, len(group.loads)
        found: dict[str, Any] = {
            "peers": dict(group.peers),
            "workers": workers,
            "load_requests": sum(group.loads.values()),
        }
        if target is None:
            found |= {"advice": None, "why": NO_TARGET}
        else:
            change = group.state.desired - workers
            action = "add" if change > 0 else "remove" if change < 0 else "none"
            found |= {
                "desired_workers": group.state.desired,
                "advice": {"action": action, "workers": abs(change), "rule": group.state.rule.value}
                | ({"remove": order[:-change]} if change < 0 else {}),
            }
        if group.gate is Rule.LOAD_UNKNOWN:
            found["removal_withheld"] = NOT_SCRAPED
        if group.gate is Rule.LOSS_UNKNOWN:
            found["removal_withheld"] = NO_EVENTS if group.unheard else NO_SECONDS
            found["unheard_workers"] = list(group.unheard)
        return found | {"drain_order": [self._worker_document(group, rank, name) for rank, name in enumerate(order)]}

    def _worker_document(self, group: _Group, rank: int, name: str) -> dict[str, Any]:
        loss = group.losses.get(name)
        labels = next((target.config.labels for target in self._targets() if target.name == name), {})
        found: dict[str, Any] = {
            "worker": name,
            "pod": labels.get("pod", name),
            **({"namespace": labels["namespace"]} if "namespace" in labels else {}),
            "load_requests": group.loads[name],
            "deletion_cost": rank,
        }
        if loss is None:
            return found | {"absent": {"lost_hit_tokens": NO_EVENTS}}
        gpu_seconds = group.gpu_seconds[name]
        others = {other: load for other, load in group.loads.items() if other != name}
        found |= {
            "cached_tokens": loss.cached_tokens,
            "lost_hit_tokens": loss.lost_hit_tokens,
            "basis": loss.basis,
            "absorbed_by": [
                {
                    "prefix": self._prefix_name(prefix.root),
                    "held_tokens": prefix.held_tokens,
                    "lost_tokens": prefix.lost_tokens,
                    "worker": absorber(prefix, others),
                }
                for prefix in loss.prefixes
            ],
        }
        return found | ({"absent": {"lost_gpu_seconds": NO_SECONDS}} if gpu_seconds is None else
                        {"lost_gpu_seconds": gpu_seconds})  # fmt: skip

    def _prefix_name(self, node: int) -> str:
        view = self._prefixes.view
        assert view is not None  # losses come from it
        return self._prefixes.names.name_of(view.tree, node, view.configured)

    def _absent(self) -> dict[str, Any]:
        known = self._losses()
        loads = {worker.target for worker in worker_loads(self._targets())}
        found = {}
        if self._settings.target_load_requests is None:
            found["scaling_desired_workers"] = NO_TARGET
        elif not loads:
            found["scaling_desired_workers"] = NO_LOAD
        if not loads & set(known):
            found["worker_loss_hit_tokens"] = NO_EVENTS
        elif all(self._seconds_per_token(model) is None for model in self._models()):
            found["worker_loss_gpu_seconds"] = NO_SECONDS
        return found

    def _models(self) -> set[str]:
        return {dict(worker.peers).get("model", "") for worker in worker_loads(self._targets())}


def scaling_handler(source: ScalingSource, clock: Callable[[], float], derive: Callable[[], Any]) -> Any:
    """`/api/v1/scaling?target_load=N`."""

    async def scaling(request: web.Request) -> web.Response:
        given = request.query.get("target_load")
        try:
            target = None if given is None else float(given)
        except ValueError:
            target = -1.0
        if set(request.query) - {"target_load"} or (target is not None and not 0 < target < 1e9):
            error = "target_load must be a number of requests above 0, and is the only parameter"
            return web.json_response({"error": error}, status=400)
        await derive()
        return web.json_response(source.advice(clock(), target))

    return scaling
