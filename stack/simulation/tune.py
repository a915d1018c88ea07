"""`--tune policy.option=values`: the same traffic under each value, the Pareto front, and a check on held-back traffic.

The value with the lowest TTFT p95 is chosen by the tuned traffic alone; what it is worth is then read from traffic that
took no part in the choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import fmean
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from prefixwatch.loadgen.grading.wording import UNKNOWN, number, percent
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.router.policies.spec import parse_spec
from prefixwatch.simulator.balance import max_over_mean_in_flight
from prefixwatch.stack.bench.scenario_choice import chosen_policies
from prefixwatch.stack.errors import UsageError

TUNE_HELP = (
    "Try values of one option of one policy, such as loadaware.beta=0,0.5,1 or loadaware.beta=0:2 (nine values): hits "
    "against balance and TTFT, and a check of the best on held-back traffic. With --policy: its options of that policy "
    "stay, and its other policies run beside the values."
)
HELD_RATIO = 1.05
"""The choice holds where its held-back TTFT p95 is at most this many times that of the best value there."""
_RANGE_VALUES = 9
_ENDLESS = re.compile(r"[+-]?\.?(nan|inf|infinity)", re.IGNORECASE)
_TUNE = re.compile(r"(?P<policy>[\w-]+)\.(?P<option>\w+)=(?P<values>.+)")


@dataclass(frozen=True, slots=True)
class Tune:
    """What is tuned, the specs to run by value, and the policies beside them by label, as `make_policy` reads them."""

    policy: str
    option: str
    specs: Mapping[str, str]
    beside: Mapping[str, str] = field(default_factory=dict)

    @property
    def policies(self) -> dict[str, str]:
        """All that run, by label."""
        return {**{spec: spec for spec in self.specs.values()}, **self.beside}


@dataclass(frozen=True, slots=True)
class Point:
    """What one value gave; an unknown figure is None."""

    hit_ratio: float | None
    """Reused prompt tokens, of all."""
    in_flight_max_over_mean: float | None
    """Requests in flight on the busiest worker over the mean, averaged over time."""
    ttft_p95_ms: float | None
    not_completed_ratio: float


def parse_tune(text: str, policies: str | None = None) -> Tune:
    """Read the option; `policies` is what `--policy` says, if anything. Raises UsageError for text that isn't one, an
    unknown policy, option or value."""
    found = _TUNE.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--tune {text}: write policy.option=values, such as loadaware.beta=0,0.5,1 or loadaware.beta=0:2"
        )
    policy, option = found["policy"], found["option"]
    values = _values(found["values"])
    if len(values) < 2:
        raise UsageError(f"--tune {text}: give at least two values to compare")
    given = {} if policies is None else chosen_policies(policies)
    own = [spec for label, spec in given.items() if parse_spec(spec).name == policy]
    fixed = _fixed_options(policy, option, own)
    specs = {value: f"{policy}{{{','.join([*fixed, f'{option}={value}'])}}}" for value in values}
    chosen_policies(",".join(specs.values()), option="--tune")
    return Tune(policy, option, specs, {label: spec for label, spec in given.items() if spec not in own})


def _fixed_options(policy: str, option: str, given: Sequence[str]) -> list[str]:
    """The options of the tuned policy that `--policy` gives, as they are written in a spec. Raises UsageError."""
    if len(given) > 1:
        raise UsageError(f"--policy names {policy} several times, and --tune varies one of them: leave one")
    options = parse_spec(given[0]).options if given else {}
    if option in options:
        raise UsageError(f"--policy gives {policy} the option {option}, which --tune varies: leave it out")
    return [f"{key}={json.dumps(value)}" for key, value in options.items()]


def _values(text: str) -> list[str]:
    low, colon, high = text.partition(":")
    if not colon:
        values = list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))
        if endless := next((value for value in values if _ENDLESS.fullmatch(value)), None):
            raise UsageError(f"--tune: '{endless}' is not a value to compare: give finite numbers")
        return values
    try:
        ends = float(low), float(high)
    except ValueError as error:
        raise UsageError(f"--tune: '{text}' is not a range: write low:high, such as 0:2") from error
    if not -inf < ends[0] < ends[1] < inf:
        raise UsageError(f"--tune: '{text}' is not a range: its first number must be below its second one")
    return [f"{value:g}" for value in np.linspace(*ends, _RANGE_VALUES)]


def point(records: Sequence[RequestRecord], workers: int) -> Point:
    """The figures of these requests; of that many `workers` some may have served none."""
    measured = [record for record in records if record.phase == "measured"]
    known = [r for r in measured if r.cached_tokens is not None and r.prompt_tokens]
    waits = [record.ttft_s for record in measured if record.ttft_s is not None]
    used = sorted({record.worker for record in measured if record.worker})
    fleet = [*used, *(f"idle-{k}" for k in range(workers - len(used)))]
    prompt = sum(record.prompt_tokens or 0 for record in known)
    return Point(
        hit_ratio=sum(record.cached_tokens or 0 for record in known) / prompt if prompt else None,
        in_flight_max_over_mean=max_over_mean_in_flight(measured, fleet),
        ttft_p95_ms=float(np.percentile(waits, 95)) * 1e3 if waits else None,
        not_completed_ratio=sum(r.outcome is not Outcome.COMPLETED for r in measured) / max(1, len(measured)),
    )


def mean_point(points: Sequence[Point]) -> Point:
    """Each figure's mean over the runs that have it."""

    def over(figure: Callable[[Point], float | None]) -> float | None:
        known: Iterable[float] = [value for own in points if (value := figure(own)) is not None]
        return fmean(known) if known else None

    return Point(
        hit_ratio=over(lambda own: own.hit_ratio),
        in_flight_max_over_mean=over(lambda own: own.in_flight_max_over_mean),
        ttft_p95_ms=over(lambda own: own.ttft_p95_ms),
        not_completed_ratio=fmean(own.not_completed_ratio for own in points),
    )


def tuned(
    tune: Tune,
    found: Mapping[str, Point],
    held_back: Mapping[str, Point],
    beside: Mapping[str, tuple[Point, Point]] | None = None,
) -> dict[str, Any]:
    """The result, JSON-ready: the points by value, which are on the Pareto front, the choice and whether it holds.

    `beside` has the policies that ran beside the values, tuned and held-back traffic: they take no part in the choice.
    """
    front = {value for value, own in found.items() if not any(_dominates(other, own) for other in found.values())}
    best = min(found, key=lambda value: _or_inf(found[value].ttft_p95_ms))
    best_there = min(_or_inf(own.ttft_p95_ms) for own in held_back.values())
    holds = _or_inf(held_back[best].ttft_p95_ms) <= HELD_RATIO * best_there < float("inf")
    return {
        "mode": "tune",
        "policy": tune.policy,
        "option": tune.option,
        "points": [
            {"value": value, **asdict(own), "pareto": value in front, "held_back": asdict(held_back[value])}
            for value, own in found.items()
        ],
        "beside": [
            {"policy": label, **asdict(own), "held_back": asdict(held)} for label, (own, held) in (beside or {}).items()
        ],
        "chosen": best,
        "holds": holds,
        "statement": _statement(tune, best, held_back, holds=holds),
    }


def tuned_policies(tune: Tune, runs: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    """The same from the points of each of `tune.policies`, by label: one per run, the last of held-back traffic."""
    means = {label: mean_point(points[:-1]) for label, points in runs.items()}
    held_back = {label: points[-1] for label, points in runs.items()}
    return tuned(
        tune,
        {value: means[spec] for value, spec in tune.specs.items()},
        {value: held_back[spec] for value, spec in tune.specs.items()},
        {label: (means[label], held_back[label]) for label in tune.beside},
    )


def _statement(tune: Tune, best: str, held_back: Mapping[str, Point], *, holds: bool) -> str:
    own = held_back[best].ttft_p95_ms
    leader = min(held_back, key=lambda value: _or_inf(held_back[value].ttft_p95_ms))
    found = f"{tune.policy}: {tune.option}={best} has the lowest TTFT p95"
    there = f"on the held-back traffic {number(own)} ms"
    if leader == best:
        return f"{found}, and {there} again the lowest"
    other = f"{tune.option}={leader} has {number(held_back[leader].ttft_p95_ms)} ms"
    return f"{found}; {there}, where {other}: " + ("as good within 5 %" if holds else "the choice does not hold")


def _dominates(one: Point, other: Point) -> bool:
    """At least as good in hits, balance and TTFT, and better in one of them."""
    pairs = [
        (_or_inf(one.hit_ratio, -1), _or_inf(other.hit_ratio, -1)),
        (_or_inf(one.in_flight_max_over_mean), _or_inf(other.in_flight_max_over_mean)),
        (_or_inf(one.ttft_p95_ms), _or_inf(other.ttft_p95_ms)),
    ]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _or_inf(value: float | None, factor: float = 1) -> float:
    """For comparisons in which less is better: an unknown figure is never good."""
    return float("inf") if value is None else factor * value


def tune_table(result: Mapping[str, Any]) -> Table:
    """For a terminal."""
    table = Table(title=f"{result['policy']}: {result['option']}", box=box.SIMPLE_HEAD, show_edge=False)
    for name in (result["option"], "hits", "max/mean", "TTFT p95 ms", "front", "held back: hits", "TTFT p95 ms"):
        table.add_column(str(name), justify="right")
    for own in (*result["points"], *result["beside"]):
        held = own["held_back"]
        table.add_row(
            own.get("value", own.get("policy")),
            percent(own["hit_ratio"]),
            number(own["in_flight_max_over_mean"]),
            number(own["ttft_p95_ms"]),
            "✓" if own.get("pareto") else "",
            percent(held["hit_ratio"]) if held else UNKNOWN,
            number(held["ttft_p95_ms"]),
        )
    table.caption = "front: no other value is better in hits, balance and TTFT at once"
    return table
