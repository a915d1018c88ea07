"""One target's page, whatever is on it, never takes the others' numbers or the exporter's memory with it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.api import fleet_document
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.derive import TargetNumbers, derive_target
from prefixwatch.exporters.scraping.exposition import ExpositionReader
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

SYSTEMS = ("vllm", "sglang", "prefixwatch-router", "lmcache", "dcgm-exporter", "tensorrt-llm")
NAMES = sorted({name for system in SYSTEMS for name in shipped_catalogue().get(system).wanted_names()})

hostile = st.floats() | st.sampled_from(
    [1e308, -1e308, 1.7e308, 5e-324, float("inf"), float("-inf"), float("nan"), 2.0**63]
)
lines = st.tuples(st.sampled_from(NAMES), st.sampled_from(["", "0", "1", "+Inf", "a"]), hostile)
pages = st.lists(lines, max_size=30)


def text_of(page: Sequence[tuple[str, str, float]]) -> bytes:
    return "".join(
        f'{name}{{engine="{label}",le="{label}",worker="{label}",model_name="{label}"}} {value}\n'
        for name, label, value in page
    ).encode()


def target(name: str, *bodies: bytes) -> Target:
    config = TargetConfig(name=name, url="http://localhost/metrics")
    made = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
    for step, body in enumerate(bodies):
        made.ingest(Scrape(0.01, body), 5.0 * step)
    return made


HEALTHY = b'vllm:num_requests_running{model_name="m"} 3\n'


@given(st.lists(st.lists(pages, min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_figures_leave_the_other_targets_page_and_document(fleet: list[list[list[tuple[str, str, float]]]]) -> None:
    """Two scrapes of a gauge of 1e308 turned every page into an error 500."""
    targets = [target(f"t{number}", *map(text_of, history)) for number, history in enumerate(fleet)]
    targets.append(target("healthy", HEALTHY, HEALTHY))
    page = render(targets)[0].decode()
    assert 'prefixwatch_requests_running{model="m",target="healthy"} 3.0' in page
    json.dumps(fleet_document(targets, 5.0)["targets"][-1], allow_nan=False)


def test_the_mean_of_the_largest_figures_is_no_overflow() -> None:
    body = b'vllm:num_requests_running{engine="0"} 1.5e308\n'
    page = render([target("e", body, body, body)])[0].decode()
    assert 'prefixwatch_worker_load_requests{target="e"} 1.5e+308' in page


def test_a_mistake_in_deriving_is_one_target_s(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, healthy = target("broken", HEALTHY), target("healthy", HEALTHY)
    store = broken.store

    def fails(given_store: SignalStore) -> TargetNumbers:
        if given_store is store:
            raise ZeroDivisionError
        return derive_target(given_store)

    monkeypatch.setattr("prefixwatch.exporters.scraping.target.derive_target", fails)
    page = render([broken, healthy])[0].decode()
    assert (broken.reason, healthy.up) == ("internal", True)
    assert 'prefixwatch_scrape_failures_total{model="m",reason="internal",target="broken"} 1.0' in page
    assert 'prefixwatch_requests_running{model="m",target="healthy"} 3.0' in page


@pytest.mark.parametrize(
    "line",
    [
        lambda size: b'vllm:num_requests_running{engine="%b"} 1\n' % (b"a" * size),
        lambda size: b"vllm:num_requests_running{%b} 1\n" % b",".join(b'l%d="a"' % n for n in range(size // 10)),
        lambda size: b'vllm:num_requests_running{engine="%b"} 1\n' % (b'\\"' * (size // 2)),
        lambda size: b"vllm:num_requests_running %b1\n" % (b" " * size),
        lambda size: b"vllm:num_requests_running{%b\n" % (b"{" * size),
    ],
)
def test_a_long_line_costs_no_more_memory_than_its_bytes(line: Callable[[int], bytes]) -> None:
    """A label of 10 MB took 1.6 GB."""
    size = 4_000_000
    body = line(size) + b'vllm:num_requests_waiting{engine="0"} 2\n'
    reader = ExpositionReader(["vllm:num_requests_running", "vllm:num_requests_waiting"])
    tracemalloc.start()
    reading = reader.read(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (reading.malformed_lines, list(reading.values)) == (1, [2.0])
    assert peak < 4 * len(body)
