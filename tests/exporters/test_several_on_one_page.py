"""Several engines on one page, and several processes at one address: each is seen as what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.labels import AGGREGATING_LABELS
from prefixwatch.exporters.scraping.quality import engines_seen
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target


def target(name: str, *texts: str) -> Target:
    own = TargetConfig(name=name, url=f"http://{name}:8000/metrics")
    made = Target(own, ExporterConfig(targets=(own,)), shipped_catalogue())
    for step, text in enumerate(texts):
        made.ingest(Scrape(0.01, text.encode()), 5.0 * step)
    return made


def gateway(label: str, step: int) -> str:
    """Two SGLang workers: one idle whose prompts hit, one busy whose prompts miss."""
    lines = []
    for worker, running, waiting, usage, hits in (("w1", 2, 0, 0.1, 0.9), ("w2", 12, 4, 0.9, 0.05)):
        labels = f'model_name="m",{label}="{worker}"'
        lines.append(
            f"sglang:num_running_reqs{{{labels}}} {running}\nsglang:num_queue_reqs{{{labels}}} {waiting}\n"
            f"sglang:token_usage{{{labels}}} {usage}\nsglang:prompt_tokens_total{{{labels}}} {1000 * step}\n"
            f'sglang:cached_tokens_total{{{labels},cache_source="device"}} {1000 * step * hits}\n'
        )
    return "".join(lines)


@pytest.mark.parametrize("label", AGGREGATING_LABELS)
def test_workers_on_a_gateway_s_page_are_engines_of_their_own(label: str) -> None:
    """smg-project/smg#813: taken for one engine, the skew that the user looks for was averaged away."""
    made = target("gw", gateway(label, 1), gateway(label, 2))
    fleet = derive_fleet([made])
    assert fleet.loads == {"gw/w1": 2.0, "gw/w2": 16.0}
    assert fleet.hotspot is not None
    assert fleet.hotspot.busiest_over_least == 8.0
    page = render([made])[0].decode()
    for line in (
        'prefixwatch_prefix_hit_ratio{engine="w1",model="m",source="cache",target="gw"} 0.9',
        'prefixwatch_prefix_hit_ratio{engine="w2",model="m",source="cache",target="gw"} 0.05',
        'prefixwatch_kv_usage_ratio{engine="w2",model="m",target="gw"} 0.9',
        'prefixwatch_requests_waiting{engine="w2",model="m",target="gw"} 4.0',
        'prefixwatch_worker_load_requests{engine="w1",model="m",target="gw"} 2.0',
    ):
        assert line in page
    assert not made.flags(5.0)["several_engines"]


def test_engines_that_nothing_known_tells_apart_are_flagged() -> None:
    made = target("gw", gateway("replica_colour", 1))
    assert made.flags(0.0)["several_engines"]


def test_a_gateway_s_prefill_and_decode_workers_are_not_compared() -> None:
    text = "".join(
        f'sglang:num_running_reqs{{model_name="m",worker_addr="{worker}",engine_type="{role}"}} {running}\n'
        for worker, role, running in (
            ("p0", "prefill", 40),
            ("p1", "prefill", 40),
            ("d0", "decode", 4),
            ("d1", "decode", 4),
        )
    )
    hotspots = derive_fleet([target("gw", text)]).hotspots
    assert {dict(peers)["role"]: hotspot.max_over_mean for peers, hotspot in hotspots.items()} == {
        "prefill": 1.0,
        "decode": 1.0,
    }


def process(start: float, tokens: int) -> str:
    return (
        f"process_start_time_seconds {start}\nvllm:num_requests_running 1\n"
        f'vllm:prefix_cache_queries_total{{model_name="m"}} {tokens}\n'
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1000)), min_size=1, max_size=30))
def test_processes_that_answer_in_turn_are_counted_each_from_where_it_was(turns: list[tuple[int, int]]) -> None:
    """Three API processes behind one port: taken for one, each answer was a restart and counted everything again."""
    shown, texts = [0, 0, 0], []
    for which, grown in turns:
        shown[which] += grown
        texts.append(process(1000.0 + 100 * which, shown[which]))
    made = target("e", *texts)
    assert made.store is not None
    assert made.store.total("prefix_query_tokens") == sum(shown)


def test_processes_in_turn_are_flagged_and_a_restart_is_not() -> None:
    first, second = process(1000.0, 500), process(2000.0, 700)
    assert target("e", first, second, first).flags(10.0)["several_processes"]
    restarted = target("e", first, process(2000.0, 10), process(2000.0, 20))
    assert not restarted.flags(10.0)["several_processes"]
    assert restarted.store is not None
    assert restarted.store.total("prefix_query_tokens") == 520


def test_two_data_parallel_ranks_of_a_real_vllm_are_two_engines(capture: Callable[[str], bytes]) -> None:
    """`--data-parallel-size 2` on vLLM's CPU build, eight requests: one page, each rank with half of them."""
    made = target("e", capture("vllm_0.32.0_data_parallel_2").decode())
    assert made.store is not None
    assert engines_seen(made.store) == 2
    assert made.store.totals_by("finished_requests", "engine", "reason") == {
        (engine, reason): 4.0 * (reason == "length")
        for engine in "01"
        for reason in ("stop", "length", "abort", "error", "repetition")
    }
    assert made.store.totals_by("prefix_query_tokens", "engine") == {("0",): 808.0, ("1",): 808.0}
    assert made.store.totals_by("prefix_hit_tokens", "engine") == {("0",): 576.0, ("1",): 576.0}
    assert derive_fleet([made]).loads == {"e/0": 0.0, "e/1": 0.0}
    flags = made.flags(0.0)
    assert not any(flags[flag] for flag in ("several_engines", "several_processes", "missing_family", "renamed_family"))


def test_a_rank_that_misses_is_not_averaged_with_one_that_hits() -> None:
    pages = [
        "".join(
            f'vllm:prefix_cache_queries_total{{engine="{rank}",model_name="m"}} {1000 * step}\n'
            f'vllm:prefix_cache_hits_total{{engine="{rank}",model_name="m"}} {hits * step}\n'
            for rank, hits in (("0", 900), ("1", 50))
        )
        for step in (1, 2)
    ]
    page = render([target("e", *pages)])[0].decode()
    for rank, ratio in (("0", 0.9), ("1", 0.05)):
        line = f'prefixwatch_prefix_hit_ratio{{engine="{rank}",model="m",source="cache",target="e"}} {ratio}'
        assert line in page
    assert 'prefixwatch_prefix_hit_tokens_total{model="m",target="e",tier="gpu"} 1900.0' in page
