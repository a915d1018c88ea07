"""What request records cost: the router to write one, the exporter to count one.

    python -m benchmarks.request_records [--tokens 1024,4096,32768] [--records 20000] [--tenants 1,16,256] [--json]

Router: remembering a tenant's prompt while it is on its way to the engine, and writing the record when it is over; half
of each prompt is an opening that the tenant sent before. The prompt's hashes are made anyway and not part of it.
Exporter: counting one record in all families, by the number of tenants, and writing the page. All in CPU time of the
thread, medians, beside a peer in the same run: one labelled `prometheus_client` histogram observing one value, of which
a router's own metrics take about ten a request.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Histogram

from prefixwatch.exporters.requests.ledger import ROUTER, RequestLedger
from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.openai_api.answer import Usage
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.exchange.endpoints import CHAT
from prefixwatch.router.exchange.exchange import Exchange, Outcome
from prefixwatch.router.exchange.prompt import Prompt
from prefixwatch.router.placement.dispatch import Placement
from prefixwatch.router.placement.ledger import Ticket
from prefixwatch.router.policy import Decision, RouteRequest, Worker
from prefixwatch.router.records.recorder import Recorder
from prefixwatch.router.records.request_log import RequestLog

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class RouterCost:
    prompt_tokens: int
    placed_us: float
    ended_us: float


@dataclass(frozen=True, slots=True)
class ExporterCost:
    tenants: int
    record_us: float
    page_ms: float
    ledger_kb: float


def router_cost(prompt_tokens: int, requests: int) -> RouterCost:
    """One tenant's requests, half of each prompt known."""
    config = RouterConfig.model_validate({"workers": [{"name": "w", "url": "http://w"}]})
    recorder = Recorder(config, "cache_aware", RequestLog(1000), lambda worker: True)
    rng = np.random.default_rng(1)
    opening = rng.integers(0, 128_000, prompt_tokens // 2, dtype=np.uint32)
    placed, ended = [], []
    for number in range(requests):
        tail = rng.integers(0, 128_000, prompt_tokens - len(opening), dtype=np.uint32)
        tokens = np.concatenate([opening, tail])
        exchange = _exchange(number, tokens, prompt_tokens)
        placed.append(_cpu_us(partial(recorder.placed, exchange)))
        cached_tokens = len(opening) // BLOCK_SIZE * BLOCK_SIZE if number else 0
        exchange.answer.usage = Usage(prompt_tokens, cached_tokens, 64)
        exchange.ended_at = 0.5
        ended.append(_cpu_us(partial(recorder.ended, exchange)))
    return RouterCost(prompt_tokens, median(placed), median(ended))


def _exchange(number: int, tokens: np.ndarray, prompt_tokens: int) -> Exchange:
    blocks = block_hashes(tokens, BLOCK_SIZE)
    prompt = Prompt(b"", "m", True, 64, tokens, blocks, 1e-4, 1e-4)
    exchange = Exchange(str(number), CHAT, 0.0, tenant="acme", session=f"s{number % 100}", prompt=prompt)
    request = RouteRequest(str(number), prompt_tokens, tokens, blocks, BLOCK_SIZE)
    decision = Decision("w", "match")
    exchange.placement = Placement(request, decision, 0, 1e-5, 1e-5, Ticket(Worker("w"), 0.0, 0), (), None)  # type: ignore[arg-type]  # losses aren't looked at
    exchange.first_content_at, exchange.last_chunk_at = 0.2, 0.5
    exchange.outcome = Outcome.COMPLETED
    return exchange


def exporter_cost(tenants: int, records: int) -> ExporterCost:
    """A ledger that counts these records of sessions of 20 requests each."""
    rng = np.random.default_rng(1)
    given = [_record(k, tenants, float(rng.exponential(0.2)), int(rng.integers(0, 60)) * 16) for k in range(records)]
    tracemalloc.start()
    ledger = RequestLedger()
    for record in given[: records // 2]:
        ledger.record(record, ROUTER)
    ledger_kb = tracemalloc.get_traced_memory()[0] / 1024
    tracemalloc.stop()
    costs = [_cpu_us(partial(ledger.record, record, ROUTER)) for record in given[records // 2 :]]
    page = _cpu_us(lambda: [sample for family in ledger.metrics(time.monotonic()) for sample in family.samples])
    return ExporterCost(tenants, median(costs), page / 1000, ledger_kb)


def _record(number: int, tenants: int, ttft: float, cached: int) -> RequestRecord:
    return RequestRecord(
        1.7e9 + number, "completed", worker=f"w{number % 8}", tenant=f"t{number % tenants}", session=f"s{number // 20}",
        policy="cache_aware", reason="match", prompt_tokens=1000, cached_tokens=cached, predicted_tokens=cached,
        held_tokens=cached, held_by=f"w{number % 8}", own_tokens=cached, block_size=16, output_tokens=64,
        ttft_seconds=ttft, e2e_seconds=ttft + 1, tpot_seconds=0.02, salted=True,
    )  # fmt: skip


def peer_us(observations: int = 5000) -> float:
    """One labelled observation of `prometheus_client`."""
    histogram = Histogram("peer", "-", ["class"], registry=CollectorRegistry())
    return median(_cpu_us(lambda: histogram.labels("chat").observe(0.3)) for _ in range(observations))


def page_of_records_ms(records: int = 1000) -> float:
    """Encoding a page of the router's endpoint."""
    given = [_record(k, 16, 0.1, 160) for k in range(records)]
    return median(_cpu_us(lambda: msgspec.json.encode(given)) for _ in range(20)) / 1000


def _cpu_us(work: Callable[[], object]) -> float:
    begun = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begun) / 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="1024,4096,32768", help="prompt lengths, comma-separated")
    parser.add_argument("--requests", type=int, default=400, help="requests of each length")
    parser.add_argument("--records", type=int, default=20_000, help="records that the exporter counts")
    parser.add_argument("--tenants", default="1,16,256", help="numbers of tenants, comma-separated")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    peer = peer_us()
    routers = [router_cost(tokens, arguments.requests) for tokens in map(int, arguments.tokens.split(","))]
    exporters = [exporter_cost(tenants, arguments.records) for tenants in map(int, arguments.tenants.split(","))]
    encoding = page_of_records_ms()
    if arguments.json:
        figures = {
            "peer_observe_us": peer,
            "router": list(map(asdict, routers)),
            "exporter": list(map(asdict, exporters)),
            "page_of_1000_records_ms": encoding,
        }
        print(json.dumps(figures, indent=2))
        return
    print(f"peer: one labelled observation of prometheus_client, {peer:.1f} µs; ratios to it in brackets")
    for cost in routers:
        print(
            f"router, {cost.prompt_tokens:>6} tokens: remember {cost.placed_us:6.1f} µs ({cost.placed_us / peer:.1f}), "
            f"record {cost.ended_us:6.1f} µs ({cost.ended_us / peer:.1f})"
        )
    for own in exporters:
        print(
            f"exporter, {own.tenants:>4} tenants: {own.record_us:6.1f} µs a record ({own.record_us / peer:.1f}), "
            f"page {own.page_ms:.1f} ms, ledger {own.ledger_kb:.0f} KB"
        )
    print(f"a page of 1,000 records: {encoding:.2f} ms to encode")


if __name__ == "__main__":
    main()
