"""The live page as programs and readers without JavaScript get it; Chromium is in test_live_page_browser.py."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.live.cards import BAD, DOUBTFUL, GOOD, NEUTRAL, Card
from prefixwatch.exporters.live.history import History, Sample, by_name, take_sample
from prefixwatch.exporters.live.page import POLICY
from prefixwatch.exporters.live.view import LiveView, live_view
from prefixwatch.exporters.live.wording import FLAG_WORDS, count, percent, seconds, share
from prefixwatch.exporters.requests.router_records import DOUBTS
from prefixwatch.exporters.scraping.histogram import Histogram
from prefixwatch.exporters.scraping.quality import flags
from prefixwatch.slo.build import load_request_objectives
from tests.exporters.conftest import Feed, MakeTarget
from tests.exporters.live_fleet import APPS, LiveFleet
from tests.exporters.requests import done, ledger_of

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "exporters/live/assets"
BUSY = "vllm:num_requests_running 30\nvllm:num_requests_waiting 10\nvllm:kv_cache_usage_perc 0.5\n"
QUIET = "vllm:num_requests_running 2\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.25\n"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def values(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.found if (value := attrs.get(attribute))]


@pytest.fixture
async def fleet() -> LiveFleet:
    fleet = LiveFleet(workers=4, sessions=60)
    await fleet.tell()
    await fleet.tell(down="w2")
    return fleet


@pytest.fixture
async def url(fleet: LiveFleet) -> AsyncIterator[str]:
    async with fleet.serving() as address:
        yield address


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def page(url: str, http: aiohttp.ClientSession) -> str:
    async with http.get(url) as answer:
        return await answer.text()


def card(view: LiveView, name: str) -> Card:
    return next(card for card in view.cards if card.id == name)


# What is served


async def test_the_whole_page_comes_without_javascript(page: str) -> None:
    assert "4 targets" not in page  # counted by the script
    for words in ("✓ up", "✗ refused: connection refused", "3 of 4", "w2 (refused)", APPS[0]):
        assert words in page
    assert '<noscript><meta http-equiv="refresh" content="15"></noscript>' in page


async def test_nothing_is_inline_and_nothing_is_loaded_from_elsewhere(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(url) as answer:
        assert answer.headers["Content-Security-Policy"] == POLICY
        assert "unsafe" not in POLICY
        page = Tags(await answer.text())
    assert not [tag for tag, attrs in page.found if tag == "style" or "style" in attrs]
    assert not [name for _, attrs in page.found for name in attrs if name.startswith("on")]
    assert all("src" in attrs for tag, attrs in page.found if tag == "script")
    assert all(link.startswith(("/", "#")) for link in [*page.values("src"), *page.values("href")])


async def test_what_did_not_change_is_not_sent_again(
    url: str, http: aiohttp.ClientSession, fleet: LiveFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixwatch.exporters.live.page._SHOWN_FOR_SECONDS", 0.0)
    for path in ("/", "/live/history"):
        async with http.get(url + path) as first:
            headers = {"If-None-Match": first.headers["ETag"]}
        async with http.get(url + path, headers=headers) as again:
            assert (again.status, await again.read()) == (304, b"")
        await fleet.tell(hot="w1")
    async with http.get(url, headers={"If-None-Match": headers["If-None-Match"]}) as changed:
        assert changed.status == 200


async def test_assets_are_kept_by_the_browser_under_their_builds_address(
    page: str, url: str, http: aiohttp.ClientSession
) -> None:
    links = [link for link in [*Tags(page).values("href"), *Tags(page).values("src")] if "/live/assets/" in link]
    for link in [*links, *Tags(page).values("data-plotly")]:
        async with http.get(url + link) as answer:
            assert answer.status == 200
            assert answer.headers["Cache-Control"] == "private, max-age=31536000, immutable"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    old = re.sub(r"assets/\w+", "assets/0123", links[0])
    async with http.get(url + old) as answer:
        assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
    for missing in ("nothing.js", "..%2fpages.py"):
        async with http.get(f"{url}/live/assets/0123/{missing}") as answer:
            assert answer.status == 404


async def test_the_page_itself_is_not_kept(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(url) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Content-Encoding"] == "gzip"


async def test_names_can_not_break_out_of_the_page(url: str, http: aiohttp.ClientSession, fleet: LiveFleet) -> None:
    evil = "</td><script>alert(1)</script>"
    fleet.exporter.targets[0].fail("refused", evil)
    async with http.get(url) as answer:
        page = await answer.text()
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page


async def test_labels_and_references_are_whole(page: str) -> None:
    tags = Tags(page)
    ids = tags.values("id")
    assert len(ids) == len(set(ids))
    named = [name for words in tags.values("aria-labelledby") for name in words.split()]
    assert set(named) <= set(ids)
    assert [level for level, _ in tags.found if level in ("h1", "h2", "h3")][:2] == ["h1", "h2"]
    assert all(attrs.get("scope") for tag, attrs in tags.found if tag == "th")


async def test_named_prefixes_can_be_gone_to_and_missing_ones_are_said(page: str, fleet: LiveFleet) -> None:
    view = fleet.exporter.prefixes.view
    assert view is not None
    names = fleet.exporter.prefixes.names
    expected = {names.id_of(view.tree, node): name for node, name in view.configured.items()}
    found = dict(re.findall(r'data-node="(\w+)" id="named-\w+">([^<]+)</button>', page))
    assert found == expected


async def test_the_map_is_given_the_prefixes_that_most_tokens_flow_through(
    url: str, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{url}/api/v1/prefixes?by=flow&depth=9&limit=5000") as answer:
        nodes = (await answer.json())["nodes"]
    flows = [node["flow_tokens_below"] for node in nodes]
    assert flows == sorted(flows, reverse=True)
    below: dict[str, int] = {}
    for node in nodes:
        below[node["parent"]] = below.get(node["parent"], 0) + node["flow_tokens_below"]
    assert flows[0] > 0
    assert all(node["flow_tokens_below"] == node["flow_tokens"] + below.get(node["id"], 0) for node in nodes)
    async with http.get(f"{url}/api/v1/prefixes?by=size") as refused:
        assert refused.status == 400
        assert (await refused.json())["error"] == "by must be cached or flow, not size"


def test_page_and_report_speak_one_visual_language() -> None:
    report = (ROOT / "loadgen/report/report_base.html.j2").read_text(encoding="utf-8")
    live = (ASSETS / "live.css").read_text(encoding="utf-8")

    def palettes(css: str) -> list[dict[str, str]]:
        names = "page|card|text|muted|line|pass|fail|inconclusive|focus"
        return [dict(re.findall(rf"--({names}): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)]

    assert palettes(live)[:2] == palettes(report)[:2]
    assert len(palettes(live)[0]) == 9


# What it says


def test_a_fleet_without_targets_or_requests_says_what_to_do() -> None:
    view = live_view([], derive_fleet([]), {}, {}, objectives=load_request_objectives(["ttft"]))
    assert (card(view, "up").figure, card(view, "up").state) == ("–", DOUBTFUL)
    assert "--target" in card(view, "up").detail
    for name in ("slo", "goodput", "ttft", "isolation", "saved", "hits", "hotspot"):
        assert card(view, name).figure == "–"
        assert card(view, name).detail
        assert card(view, name).state == NEUTRAL
    assert view.objectives[0].good.text == "–"
    assert view.alarms == []
    assert view.uncertain == ["Targets up: not known"]


async def test_before_the_first_scrape_the_page_does_not_say_that_all_is_well(http: aiohttp.ClientSession) -> None:
    async with LiveFleet(workers=3, sessions=0).serving() as address, http.get(address) as answer:
        page = await answer.text()

    assert "! 1 thing is in doubt</strong> Targets up: 0 of 3" in page
    assert "Nothing stands out" not in page


def test_what_is_down_hot_or_missed_stands_out(make_target: MakeTarget) -> None:
    targets = [
        make_target("a", BUSY, BUSY, system="vllm"),
        *(make_target(name, QUIET, QUIET, system="vllm") for name in "bcd"),
        make_target("e", "timeout"),
    ]
    view = live_view(targets, derive_fleet(targets), {}, {}, now_seconds=5.0)
    assert view.alarms == ["Targets up: 4 of 5", "Busiest worker: 3.5×"]
    assert card(view, "hotspot").detail == "a, times the mean load; 1 of 4 above 1.5×"
    assert [(row.load.text, row.kv_usage.text) for row in view.workers[:2]] == [("40", "50 %"), ("2", "25 %")]
    gone = view.workers[-1]
    assert (gone.up, gone.why_not.partition(":")[0]) == (False, "timeout")
    assert gone.load.why == gone.why_not


def test_objectives_and_isolation_are_taken_from_the_request_records() -> None:
    ledger = ledger_of(
        [*(done(ttft_seconds=0.2) for _ in range(90)), *(done(ttft_seconds=0.9, own_tokens=0) for _ in range(10))],
        objectives=["ttft"],
    )
    ledger.record(done(cached_tokens=512, own_tokens=0, tenant="x", salted=False), "router")
    documents = {"requests": ledger.document(0.0)}
    objectives = load_request_objectives(["ttft"])
    view = live_view([], derive_fleet([]), by_name(ledger.metrics(0.0)), documents, objectives=objectives)
    (row,) = view.objectives
    assert (row.good.text, row.requests, row.budget, row.state) == ("90.1 %", "101", "198 %", BAD)
    assert card(view, "slo").detail == "missed: ttft"
    assert (card(view, "isolation").figure, card(view, "isolation").state) == ("1 finding", BAD)
    assert "Objectives met: 0 of 1" in view.alarms


def test_problems_of_the_exporter_itself_are_told() -> None:
    documents: dict[str, dict[str, Any]] = {
        "service": {"problems": ["dns: no such host"], "reload_problem": "line 3: listen: not an address"},
        "requests": {
            "failed_reads": [{"source": "router", "target": "r", "reason": "timeout", "reads": 3}],
            "records_missed": {"router": 12000, "spans": 0},
        },
    }
    view = live_view([], derive_fleet([]), {}, documents)
    assert view.problems == [
        "dns: no such host",
        "the last configuration was refused: line 3: listen: not an address",
        "r: its request records could not be read 3 times (timeout)",
        "12 k request records of router were gone before they could be read",
    ]


def test_every_flag_has_words(feed: Feed) -> None:
    text = (ROOT / "exporters/scraping/quality.py").read_text(encoding="utf-8")
    told = set(re.findall(r'^        "(\w+)": ', text, re.M)) | set(flags(feed(QUIET, QUIET))) | set(DOUBTS)
    assert len(told) > 12
    assert told <= set(FLAG_WORDS)


def test_the_documentation_has_the_same_words() -> None:
    page = Path("docs/exporter.md").read_text(encoding="utf-8").partition("## Data-quality flags")[2]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page.partition("\n## ")[0], re.M)) == FLAG_WORDS


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (count(0), "0"),
        (count(0.25), "0.25"),
        (count(9999), "9,999"),
        (count(12_345), "12.3 k"),
        (count(7_654_321), "7.65 M"),
        (count(2e9), "2 G"),
        (percent(0.256), "26 %"),
        (share(0.99951), "99.95 %"),
        (seconds(0.0934), "93.4 ms"),
        (seconds(1.5), "1.50 s"),
        (seconds(None), "–"),
    ],
)
def test_figures_read_well(words: str, text: str) -> None:
    assert words == text


# What it remembers


def moment(
    at: float, hits: int = 0, misses: int = 0, good: float | None = None, requests: float | None = None
) -> Sample:
    def times(number: int, slot: int) -> Histogram:
        counts = [0.0, 0.0, 0.0]
        counts[slot:] = [float(number)] * (3 - slot)
        return Histogram((0.1, 1.0, float("inf")), tuple(counts))

    ttft = {"hit": times(hits, 0), "miss": times(misses, 1)}
    return Sample(1.7e9 + at, at, 0.5, (4.0, 2.0, 1.0), ttft, good, requests)


def test_medians_and_goodput_are_those_of_the_last_minute() -> None:
    history = History()
    history.add(moment(0.0, hits=1000, misses=1000, good=0, requests=1000))
    for at in range(5, 125, 5):
        history.add(moment(float(at), hits=1000 + at, misses=1000 + at // 5, good=at, requests=1000 + 2 * at))
    newest = history.newest
    assert newest is not None
    assert (newest.good_requests, newest.requests, newest.seconds) == (60, 120, 60.0)
    assert newest.goodput_ratio == 0.5
    assert newest.ttft_hit_p50_seconds == 0.05
    assert newest.ttft_miss_p50_seconds is None  # 12 first tokens are too few


def test_counts_that_begin_again_are_not_known_and_not_negative() -> None:
    history = History()
    history.add(moment(0.0, hits=100, good=50, requests=100))
    history.add(moment(5.0, hits=30, good=10, requests=20))
    newest = history.newest
    assert newest is not None
    assert (newest.requests, newest.goodput_ratio, newest.ttft_hit_p50_seconds) == (None, None, None)


def test_what_was_not_known_before_has_begun_at_nothing() -> None:
    history = History()
    history.add(moment(0.0))
    history.add(moment(5.0, good=30, requests=40))
    newest = history.newest
    assert newest is not None
    assert newest.goodput_ratio == 0.75


def test_hits_are_held_against_misses_and_partial_ones_where_there_is_no_other() -> None:
    history = History()
    history.add(moment(0.0))
    history.add(moment(5.0, hits=50, misses=50))
    newest = history.newest
    assert newest is not None
    told = card(live_view([], derive_fleet([]), {}, {}, point=newest), "ttft")
    assert (told.title, told.figure, told.state) == ("TTFT, hit / miss", "50 ms / 550 ms", GOOD)
    assert "a miss waits 500 ms longer" in told.detail
    partial = replace(newest, ttft_hit_p50_seconds=None, ttft_partial_p50_seconds=0.6)
    told = card(live_view([], derive_fleet([]), {}, {}, point=partial), "ttft")
    assert (told.title, told.figure, told.state) == ("TTFT, partial hit / miss", "600 ms / 550 ms", BAD)


def test_the_past_is_columns_and_bounded() -> None:
    history = History(points=3)
    for at in range(5):
        history.add(moment(float(at)))
    columns = history.columns()
    assert columns["unix_seconds"] == [1.7e9 + 2, 1.7e9 + 3, 1.7e9 + 4]
    assert {len(column) for column in columns.values()} == {3}
    assert (columns["load_max"][0], columns["goodput_ratio"][0]) == (4.0, None)


def test_a_sample_takes_first_tokens_from_request_records_before_router_pages(make_target: MakeTarget) -> None:
    ledger = ledger_of([done(cached_tokens=992), done(), done()])
    targets = [make_target("a", QUIET, QUIET, system="vllm")]
    sample = take_sample(targets, derive_fleet(targets), by_name(ledger.metrics(0.0)), 1.7e9, 0.0)
    assert {cache: times.count for cache, times in sample.ttft.items()} == {"hit": 1, "miss": 2}
    assert (sample.requests, sample.goodput_requests) == (3, 3)
    assert sample.loads == (2.0, 2.0, 2.0)
