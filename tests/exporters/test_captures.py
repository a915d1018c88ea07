"""Every captured page of a real process: the system, its version, and exact numbers in canonical units."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.exporters.catalogue.check import check
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.signals import SignalStore

Capture = Callable[[str], bytes]
Feed = Callable[..., SignalStore]

HERE = Path(__file__).parent
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "captures.yaml").read_text())

UNITS = {
    "tokens": "_tokens",
    "seconds": "_seconds",
    "bytes": "_bytes",
    "ratio": "_ratio",
    "requests": "_requests",
    "blocks": "_blocks",
    "objects": "_objects",
    "watts": "_watts",
    "joules": "_joules",
}
"""Units whose signals say it in their names; a few older names are listed below."""

NAMED_OTHERWISE = {
    "router_decision", "ttft_by_cache", "kv_transfer", "kv_block_lifetime", "kv_block_idle_before_evict",
    "kv_block_reuse_gap", "moe_balance_sum", "isolation_violations",
}  # fmt: skip


def captured() -> list[str]:
    names = (path.name.removeprefix("metrics_") for path in (HERE / "captures").iterdir())
    return sorted(name.removesuffix(".gz").removesuffix(".txt") for name in names)


def test_no_capture_is_left_out() -> None:
    assert captured() == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_captured_page_says_what_the_process_counted(name: str, capture: Capture, feed: Feed) -> None:
    expected, page = EXPECTED[name], capture(name)
    systems = shipped_catalogue().matching(metric_names(page))
    assert [system.system for system in systems] == [expected["system"]]
    assert systems[0].version(metric_names(page)) == expected.get("version", "")
    store = feed(page, system=expected["system"])
    for key, value in expected.get("values", {}).items():
        signal, _, part = key.partition(".")
        found = store.total(signal, part or "value")
        assert found is not None, key
        assert math.isclose(found, value, rel_tol=1e-12), key
    for signal, value in expected.get("gauges", {}).items():
        assert math.isclose(sum(store.gauges_of(signal).values()), value, rel_tol=1e-12), signal


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_nothing_of_a_captured_page_looks_like_another_unit(name: str, capture: Capture) -> None:
    """Trap 9: names in ms, us, MB or percent have a scale; no gauge of a ratio is above 1."""
    catalogue = shipped_catalogue()
    found = check(catalogue.get(EXPECTED[name]["system"]), capture(name), catalogue)
    assert [line for line in found.warnings if "look like" in line or "not between 0 and 1" in line] == []
    assert [line for line in found.warnings if "the page declares" in line] == []


@pytest.mark.parametrize("system", shipped_catalogue().names)
def test_a_signals_name_and_its_unit_agree(system: str) -> None:
    for name, signal in shipped_catalogue().get(system).signals.items():
        if name not in NAMED_OTHERWISE and signal.unit in UNITS:
            assert UNITS[signal.unit] in f"_{name}_", name


def test_the_router_is_blind_while_the_engines_hit(capture: Capture, feed: Feed) -> None:
    """Trap 2: a tenant header is a salt; 0 predicted, 77 % delivered (81 % are predicted without it)."""

    def ratios(name: str) -> tuple[float, float]:
        store = feed(capture(name), system="dynamo-frontend")
        prompts = store.total("router_prompt_tokens")
        predicted, delivered = store.total("router_predicted_hit_tokens"), store.total("router_delivered_hit_tokens")
        assert prompts
        assert predicted is not None
        assert delivered is not None
        return predicted / prompts, delivered / prompts

    assert ratios("dynamo-frontend_1.6.1_kvtenant") == (0.0, 80528 / 103980)
    assert ratios("dynamo-frontend_1.6.1_kv") == (253088 / 311832, 261136 / 311832)


def test_worker_ids_of_two_spellings_are_never_joined(capture: Capture, feed: Feed) -> None:
    """Trap 4: decimal ids of engines on dynamo_frontend_worker_*, hexadecimal ones of the frontend elsewhere."""
    store = feed(capture("dynamo-frontend_1.6.1_kv"), system="dynamo-frontend")
    workers = {dict(labels)["worker"] for labels in store.gauges_of("prefill_backlog_tokens")}
    assert workers
    assert all(worker.isdecimal() for worker in workers)
    assert not any("worker" in dict(labels) for labels in store.gauges_of("in_flight_requests"))


def test_two_workers_and_the_frontend_agree_on_the_requests(capture: Capture, feed: Feed) -> None:
    """The engines' own first tokens are complete (309 + 291), where the frontend's are not (586): trap 12."""
    counts = [
        feed(capture(f"dynamo-mocker_1.6.1_kv_{worker}")).total("ttft_seconds", "count") for worker in ("w1", "w2")
    ]
    frontend = feed(capture("dynamo-frontend_1.6.1_kv"), system="dynamo-frontend")
    assert (sum(count or 0 for count in counts), frontend.total("finished_requests")) == (600.0, 600.0)
    assert frontend.total("ttft_seconds", "count") == 586.0


def test_an_lora_page_counts_each_token_once(capture: Capture, feed: Feed) -> None:
    """vllm-project/vllm#13303 (EM34): the adapters' gauge has timestamps for values and stale series; it isn't read."""
    page = capture("vllm_0.32.0_lora")
    assert page.count(b"\nvllm:lora_requests_info{") == 2
    system = shipped_catalogue().get("vllm")
    assert "vllm:lora_requests_info" not in system.wanted_names()
    numbers = derive_target(feed(page, page))
    assert (numbers.running, numbers.flags["missing_family"]) == (0.0, False)


def test_ids_that_change_with_every_start_are_no_labels(capture: Capture, feed: Feed) -> None:
    """Trap 11: Ray attaches actors, sessions and workers to each series; replicas are what is told apart."""
    store = feed(capture("ray-serve_2.60.0"), system="ray-serve")
    assert store.totals_by("routed_requests", "worker") == {("tu7gggak",): 238.0, ("8c3r1mdq",): 242.0}
    assert {label for labels in store.gauges_of("in_flight_requests") for label, _ in labels} == {"worker"}
    (latency,) = store.histograms("e2e_seconds")[()]
    assert (latency.count, latency.bounds[0]) == (480.0, 0.001)
