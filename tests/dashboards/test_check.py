"""Which answers count as data, and which reasons are taken, against a Prometheus that is made up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from prefixwatch.alerts.prometheus import Prometheus, PrometheusError, new_session
from prefixwatch.dashboards.queries.check import LOST_METRIC, check, counted, may_be_empty
from prefixwatch.dashboards.queries.inventory import Shown, everything_asked
from prefixwatch.documents import DocumentError
from tests.dashboards.fake_prometheus import NOW, answering


async def test_every_query_is_asked_once_with_its_variables_replaced() -> None:
    async with answering("1") as (url, asked), new_session() as session:
        outcomes = await check(Prometheus(url, session), Shown(), NOW)

    assert counted(outcomes) == {"data": len(everything_asked()), "listed": 0, "early": 0, "empty": 0, "refused": 0}
    wanted = Counter(Shown().expanded(one.expr) for one in everything_asked() if one.kind != "label values")
    assert Counter(asked) == wanted
    assert not any("$" in query for query in asked)


async def test_nothing_and_nan_are_no_data_unless_a_reason_is_listed() -> None:
    async with answering(None) as (url, _), new_session() as session:
        nothing = await check(Prometheus(url, session), Shown(), NOW)
    async with answering("NaN") as (url, _), new_session() as session:
        nan = await check(Prometheus(url, session), Shown(), NOW)

    hits = [o for o in nothing if (o.asked.panel, o.asked.ref) == ("How much of the prompts is reused?", "A")]
    assert [o.status for o in hits] == ["empty"] * 2
    assert hits[0].why == "no data: no prompt tokens looked up, or no engine counts them"
    gpu = next(o for o in nothing if o.asked.panel == "GPUs busy, tensor cores busy")
    assert (gpu.status, gpu.why) == ("listed", "only with a GPU exporter (DCGM) among the targets")
    lost = [o for o in nothing if o.asked.explains]
    assert {(o.status, o.why) for o in lost} == {("listed", LOST_METRIC)}
    assert {o.status for o in nan if not o.asked.explains and o.asked.panel not in {"annotation", "variable"}} == {
        "empty",
        "listed",
    }
    assert {o.status for o in nan if o.asked.explains} == {"data"}, "NaN is what they say while a metric is lost"


async def test_a_refused_query_is_told_with_the_complaint() -> None:
    async with answering("1", refused="prefixwatch_warm_pool_utilization_ratio") as (url, _), new_session() as session:
        outcomes = await check(Prometheus(url, session), Shown(), NOW)

    assert [(o.asked.panel, o.why) for o in outcomes if o.status == "refused"] == [
        ("Which classes are degraded, and how far?", "many-to-many")
    ]


async def test_nobody_there_is_told_with_the_remedy() -> None:
    async with new_session() as session:
        with pytest.raises(PrometheusError, match=r"http://127.0.0.1:1: can't be asked .*address of a running Prom"):
            await check(Prometheus("http://127.0.0.1:1", session), Shown(), NOW)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("metrics: {prefixwatch_nothing: why}\nqueries: []\n", "no panel reads a series of this name"),
        (
            "metrics: {}\nqueries: [{dashboard: overview, panel: Nothing, ref: A, reason: why}]\n",
            "there is no overview › Nothing › A",
        ),
    ],
)
def test_a_reason_for_what_is_never_asked_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "may_be_empty.yaml"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(DocumentError, match=complaint):
        may_be_empty(file)
