"""The Python API: runs as data frames that hold exactly what was graded, and one verdict whoever grades."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import prefixwatch
from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.grading.figures import DEFINITIONS, HOTSPOT_TITLES
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.results.api import Run
from prefixwatch.stack.bench.report import run_report
from prefixwatch.stack.cli.slo_grade import grade as slo_grade
from tests.stack.test_finished_runs import records, write_run


def uneven(policy: str, seed: int) -> list[RequestRecord]:
    """Requests of every kind: refused, cancelled, without usage, priming, with gaps, of two classes."""
    rng = np.random.default_rng(seed)
    return [_varied(row, rng) for row in records(policy, seed=seed)]


def _varied(row: RequestRecord, rng: np.random.Generator) -> RequestRecord:
    cached = [None, 0, 64, 128, 144][row.index % 5]
    known: dict[str, Any] = {
        "cached_tokens": cached,
        "chunk_gaps_ms": rng.uniform(5, 30, [15, 3][row.index % 2]).tolist(),
        "tenant": f"t{row.index % 3}",
        "request_class": ["chat", "batch"][row.index % 2],
        "prompt_tokens": None if cached is None else 160,
        "decision_us": float(rng.uniform(20, 90)),
        "phase": "prime" if row.index < 5 else "measured",
    }
    if row.index % 3:
        known["first_answer_s"] = (row.first_token_s or 0.0) + 0.2
    if row.index % 17 == 0:
        known |= {"outcome": Outcome.REFUSED, "first_token_s": None, "output_tokens": None, "chunk_gaps_ms": []}
    if row.index % 41 == 0:
        known |= {"outcome": Outcome.CANCELLED, "first_token_s": None, "end_s": None, "chunk_gaps_ms": []}
    return replace(row, **known)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = uneven("round_robin", 1) + uneven("cache_aware", 2)
    return write_run(tmp_path_factory.mktemp("api") / "run", rows, ("ttft", "availability"))


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return prefixwatch.read_run(folder)


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, prefixwatch; print(sorted({m.partition('.')[0] for m in sys.modules} & {'pandas', 'numpy'}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(prefixwatch.__all__) == set(dir(prefixwatch))
    assert callable(prefixwatch.build_rules)
    assert [slo.name for slo in prefixwatch.load_slos(["ttft"])] == ["ttft"]


def test_the_requests_are_the_graded_ones_and_typed(run: Run) -> None:
    requests = run.requests
    assert len(requests) == 2 * 2 * 295
    assert len(run.log) == 2 * 2 * 300
    kinds = {name: str(kind) for name, kind in requests.dtypes.items()}
    assert kinds["ttft_ms"] == kinds["scheduled_s"] == "float64"
    assert kinds["cached_tokens"] == "Int64"
    assert kinds["cache"] == kinds["tenant"] == kinds["outcome"] == "category"
    assert kinds["good"] == "bool"
    assert set(requests["cache"].cat.categories) == {"hit", "miss", "partial", "unknown"}
    assert requests["cached_tokens"].isna().sum() == (requests["cache"] == "unknown").sum() > 0
    assert run.figures["policy"].cat.categories.tolist() == ["cache_aware", "round_robin"]


def rate(requests: pd.DataFrame) -> float:
    """Requests per second of the plan: each repeat's span, scaled by n / (n − 1)."""
    times = requests.groupby("repeat", observed=True).scheduled_s
    return float(len(requests) / ((times.max() - times.min()) * times.size() / (times.size() - 1)).sum())


REDERIVED: dict[str, Any] = {
    **{f"ttft_p{q}": lambda r, q=q: r.ttft_ms.quantile(q / 100) for q in (50, 95, 99)},
    **{
        f"ttft_{cache}_p{q}": lambda r, q=q, cache=cache: r.ttft_ms[r.cache == cache].quantile(q / 100)
        for q in (50, 95, 99)
        for cache in ("hit", "partial", "miss")
    },
    **{
        f"{name}_p{q}": lambda r, q=q, name=name: r[f"{name}_ms"].quantile(q / 100)
        for q in (50, 95, 99)
        for name in ("ttft_from_send", "first_answer", "tpot", "e2e", "client_lag")
    },
    **{f"router_decision_p{q}": lambda r, q=q: r.router_decision_us.quantile(q / 100) for q in (50, 95, 99)},
    **{f"chunk_gap_p{q}": lambda r, q=q: gaps(r).quantile(q / 100) for q in (50, 95, 99)},
    **{f"itl_p{q}": lambda r, q=q: gaps(r[r.gaps_are_tokens]).quantile(q / 100) for q in (50, 95, 99)},
    "prompt_tokens": lambda r: r.prompt_tokens[r.cached_tokens.notna()].sum(),
    "hit_tokens": lambda r: r.cached_tokens.sum(),
    "expected_hit_tokens": lambda r: r.reusable_tokens[r.cached_tokens.notna()].sum(),
    "hit_ratio": lambda r: r.cached_tokens.sum() / r.prompt_tokens[r.cached_tokens.notna()].sum(),
    "block_hit_ratio": lambda r: (r.cached_tokens // 16).sum() / (r.prompt_tokens[r.cached_tokens.notna()] // 16).sum(),
    "hit_tokens_mean": lambda r: r.cached_tokens.sum() / r.cached_tokens.notna().sum(),
    "hit_tokens_p50": lambda r: r.cached_tokens.dropna().astype("float64").quantile(0.5),
    "hit_tokens_p95": lambda r: r.cached_tokens.dropna().astype("float64").quantile(0.95),
    "goodput_ratio": lambda r: r.good.mean(),
    "goodput_rps": lambda r: r.good.mean() * rate(r),
    "not_completed_ratio": lambda r: (r.outcome != "completed").mean(),
    "offered_rps": rate,
    "achieved_rps": lambda r: (r.outcome == "completed").mean() * rate(r) * pace(r),
    "without_output_tokens_ratio": lambda r: r.output_tokens[r.outcome == "completed"].isna().mean(),
    "without_cached_tokens_ratio": lambda r: r.cached_tokens[r.outcome == "completed"].isna().mean(),
    "output_tokens_per_second": lambda r: r.output_tokens_per_second.to_numpy().mean(),
}


def gaps(requests: pd.DataFrame) -> pd.Series[float]:
    return pd.Series(np.concatenate(requests.chunk_gaps_ms.to_list()))


def pace(requests: pd.DataFrame) -> float:
    """How much longer the completed requests took to end than to come due, between their deciles; at most 1."""
    done = requests[requests.outcome == "completed"]
    spans = [
        sum(float(np.subtract(*np.quantile(own[name], (0.9, 0.1)))) for _, own in done.groupby("repeat", observed=True))
        for name in ("scheduled_s", "end_s")
    ]
    return min(1.0, spans[0] / spans[1])


def test_every_figure_follows_from_the_frame_to_the_last_digit(run: Run) -> None:
    assert set(REDERIVED) | set(HOTSPOT_TITLES) == set(DEFINITIONS) | set(HOTSPOT_TITLES)
    for policy in ("round_robin", "cache_aware"):
        requests = run.requests[run.requests.policy == policy]
        figures = run.figures[run.figures.policy == policy].set_index("name")["value"]
        for name, derive in REDERIVED.items():
            found, wanted = derive(requests), figures[name]
            assert found == wanted or (np.isnan(found) and np.isnan(wanted)), (policy, name)
        loads = requests.assign(window=requests.scheduled_s // 30).groupby(["repeat", "window"], observed=True)
        tokens = [part.groupby("worker", observed=True).prompt_tokens.sum() for _, part in loads if len(part) >= 8]
        assert [max(each) / each.mean() for each in tokens] == pytest.approx(
            [figures["hotspot_max_over_mean"]] * len(tokens), abs=0.2
        )


def test_groups_have_the_graders_figures(run: Run) -> None:
    found = run.by("tenant", "cache")
    assert found.index.names == ["policy", "tenant", "cache"]
    assert found["requests"].sum() == len(run.requests)
    own = run.requests.query("policy == 'cache_aware' and tenant == 't1' and cache == 'miss'")
    row = found.xs(("cache_aware", "t1", "miss"))
    assert row["ttft_p95_ms"] == own.ttft_ms.quantile(0.95)
    assert row["hit_tokens"] == 0
    whole = run.by()
    assert whole.loc["cache_aware", "ttft_p50_ms"] == run.requests.query("policy == 'cache_aware'").ttft_ms.median()
    with pytest.raises(KeyError):
        run.by("tennant")


def test_whoever_grades_a_log_says_the_same(folder: Path, tmp_path: Path) -> None:
    """`bench`, `report`, `slo grade` and the API: one verdict, one exit code, the same intervals."""
    for slos in (["ttft"], ["availability"], ["ttft", "goodput"]):
        reported, report_code = run_report(folder, slos, tmp_path / "again", Console(file=io.StringIO()))
        graded, grade_code = slo_grade(folder / "requests.parquet", slos)
        run = prefixwatch.grade(folder, slos)
        assert report_code == grade_code == run.exit_code
        assert reported["verdict"] == graded["verdict"] == run.verdict
        assert reported["validity"] == graded["validity"]
        wanted = [row["ci95"] for row in reported["policies"]["cache_aware"]["objectives"]]
        assert [list(row["ci95"]) for row in graded["policies"]["cache_aware"]] == wanted
        mine = run.objectives[run.objectives.policy == "cache_aware"]
        assert mine[["ci95_low", "ci95_high"]].to_numpy().tolist() == wanted


def test_runs_are_compared_as_the_command_compares_them(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1))
    b = write_run(tmp_path / "b", records("score", seed=2, slower=1.4, plan=5))
    found = prefixwatch.compare(a, b)
    assert (found.verdict, found.exit_code) == ("worse", 1)
    ttft = found.comparison.set_index("metric").loc["ttft_p50"]
    assert ttft["difference"] == ttft["b_value"] - ttft["a_value"] > 0
    assert ttft["ci95_low"] > 0
    assert found.notes[0].startswith("the plans differ: A score sent 600 requests at ")
    assert "80 % were reusable and 100 % of those were hits" in found.notes[0]


def test_a_log_alone_can_be_read_and_one_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "mine.parquet"
    alone.write_bytes((folder / "requests.parquet").read_bytes())
    run = prefixwatch.grade(alone, ["ttft"])
    assert run.summary.engine == "unknown"
    assert run.requests.equals(prefixwatch.grade(folder, ["ttft"]).requests)
    assert run.fleet.empty
    with pytest.raises(InputError, match="no such folder or file"):
        prefixwatch.read_run(tmp_path / "none")
