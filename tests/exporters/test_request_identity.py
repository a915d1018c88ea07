"""What a request was for and where it was served: kept from the record to every family, bounded, and never merged."""

from __future__ import annotations

from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.metrics_page.families import FAMILIES, SERVED
from prefixwatch.exporters.probes.prefill_baseline import PrefillBaselines
from prefixwatch.exporters.requests.ledger import ROUTER, RequestLedger
from prefixwatch.exporters.requests.request import Place
from prefixwatch.exporters.scraping.scrape import Scrape
from tests.exporters.requests import done, ledger_of, refused

PLACES = {
    "w0": Place(cluster="east", namespace="chat", pool="h200"),
    "w1": Place(cluster="west", namespace="chat", pool="l40s"),
    "router-a": Place(cluster="east"),
}


def series(ledger: RequestLedger, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Values above 0 by all labels."""
    return {
        tuple(sorted((name, value) for name, value in sample.labels.items() if value)): sample.value
        for family in ledger.metrics(100.0)
        for sample in family.samples
        if sample.name == f"prefixwatch_{name}" and sample.value
    }


def test_every_request_family_has_the_identity() -> None:
    """Requests, TTFT, TPOT, goodput, objectives, tenants, sessions, cold prefills, placements, isolation."""
    ledger = ledger_of(places=PLACES, baseline=lambda model, tokens: 0.1)
    for cached in (0, 992) * 30:
        ledger.record(
            done(worker="w0", model="llama", tenant="t", session="s", cached_tokens=cached, own_tokens=992, salted=True,
                 predicted_tokens=992, held_tokens=992, held_by="w0"),
            ROUTER,
        )  # fmt: skip
    groups = {"requests", "isolation", "sessions", "cold prefill"}
    seen = set()
    for family in ledger.metrics(100.0):
        known = FAMILIES[family.name.removeprefix("prefixwatch_")]
        if known.given[: len(SERVED)] == SERVED:
            seen.add(known.name)
            for sample in family.samples:
                identity = {name: sample.labels.get(name) for name in SERVED}
                assert identity == {"model": "llama", "cluster": "east", "namespace": "chat", "pool": "h200"}
    of_requests = {family.name for family in FAMILIES.values() if family.group in groups}
    without = {name for name in of_requests if FAMILIES[name].given[: len(SERVED)] != SERVED}
    assert without == {
        "request_records", "request_records_missed", "label_overflow_requests",  # of the exporter's reading
        "isolation_cached_tokens", "isolation_duplicate_tokens", "isolation_lost_hit_tokens",  # of a target
        "prefill_wait_seconds", "cold_prefill_baseline_seconds",
        "goodput_least_ratio", "goodput_most_ratio", "cache_size_hit_ratio",  # of a model's engines, whoever asks
        "sessions_moved_ratio", "workers_changed",  # of the fleet
    }  # fmt: skip
    assert {"requests", "ttft_seconds", "tpot_seconds", "slo_requests", "tenant_hit_tokens", "sticky_requests",
            "isolation_audited_requests", "cold_prefill_requests", "prefix_funnel_tokens"} <= seen  # fmt: skip


def test_two_models_are_two_series_and_their_deltas_are_apart() -> None:
    """A 70B model's misses don't count against an 8B model's hits."""
    records = []
    for k in range(40):
        hit = k % 2 == 0
        records += [
            done(model="small", cached_tokens=992 if hit else 0, ttft_seconds=0.1 if hit else 0.2),
            done(model="large", cached_tokens=992 if hit else 0, ttft_seconds=1.0 if hit else 3.0),
        ]
    ledger = ledger_of(records)
    delta = series(ledger, "ttft_miss_minus_hit_seconds")
    assert {dict(labels)["model"]: round(value, 6) for labels, value in delta.items()
            if dict(labels)["quantile"] == "0.5"} == {"small": 0.1, "large": 2.0}  # fmt: skip
    completed = {dict(labels)["model"]: value for labels, value in series(ledger, "requests_total").items()}
    assert completed == {"small": 40, "large": 40}


def test_a_refused_request_is_counted_where_its_router_runs() -> None:
    ledger = ledger_of([done(model="llama", worker="w0")], places=PLACES)
    ledger.record(refused(model="llama"), ROUTER, "router-a")
    assert series(ledger, "requests_total") == {
        (("class", "default"), ("cluster", "east"), ("model", "llama"), ("namespace", "chat"),
         ("outcome", "completed"), ("pool", "h200")): 1,
        (("class", "default"), ("cluster", "east"), ("model", "other"), ("outcome", "refused")): 1,
    }  # fmt: skip
    ledger.serves("llama", "w0")
    ledger.record(refused(model="llama"), ROUTER, "router-a")
    assert series(ledger, "requests_total")[
        ("class", "default"), ("cluster", "east"), ("model", "llama"), ("outcome", "refused")
    ] == 1  # fmt: skip


def test_a_model_that_no_worker_serves_gets_no_series() -> None:
    """Clients choose the name: 3,000 invented ones are one series, and no overflow of real ones."""
    ledger = ledger_of([done(model="real")])
    for k in range(3000):
        ledger.record(refused(model=f"invented-{k}", outcome="rejected"), ROUTER)
    models = {dict(labels).get("model") for labels in series(ledger, "requests_total")}
    assert models == {"real", "other"}
    assert series(ledger, "label_overflow_requests_total") == {}


def test_labels_beyond_their_limit_are_counted() -> None:
    ledger = ledger_of([done(tenant=f"t{k}", model=f"m{k}") for k in range(150)])
    assert series(ledger, "label_overflow_requests_total") == {(("label", "tenant"),): 130, (("label", "model"),): 50}


def test_a_cold_prompt_costs_each_model_its_own() -> None:
    baselines = PrefillBaselines()
    baselines.of("small").add("a", 1000, 0.1)
    assert [baselines.seconds(model, 1000) for model in ("small", "", "large")] == [0.1, 0.1, None]
    baselines.of("large").add("b", 1000, 0.9)
    assert [baselines.seconds(model, 1000) for model in ("small", "", "large")] == [0.1, None, 0.9]
    assert baselines.line() is None


def test_targets_give_the_place_by_name_and_by_address() -> None:
    """Labels of a target, from its configuration or discovery; routers call workers by name, URL or host:port."""
    labels = {"cluster": "east", "namespace": "chat", "pool": "h200"}
    target = TargetConfig(name="w0", url="http://10.0.0.1:8000", labels=labels, zone="z1")
    exporter = Exporter(ExporterConfig(targets=(target,)))
    place = Place("z1", "", "h200", "chat", "east")
    for name in ("w0", "10.0.0.1:8000", "http://10.0.0.1:8000", "http://10.0.0.1:8000/metrics"):
        assert exporter.fleet.place_of(name) == place
    assert exporter.fleet.place_of("w1") == Place()


async def test_a_scraped_engine_begins_the_counts_of_its_models() -> None:
    """So that the first request is an increase, and a refused one is counted for its model."""
    exporter = Exporter(ExporterConfig(targets=(TargetConfig(name="w0", url="http://10.0.0.1:8000"),)))
    page = b'vllm:num_requests_running{model_name="llama",engine="0"} 1\n'

    async def fetch(_: object) -> Scrape:
        return Scrape(0.01, page)

    exporter.fetch = fetch  # type: ignore[method-assign,assignment]
    exporter.ledger.expect(ROUTER)
    await exporter.scrape_all()
    (family,) = [family for family in exporter.ledger.metrics(0.0) if family.name == "prefixwatch_requests"]
    assert {sample.labels["model"] for sample in family.samples} == {"llama"}
    assert {sample.value for sample in family.samples} == {0.0}
