"""The block of figures: each by model, with its window, and unknown with a reason instead of 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.fleet.status import TITLES, status
from prefixwatch.exporters.requests.ledger import RequestLedger
from prefixwatch.exporters.scraping.target import Target
from tests.exporters.requests import done, ledger_of, refused

MakeTarget = Callable[..., Target]


def engine(model: str, running: int, hits: int, queries: int) -> str:
    labels = f'{{model_name="{model}",engine="0"}}'
    return (
        f"vllm:num_requests_running{labels} {running}\nvllm:num_requests_waiting{labels} 0\n"
        f"vllm:prefix_cache_hits_total{labels} {hits}\nvllm:prefix_cache_queries_total{labels} {queries}\n"
    )


def requests() -> RequestLedger:
    small = [done(model="small", cached_tokens=992 * (k % 2), ttft_seconds=0.1 if k % 2 else 0.3) for k in range(60)]
    large = [done(model="large", cached_tokens=0, ttft_seconds=2.0) for _ in range(30)]
    return ledger_of([*small, *large, refused(model="large", outcome="failed", worker="w")], objectives=["ttft"])


def figures(targets: list[Target], ledger: RequestLedger) -> dict[str, dict[str, dict[str, Any]]]:
    document = status(targets, derive_fleet(targets), ledger.window(100.0), 60.0)
    return {model: {row["name"]: row for row in rows} for model, rows in document["models"].items()}


def values(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {name: round(row["value"], 6) for name, row in rows.items() if row["value"] is not None}


def test_every_figure_is_of_its_model(make_target: MakeTarget) -> None:
    targets = [
        make_target("s0", engine("small", 4, 0, 0), engine("small", 4, 500, 1000)),
        make_target("s1", engine("small", 2, 0, 0), engine("small", 2, 100, 1000)),
        make_target("l0", engine("large", 9, 0, 0), engine("large", 9, 0, 500)),
    ]
    shown = figures(targets, requests())
    assert values(shown["small"]) == {
        "hit_tokens_per_second": 120.0, "hit_ratio": 0.3, "ttft_hit_p50": 0.1, "ttft_hit_p95": 0.1,
        "ttft_miss_p50": 0.3, "ttft_miss_p95": 0.3, "ttft_miss_minus_hit_p50": 0.2, "goodput_ratio": 1.0,
        "hotspot_max_over_mean": round(4 / 3, 6), "isolation_audited_ratio": 0.0,
    }  # fmt: skip
    assert values(shown["large"]) == {
        "hit_tokens_per_second": 0.0, "hit_ratio": 0.0, "ttft_miss_p50": 2.0, "ttft_miss_p95": 2.0,
        "goodput_ratio": 0.0, "isolation_audited_ratio": 0.0,
    }  # fmt: skip


def test_what_is_not_known_has_a_reason(make_target: MakeTarget) -> None:
    """Two plain engines and nothing else; then one of them doesn't count hits any more: a ratio is over the other."""
    blind = "\n".join(line for line in engine("m", 1, 0, 0).split("\n") if "cache" not in line)
    targets = [make_target("a", engine("m", 1, 0, 0), engine("m", 1, 90, 100)), make_target("b", blind, blind)]
    shown = figures(targets, ledger_of())["m"]
    assert list(shown) == list(TITLES)
    assert values(shown) == {"hit_tokens_per_second": 18.0, "hit_ratio": 0.9, "hotspot_max_over_mean": 1.0}
    assert all(row["why"] for row in shown.values() if row["value"] is None)
    assert shown["ttft_hit_p50"]["why"] == "no request records: scrape prefixwatch's router, or send GenAI spans"
    none = figures([make_target("b", blind, blind)], ledger_of())["m"]
    assert none["hit_ratio"]["why"] == "no engine of the model counts hits and lookups"


@pytest.mark.parametrize("audited", [True, False])
def test_no_violation_is_only_a_figure_where_enough_was_audited(audited: bool) -> None:
    record = done(cached_tokens=0, own_tokens=0 if audited else None)
    row = figures([], ledger_of([record] * 30))["m"]["isolation_violations"]
    assert (row["value"], bool(row["why"])) == ((0, False) if audited else (None, True))
