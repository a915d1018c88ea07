"""Numbers, names and fields that no run can have: told by file, key and remedy, before the memory is full."""

from __future__ import annotations

import pytest

from prefixwatch.documents import DocumentError, parse
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.scenario.arrivals import ArrivalError, arrival_times, constant_rate, diurnal_rate
from prefixwatch.loadgen.scenario.model import Scenario

BASE = {
    "duration_seconds": "5",
    "arrivals": "{rate_per_second: 4}",
    "groups": "{count: 3, shared_tokens: 64, unique_tokens: 10, output_tokens: 4}",
}


def scenario_text(**keys: str) -> str:
    return "name: odd\n" + "".join(f"{key}: {value}\n" for key, value in (BASE | keys).items())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("duration_seconds", ".inf", "duration_seconds: should be a finite number"),
        ("arrivals", "{rate_per_second: .inf}", "arrivals.rate_per_second: should be a finite number"),
        ("arrivals", "{rate_per_second: .nan}", "arrivals.rate_per_second: should be a finite number"),
        ("arrivals", "{kind: gamma, rate_per_second: 4, burstiness: 1.0e-9}", "arrivals.burstiness: should be greater"),
        ("groups", BASE["groups"].replace("64", "1000000000"), "groups.shared_tokens.max: should be less"),
        ("groups", BASE["groups"].replace("64", "{median: 9, sigma: 50}"), "groups.shared_tokens.sigma: should be le"),
        ("groups", BASE["groups"].replace("count: 3", "count: 1000000000"), "groups.count: should be less"),
        (
            "groups",
            BASE["groups"].replace("{", "{popularity: {zipf: 1000}, ", 1),
            "groups.popularity.zipf: should be",
        ),
        ("tenants", '[{name: "a\\nb"}]', "tenants[0].name: holds a line break"),
        ("tenants", '[{name: a, headers: {x-a: "b\\r\\nc: d"}}]', "tenants[0].headers: holds a line break"),
        ("tenants", "[{name: a, headers: {X-API-Key: s3cret}}]", "X-API-Key would be copied into every result"),
        ("extra_body", "{stream: false, messages: []}", "extra_body: messages, stream: the plan says what is in it"),
    ],
)
def test_it_is_named_with_its_key(key: str, value: str, says: str) -> None:
    with pytest.raises(DocumentError) as refused:
        parse(scenario_text(**{key: value}), Scenario, name="odd.yaml")
    assert str(refused.value).startswith("odd.yaml:")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"duration_seconds": "1.0e+9"},
        {"arrivals": "{kind: constant, rate_per_second: 1.0e+9}"},
        {"arrivals": "{kind: closed, concurrency: 1000000000}"},
        {"flash_crowd": "{at_seconds: 1, seconds: 3, rate_per_second: 1.0e+12, tokens: 10}"},
    ],
)
def test_more_requests_than_a_plan_can_hold_are_refused(keys: dict[str, str], tokenizer: Tokenizer) -> None:
    scenario = parse(scenario_text(**keys), Scenario, name="odd.yaml")
    with pytest.raises(ArrivalError, match="more than a plan can hold, 10,000,000: lower the rate, the number or the"):
        make_plan(scenario, PromptWriter(tokenizer), seed=1, nonce="n", model="m")


def test_a_rate_that_swings_a_billion_times_a_second_keeps_its_mean() -> None:
    times = arrival_times("constant", diurnal_rate(1, 3, 1e-9, 0, 100), None)  # type: ignore[arg-type]  # draws nothing
    assert len(times) == pytest.approx(200, abs=2)


def test_ordinary_runs_are_far_from_the_bounds() -> None:
    """A million requests are graded in one run."""
    assert len(arrival_times("constant", constant_rate(1000, 1000), None)) == 10**6  # type: ignore[arg-type]
