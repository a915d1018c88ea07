"""What the page shows, as words and figures: pure, from the targets and the other sources as they are now.

A figure that isn't known is a dash with its reason; a judgement always has a word and a sign, never a colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.exporters.fleet.derivation import FAMILY_OF, FleetNumbers
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.live.cards import BAD, DOUBTFUL, ELSEWHERE, GOOD, NEUTRAL, Card, all_cards
from prefixwatch.exporters.live.history import Families, Point
from prefixwatch.exporters.live.wording import UNKNOWN, count, flag_words, percent, seconds, share
from prefixwatch.exporters.metrics_page.families import NAMESPACE
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.slo.objective import Objective


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
    cards = all_cards(
        targets,
        fleet,
        families,
        requests,
        point=point,
        objectives=[(row.name, row.state) for row in judged],
        isolation=isolation,
    )
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
