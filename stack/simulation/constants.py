"""`--calibrate`: a policy's constants from the first minute of the same traffic on the same engines.

The minute's requests are sent one after another, so that each is alone on its engine, and round robin spreads them.
What a first token took then is fitted by FlexLB's calibrated predictor:

    T = base_ms + ms_per_token · tokens to compute + ms_per_token_context · Σ over them of the tokens before each

    calibration                 the measured rows themselves, as `flexlb_formula` takes them
    prefill_tokens_per_second   1000 · n / (T(n) − base_ms), n the median of the tokens to compute

An option that the user gives keeps its value, and a policy without such options is left as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.router.policies import POLICIES, policy_class
from prefixwatch.router.policies.flexlb.prefill_predictor import CalibratedPredictor, Prefill
from prefixwatch.router.policies.spec import parse_spec
from prefixwatch.stack.errors import UsageError

CALIBRATE_HELP = (
    "First send the first minute's requests one after another, and fit what policies take as constants (prefill rate, "
    "FlexLB's calibration). Options that are given stay."
)
SECONDS = 60.0
"""Of traffic, whose requests are sent."""
LEAST_REQUESTS = 8
MOST_ROWS = 32
"""Of measured times that a policy gets: it fits them each time that it meets a worker."""


@dataclass(frozen=True, slots=True)
class Constants:
    """`rows`: (prompt tokens, cached tokens, ms) of measured first tokens; `error`: the fit's median relative error."""

    rows: Sequence[tuple[int, int, float]]
    base_ms: float
    ms_per_token: float
    ms_per_token_context: float
    prefill_tokens_per_second: float
    error: float
    requests: int

    def options(self) -> dict[str, Any]:
        """By the names that policies have for them."""
        return {
            "calibration": [[prompt, cached, round(ms, 3)] for prompt, cached, ms in self.rows],
            "prefill_tokens_per_second": float(f"{self.prefill_tokens_per_second:.4g}"),
        }

    def document(self) -> dict[str, Any]:
        """For config.yaml."""
        return {
            "requests": self.requests,
            "base_ms": round(self.base_ms, 4),
            "ms_per_token": round(self.ms_per_token, 6),
            "ms_per_token_context": round(self.ms_per_token_context, 9),
            "median_error": round(self.error, 4),
            **self.options(),
        }


def fit_constants(records: Iterable[RequestRecord]) -> Constants:
    """From requests that were sent one after another. Raises UsageError where they don't determine the constants."""
    rows = [
        (r.prompt_tokens, r.cached_tokens, 1e3 * (r.first_token_s - r.sent_s))
        for r in records
        if r.outcome is Outcome.COMPLETED
        and r.prompt_tokens
        and r.cached_tokens is not None
        and r.first_token_s is not None
        and r.sent_s is not None
    ]
    if len(rows) < LEAST_REQUESTS:
        raise UsageError(
            f"--calibrate: {len(rows)} requests of the first {SECONDS:.0f} s completed with their cached tokens, and "
            f"{LEAST_REQUESTS} are needed: have the engines report them, or give the policies their constants"
        )
    kept = _spread(sorted(rows, key=lambda row: row[0] - row[1]))
    try:
        found = CalibratedPredictor.fit(kept)
    except ValueError as error:
        raise UsageError(f"--calibrate: {error}") from error
    typical = round(median(prompt - cached for prompt, cached, _ in kept))
    work_ms = found.predict_ms([Prefill(typical, 0)]) - found.base_ms
    if not work_ms > 0:
        raise UsageError("--calibrate: first tokens took no longer with more to compute: no rate follows from them")
    errors = [abs(found.predict_ms([Prefill(prompt, cached)]) / ms - 1) for prompt, cached, ms in rows]
    return Constants(
        kept,
        found.base_ms,
        found.ms_per_token,
        found.ms_per_token_context,
        1e3 * typical / work_ms,
        median(errors),
        len(rows),
    )


def _spread(rows: Sequence[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """At most `MOST_ROWS`, from the least to the most to compute."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[round(k * (len(rows) - 1) / (MOST_ROWS - 1))] for k in range(MOST_ROWS)]


def calibrated(specs: Mapping[str, str], constants: Constants) -> dict[str, str]:
    """The policies by label, with the constants that each has an option for and wasn't given."""
    return {label: _calibrated(label, text, constants) for label, text in specs.items()}


def _calibrated(label: str, text: str, constants: Constants) -> str:
    spec = parse_spec(text)
    known = _options_of(spec.name) - set(spec.options)
    found = {name: value for name, value in constants.options().items() if name in known}
    if not found:
        return text
    options = ",".join(f"{name}={json.dumps(value)}" for name, value in {**spec.options, **found}.items())
    word = re.sub(r"[^\w.-]+", "-", label).strip("-")
    return f"{word}:{spec.name}{{{options}}}"


def policies_with_constants() -> dict[str, str]:
    """All policies that have an option for one of the constants."""
    return {name: name for name in POLICIES if _options_of(name) & {"calibration", "prefill_tokens_per_second"}}


def _options_of(policy: str) -> set[str]:
    return {field.name for field in fields(policy_class(policy).Options)}


def constants_note(constants: Constants, *, of_target: bool = False) -> str:
    """What results say of it."""
    what = "constants for the target's router were fitted to" if of_target else "policies were calibrated by"
    return (
        f"{what} {constants.requests} requests of the first {SECONDS:.0f} s, one after another: "
        f"{constants.prefill_tokens_per_second:,.0f} prompt tokens/s, {constants.base_ms:.3g} ms before them, median "
        f"error {constants.error:.1%}; the constants are in config.yaml"
    )
