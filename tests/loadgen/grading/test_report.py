"""The report people open, and its short forms for consoles and CI."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from prefixwatch.loadgen.grading.run_figures import RunFigures
from prefixwatch.loadgen.grading.summary import RunFacts, Summary, build_summary, columns_by_policy
from prefixwatch.loadgen.grading.wording import figure_text, limits_text, number, percent, signed_percent
from prefixwatch.loadgen.report.advice import what_to_do
from prefixwatch.loadgen.report.charts import build_charts
from prefixwatch.loadgen.report.fleet_charts import worker_rows
from prefixwatch.loadgen.report.headline import Tile, plain_sentence, tiles
from prefixwatch.loadgen.report.junit import junit_tree, write_junit
from prefixwatch.loadgen.report.page import console_table, markdown_summary, render_report, write_report
from prefixwatch.loadgen.request_log.engine_counters import EngineCounters
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.slo.build import load_objectives

MakeLog = Callable[..., list[RequestRecord]]

FACTS = RunFacts(scenario="shared-prefix", engine="simulated", workers=4)
OBJECTIVES = load_objectives(["ttft", "tpot", "goodput", "availability"])
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def log(make_log: MakeLog) -> list[RequestRecord]:
    return make_log("round_robin", "cache_aware")


@pytest.fixture(scope="module")
def summary(log: list[RequestRecord]) -> Summary:
    return build_summary(log, OBJECTIVES, FACTS)


@pytest.fixture(scope="module")
def page(summary: Summary, log: list[RequestRecord]) -> str:
    return render_report(summary, log, OBJECTIVES, {"scenario": "shared-prefix", "seed": 7})


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_it_asks_nothing_of_any_server(page: str) -> None:
    tags = Tags(page).found

    linked = [attrs for _, attrs in tags for name in ("src", "href") if not (attrs.get(name) or "#").startswith("#")]
    assert linked == []
    policy = next(attrs["content"] for tag, attrs in tags if tag == "meta" and "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_every_chart_has_a_title_a_text_and_a_table(page: str) -> None:
    tags = Tags(page).found
    charts = [attrs for tag, attrs in tags if attrs.get("class") == "chart"]

    ids = {attrs.get("id") for _, attrs in tags}
    assert [chart["id"] for chart in charts] == [
        "ttft-distribution",
        "tradeoff",
        "hit-tokens",
        "balance",
        "ttft-over-time",
        "client-lag",
    ]
    assert all({chart["aria-labelledby"], chart["aria-describedby"]} <= ids for chart in charts)
    assert page.count("<summary>As a table</summary>") == len(charts)


def test_it_says_verdict_figures_and_how_to_run_it_again(page: str, summary: Summary) -> None:
    text = page[: page.index("<script>")]

    assert "✓ Pass" in text
    assert "cache_aware vs round_robin: TTFT p95 " in text
    assert "95 % of requests: TTFT ≤ 0.5 s" in text
    assert f"<td>{percent(summary.policies['cache_aware'].value('hit_ratio'))}</td>" in text
    assert "scenario: shared-prefix\nseed: 7\n" in text


def test_the_first_screen_has_the_verdict_four_tiles_the_curve_and_where_it_was_made(
    make_log: MakeLog, log: list[RequestRecord]
) -> None:
    facts = replace(
        FACTS,
        started_at="2026-11-30T12:00:00+00:00",
        host="bench-01",
        profile="assumed-gpu",
        versions={"prefixwatch": "0.1.0", "python": "3.11.2"},
    )
    summary = build_summary(log, OBJECTIVES, facts)
    page = render_report(summary, log, OBJECTIVES, {})
    start, _, rest = page.partition('<nav aria-label="Contents">')

    assert "2026-11-30 12:00:00 UTC · host bench-01 · profile assumed-gpu (assumed) · prefixwatch 0.1.0" in start
    assert "<span>cache_aware meets all 4 objectives.</span>" in start
    assert 'id="ttft-distribution"' in start
    own, [ttft] = summary.policies["cache_aware"], [c for c in summary.comparison if c.metric == "ttft_p95"]
    assert [tile.title for tile in tiles(summary)] == ["TTFT p95", "Hit tokens", "Goodput", "TPOT p95"]
    assert tiles(summary)[0] == Tile(
        "TTFT p95",
        f"{figure_text(own, 'ttft_p95')} ms",
        limits_text(own, "ttft_p95"),
        f"{signed_percent(ttft.relative)} from {number(ttft.b_value)}",
        "better",
    )
    anchors = re.findall(r'<a href="#([a-z]+)">', rest)
    assert anchors[:2] == ["leaderboard", "objectives"]
    assert all(f'id="{anchor}"' in page for anchor in anchors)
    alone = build_summary(make_log("score", repeats=1), [], facts)
    assert plain_sentence(alone) == "score was measured without objectives."
    assert tiles(alone)[0].note == "240 requests"


def test_policies_are_side_by_side(summary: Summary, page: str) -> None:
    table = page[page.index('id="percentiles"') : page.index('id="figures"')]
    row = table[table.index(">TTFT</th>") :].split("</tr>")[0]
    values = [figure_text(own, f"ttft_{p}") for own in summary.policies.values() for p in ("p50", "p95", "p99")]
    assert re.findall(r"<td>([^<]+)", row) == values


def test_names_can_not_break_out_of_the_page(make_log: MakeLog) -> None:
    evil = "</script><script>alert(1)</script>"
    log = [replace(r, policy=evil, group=evil) for r in make_log("score", repeats=1)]

    page = render_report(build_summary(log, OBJECTIVES, FACTS), log, OBJECTIVES, {"note": evil})

    assert evil not in page


def test_a_log_without_a_single_answer_still_makes_a_report(make_log: MakeLog) -> None:
    log = [
        RequestRecord(
            id=r.id,
            policy=r.policy,
            repeat=0,
            index=r.index,
            phase="measured",
            tenant="-",
            session="s",
            turn=0,
            group="-",
            request_class="chat",
            scheduled_s=r.scheduled_s,
        )
        for r in make_log("a", "b", repeats=1)
    ]

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert summary.validity.reasons == ["a: not one request was sent", "b: not one request was sent"]
    assert "✗ Not valid" in render_report(summary, log, OBJECTIVES, {})
    assert "–" in markdown_summary(summary)
    assert render_report(build_summary([], OBJECTIVES, FACTS), [], OBJECTIVES, {})


def test_charts_stay_small_whatever_the_run(make_log: MakeLog) -> None:
    log = make_log("round_robin", repeats=1, requests=4000)

    charts = build_charts(columns_by_policy(log), OBJECTIVES, workers=4)

    assert max(len(trace["x"]) for chart in charts for trace in chart.traces) <= 200


def test_policies_differ_by_more_than_colour(summary: Summary, log: list[RequestRecord]) -> None:
    charts = {c.id: c for c in build_charts(columns_by_policy(log), OBJECTIVES, workers=4)}

    symbols = [trace["marker"]["symbol"] for trace in charts["balance"].traces]
    dashes = {trace["line"]["dash"] for trace in charts["ttft-distribution"].traces}
    assert symbols == ["circle", "square"]
    assert dashes == {"solid", "dot"}


def test_the_console_table_has_a_column_a_policy_and_fits_a_narrow_terminal(summary: Summary) -> None:
    output = StringIO()
    Console(file=output, width=80).print(console_table(summary))

    assert "shared-prefix on 4 × simulated" in output.getvalue()
    row = next(line for line in output.getvalue().splitlines() if "TTFT p95 ms" in line)
    for own in summary.policies.values():
        assert number(own.value("ttft_p95")) in row


def test_the_markdown_summary_is_a_github_table(summary: Summary) -> None:
    text = markdown_summary(summary)

    assert text.startswith(
        "## prefixwatch: shared-prefix – pass\n\n4 × simulated, 3 repeats\n\n- cache_aware vs round_robin: "
    )
    assert re.search(r"^\| policy \| TTFT p50 ms \|.*\n\| --- \| ---: \|", text, re.MULTILINE)
    assert "| cache_aware | ttft | 95 % of requests: TTFT ≤ 0.5 s | 100 % |" in text


def test_junit_fails_what_the_verdict_fails(make_log: MakeLog, tmp_path: Path) -> None:
    log = [replace(r, first_token_s=r.scheduled_s + 0.9) for r in make_log("round_robin", "score")]

    write_junit(tmp_path / "junit.xml", build_summary(log, OBJECTIVES, FACTS))

    suites = {s.get("name"): s for s in ElementTree.parse(tmp_path / "junit.xml").getroot()}
    assert (suites["score"].get("tests"), suites["score"].get("failures")) == ("5", "2")
    failed = [case.get("name") for case in suites["score"] if case.find("failure") is not None]
    assert failed == ["ttft", "goodput"]
    assert suites["round_robin"].get("failures") == "0"


def test_junit_of_an_invalid_run_skips_with_the_reason(summary: Summary, log: list[RequestRecord]) -> None:
    invalid = build_summary(log, OBJECTIVES, replace(FACTS, client_reasons=["the client stalled"]))

    skipped = junit_tree(invalid).findall("testsuite/testcase/skipped")

    assert len(skipped) == 8
    assert skipped[0].get("message") == "the run is invalid: the client stalled"


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
def test_a_browser_draws_every_chart(summary: Summary, log: list[RequestRecord], page: str, tmp_path: Path) -> None:
    """Offline, and under the page's own content policy."""
    assert CHROMIUM is not None
    write_report(tmp_path / "report.html", summary, log, OBJECTIVES, {})
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"

    dom = subprocess.run(
        [CHROMIUM, *flags, profile, "--virtual-time-budget=2000", f"file://{tmp_path}/report.html"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout

    drawn = dom[dom.index("<main") : dom.index("</main>")]
    assert drawn.count('class="main-svg"') >= 6
    assert drawn.count('<g class="cartesianlayer">') == 6
    assert "cache_aware, hit" in drawn


COUNTERS = EngineCounters(
    start_hit_tokens=9e5, start_query_tokens=1e6, end_hit_tokens=9.1e5, end_query_tokens=1.1e6, hit_tokens=1e4,
    query_tokens=1e5, hit_ratio=0.1,
)  # fmt: skip
RUNS = [
    RunFigures(
        policy=policy, repeat=repeat, client_floor_p50_ms=0.14 + repeat, client_floor_p99_ms=0.5, loop_lag_p99_ms=3.0,
        cpu_share=0.02, in_flight_max=7, retokenization_loss_tokens=5, engine=COUNTERS,
    )
    for policy in ("round_robin", "cache_aware")
    for repeat in range(2)
]  # fmt: skip


@pytest.fixture(scope="module")
def with_runs(log: list[RequestRecord]) -> Summary:
    return build_summary(log, OBJECTIVES, replace(FACTS, runs=RUNS))


def test_the_report_shows_what_the_client_added_and_the_engines_counted(
    with_runs: Summary, log: list[RequestRecord]
) -> None:
    page = render_report(with_runs, log, OBJECTIVES, {})

    assert "<td>1.14</td><td>0.5</td><td>3</td><td>2 %</td><td>7</td>" in page
    assert "<td>900,000 → 910,000</td><td>1,000,000 → 1,100,000</td><td>10 %</td><td>5</td>" in page
    assert "· open loop" in page


def test_percentiles_stand_with_their_intervals(summary: Summary, page: str) -> None:
    own = summary.policies["cache_aware"]
    value, limits = figure_text(own, "ttft_p95"), limits_text(own, "ttft_p95")
    assert re.fullmatch(r"[\d.]+…[\d.]+", limits)
    assert f"<td>{value}<small>{limits}</small></td>" in page
    assert f"{value} ({limits})" in markdown_summary(summary)


def test_figures_that_are_no_latency_stand_with_their_intervals_too(summary: Summary, page: str) -> None:
    own = summary.policies["cache_aware"]
    output, limits = figure_text(own, "output_tokens_per_second"), limits_text(own, "output_tokens_per_second")
    ratio = f"{figure_text(own, 'hit_ratio')} | {limits_text(own, 'hit_ratio')}"
    assert "…" in limits
    assert f"<td>{output}<small>{limits}</small></td>" in page
    assert f"| cache_aware | hit tokens / prompt tokens | {ratio} |" in markdown_summary(summary)
    screen = Console(file=StringIO(), width=120)
    screen.print(console_table(summary))
    assert isinstance(screen.file, StringIO)
    assert f"{output} ({limits})" in screen.file.getvalue()


def test_expected_and_reported_hit_tokens_stand_side_by_side(summary: Summary, page: str) -> None:
    own = summary.policies["cache_aware"]
    expected, reported = own.value("expected_hit_tokens"), own.value("hit_tokens")
    assert expected is not None
    assert reported is not None
    cells = f"<td>{expected:,}</td><td>{reported:,}</td>"
    assert f"{cells}<td>{percent(reported / expected)}</td><td>–</td>" in page


def test_the_console_says_how_sure_and_how_late(with_runs: Summary) -> None:
    output = StringIO()
    Console(file=output, width=80).print(console_table(with_runs))

    rows = {line.split("│")[1].strip(): line for line in output.getvalue().splitlines() if line.startswith("│")}
    assert "…" in rows["TTFT p95 95 % CI"]
    assert "0.4" in rows["client lag p95 ms"]
    assert "1.14" in rows["client floor p50 ms"]
    assert "10" in rows["retokenized tokens"]
    assert "ITL p95 ms" not in rows  # no gaps in this log


def test_the_first_screen_says_what_to_do(make_log: MakeLog, summary: Summary, page: str) -> None:
    [preferred] = what_to_do(summary)
    assert preferred.startswith("Prefer cache_aware to round_robin for this traffic")
    assert page.index(preferred) < page.index('<nav aria-label="Contents">')
    slow = [replace(r, first_token_s=(r.first_token_s or 0) + 2) for r in make_log("score")]
    missed = what_to_do(build_summary(slow, OBJECTIVES, FACTS))
    assert missed[-1].startswith("Lower the rate or add workers")
    leaked = replace(FACTS, client_reasons=["score: others used these engines: repeat it when nobody else sends"])
    spoilt = build_summary(make_log("score", repeats=1, requests=8), OBJECTIVES, leaked)
    assert what_to_do(spoilt) == [
        "Decide nothing by this run. Repeat it when nobody else sends. The other reason is under Validity."
    ]


def test_each_worker_has_a_row_with_its_own_counters() -> None:
    rows = [
        FleetRow(
            unix_s=at, policy="p", repeat=0, worker=worker, up=True, running=running, waiting=0.0,
            kv_usage_ratio=0.1 * at, prefix_hit_tokens_total=50.0 * at, prefix_query_tokens_total=share * at,
        )
        for worker, running, share in (("e0", 2.0, 300.0), ("e1", 4.0, 100.0))
        for at in (1.0, 2.0, 3.0)
    ]  # fmt: skip
    restarted = replace(rows[0], worker="e2", prefix_query_tokens_total=1.0)
    found = worker_rows([*rows, replace(restarted, prefix_query_tokens_total=9.0), restarted])
    assert found[0][:2] + found[0][3:] == ["e0", "p", "2", "30 %", "600", "–", "16.7 %"]  # of all: e2's is unknown
    assert found[2][5:] == ["–", "–", "–"]
    assert worker_rows(rows)[1] == ["e1", "p", "3", "4", "30 %", "200", "25 %", "50 %"]
