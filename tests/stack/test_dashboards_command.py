"""`prefixwatch dashboards`: exit codes, what is printed, and pages without a Grafana."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefixwatch.alerts.prometheus import PrometheusError, Series
from prefixwatch.dashboards.preview import _heatmap
from prefixwatch.dashboards.queries.inventory import Shown
from prefixwatch.documents.errors import InputError
from prefixwatch.stack.cli.dashboards import print_check, run_check, run_preview
from prefixwatch.stack.errors import UsageError
from tests.dashboards.fake_prometheus import answering


@contextmanager
def prometheus(value: str | None, **more: Any) -> Iterator[str]:
    """The address of one that runs in a thread of its own, as commands bring their own event loop."""
    started: asyncio.Queue[str] = asyncio.Queue()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with answering(value, **more) as (url, _):
            await started.put(url)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(started.get(), loop).result(30)
    finally:  # a thread that stays would keep a failed run from ending
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_all_answered_is_0_and_the_scrape_interval_is_compared() -> None:
    """weka/csi-wekafs#741 (SL08): panels flicker when Grafana takes another scrape interval for granted."""
    with prometheus("1") as url:
        document, exit_code = run_check(url, Shown(scrape_seconds=15.0), "prefixwatch")

    assert exit_code == 0
    assert document["counts"]["data"] == len(document["queries"])
    assert document["notes"] == [
        "Prometheus scrapes the exporter every 1m, but 15 s are taken for granted: set the datasource's "
        "scrape interval (timeInterval) and the dashboards' variable to it"
    ]


def test_without_the_exporter_each_panel_says_which_series_it_needs() -> None:
    with prometheus(None) as url:
        document, _ = run_check(url, Shown(), "prefixwatch", {"prefixwatch_kv_usage_ratio"})

    why = {(row["panel"], row["ref"]): (row["status"], row["why"]) for row in document["queries"]}
    assert why["KV cache in use", "A"][0] == "empty"
    assert why["variable", "job"] == ("listed", "series that rules record have no job")
    needs = [text for status, text in why.values() if text.startswith("needs the exporter, which gives prefixwatch")]
    assert any("prefixwatch_tenant_hit_tokens_total" in text for text in needs)


def test_an_empty_prometheus_is_1_and_names_the_queries() -> None:
    console = Console(record=True, width=300)
    with prometheus(None) as url:
        document, exit_code = run_check(url, Shown(), "prefixwatch")
    print_check(document, console)

    assert exit_code == 1
    assert document["counts"]["data"] == 0
    told = console.export_text()
    assert "Time to first token" in told
    assert "no data: needs request records" in told
    assert f"{len(document['queries'])} queries: 0 with data" in told


def test_what_had_data_while_traffic_ran_is_listed_once_it_has_stopped() -> None:
    """Unknown isn't wrong: `up` without traffic made half of the panels fail."""
    stopped = time.time() - 3600
    with prometheus("1", until=stopped) as url:
        document, exit_code = run_check(url, Shown(), "prefixwatch")

    when = datetime.fromtimestamp(stopped, UTC).strftime("%Y-%m-%d %H:%M UTC")
    reasons = {row["why"] for row in document["queries"] if row["panel"] == "Time to first token"}
    assert f"no request since {when}; it had data then" in reasons
    assert (exit_code, document["counts"]["empty"]) == (0, 0)


def test_a_renamed_series_had_none_then_either_and_fails() -> None:
    renamed = "prefixwatch_ttft_seconds"
    with prometheus("1", until=time.time() - 3600, renamed=renamed) as url:
        document, exit_code = run_check(url, Shown(), "prefixwatch")

    empty = {row["panel"] for row in document["queries"] if row["status"] == "empty"}
    reading = {row["panel"] for row in document["queries"] if renamed in row["expr"]}
    assert exit_code == 1
    assert "Time to first token" in empty
    assert empty == reading


SCRAPED, RULES, ENDED = "count(prefixwatch_target_up)", "count(ALERTS", "sum(rate(prefixwatch_requests_total["


def _judged(began_ago: dict[str, float]) -> tuple[dict[str, Any], int]:
    """Of a Prometheus without an answer to any panel: what it has, and for how many seconds."""
    now = time.time()
    with prometheus(None, since={text: now - ago for text, ago in began_ago.items()}) as url:
        return run_check(url, Shown(), "prefixwatch")


@pytest.mark.parametrize(
    ("began_ago", "exit_code", "status", "note"),
    [
        ({}, 1, "empty", "there is no series prefixwatch_target_up in the last day: have this Prometheus scrape"),
        ({SCRAPED: 900.0, ENDED: 900.0}, 1, "empty", "no rule was evaluated in the last day: load what `prefixwatch"),
        ({SCRAPED: 3600.0, RULES: 3600.0}, 3, "early", "not enough data yet: no request ended in the last day: send"),
        ({SCRAPED: 20.0}, 3, "early", "not enough data yet: no request ended in the last day: send traffic"),
        ({SCRAPED: 200.0, RULES: 90.0, ENDED: 150.0}, 3, "early", "not enough data yet: requests end since "),
        ({SCRAPED: 3600.0, RULES: 3600.0, ENDED: 700.0}, 1, "empty", "Prometheus scrapes"),
    ],
    ids=["not scraped", "no rules", "no requests", "just started", "2.5 min of requests", "requests for long"],
)
def test_too_little_data_is_not_the_same_as_none(
    began_ago: dict[str, float], exit_code: int, status: str, note: str
) -> None:
    document, code = _judged(began_ago)

    assert code == exit_code
    assert {row["status"] for row in document["queries"]} == {"listed", status}
    assert document["notes"][-1].startswith(note)


def test_where_requests_are_young_it_says_when_to_check_again() -> None:
    console = Console(record=True, width=300)
    document, _ = _judged({SCRAPED: 200.0, RULES: 90.0, ENDED: 150.0})
    print_check(document, console)

    first, again = re.findall(r"(\d\d:\d\d:\d\d) UTC", document["notes"][-1])
    waited = datetime.strptime(again, "%H:%M:%S") - datetime.strptime(first, "%H:%M:%S")
    assert waited.seconds == 600
    assert f"{document['counts']['early']} without data yet, 0 empty" in console.export_text()


def test_what_is_refused_is_wrong_however_young_the_data() -> None:
    with prometheus(
        None, refused="prefixwatch_kv_usage_ratio", since=dict.fromkeys((SCRAPED, RULES, ENDED), 0.0)
    ) as url:
        _, old = run_check(url, Shown(), "prefixwatch")
    now = time.time()
    with prometheus(None, refused="prefixwatch_kv_usage_ratio", since=dict.fromkeys((SCRAPED, ENDED), now - 60)) as url:
        document, young = run_check(url, Shown(), "prefixwatch")

    assert (old, young) == (1, 1)
    assert document["counts"]["refused"] > 0
    assert document["counts"]["early"] > 0


QUIET = Console(quiet=True)


def test_nobody_there_is_an_error_of_the_environment() -> None:
    with pytest.raises(PrometheusError, match=r"http://127\.0\.0\.1:1"):
        run_check("http://127.0.0.1:1", Shown(), "prefixwatch")
    assert issubclass(PrometheusError, InputError)


def test_a_preview_shows_values_texts_for_none_and_lost_metrics(tmp_path: Path) -> None:
    with prometheus("0.25") as url:
        index = run_preview(url, Shown(), tmp_path / "full", ["overview"], QUIET)
    with prometheus(None) as url:
        run_preview(url, Shown(), tmp_path / "empty", ["overview"], QUIET)
    with prometheus("NaN") as url:
        run_preview(url, Shown(), tmp_path / "lost", ["overview"], QUIET)

    assert index == tmp_path / "full" / "index.html"
    assert (tmp_path / "full" / "plotly.min.js").stat().st_size > 1_000_000
    assert "25.0%" in (tmp_path / "full" / "overview.html").read_text(encoding="utf-8")
    assert "no objective has events yet" in (tmp_path / "empty" / "overview.html").read_text(encoding="utf-8")
    assert "metric gone" in (tmp_path / "lost" / "overview.html").read_text(encoding="utf-8")


def test_a_previews_heat_map_shows_what_each_bucket_holds_beyond_the_one_below() -> None:
    panel = {"gridPos": {"h": 8, "w": 12}, "options": {"yAxis": {"unit": "s"}}}
    buckets = [("+Inf", [4.0, 9.0]), ("0.1", [1.0, 2.0]), ("0.5", [4.0, 8.0])]
    named = [(le, Series({"le": le}, [(60.0 * k, value) for k, value in enumerate(values)])) for le, values in buckets]

    drawn = _heatmap(panel, named)

    assert '"z":[[1.0,2.0],[3.0,6.0],[0.0,1.0]]' in drawn.replace(" ", "")
    assert "100 ms" in drawn


def test_a_preview_has_tables_units_and_thresholds_as_the_dashboards_have_them(tmp_path: Path) -> None:
    with prometheus("0.25") as url:
        run_preview(url, Shown(), tmp_path, ["overview", "slo-budgets"], QUIET)

    overview, budgets = ((tmp_path / f"{name}.html").read_text("utf-8") for name in ("overview", "slo-budgets"))
    assert "<th>budget left</th><th>used up in</th>" in budgets
    assert (
        '<span style="color:inherit">25.0%</span></td><td class="number"><span style="color:inherit">250 ms' in budgets
    )
    assert '<th></th><td><span style="color:#006b4c">25.0%</span>' in overview, "budget left"
    assert '"ticksuffix":"s","tickformat":"~s"' in overview
    assert "1e-09" not in overview + budgets
    assert '<a href="index.html">' in overview


def test_a_preview_of_an_unknown_dashboard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no dashboard 'nothing'"):
        run_preview("http://127.0.0.1:1", Shown(), tmp_path, ["nothing"], QUIET)
