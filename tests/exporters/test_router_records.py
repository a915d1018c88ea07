"""Reading a router's records: every one once, over page cuts, restarts, overwritten ones and failures."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.http.client_config import ClientConfig
from prefixwatch.exporters.requests.router_records import RecordReader, RouterRecords
from prefixwatch.exporters.scraping.scrape import ScrapeFault
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.request_record import RequestPage, RequestRecord
from tests.exporters.requests import done, figures, ledger_of

MakeTarget = Callable[..., Target]


class Log:
    """A router's log as its endpoint shows it."""

    def __init__(self, started: str = "one", kept: int = 1000, page: int = 1000) -> None:
        self.started, self.kept, self.page = started, kept, page
        self.records: list[RequestRecord] = []
        self.urls: list[str] = []

    async def get(self, url: str, client: ClientConfig) -> bytes:
        self.urls.append(url)
        return msgspec.json.encode(self.after(int(url.rpartition("=")[2])))

    def after(self, number: int) -> RequestPage:
        oldest = max(0, len(self.records) - self.kept) + 1
        first = min(max(number + 1, oldest), len(self.records) + 1)
        return RequestPage(self.started, first, self.records[first - 1 : first - 1 + self.page])


def read(reader: RecordReader, log: Log) -> tuple[list[RequestRecord], int]:
    records, missed = [], 0
    reader.finished = False
    while not reader.finished:
        more, gone = reader.take(log.after(reader.after))
        records += more
        missed += gone
    return records, missed


def ended(*times: float) -> list[RequestRecord]:
    return [done(ended_unix_seconds=at) for at in times]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=8))
def test_every_record_is_read_once_however_the_pages_are_cut(rounds: list[tuple[int, int]]) -> None:
    log, reader, read_so_far = Log(), RecordReader(0.0), []
    for added, page in rounds:
        log.records += ended(*range(len(log.records), len(log.records) + added))
        log.page = page
        records, missed = read(reader, log)
        read_so_far += records
        assert missed == 0
    assert read_so_far == log.records


def test_after_a_restart_of_the_router_all_its_records_are_new() -> None:
    reader, log = RecordReader(0.0), Log()
    log.records = ended(1, 2, 3)
    assert read(reader, log) == (log.records, 0)
    reborn = Log("two")
    reborn.records = ended(4, 5, 6, 7)
    assert read(reader, reborn) == (reborn.records, 0)


async def test_routers_that_take_turns_at_one_address_are_counted_once_and_told(make_target: MakeTarget) -> None:
    """A load balancer in front of two routers: each answers for itself, and no record is read again."""
    logs, ledger, target = [Log("one"), Log("two")], ledger_of(), make_target("router")
    logs[0].records, logs[1].records = ended(1, 2, 3), ended(4, 5)
    records = RouterRecords(ledger)
    seen = []
    for turn in range(4):
        await records.read(target, logs[turn % 2].get)
        seen.append((figures(ledger)["request_records_total"]["router",], target.flags(0.0)["several_routers"]))
        logs[turn % 2].records += ended(10 + turn)
    assert seen == [(3, False), (5, False), (6, True), (7, True)]


def test_overwritten_records_are_counted_as_missed() -> None:
    reader, log = RecordReader(0.0), Log(kept=3)
    log.records = ended(1)
    read(reader, log)
    log.records += ended(*range(2, 12))
    assert read(reader, log) == (ended(9, 10, 11), 7)


def test_what_ended_before_the_exporter_began_is_passed_over_once() -> None:
    """A restarted exporter's counters begin at 0: what its predecessor counted would count as an increase again."""
    reader, log = RecordReader(10.0), Log(kept=3)
    log.records = ended(1, 2, 3, 9.0, 11.0)
    assert read(reader, log) == (ended(11.0), 0)
    log.records += ended(4.0)  # a router whose clock is behind
    assert read(reader, log) == (ended(4.0), 0)


def test_a_page_that_repeats_what_was_read_counts_nothing_twice() -> None:
    reader, log = RecordReader(0.0), Log()
    log.records = ended(1, 2, 3)
    read(reader, log)
    assert reader.take(RequestPage("one", 2, ended(2, 3, 4))) == (ended(4), 0)


async def test_records_are_asked_for_beside_the_metrics_page(make_target: MakeTarget) -> None:
    log, ledger, target = Log(page=2), ledger_of(), make_target("router")
    log.records = [*ended(1, 2, 3), done(prompt_tokens=40, cached_tokens=48)]
    records = RouterRecords(ledger)
    await records.read(target, log.get)
    assert log.urls[:2] == [f"http://localhost/router/requests?after={after}" for after in (0, 2)]
    shown = figures(ledger)
    assert shown["request_records_total"] == {("router",): 4}
    assert shown["request_records_missed_total"] == {("router",): 0}
    assert target.flags(0.0)["cached_exceeds_prompt"] is True
    assert target.flags(0.0)["ttft_near_e2e"] is False


async def test_a_record_that_would_take_counters_back_is_left_out(make_target: MakeTarget) -> None:
    log, ledger, target = Log(), ledger_of(), make_target("router")
    log.records = [done(cached_tokens=-5), done(tenant="t" * 1_000_000, cached_tokens=16)]
    await RouterRecords(ledger).read(target, log.get)
    assert figures(ledger)["tenant_hit_tokens_total"] == {("t" * 128,): 16}
    assert target.flags(0.0)["bad_records"] is True


async def test_a_failed_read_is_counted_and_made_good_later(make_target: MakeTarget) -> None:
    log, ledger, target = Log(), ledger_of(), make_target("router")
    log.records = ended(1, 2)
    records = RouterRecords(ledger)

    async def gone(url: str, client: ClientConfig) -> bytes:
        raise ScrapeFault("http_404")

    async def html(url: str, client: ClientConfig) -> bytes:
        return b"<html>"

    await records.read(target, gone)
    await records.read(target, html)
    assert "requests_total" not in figures(ledger)
    failed = ledger.document(0.0)["failed_reads"]
    assert [(one["target"], one["reason"], one["reads"]) for one in failed] == [
        ("router", "http_404", 1),
        ("router", "not_records", 1),
    ]
    await records.read(target, log.get)
    assert figures(ledger)["request_records_total"] == {("router",): 2}
