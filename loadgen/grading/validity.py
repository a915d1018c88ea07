"""Whether a run is valid: reasons why it isn't, each with a remedy.

These are read from the request log, so that an old log can be judged too; what only the running client knows
(its event loop, its CPU) arrives as its own reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

import numpy as np

from prefixwatch.loadgen.grading.statistics import MIN_BLOCK_REQUESTS, MIN_BLOCKS
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.reuse.limits import unexplained_reuse
from prefixwatch.slo.objective import Objective, RequestField

MAX_LAG_SHARE = 0.05
"""Of the tightest TTFT threshold: how late the client itself may be, at p99."""
MAX_LAG_OF_TTFT = 0.1
"""Of the measured TTFT p50: the client's lag at p50."""
MAX_TOKEN_MISMATCH_SHARE = 0.01
MIN_IN_FLIGHT_SHARE = 0.95
MIN_REQUESTS = MIN_BLOCKS * MIN_BLOCK_REQUESTS


def invalid_reasons(
    columns: Mapping[str, Columns],
    objectives: Sequence[Objective],
    *,
    warm: bool = False,
    requested_in_flight: int | None = None,
) -> list[str]:
    """Why this run is not valid; empty for a valid one."""
    reasons = list(_plan_reasons(columns))
    if objectives or len(columns) > 1:  # one policy with nothing to decide needs no power
        reasons += _power_reasons(columns)
    for policy, own in columns.items():
        found = [*_lag_reasons(own, objectives), *_token_reasons(own)]
        if not warm:
            found += _reuse_reasons(own)
        if requested_in_flight is not None:
            found += _in_flight_reasons(own, requested_in_flight)
        reasons += [f"{policy}: {reason}" for reason in found]
    return reasons


def peak_in_flight(columns: Columns) -> int:
    """Most requests under way at once, in any repeat; one without an end counts to the repeat's end."""
    peak = 0
    for repeat in np.unique(columns.repeat):
        mine = columns.repeat == repeat
        start = (columns.scheduled + columns.lag)[mine]
        sent = ~np.isnan(start)
        end = np.nan_to_num(columns.end[mine][sent], nan=np.inf)
        times = np.concatenate([start[sent], end])
        steps = np.repeat([1, -1], int(sent.sum()))
        order = np.lexsort((steps, times))  # an end at the same instant frees its place first
        peak = max(peak, int(np.cumsum(steps[order]).max(initial=0)))
    return peak


def _plan_reasons(columns: Mapping[str, Columns]) -> Iterator[str]:
    positions = {
        policy: set(zip(own.repeat.tolist(), own.index.tolist(), strict=True)) for policy, own in columns.items()
    }
    trimmed = {policy: set().union(*own.trimmed.values()) for policy, own in columns.items()}
    everything = set().union(*positions.values(), *trimmed.values())
    for policy, own in positions.items():
        if len(own) and np.isnan(columns[policy].lag).all():
            yield f"{policy}: not one request was sent"
        if missing := len(everything - own - trimmed[policy]):
            yield f"{policy}: {missing} requests of the plan are not in its log: run all policies on one plan"


def _power_reasons(columns: Mapping[str, Columns]) -> Iterator[str]:
    for policy, own in columns.items():
        if len(own) < MIN_REQUESTS:
            yield f"{policy}: too few requests ({len(own)}, at least {MIN_REQUESTS} needed): run longer or more repeats"


def _lag_reasons(own: Columns, objectives: Sequence[Objective]) -> Iterator[str]:
    """How late the client itself was, against the tightest objective and against what was measured."""
    lags = own.lag[~np.isnan(own.lag)]
    if not len(lags):
        return
    lag = float(np.percentile(lags, 99))
    thresholds = [t for objective in objectives for t in objective.thresholds(RequestField.TTFT_SECONDS)]
    limit = MAX_LAG_SHARE * min(thresholds, default=inf)
    if lag > limit:
        yield (
            f"the client sent late, p99 {lag * 1e3:.1f} ms, over {limit * 1e3:.1f} ms "
            f"({MAX_LAG_SHARE:.0%} of the TTFT threshold): lower the rate or free the machine"
        )
    known = own.wait[~np.isnan(own.wait)]
    if not len(known):
        return
    middle, ttft = float(np.median(lags)), float(np.median(known))
    if middle > MAX_LAG_OF_TTFT * ttft:
        yield (
            f"the client sent late, p50 {middle * 1e3:.3g} ms, over {MAX_LAG_OF_TTFT:.0%} of the TTFT p50 "
            f"({ttft * 1e3:.3g} ms): a large part of the measured TTFT is the client's; free the machine"
        )


def _token_reasons(own: Columns) -> Iterator[str]:
    reported = ~np.isnan(own.reported_prompt)
    wrong = int((own.reported_prompt[reported] != own.planned_prompt[reported]).sum())
    if wrong > MAX_TOKEN_MISMATCH_SHARE * reported.sum():
        yield (
            f"{wrong} of {int(reported.sum())} answers report a different prompt length than planned: "
            f"use the tokenizer and chat template of the served model"
        )


def _reuse_reasons(own: Columns) -> Iterator[str]:
    """Reuse of text that nobody had sent in this run."""
    found = unexplained_reuse(own)
    count = int(found.impossible.sum())
    if not count:
        return
    if found.whole_prompt:
        yield (
            f"{count} answers report more cached tokens than this run had sent, up to the whole prompt: the server "
            f"counts transferred or computed tokens as cached (prefill/decode split?); reuse figures say nothing"
        )
    else:
        yield (
            f"{count} requests hit more tokens than this run had sent: the caches were warm; "
            f"use a new nonce, reset the caches, or declare the scenario warm"
        )


def _in_flight_reasons(own: Columns, requested: int) -> Iterator[str]:
    peak = peak_in_flight(own)
    if peak < MIN_IN_FLIGHT_SHARE * requested:
        yield f"{requested} requests in flight were requested, {peak} reached: look for a connection limit on the path"
