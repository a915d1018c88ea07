"""Request records, and the figures of a ledger that has counted them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prefixwatch.exporters.metrics_page.families import SERVED
from prefixwatch.exporters.requests.config import RequestSettings
from prefixwatch.exporters.requests.ledger import ROUTER, RequestLedger
from prefixwatch.exporters.requests.request import Place
from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.slo.build import load_objectives

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def done(**fields: Any) -> RequestRecord:
    """A completed, streamed request of 1,000 tokens, of which none was cached."""
    defaults = {
        "ended_unix_seconds": 1_700_000_000.0, "outcome": "completed", "worker": "w0", "model": "m",
        "prompt_tokens": 1000, "cached_tokens": 0, "output_tokens": 11, "ttft_seconds": 0.2, "tpot_seconds": 0.02,
        "e2e_seconds": 0.4, "block_size": 16, "policy": "cache_aware", "reason": "match",
    }  # fmt: skip
    return RequestRecord(**{**defaults, **fields})


def refused(**fields: Any) -> RequestRecord:
    """Turned away after 5 ms."""
    return RequestRecord(
        **{"ended_unix_seconds": 1_700_000_000.0, "outcome": "refused", "e2e_seconds": 0.005, **fields}
    )


def ledger_of(
    records: Iterable[RequestRecord] = (),
    source: str = ROUTER,
    *,
    objectives: Iterable[str] = ("availability", "ttft", "tpot", "goodput"),
    places: dict[str, Place] | None = None,
    settings: RequestSettings | None = None,
    **keywords: Any,
) -> RequestLedger:
    """A ledger that counted these; its clock stands at 100."""
    ledger = RequestLedger(
        settings,
        objectives=load_objectives(objectives),
        place_of=lambda worker: (places or {}).get(worker, Place()),
        clock=lambda: 100.0,
        **keywords,
    )
    for record in records:
        ledger.record(record, source)
    return ledger


def figures(ledger: RequestLedger, now_seconds: float = 100.0) -> dict[str, dict[tuple[str, ...], float]]:
    """Every sample by its name without the namespace and its label values, in the order of the labels' names; summed
    over models and places."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in ledger.metrics(now_seconds):
        for sample in family.samples:
            values = tuple(value for name, value in sorted(sample.labels.items()) if name not in SERVED)
            series = found.setdefault(sample.name.removeprefix("prefixwatch_"), {})
            series[values] = series.get(values, 0.0) + sample.value
    return found
