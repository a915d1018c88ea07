"""What the page shows, as words and figures: pure, from the targets and the other sources as they are now.

A figure that isn't known is a dash with its reason; a judgement always has a word and a sign, never a colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.exporters.fleet.derivation import FAMILY_OF, OVERLOAD_FACTOR, FleetNumbers
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.isolation.verdicts import LEAST_AUDITED_RATIO
from prefixwatch.exporters.live.history import Families, Point, total
from prefixwatch.exporters.live.wording import UNKNOWN, count, flag_words, percent, seconds, share
from prefixwatch.exporters.metrics_page.families import NAMESPACE
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.cache_class import HIT, REUSABLE, WHOLE_PROMPT
from prefixwatch.slo.objective import Objective

GOOD, BAD, DOUBTFUL, NEUTRAL, ELSEWHERE = "good", "bad", "doubtful", "neutral", "elsewhere"
"""States of a figure; the page has a sign and a word for each."""

_BUSY_REQUESTS = 2.0
"""A worker with less to do than that is no hot one, however idle the others are."""
_FEW_FIRST_TOKENS = "it takes 20 first tokens of a class in the last minute"
_NO_REQUESTS = "no request records: scrape prefixwatch's router, or send GenAI spans"


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure as text, the number to sort it by, and why it isn't known."""

    text: str
    value: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One target of the fleet table."""

    name: str
    url: str
    system: str
    role: str
    up: bool
    why_not: str
    load: Cell
    kv_usage: Cell
    hit_ratio: Cell
    ttft: Cell
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Card:
    """One question of a glance, and its answer."""

    id: str
    title: str
    figure: str
    detail: str
    state: str = NEUTRAL


@dataclass(frozen=True, slots=True)
class ObjectiveRow:
    """An objective and how it fared since the exporter's start."""

    name: str
    rule: str
    good: Cell
    requests: str
    budget: str
    excluded: str
    state: str


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A prefix that has a configured name; without an id it isn't cached."""

    name: str
    id: str
    cached: str
    workers: str


BLOCK: Mapping[str, str] = {
    "hit_tokens_per_second": "hit tokens/s", "hit_ratio": "prompt tokens from cache", "ttft_hit_p50": "TTFT hit p50",
    "ttft_hit_p95": "TTFT hit p95", "ttft_miss_p50": "TTFT miss p50", "ttft_miss_p95": "TTFT miss p95",
    "goodput_ratio": "goodput", "hotspot_max_over_mean": "busiest / mean", "evicted_blocks": "evicted blocks",
    "isolation_violations": "isolation violations",
}  # fmt: skip
"""Columns of the first row: figures of `fleet.status`, and their short titles."""


@dataclass(frozen=True, slots=True)
class BlockRow:
    """The block of figures of one model."""

    model: str
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class LiveView:
    """All of the page but the prefix map and the charts."""

    cards: Sequence[Card]
    block: Sequence[BlockRow]
    workers: Sequence[WorkerRow]
    objectives: Sequence[ObjectiveRow]
    isolation: Sequence[tuple[str, str, str]]
    """What could be judged, how often it happened, and its state."""
    findings: Sequence[tuple[str, str, str, str]]
    """The latest: what was found, whose cache or salt it is, at which worker, and the ids of requests that show it."""
    not_known: Sequence[tuple[str, str]]
    """Quantities that aren't known, and why."""
    problems: Sequence[str]
    named: Sequence[NamedRow]

    @property
    def block_titles(self) -> Sequence[str]:
        return list(BLOCK.values())

    @property
    def alarms(self) -> Sequence[str]:
        """What stands out, for the line at the top."""
        return [f"{card.title}: {card.figure}" for card in self.cards if card.state == BAD]

    @property
    def uncertain(self) -> Sequence[str]:
        """What is in doubt, for the same line: while no target is scraped it mustn't say that all is well."""
        return [f"{card.title}: {_or_words(card.figure)}" for card in self.cards if card.state == DOUBTFUL]

    @property
    def doubts(self) -> int:
        return sum(bool(row.warnings) for row in self.workers) + len(self.problems)


def _or_words(figure: str) -> str:
    return "not known" if figure == UNKNOWN else figure


def live_view(
    targets: Sequence[Target],
    fleet: FleetNumbers,
    families: Families,
    documents: Mapping[str, Mapping[str, Any]],
    *,
    objectives: Sequence[Objective] = (),
    elsewhere: Sequence[tuple[str, str]] = (),
    block: Mapping[str, Any] | None = None,
    point: Point | None = None,
    named: Sequence[NamedRow] = (),
    now_seconds: float = 0.0,
) -> LiveView:
    """`documents` are those of the other sources by name, `families` the metrics of the request records, `block` the
    document of `fleet.status`. `elsewhere` are the names and rules of objectives that only Prometheus can judge."""
    rows = [_worker(target, fleet, now_seconds) for target in targets]
    requests = documents.get("requests", {})
    isolation = _isolation(requests)
    judged = [_objective(objective, requests.get("objectives", {})) for objective in objectives]
    cards = [
        _up_card(targets),
        _slo_card(judged, requests),
        _goodput_card(point, fleet, requests),
        _ttft_card(point, fleet, requests),
        _hit_card(fleet, families),
        _hotspot_card(fleet),
        _isolation_card(isolation, requests),
        _saved_card(families, requests),
    ]
    judged += [_objective_elsewhere(name, rule) for name, rule in elsewhere]
    return LiveView(
        cards=cards,
        block=_block(block or {}),
        workers=rows,
        objectives=judged,
        isolation=isolation,
        findings=_findings(requests),
        not_known=list(_not_known(fleet, families, documents)),
        problems=list(_problems(documents)),
        named=named,
    )


def _worker(target: Target, fleet: FleetNumbers, now_seconds: float) -> WorkerRow:
    system, numbers = target.system, target.numbers
    flags = target.flags(now_seconds)
    why = "" if target.up else f"{target.reason.replace('_', ' ')}: {target.detail}"
    means = target.loads.means()
    absent = numbers.absent if numbers else {}
    ttft = numbers.latency_seconds.get(("ttft", 0.95)) if numbers else None
    return WorkerRow(
        name=target.name,
        url=shown_url(target.config.url),
        system=" ".join(filter(None, [system.title if system else "unknown system", target.version])),
        role=system.role if system else "",
        up=target.up,
        why_not=why,
        load=_cell(sum(means.values()) if means else None, count, why or "no load in the window yet"),
        kv_usage=_cell(
            numbers.kv_usage_max_ratio if numbers else None, percent, why or absent.get("kv_usage", "it doesn't tell")
        ),
        hit_ratio=_cell(
            numbers.hit_ratio if numbers else None, percent, why or absent.get("hit_ratio", "not known yet")
        ),
        ttft=_cell(ttft, seconds, why or absent.get("ttft", "it doesn't time first tokens")),
        warnings=[flag_words(flag) for flag, raised in flags.items() if raised and (target.up or flag != "stale")],
    )


def _block(document: Mapping[str, Any]) -> list[BlockRow]:
    rows = []
    for model, figures in document.get("models", {}).items():
        by_name = {one["name"]: one for one in figures}
        cells = [_cell(one["value"], _WORDS[one["unit"]], one["why"]) for one in map(by_name.__getitem__, BLOCK)]
        rows.append(BlockRow(model or "(no model)", cells))
    return rows


def _cell(value: float | None, words: Any, why: str) -> Cell:
    return Cell(UNKNOWN, why=why) if value is None else Cell(words(value), value)


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


def _slo_card(rows: Sequence[ObjectiveRow], requests: Mapping[str, Any]) -> Card:
    judged = [row for row in rows if row.state != NEUTRAL]
    if not judged:
        return Card("slo", "Objectives met", UNKNOWN, _why(requests, "no request was judged yet"))
    missed = [row.name for row in judged if row.state == BAD]
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


def _hit_card(fleet: FleetNumbers, families: Families) -> Card:
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


_ISOLATION_WORDS: Mapping[str, tuple[str, bool]] = {
    "cross_tenant_hit": ("Reused another tenant's cache (certain)", True),
    "unsalted_traffic": ("Unsalted traffic beside other tenants (exposed)", False),
    "fast_cold_prompt": ("Cold prompts as fast as hits (statistical)", False),
}


def _isolation(requests: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    told = requests.get("isolation", {}).get("violations", {})
    rows = []
    for kind, (words, certain) in _ISOLATION_WORDS.items():
        found = told.get(kind)
        if found is not None:
            rows.append((words, count(found), GOOD if not found else BAD if certain else DOUBTFUL))
    return rows


_FINDING_WORDS: Mapping[str, str] = {
    "cross_tenant_hit": "reused what its tenant never sent",
    "salt_ignored": "reused what was sent under another salt",
    "salt_reused": "two tenants have the same salt",
    "tenant_without_salt": "no salt beside other tenants",
    "salt_per_request": "a new salt with each request",
    "stored_unsalted": "stored without a salt, where another tenant's are",
    "stored_salt_shared": "stored under a salt that another tenant has",
    "fast_cold_prompt": "first tokens as fast as hits",
}
_TIER_WORDS: Mapping[str, str] = {"gpu": ", GPU tier", "external": ", outer tier", "unknown": ""}
_FINDINGS_SHOWN = 10


def _findings(requests: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    return [
        (
            f"{_FINDING_WORDS.get(one['kind'], one['kind'])} ({one['certainty']}{_TIER_WORDS[one['tier']]})",
            " ← ".join(name for name in (one["tenant"] or "no tenant", one.get("other_tenant")) if name),
            one["worker"],
            ", ".join(one["evidence"]),
        )
        for one in requests.get("isolation", {}).get("latest_findings", ())[:_FINDINGS_SHOWN]
    ]


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


def _objective(objective: Objective, told: Mapping[str, Any]) -> ObjectiveRow:
    found = told.get(objective.name, {})
    good, bad = found.get("good") or 0.0, found.get("bad") or 0.0
    requests = good + bad
    excluded = count(found.get("excluded", 0))
    if not requests:
        why = "no request that it covers has ended"
        return ObjectiveRow(objective.name, objective.rule, Cell(UNKNOWN, why=why), "0", UNKNOWN, excluded, NEUTRAL)
    ratio, allowed = good / requests, 1 - objective.target
    spent = (bad / requests) / allowed if allowed else (float("inf") if bad else 0.0)
    budget = "none is allowed" if not allowed and bad else share(spent)
    state = GOOD if ratio >= objective.target else BAD
    return ObjectiveRow(
        objective.name, objective.rule, Cell(share(ratio), ratio), count(requests), budget, excluded, state
    )


def _objective_elsewhere(name: str, rule: str) -> ObjectiveRow:
    why = "it judges no single requests: Prometheus evaluates it"
    return ObjectiveRow(name, rule, Cell(UNKNOWN, why=why), UNKNOWN, UNKNOWN, UNKNOWN, ELSEWHERE)


_WORDS: Mapping[str, Any] = {
    "ratio": percent, "s": seconds, "×": lambda value: f"{value:.2g}×", "tokens/s": count, "blocks": count,
    "requests": count, "bytes/s": count,
}  # fmt: skip
"""How figures of a unit are written."""


def _why(requests: Mapping[str, Any], otherwise: str) -> str:
    return str(requests.get("absent", {}).get("everything", "")) or (
        otherwise if requests.get("records") else _NO_REQUESTS
    )


def _not_known(
    fleet: FleetNumbers, families: Families, documents: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    told = {name: why for name, why in fleet.absent.items() if FAMILY_OF.get(name, name) not in families}
    for name, document in documents.items():
        for quantity, why in document.get("absent", {}).items():
            told.setdefault(f"{name}: {quantity}" if quantity == "everything" else quantity, why)
    for quantity, why in told.items():
        yield quantity.removeprefix(NAMESPACE).replace("_", " "), str(why)
    for quantity, note in fleet.notes.items():
        yield quantity.replace("_", " "), note


def _problems(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    service, requests = documents.get("service", {}), documents.get("requests", {})
    yield from service.get("problems", ())
    if problem := service.get("reload_problem"):
        yield f"the last configuration was refused: {problem}"
    for read in requests.get("failed_reads", ()):
        yield f"{read['target']}: its request records could not be read {count(read['reads'])} times ({read['reason']})"
    for source, missed in requests.get("records_missed", {}).items():
        if missed:
            yield f"{count(missed)} request records of {source} were gone before they could be read"
