"""Results as typed pandas DataFrames: units in column names, categories, unknown values as missing, never 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from prefixwatch.loadgen.grading.figures import figures_of
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.summary import Summary, decided
from prefixwatch.loadgen.request_log.columns import Columns, measured_rows
from prefixwatch.loadgen.request_log.fleet_rows import SCHEMA as FLEET_SCHEMA
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow

CATEGORIES = (
    "policy", "repeat", "phase", "tenant", "session", "group", "request_class", "outcome", "worker", "reason",
    "prediction_cause", "cache", "cache_basis",
)  # fmt: skip
_UNIT_SUFFIX = {"ms": "_ms", "us": "_us"}


def requests_frame(policies: Mapping[str, Measured], log: pa.Table) -> pd.DataFrame:
    """One row per measured request, as it was graded: in the order of policy, repeat and plan.

    Times are milliseconds from the scheduled time. `ttft_ms` of a request that timed out or was still waiting at the
    end is its wait so far; `good` is whether it completed and met every objective that covers it.
    """
    parts = [
        _of_policy(name, measured, measured_rows(log.filter(pc.equal(log["policy"], name))))
        for name, measured in policies.items()
    ]
    frame = pd.concat(parts or [_of_policy("", Measured(Columns.of([])), log)], ignore_index=True)
    return frame.astype({name: "category" for name in CATEGORIES if name in frame})


def _of_policy(policy: str, measured: Measured, rows: pa.Table) -> pd.DataFrame:
    columns = measured.columns
    ends = np.cumsum(columns.gap_counts)
    gaps = np.split(columns.gaps_ms, ends[:-1]) if len(columns) else []
    tokens = {
        "prompt_tokens": columns.prompt,
        "planned_prompt_tokens": columns.planned_prompt,
        "reusable_tokens": columns.reusable(),
        "cached_tokens": columns.cached,
        "predicted_tokens": columns.predicted,
        "output_tokens": columns.output,
    }
    frame = pd.DataFrame(
        {
            "id": rows["id"].to_pandas(),
            "policy": policy,
            "repeat": columns.repeat,
            "index": columns.index,
            "tenant": columns.tenant,
            "session": rows["session"].to_pandas(),
            "turn": columns.turn,
            "group": columns.group,
            "request_class": columns.request_class,
            "scheduled_s": columns.scheduled,
            "end_s": columns.end,
            "outcome": columns.outcome,
            "good": measured.good,
            "ttft_ms": columns.wait * 1e3,
            "first_answer_ms": columns.first_answer * 1e3,
            "ttft_from_send_ms": (columns.ttft - columns.lag) * 1e3,
            "tpot_ms": columns.tpot * 1e3,
            "e2e_ms": np.where(columns.completed, columns.e2e * 1e3, np.nan),
            "client_lag_ms": columns.lag * 1e3,
            "router_decision_us": columns.decision_us,
            "output_tokens_per_second": measured.output_rate,
            **tokens,
            "cache": measured.cache_class,
            "cache_basis": columns.cache_basis(),
            "worker": columns.worker,
            "reason": columns.reason,
            "prediction_cause": columns.prediction_cause,
        }
    )
    frame["chunk_gaps_ms"] = pd.Series(gaps, dtype=object)
    frame["gaps_are_tokens"] = columns.gap_counts + 1 == columns.output
    empty = {name: frame[name].replace("", None) for name in ("worker", "reason", "prediction_cause", "cache_basis")}
    return frame.assign(**empty).astype(dict.fromkeys(tokens, "Int64"))


def log_frame(log: pa.Table) -> pd.DataFrame:
    """Every row of requests.parquet, with the columns of docs/columns.md; categories and nullable integers."""
    frame: pd.DataFrame = log.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame.astype({name: "category" for name in CATEGORIES if name in frame})


def fleet_frame(rows: Sequence[FleetRow]) -> pd.DataFrame:
    """One row per worker and reading, with the columns of docs/columns.md."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=FLEET_SCHEMA)
    frame: pd.DataFrame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame.astype(dict.fromkeys(("policy", "worker", "repeat"), "category"))


def figures_frame(summary: Summary) -> pd.DataFrame:
    """One row per policy and figure: value, unit, 95 % interval, sample size."""
    rows = [
        {"policy": policy, **figure.model_dump()} for policy, own in summary.policies.items() for figure in own.figures
    ]
    frame = _with_limits(rows, ["policy", "name", "unit", "value", "ci95", "n"])
    return frame.astype({"policy": "category", "unit": "category", "value": "float64", "n": "Int64"})


def objectives_frame(summary: Summary) -> pd.DataFrame:
    """One row per policy and objective; `result` is pass, fail or inconclusive by the whole interval."""
    rows = [
        {"policy": policy, **objective.model_dump(), "result": decided(objective)}
        for policy, own in summary.policies.items()
        for objective in own.objectives
    ]
    names = ["policy", "name", "rule", "objective", "measured", "ok", "ci95", "good", "total", "excluded", "result"]
    return _with_limits(rows, names).astype({"policy": "category", "ok": "boolean", "result": "category"})


def rows_frame(rows: Iterable[BaseModel], model: type[BaseModel]) -> pd.DataFrame:
    """Models with a `ci95` as rows, such as the comparison of two policies or runs."""
    return _with_limits([row.model_dump() for row in rows], list(model.model_fields))


def by_group(policies: Mapping[str, Measured], requests: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The grader's figures of each group of requests; one row per group, `requests` counts them.

    `names` are columns of `requests`. Raises KeyError for another name.
    """
    rows: list[dict[str, Any]] = []
    keys = ["policy", *(name for name in names if name != "policy")]
    for policy, measured in policies.items():
        own = requests[requests["policy"] == policy].reset_index(drop=True)
        for group, members in own.groupby(keys[1:] or ["policy"], observed=True, sort=True):
            chosen = np.zeros(len(own), dtype=np.bool_)
            chosen[members.index.to_numpy()] = True
            part = Measured(measured.columns.where(chosen), measured.objectives, workers=measured.workers)
            figures = {
                f"{each.name}{_UNIT_SUFFIX.get(each.unit, '')}": each.value
                for each in figures_of(part, intervals=False)
            }
            values = group if keys[1:] else ()
            rows.append({**dict(zip(keys, (policy, *values), strict=True)), "requests": len(part), **figures})
    return pd.DataFrame(rows).set_index(keys) if rows else pd.DataFrame()


def _with_limits(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    """`ci95` becomes two columns."""
    frame = pd.DataFrame(rows, columns=list(names))
    limits = [(np.nan, np.nan) if found is None else found for found in frame.pop("ci95")]
    place = list(names).index("ci95")
    for offset, name in enumerate(("ci95_low", "ci95_high")):
        frame.insert(place + offset, name, np.array([each[offset] for each in limits], dtype=np.float64))
    return frame
