"""Prefix tokens as routers count them: shown for workers whose engines count none, and never beside an engine's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.target import Target

MakeTarget = Callable[..., Target]
Capture = Callable[[str], bytes]


def router(**tokens: tuple[int, int]) -> str:
    """Our router's page: delivered hits and prompt tokens by worker."""
    counts = "".join(
        f'prefixwatch_router_delivered_hit_tokens_total{{worker="{worker}"}} {hits}\n'
        f'prefixwatch_router_prompt_tokens_total{{worker="{worker}"}} {prompts}\n'
        for worker, (hits, prompts) in tokens.items()
    )
    return f'{counts}prefixwatch_router_in_flight{{worker="w"}} 0\n'


def vllm(hits: int, queries: int) -> str:
    return (
        'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
        f'vllm:prefix_cache_hits_total{{model_name="m"}} {hits}\n'
        f'vllm:prefix_cache_queries_total{{model_name="m"}} {queries}\n'
    )


LLAMA_CPP = "llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\nllamacpp:prompt_tokens_total 7\n"


def tokens(family: str, *targets: Target) -> Mapping[str, float]:
    """The family's series by target."""
    lines = [line for line in render(targets)[0].decode().splitlines() if line.startswith(f"prefixwatch_{family}{{")]
    return {line.split('target="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_a_frontend_tells_the_tokens_of_engines_that_count_none(capture: Capture, make_target: MakeTarget) -> None:
    """Dynamo's mocked workers have no prefix counters; their frontend has what they reported, 0.837 of the prompts."""
    frontend = make_target("frontend", capture("dynamo-frontend_1.6.1_kv").decode())
    workers = [make_target(f"w{i}", capture(f"dynamo-mocker_1.6.1_kv_w{i}").decode()) for i in (1, 2)]
    assert tokens("prefix_hit_tokens_total", frontend, *workers) == {"frontend": 261136.0}
    assert tokens("prefix_query_tokens_total", frontend, *workers) == {"frontend": 311832.0}


def test_two_frontends_that_name_no_worker_stay_apart(capture: Capture, make_target: MakeTarget) -> None:
    page = capture("dynamo-frontend_1.6.1_kv").decode()
    told = tokens("prefix_hit_tokens_total", make_target("one", page), make_target("two", page))
    assert told == {"one": 261136.0, "two": 261136.0}


def test_engines_own_counts_stand_alone(make_target: MakeTarget) -> None:
    told = tokens("prefix_hit_tokens_total", make_target("r", router(e=(90, 100))), make_target("e", vllm(95, 110)))
    assert told == {"e": 95.0}


def test_in_a_mixed_fleet_the_router_speaks_for_engines_that_count_none(make_target: MakeTarget) -> None:
    fleet = [
        make_target("r", router(e=(90, 100), l=(30, 40))),
        make_target("e", vllm(95, 110)),
        make_target("l", LLAMA_CPP, system="llamacpp"),
    ]
    assert tokens("prefix_hit_tokens_total", *fleet) == {"e": 95.0, "l": 30.0}
    assert tokens("prefix_query_tokens_total", *fleet) == {"e": 110.0, "l": 40.0}


def test_a_worker_that_is_no_target_may_be_an_engine_that_counts(make_target: MakeTarget) -> None:
    """The router may know an engine by a name that no target has: its tokens could be told already."""
    told = tokens("prefix_hit_tokens_total", make_target("r", router(x=(90, 100))), make_target("e", vllm(95, 110)))
    assert told == {"e": 95.0}


def test_two_routers_in_front_of_one_worker_add_up(make_target: MakeTarget) -> None:
    told = tokens("prefix_hit_tokens_total", *(make_target(name, router(w=(30, 40))) for name in ("r1", "r2")))
    assert told == {"w": 60.0}


def test_prompts_whose_cached_tokens_nobody_knows_are_no_queries(capture: Capture, make_target: MakeTarget) -> None:
    """They would pass for misses: Dynamo 1.2 counts prompts only, FlexLB what it expects."""
    old = make_target("old", capture("dynamo-frontend_1.2.1_v121").decode())
    assert tokens("prefix_query_tokens_total", old) == {}


def test_the_fleets_ratio_takes_both_in(make_target: MakeTarget) -> None:
    fleet = [
        make_target("r", router(l=(0, 0)), router(l=(30, 60))),
        make_target("e", vllm(0, 0), vllm(10, 40)),
        make_target("l", LLAMA_CPP, LLAMA_CPP, system="llamacpp"),
    ]
    assert derive_fleet(fleet).hit_ratio == 0.4


def lines(*targets: Target) -> list[str]:
    return render(targets)[0].decode().splitlines()


def test_a_router_that_a_salt_blinds_expects_nothing_of_all_that_is_delivered(
    capture: Capture, make_target: MakeTarget
) -> None:
    """Trap 2: Dynamo salts its hashes for an x-tenant-id header; its engines hit all the same."""
    seeing = lines(make_target("f", capture("dynamo-frontend_1.6.1_kv").decode()))
    assert "prefixwatch_predicted_hit_tokens_total 253088.0" in seeing
    assert "prefixwatch_delivered_hit_tokens_total 261136.0" in seeing
    blind = lines(make_target("f", capture("dynamo-frontend_1.6.1_kvtenant").decode()))
    assert "prefixwatch_predicted_hit_tokens_total 0.0" in blind
    assert "prefixwatch_delivered_hit_tokens_total 80528.0" in blind


def test_expectations_are_held_against_deliveries_of_the_same_routers_only(
    capture: Capture, make_target: MakeTarget
) -> None:
    """FlexLB expects and isn't told, Dynamo 1.2 is told nothing and expects nothing that it counts."""
    flexlb = "flexlb_app_cache_routing_selected_match_hit_tokens_total 600\nflexlb_app_routing_queue_length 0\n"
    both = make_target("b", router(w=(30, 40)) + 'prefixwatch_router_predicted_hit_tokens_total{worker="w"} 36\n')
    old = make_target("old", capture("dynamo-frontend_1.2.1_v121").decode())
    told = [line for line in lines(both, make_target("flexlb", flexlb), old) if "_hit_tokens_total" in line]
    assert "prefixwatch_predicted_hit_tokens_total 36.0" in told
    assert "prefixwatch_delivered_hit_tokens_total 30.0" in told
    assert not [line for line in lines(make_target("flexlb", flexlb), old) if "predicted_hit_tokens_total " in line]
