"""An engine upgrade renames a metric: exactly the panels that depend on it say so, none goes blank in silence."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.queries.expressions import recording_rules
from prefixwatch.dashboards.queries.panel_queries import (
    EXPLAINING,
    MISSING,
    engine_signals,
    metrics_read,
    missing_signals,
    queries_of,
)
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target
from tests.alerts.hygiene import metrics

CAPTURE = Path("tests/exporters/captures/metrics_vllm_0.32.0_kvmetrics_mfu_spec.txt.gz")
RENAMES = {
    "prefix_hit_tokens": (
        "vllm:prefix_cache_hits",
        "vllm:external_prefix_cache_hits",
        "vllm:prompt_tokens_cached_by_source",
    ),
    "prefix_query_tokens": ("vllm:prefix_cache_queries",),
    "running_requests": ("vllm:num_requests_running",),
    "waiting_requests": ("vllm:num_requests_waiting",),
    "kv_usage_ratio": ("vllm:kv_cache_usage_perc",),
}
"""Signal that vLLM must give → all names of the metric that carries it."""
ABOUT_THE_PAGE = re.compile(
    r"prefixwatch_(scrape_|data_quality|missing_signal|unread_families|target_up|preemptions)|process_"
)


def exported(text: str) -> str:
    """The exporter's page for two engines with this page, the second with more waiting requests."""
    targets = []
    busier = re.sub(r"^(vllm:num_requests_waiting\S*\{.*\}) 3.0$", r"\1 30.0", text, flags=re.MULTILINE)
    for name, page in (("engine-a", text), ("engine-b", busier)):
        config = TargetConfig(name=name, url="http://localhost/metrics")
        target = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
        for step in range(3):
            target.ingest(Scrape(0.01, _grown(page, 1 + step / 10).encode()), 5.0 * step)
        targets.append(target)
    return render(targets)[0].decode()


def _page() -> str:
    """With requests that wait, as an engine in use has."""
    text = gzip.decompress(CAPTURE.read_bytes()).decode()
    return re.sub(r"^(vllm:num_requests_(?:running|waiting)\{.*\}) 0.0$", r"\1 3.0", text, flags=re.MULTILINE)


def _renamed(text: str, names: tuple[str, ...]) -> str:
    for name in names:
        text = text.replace(name, f"{name}_v2")
    return text


def _grown(text: str, factor: float) -> str:
    """Counters go on, so that the window has something to derive."""
    counted = re.compile(r"^(\S+?(?:_total|_bucket|_sum|_count)(?:\{.*\})?) ([0-9.e+]+)$", re.MULTILINE)
    return counted.sub(lambda match: f"{match[1]} {float(match[2]) * factor!r}", text)


def _affected(before: str, after: str) -> set[str]:
    """Series that are gone, or have another value."""
    changed = set(before.splitlines()) - set(after.splitlines())
    names = {re.split(r"[{ ]", line)[0] for line in changed if not line.startswith("#")}
    return {name for name in names if not ABOUT_THE_PAGE.match(name)}


@pytest.mark.parametrize(("signal", "metric"), RENAMES.items(), ids=list(RENAMES))
def test_exactly_the_panels_that_lost_a_series_explain_it(signal: str, metric: tuple[str, ...]) -> None:
    """vllm-project/production-stack#989 (EM07): consumers of the old name went blank or read zero."""
    before, after = exported(_page()), exported(_renamed(_page(), metric))
    affected = _affected(before, after)

    assert affected, "the rename took nothing away"
    assert affected == {name for name in engine_signals()[signal] if f"\n{name}" in before}
    assert "prefixwatch_missing_signal{" not in before
    assert f'prefixwatch_missing_signal{{signal="{signal}",target="engine-a"}} 1.0' in _sorted_labels(after)
    assert re.search(
        r'prefixwatch_data_quality\{flag="missing_family",.*target="engine-a"\} 1.0', _sorted_labels(after)
    )
    rules = {rule.name for rule in recording_rules() if metrics(rule.expr) & affected}
    for dashboard in shipped().values():
        for panel in dashboard.panels:
            depends = bool(set(metrics_read(panel)) & (affected | rules))
            assert not depends or signal in missing_signals(panel), f"{dashboard.title}: {panel.title} goes blank"


def _sorted_labels(page: str) -> str:
    return re.sub(r"\{([^}]*)\}", lambda match: "{" + ",".join(sorted(match[1].split(","))) + "}", page)


@pytest.mark.parametrize("signal", RENAMES)
def test_the_explanation_names_the_target_and_the_signal(signal: str) -> None:
    for dashboard in shipped().values():
        for panel in dashboard.panels:
            if signal in missing_signals(panel) and panel.kind != "table":  # a table's cell is a dash
                assert panel.kind in EXPLAINING, f"{panel.title}: a {panel.kind} can't show a lost metric"
                [told] = [query for query in queries_of(panel, dashboard) if query.ref == MISSING]
                assert signal in told.expr
                assert told.legend == "{{target}} lost {{signal}}: see Exporter health"


def test_every_signal_that_an_engine_must_give_is_known_to_the_panels() -> None:
    systems = map(shipped_catalogue().get, shipped_catalogue().names)
    engines = [system for system in systems if system.role == "engine"]
    required = {name for system in engines for name, signal in system.signals.items() if signal.required}

    assert required <= set(engine_signals())
