"""A policy's log in the result format of `vllm bench serve`, by that tool's definitions, for what already reads it.

Its figures aren't ours: percentiles are of completed requests alone, times count from the sending, ITL is the gap
between chunks, whatever they hold, and TPOT ends with the answer (vllm/benchmarks/serve.py, `calculate_metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefixwatch.loadgen.grading.measured import goodput
from prefixwatch.loadgen.grading.validity import peak_in_flight
from prefixwatch.loadgen.plan.request import MEASURED
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.slo.objective import Floats, Objective

PERCENTILES = (50, 95, 99)


def vllm_bench_result(log: pa.Table, objectives: Sequence[Objective], labels: Mapping[str, Any]) -> dict[str, Any]:
    """One policy's measured requests, all repeats together; `labels` are taken over as they are.

    `request_goodput` is by the SLO documents, and null without any. A figure that nothing supports is null.
    """
    measured = log.filter(pc.equal(log["phase"], MEASURED))
    columns = Columns.of(measured)
    done = columns.completed
    output = _column(measured, "output_tokens")
    own = columns.where(done)
    answered = own.e2e - own.lag
    ttft = own.ttft - own.lag
    more_than_one = output[done] > 1
    tpot = (answered - ttft)[more_than_one] / (output[done][more_than_one] - 1)
    seconds = _seconds(columns)
    tokens_in, tokens_out = float(np.nansum(own.prompt)), float(np.nansum(output[done]))
    good = int(goodput(columns, objectives).sum()) if objectives else None
    return {
        **labels,
        "num_prompts": len(columns),
        "duration": seconds,
        "completed": int(done.sum()),
        "failed": int((~done).sum()),
        "total_input_tokens": int(tokens_in),
        "total_output_tokens": int(tokens_out),
        "request_throughput": _rate(float(done.sum()), seconds),
        "request_goodput": None if good is None else _rate(good, seconds),
        "output_throughput": _rate(tokens_out, seconds),
        "total_token_throughput": _rate(tokens_in + tokens_out, seconds),
        "max_concurrent_requests": peak_in_flight(own),
        **_spread("ttft", ttft * 1e3),
        **_spread("tpot", tpot * 1e3),
        **_spread("itl", own.gaps_ms),
        **_spread("e2el", answered * 1e3),
    }


def _spread(name: str, values_ms: Floats) -> dict[str, float | None]:
    known = values_ms[~np.isnan(values_ms)]
    if not len(known):
        return dict.fromkeys([f"{figure}_{name}_ms" for figure in ("mean", "median", "std", "p50", "p95", "p99")])
    return {
        f"mean_{name}_ms": float(known.mean()),
        f"median_{name}_ms": float(np.median(known)),
        f"std_{name}_ms": float(known.std()),
        **{f"p{percent}_{name}_ms": float(np.percentile(known, percent)) for percent in PERCENTILES},
    }


def _seconds(columns: Columns) -> float | None:
    """From the first sending to the last end, of each repeat, added up."""
    total = 0.0
    for repeat in np.unique(columns.repeat):
        mine = columns.repeat == repeat
        sent, end = (columns.scheduled + columns.lag)[mine], columns.end[mine]
        if np.isnan(sent).all() or np.isnan(end).all():
            return None
        total += float(np.nanmax(end) - np.nanmin(sent))
    return total or None


def _rate(count: float, seconds: float | None) -> float | None:
    return None if seconds is None else count / seconds


def _column(table: pa.Table, name: str) -> Floats:
    """In the order of `Columns`."""
    table = table.take(pc.sort_indices(table, [("repeat", "ascending"), ("index", "ascending")]))
    return np.asarray(pc.cast(table[name], pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
