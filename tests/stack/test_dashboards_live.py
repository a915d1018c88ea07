"""Every query of every dashboard against a real Prometheus, filled by a real run of the whole stack."""

from __future__ import annotations

import asyncio

import pytest

from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.queries.check import check
from prefixwatch.dashboards.queries.inventory import Shown
from prefixwatch.dashboards.queries.panel_queries import EXPLAINING, missing_signals
from prefixwatch.engines.tiny_model import MODEL_NAME, default_model_dir
from tests.stack.dashboard_stack import (
    FEW,
    SCRAPE_SECONDS,
    Running,
    answered,
    faults,
    observed,
    short_folder,
    simulated_engines,
    without_answer,
)


async def explaining(running: Running) -> set[tuple[str, str]]:
    """Panels that tell of a lost metric, once any does. Raises TimeoutError.

    The first answers are not taken: the scrape that tells of the loss may have come while they were given.
    """
    shown = Shown(range_seconds=5.0, scrape_seconds=SCRAPE_SECONDS)
    told = False
    async with asyncio.timeout(60), new_session() as session:
        while True:
            outcomes = await check(Prometheus(running.prometheus, session), shown)
            telling = {(o.asked.dashboard, o.asked.panel) for o in outcomes if o.asked.explains and o.status == "data"}
            if told:
                return telling
            told = bool(telling)


@pytest.mark.timeout(420)
@pytest.mark.prometheus
async def test_every_query_has_an_answer_and_a_renamed_metric_is_explained() -> None:
    """vllm-project/production-stack#989 (EM07) at the end: exactly the panels that read it tell of a lost metric."""
    with short_folder() as folder:
        async with (
            simulated_engines(folder) as engines,
            observed(engines, folder, default_model_dir(), MODEL_NAME) as running,
        ):
            outcomes = await answered(running, MODEL_NAME)
            running.renamed.add("vllm:kv_cache_usage_perc")
            explained = await explaining(running)

    assert faults(outcomes) == []
    assert len(without_answer(outcomes)) < FEW
    assert explained == {
        (name, panel.title)
        for name, dashboard in shipped().items()
        for panel in dashboard.panels
        if panel.kind in EXPLAINING and "kv_usage_ratio" in missing_signals(panel)
    }
