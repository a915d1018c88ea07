"""Times are held against each other, the load and the clock: a wrong unit or a sum over ranks is flagged."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
FAMILIES = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "ttft": "vllm:time_to_first_token_seconds",
    "inter_token": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "transfer": "vllm:nixl_xfer_time_seconds",
}
SCRAPES = [5.0 * step for step in range(13)]


@dataclass(frozen=True)
class Served:
    """One request: when it arrived and how long each part of it took."""

    arrived: float
    queue: float
    prefill: float
    tokens: int
    inter_token: float

    @property
    def ended(self) -> float:
        return self.arrived + self.queue + self.prefill + (self.tokens - 1) * self.inter_token

    def observed(self, part: str, at: float) -> list[float]:
        """What was observed of it until then, as an engine books it."""
        first = self.arrived + self.queue + self.prefill
        if part == "e2e":
            return [self.ended - self.arrived] if self.ended <= at else []
        if part == "inter_token":
            booked = min(self.tokens - 1, int((at - first) / self.inter_token)) if at > first else 0
            return [self.inter_token] * booked
        if part == "ttft":
            return [first - self.arrived] if first <= at else []
        if part == "transfer":
            return [self.prefill / 2] if first <= at else []
        return [getattr(self, part)] if self.ended <= at else []


def traffic(seed: int, rate: float, longest: float) -> list[Served]:
    chance = random.Random(seed)
    found, at = [], -2 * longest
    while at < SCRAPES[-1]:
        at += chance.expovariate(rate)
        found.append(
            Served(
                at, chance.random() * longest / 3, 0.01 + chance.random() * longest / 3,
                chance.randint(1, 40), 0.001 + chance.random() * longest / 120,
            )
        )  # fmt: skip
    return found


def page(requests: list[Served], at: float, scales: Mapping[str, float], repeats: Mapping[str, int]) -> str:
    running = sum(one.arrived <= at < one.ended for one in requests)
    lines = [f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} 0\n']
    generated = sum(1 + len(one.observed("inter_token", at)) for one in requests if one.observed("ttft", at))
    lines.append(f'vllm:generation_tokens_total{{engine="0"}} {generated}\n')
    for part, family in FAMILIES.items():
        scale, times = scales.get(part, 1.0), repeats.get(part, 1)
        values = [value * scale for one in requests if one.arrived <= at for value in one.observed(part, at)]
        counts = [times * sum(value <= bound for value in values) for bound in BOUNDS]
        lines += [f'{family}_bucket{{le="{bound}"}} {count}\n' for bound, count in zip(BOUNDS, counts, strict=True)]
        lines.append(
            f'{family}_bucket{{le="+Inf"}} {times * len(values)}\n{family}_sum {times * sum(values)}\n'
            f"{family}_count {times * len(values)}\n"
        )
    return "".join(lines)


def scraped(
    requests: list[Served], scales: Mapping[str, float] | None = None, repeats: Mapping[str, int] | None = None
) -> Target:
    config = TargetConfig(name="e", url="http://e:8000/metrics")
    made = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
    for at in SCRAPES:
        made.ingest(Scrape(0.01, page(requests, at, scales or {}, repeats or {}).encode()), at)
    return made


@given(st.integers(0, 10_000), st.floats(1.0, 5.0), st.floats(0.1, 60.0))
@settings(max_examples=15)
def test_a_healthy_engine_s_times_agree_whatever_its_traffic(seed: int, rate: float, longest: float) -> None:
    made = scraped(traffic(seed, rate, longest))
    flags = made.flags(60.0)
    assert flags["times_disagree"] is False, made.contradictions()
    assert flags.get("load_disagrees", False) is False


@pytest.mark.parametrize("part", FAMILIES)
@pytest.mark.parametrize("longest", [0.3, 3.0, 60.0])
def test_milliseconds_that_pass_for_seconds_are_flagged(part: str, longest: float) -> None:
    made = scraped(traffic(1, 4.0, longest), scales={part: 1_000.0})
    assert made.flags(60.0)["times_disagree"]
    named = made.contradictions()["times_disagree"].replace("_seconds", "")
    assert ("kv_transfer" if part == "transfer" else part) in named


def test_all_times_in_milliseconds_are_held_against_the_clock() -> None:
    made = scraped(traffic(1, 4.0, 3.0), scales=dict.fromkeys(FAMILIES, 1_000.0))
    assert made.flags(60.0)["times_disagree"]
    assert "requests at a time" in made.contradictions()["times_disagree"]


@pytest.mark.parametrize("part", ["prefill", "ttft", "transfer"])
def test_times_that_each_rank_adds_are_held_against_the_clock(part: str) -> None:
    """Eight ranks each book the same second: eight seconds a second, with four requests at a time."""
    made = scraped(traffic(1, 4.0, 6.0), repeats={part: 64})
    assert made.flags(60.0)["times_disagree"]


def test_an_engine_without_traffic_has_nothing_to_compare() -> None:
    assert "times_disagree" not in scraped([]).flags(60.0)


@pytest.mark.parametrize("name", ["model", "role"])
def test_what_a_target_is_declared_as_is_held_against_its_page(name: str) -> None:
    text = 'vllm:num_requests_running{model_name="m",engine="0",engine_type="decode"} 1\n'
    own = {"model": "m", "role": "decode"} | {name: "prefill"}
    config = TargetConfig.model_validate({"name": "e", "url": "http://e:8000/metrics", "labels": own})
    made = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
    made.ingest(Scrape(0.01, text.encode()), 0.0)
    assert made.flags(0.0)["identity_disagrees"]
    shown = {"model": "m", "role": "decode"}[name]
    assert made.contradictions()["identity_disagrees"] == f"{name}: prefill is configured, {shown} is on its page"
    agreed = TargetConfig.model_validate({"name": "e", "url": "http://e/", "labels": {"model": "m", "role": "decode"}})
    same = Target(agreed, ExporterConfig(targets=(agreed,)), shipped_catalogue())
    same.ingest(Scrape(0.01, text.encode()), 0.0)
    assert same.flags(0.0)["identity_disagrees"] is False
