"""The cards at the top of the page: one question of a glance each, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.exporters.fleet.derivation import OVERLOAD_FACTOR, FleetNumbers
from prefixwatch.exporters.isolation.verdicts import LEAST_AUDITED_RATIO
from prefixwatch.exporters.live.history import Families, Point, total
from prefixwatch.exporters.live.wording import UNKNOWN, count, percent, seconds
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.cache_class import HIT, REUSABLE, WHOLE_PROMPT

GOOD, BAD, DOUBTFUL, NEUTRAL, ELSEWHERE = "good", "bad", "doubtful", "neutral", "elsewhere"
"""States of a figure; the page has a sign and a word for each."""

_BUSY_REQUESTS = 2.0
"""A worker with less to do than that is no hot one, however idle the others are."""
_FEW_FIRST_TOKENS = "it takes 20 first tokens of a class in the last minute"
_NO_REQUESTS = "no request records: scrape prefixwatch's router, or send GenAI spans"


@dataclass(frozen=True, slots=True)
class Card:
    """One question of a glance, and its answer."""

    id: str
    title: str
    figure: str
    detail: str
    state: str = NEUTRAL


def all_cards(
    targets: Sequence[Target],
    fleet: FleetNumbers,
    families: Families,
    requests: Mapping[str, Any],
    *,
    point: Point | None,
    objectives: Sequence[tuple[str, str]],
    isolation: Sequence[tuple[str, str, str]],
) -> list[Card]:
    """`requests` is the document of the request records; `objectives` are names and states, `isolation` the rows of
    the page's table."""
    return [
        _up_card(targets),
        _slo_card(objectives, requests),
        _goodput_card(point, fleet, requests),
        _ttft_card(point, fleet, requests),
        _hit_card(fleet),
        _hotspot_card(fleet),
        _isolation_card(isolation, requests),
        _saved_card(families, requests),
    ]


def _up_card(targets: Sequence[Target]) -> Card:
    down = [target for target in targets if not target.up]
    if not targets:
        return Card("up", "Targets up", UNKNOWN, "no targets: name some with --target or in exporter.targets", DOUBTFUL)
    detail = "all answer with metrics that are understood"
    if down:
        names = ", ".join(f"{t.name} ({t.reason.replace('_', ' ')})" for t in down[:3])
        detail = names + (f" and {len(down) - 3} more" if len(down) > 3 else "")
    only_new = all(target.reason == "not_scraped" for target in down)
    state = GOOD if not down else DOUBTFUL if only_new else BAD
    return Card("up", "Targets up", f"{len(targets) - len(down)} of {len(targets)}", detail, state)


def _slo_card(objectives: Sequence[tuple[str, str]], requests: Mapping[str, Any]) -> Card:
    judged = [(name, state) for name, state in objectives if state != NEUTRAL]
    if not judged:
        return Card("slo", "Objectives met", UNKNOWN, _why(requests, "no request was judged yet"))
    missed = [name for name, state in judged if state == BAD]
    detail = f"missed: {', '.join(missed)}" if missed else "since the exporter's start"
    return Card(
        "slo", "Objectives met", f"{len(judged) - len(missed)} of {len(judged)}", detail, BAD if missed else GOOD
    )


def _goodput_card(point: Point | None, fleet: FleetNumbers, requests: Mapping[str, Any]) -> Card:
    if point is None or point.goodput_ratio is None or point.requests is None or not point.seconds:
        why = fleet.absent.get("goodput", "") if not requests.get("records") else "no request ended in the last minute"
        return Card("goodput", "Goodput", UNKNOWN, why or _why(requests, "no request ended in the last minute"))
    rate = (point.good_requests or 0.0) / point.seconds
    detail = f"{count(rate)} good requests/s; share of requests that met every objective, last minute"
    return Card("goodput", "Goodput", percent(point.goodput_ratio), detail)


def _ttft_card(point: Point | None, fleet: FleetNumbers, requests: Mapping[str, Any]) -> Card:
    """Hits against misses; where no prompt is reused as a whole, those reused in part."""
    hit, miss = (point.ttft_hit_p50_seconds, point.ttft_miss_p50_seconds) if point else (None, None)
    partial = point.ttft_partial_p50_seconds if point else None
    reused, kind = (partial, "partial hit") if hit is None and partial is not None else (hit, "hit")
    title = f"TTFT, {kind} / miss"
    if reused is None and miss is None:
        why = fleet.absent.get("ttft_delta", _FEW_FIRST_TOKENS)
        return Card("ttft", title, UNKNOWN, why if not requests.get("records") else _FEW_FIRST_TOKENS)
    figure = f"{seconds(reused)} / {seconds(miss)}"
    if reused is None or miss is None:
        return Card("ttft", title, figure, f"median of the last minute; {_FEW_FIRST_TOKENS}")
    slower = reused >= miss
    detail = f"a {kind} is not faster than a miss" if slower else f"a miss waits {seconds(miss - reused)} longer"
    detail = f"median of the last minute; {detail}; {_basis(requests)}"
    return Card("ttft", title, figure, detail, BAD if slower else GOOD)


def _basis(requests: Mapping[str, Any]) -> str:
    """What hits are measured against, by most requests."""
    counts = requests.get("cache_classes", {}).get(HIT, {})
    if counts.get(REUSABLE, 0) >= counts.get(WHOLE_PROMPT, 0):
        return "a hit reuses all that was sent before"
    return "a hit reuses the whole prompt"


def _hit_card(fleet: FleetNumbers) -> Card:
    title = "Prompt tokens from cache"
    if fleet.hit_ratio is None:
        return Card("hits", title, UNKNOWN, fleet.absent.get("hit_ratio", "not known yet"))
    return Card("hits", title, percent(fleet.hit_ratio), "hit tokens of all tokens looked up, in the window")


def _hotspot_card(fleet: FleetNumbers) -> Card:
    title = "Busiest worker"
    if fleet.hotspot is None:
        return Card("hotspot", title, UNKNOWN, fleet.absent.get("hotspot", "not known yet"))
    busiest = max(fleet.loads, key=lambda name: fleet.loads[name])
    over = round(fleet.hotspot.overloaded_ratio * fleet.hotspot.workers)
    queues = fleet.loads[busiest] >= _BUSY_REQUESTS
    detail = f"{busiest}, times the mean load; {over} of {fleet.hotspot.workers} above {OVERLOAD_FACTOR:g}×"
    return Card("hotspot", title, f"{fleet.hotspot.max_over_mean:.2g}×", detail, BAD if over and queues else GOOD)


def _isolation_card(rows: Sequence[tuple[str, str, str]], requests: Mapping[str, Any]) -> Card:
    title = "Tenant isolation"
    document = requests.get("isolation", {})
    if not rows:
        return Card("isolation", title, UNKNOWN, _why(requests, "no request could be judged yet"))
    states = [state for _, _, state in rows]
    state = BAD if BAD in states else DOUBTFUL if DOUBTFUL in states else GOOD
    violations = sum(document["violations"].values())
    audited = count(document.get("audited_requests", 0))
    detail = f"{audited} requests audited, {count(document.get('not_audited_requests', 0))} could not be"
    if not violations and document.get("audited_ratio", 1.0) < LEAST_AUDITED_RATIO:
        most = max(document["not_audited"].values(), key=lambda one: one["requests"])["why"]
        return Card("isolation", title, UNKNOWN, f"{detail}, mostly because {most}", DOUBTFUL)
    return Card(
        "isolation", title, f"{count(violations)} {'finding' if violations == 1 else 'findings'}", detail, state
    )


def _saved_card(families: Families, requests: Mapping[str, Any]) -> Card:
    title = "Prefill saved"
    spared, usd = total(families, "prefill_saved_gpu_seconds"), total(families, "prefill_saved_usd")
    if spared is None:
        why = requests.get("absent", {}).get("prefill_saved_gpu_seconds")
        return Card("saved", title, UNKNOWN, why or _why(requests, "not known yet"))
    money = f"${usd:,.2f} at the configured price, " if usd is not None else ""
    return Card("saved", title, f"{count(spared)} GPU·s", f"{money}since the exporter's start")


def _why(requests: Mapping[str, Any], otherwise: str) -> str:
    return str(requests.get("absent", {}).get("everything", "")) or (
        otherwise if requests.get("records") else _NO_REQUESTS
    )
