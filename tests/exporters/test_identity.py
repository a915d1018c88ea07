"""What a target is, in every family about it: model, role, pool, namespace, cluster. Workers are never merged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.metrics_page.families import FAMILIES
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.labels import LabelLimit
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

MakeTarget = Callable[..., Target]


def target(name: str, *texts: str, **config: object) -> Target:
    """Scraped with these texts, five seconds apart."""
    own = TargetConfig.model_validate({"name": name, "url": f"http://{name}:8000/metrics", **config})
    made = Target(own, ExporterConfig(targets=(own,)), shipped_catalogue())
    for step, text in enumerate(texts):
        made.ingest(Scrape(0.01, text.encode()), 5.0 * step)
    return made


def vllm(running: float, model: str = "m", finished: int = 0) -> str:
    return (
        f'vllm:num_requests_running{{model_name="{model}",engine="0"}} {running}\n'
        f'vllm:request_success_total{{model_name="{model}",engine="0",finished_reason="stop"}} {finished}\n'
    )


def router(sent: dict[str, int]) -> str:
    return "".join(
        f'prefixwatch_router_in_flight{{worker="{worker}"}} {count % 7}\n'
        f'prefixwatch_router_requests_total{{worker="{worker}",outcome="completed"}} {count}\n'
        for worker, count in sent.items()
    )


def test_each_worker_of_a_large_fleet_has_its_own_load_and_share() -> None:
    """With 200 workers and a limit of 100 values, half of the requests in flight were at a worker called "other"."""
    workers = [f"worker-{number:03}" for number in range(200)]
    fleet = derive_fleet([target("r", router(dict.fromkeys(workers, 0)), router(dict.fromkeys(workers, 10)))])
    assert sorted(fleet.loads) == workers
    assert fleet.top_share == pytest.approx(1 / 200)


@given(st.integers(1, 300), st.integers(1, 50))
def test_the_limit_merges_what_clients_choose_and_counts_it(values: int, most: int) -> None:
    limit = LabelLimit(most)
    kept = {limit.bounded("model", f"m{number}") for number in [*range(values), *range(values)]}
    workers = {limit.bounded("worker", f"w{number}") for number in range(values)}
    assert len(kept - {"other"}) == min(values, most)
    assert limit.overflowed == ({"model": values - most} if values > most else {})
    assert len(workers) == values


def test_an_overflow_is_a_flag_and_a_number() -> None:
    models = "".join(f'vllm:num_requests_running{{model_name="m{number}"}} 1\n' for number in range(103))
    overflowing = target("e", models)
    assert overflowing.flags(0.0)["labels_overflowed"]
    assert 'prefixwatch_labels_overflowed{label="model",target="e"} 3.0' in render([overflowing])[0].decode()
    assert not target("e", vllm(1)).flags(0.0)["labels_overflowed"]


def test_other_is_no_worker() -> None:
    text = router({"a": 0, "other": 0}), router({"a": 30, "other": 300})
    fleet = derive_fleet([target("r", *text)])
    assert fleet.loads == {"a": 1.0}
    assert fleet.top_share == 1.0


def test_only_workers_of_one_model_and_role_are_compared() -> None:
    """A 70B worker with 12 requests is not a hotspot among 8B workers with 2."""
    fleet = [
        target("big-0", vllm(12, "70b")),
        target("big-1", vllm(12, "70b")),
        target("small-0", vllm(2, "8b")),
        target("small-1", vllm(2, "8b")),
        target("p-0", vllm(30, "8b"), role="prefill"),
        target("p-1", vllm(10, "8b"), role="prefill"),
    ]
    hotspots = {peers: hotspot.max_over_mean for peers, hotspot in derive_fleet(fleet).hotspots.items()}
    assert hotspots == {
        (("model", "70b"),): 1.0,
        (("model", "8b"),): 1.0,
        (("model", "8b"), ("role", "prefill")): 1.5,
    }
    page = render(fleet)[0].decode()
    assert 'prefixwatch_hotspot_max_over_mean{model="8b",role="prefill"} 1.5' in page


def test_shares_are_taken_within_a_model() -> None:
    big, small = (
        [target(f"{model}-{number}", vllm(1, model), vllm(1, model)) for number in range(2)] for model in ("70b", "8b")
    )
    sent = {"http://70b-0:8000": 30, "70b-1:8000": 10, "8b-0": 500, "8b-1": 500}
    text = router(dict.fromkeys(sent, 0)), router(sent)
    fleet = derive_fleet([*big, *small, target("r", *text)])
    assert fleet.top_shares == {(("model", "70b"),): 0.75, (("model", "8b"),): 0.5}


def test_a_router_s_name_of_a_worker_becomes_its_target_s() -> None:
    """So that a router's count and an engine's can be joined on one label."""
    page = render([target("a", vllm(1)), target("r", router({"http://a:8000": 3}))])[0].decode()
    assert 'prefixwatch_worker_load_requests{model="m",target="a"} 1.0' in page


def test_identity_comes_from_the_page_the_configuration_and_discovery() -> None:
    engine = target("e", vllm(1, "m"), role="decode", labels={"namespace": "llm", "pool": "blue", "model": "x"})
    assert dict(engine.identity) == {"model": "m", "role": "decode", "pool": "blue", "namespace": "llm"}
    nameless = target("e", "vllm:num_requests_running 1\n", labels={"model": "x"}, cluster="eu")
    assert dict(nameless.identity) == {"model": "x", "cluster": "eu"}


def test_a_target_that_is_down_keeps_its_identity() -> None:
    """Or nobody could count the workers of a model that are up."""
    engine = target("e", vllm(1, "m"))
    engine.ingest(Scrape(0.01, reason="refused"), 5.0)
    assert 'prefixwatch_target_up{model="m",system="vllm",target="e"} 0.0' in render([engine])[0].decode()


def test_a_target_of_two_models_has_none_of_its_own() -> None:
    two = target("e", vllm(1, "a") + vllm(2, "b").replace('engine="0"', 'engine="1"'))
    assert dict(two.identity) == {}
    assert dict(two.identity_of("1")) == {"model": "b"}


def test_every_family_about_load_or_cache_of_a_target_carries_its_identity() -> None:
    without = {name for name, family in FAMILIES.items() if "target" in family.given and "model" not in family.labels}
    assert without == {name for name, family in FAMILIES.items() if family.group == "exporter"} & without
    assert FAMILIES["target_up"].labels[-5:] == ("model", "role", "pool", "namespace", "cluster")
