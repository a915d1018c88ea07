"""Latency and traffic of a fleet from nothing but engines' pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.retired_targets import RetiredTargets
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

BOUNDS = ("0.1", "0.5", "1.0", "+Inf")

Key = tuple[str, frozenset[tuple[str, str]]]


def engine(name: str, text: str, retired: RetiredTargets | None = None, **config: object) -> Target:
    own = TargetConfig.model_validate({"name": name, "url": f"http://{name}:8000/metrics", **config})
    made = Target(own, ExporterConfig(targets=(own,)), shipped_catalogue(), retired)
    made.ingest(Scrape(0.01, text.encode()), 0.0)
    return made


def vllm(model: str, counts: Sequence[int], seconds: float = 0.0) -> str:
    """Cumulative counts at `BOUNDS`."""
    name, labels = "vllm:time_to_first_token_seconds", f'model_name="{model}",engine="0"'
    buckets = [f'{name}_bucket{{{labels},le="{le}"}} {count}\n' for le, count in zip(BOUNDS, counts, strict=True)]
    return (
        f"vllm:num_requests_running{{{labels}}} 1\n"
        + "".join(buckets)
        + f"{name}_sum{{{labels}}} {seconds}\n{name}_count{{{labels}}} {counts[-1]}\n"
        + f"vllm:prompt_tokens_total{{{labels}}} {100 * counts[-1]}\n"
        + f"vllm:generation_tokens_total{{{labels}}} {10 * counts[-1]}\n"
        + f'vllm:request_success_total{{{labels},finished_reason="stop"}} {counts[-1]}\n'
    )


def samples(page: bytes) -> dict[Key, float]:
    return {
        (sample.name.removeprefix("prefixwatch_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def of(found: dict[Key, float], name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


@given(
    st.lists(
        st.tuples(st.sampled_from(["8b", "70b"]), st.lists(st.integers(0, 1000), min_size=4, max_size=4).map(sorted)),
        min_size=1,
        max_size=6,
    )
)
def test_buckets_of_a_model_add_up_exactly(fleet: list[tuple[str, list[int]]]) -> None:
    found = samples(render([engine(f"e{n}", vllm(model, counts)) for n, (model, counts) in enumerate(fleet)])[0])
    for model in {model for model, _ in fleet}:
        for place, bound in enumerate(BOUNDS):
            expected = sum(counts[place] for own, counts in fleet if own == model)
            assert of(found, "engine_ttft_seconds_bucket", model=model, le=bound) == expected


def test_an_slo_of_first_tokens_can_be_read_from_engines_alone() -> None:
    """95 % within half a second, by model: good and all events are buckets of one family."""
    fleet = [
        engine("a", vllm("m", (10, 90, 99, 100), 30.0), pool="blue"),
        engine("b", vllm("m", (0, 60, 90, 100), 60.0), pool="blue"),
        engine("c", vllm("n", (0, 0, 0, 50), 90.0)),
    ]
    found = samples(render(fleet)[0])
    own = {"model": "m", "pool": "blue"}
    assert of(found, "engine_ttft_seconds_bucket", le="0.5", **own) == 150
    assert of(found, "engine_ttft_seconds_count", **own) == 200
    assert of(found, "engine_ttft_seconds_sum", **own) == 90.0
    assert of(found, "engine_prompt_tokens_total", **own) == 20_000
    assert of(found, "engine_generation_tokens_total", **own) == 2_000
    assert of(found, "engine_finished_requests_total", reason="stop", **own) == 200
    assert of(found, "engine_finished_requests_total", reason="stop", model="n") == 50


def test_a_real_engine_s_page_gives_latency_and_traffic(capture: Callable[[str], bytes]) -> None:
    found = samples(render([engine("e", capture("vllm_0.32.0").decode())])[0])
    for family in ("ttft", "e2e", "queue"):
        assert of(found, f"engine_{family}_seconds_count", model="tiny") == 59
    assert of(found, "engine_prompt_tokens_total", model="tiny") == 118_473


@pytest.mark.parametrize(
    ("counter", "other"),
    [
        ("sglang:prompt_tokens_total", "sglang:num_running_reqs"),
        ("trtllm_prompt_tokens_total", "trtllm_prompt_cached_tokens_total"),
        ("tgi_request_input_length_sum", "tgi_queue_size"),
    ],
)
def test_prompts_of_other_engines_count_too(counter: str, other: str) -> None:
    text = render([engine("e", f"{other} 1\n{counter} 500\n")])[0].decode()
    assert "prefixwatch_engine_prompt_tokens_total 500.0" in text


def test_an_engine_that_is_down_or_gone_keeps_what_it_counted() -> None:
    retired = RetiredTargets(100)
    down, gone = (engine(name, vllm("m", (1, 2, 3, 4)), retired, cluster="eu") for name in ("down", "gone"))
    down.ingest(Scrape(0.01, reason="refused"), 5.0)
    gone.end()
    found = samples(render([down], gone=retired.holders())[0])
    assert of(found, "engine_ttft_seconds_count", model="m", cluster="eu") == 8


def test_the_last_start_of_an_engine_is_that_of_the_youngest_that_is_up() -> None:
    """Its cache was empty then; an engine that is down has none, and a router's start says nothing about caches."""
    started = "process_start_time_seconds %d\n"
    old, young = (engine(name, vllm("8b", [1, 2, 3, 4]) + started % at) for name, at in (("a", 1000), ("b", 2000)))
    down = engine("c", vllm("8b", [1, 2, 3, 4]) + started % 3000)
    down.ingest(Scrape(0.01, None, "refused", "nobody listens"), 5.0)
    router = engine("r", "prefixwatch_router_requests_total 1\n" + started % 4000)
    unsaid = engine("d", vllm("70b", [1, 2, 3, 4]))
    found = samples(render([old, young, down, router, unsaid])[0])
    assert {key: value for key, value in found.items() if key[0] == "engine_started_seconds"} == {
        ("engine_started_seconds", frozenset({("model", "8b")})): 2000
    }
