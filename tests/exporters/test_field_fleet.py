"""The fleet of the field benchmark, small and short: every target is seen, and nothing is merged or misread."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.field_fleet import EARLIER, Figures, fleet_of, measure, table
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.requests.ledger import ROUTER
from prefixwatch.exporters.scraping.target import Target
from tests.exporters.requests import done, ledger_of


def test_a_small_field_fleet_is_read_right() -> None:
    figures = measure(20, 10.0)
    models = {worker.model for worker in fleet_of(20)}
    assert (len(models), figures.workers_with_a_load, figures.targets_down) == (3, 19, 1)
    assert set(figures.flags) <= {"stale", "counter_reset", "shared_workers"}
    assert figures.top_share is not None
    assert 5 * figures.page_gzip_kb < figures.page_kb
    assert figures.page_kb < 400


def test_a_worker_and_a_tenant_add_little_to_the_page(
    make_target: Callable[..., Target], capture: Callable[[str], bytes]
) -> None:
    """200 workers, and 20 tenants (the rest is `other`) of 3 models and 3 cache classes, stay below 600 KB."""
    page = capture("vllm_0.32.0_default_flags").decode()
    few, many = [[make_target(f"worker-{n:03}", page, page, page) for n in range(count)] for count in (2, 12)]
    assert len(render(many)[0]) - len(render(few)[0]) < 10 * 1_200
    one, three = [[done(tenant=f"tenant-{n}", model="llama-70b") for n in range(count)] for count in (1, 3)]
    pages = [render([], sources=[ledger_of(records, ROUTER)])[0] for records in (one, three)]
    assert len(pages[1]) - len(pages[0]) < 2 * 1_500


def test_each_figure_stands_beside_the_earlier_one() -> None:
    figures = Figures(500.0, 50.0, 8_000, 3, 30.0, 8.0, 110.0, 90.0, 199, 0.1, 1, {"stale": 1}, {"target_up": 206})
    lines = table(figures).splitlines()
    assert "| page_kb | 500 | 1330–1410 | < 600 |" in lines
    assert set(EARLIER) <= set(Figures.__dataclass_fields__)
