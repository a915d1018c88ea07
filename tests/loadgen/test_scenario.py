from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from prefixwatch.documents import DocumentError, parse
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario, shipped_scenarios

GOOD = """\
name: x
duration_seconds: 5
arrivals: {kind: poisson, rate_per_second: 2}
groups:
  count: 2
  popularity: {zipf: 1}
  shared_tokens: 100
  unique_tokens: {min: 1, max: 9}
  output_tokens: 4
"""


def problem(text: str) -> str:
    with pytest.raises(DocumentError) as caught:
        parse(text, Scenario, name="x.yaml")
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_load_under_their_own_name(name: str) -> None:
    assert load_scenario(name).name == name


def test_the_negative_control_differs_in_sharing_and_rate_only() -> None:
    shared, control = load_scenario("shared-prefix"), load_scenario("no-shared-prefix")
    assert control.groups is not None
    assert control.groups.count == 0
    for length in ("shared_tokens", "unique_tokens", "output_tokens"):
        assert getattr(control.groups, length) == getattr(shared.groups, length)
    assert (control.tenants, control.engine, control.slo) == (shared.tenants, shared.engine, shared.slo)


def test_a_path_is_read_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    groups = load_scenario(file).groups
    assert groups is not None
    assert groups.shared_tokens is not None
    assert groups.shared_tokens.max == 100


def test_a_wrong_name_says_which_there_are() -> None:
    with pytest.raises(DocumentError, match=r"no scenario 'shared-prefx': did you mean 'shared-prefix'\?"):
        load_scenario("shared-prefx")


def test_an_unknown_key_names_line_and_remedy() -> None:
    text = GOOD.replace("  shared_tokens: 100", "  shared_tokens: 100\n  shraed: 1")
    assert problem(text) == (
        "x.yaml:8: groups.shraed: unknown key: "
        "use one of count, popularity, shared_tokens, nesting, unique_tokens, output_tokens"
    )


def test_a_misspelt_key_is_recognised() -> None:
    text = GOOD + "durations_seconds: 1\n"
    assert "x.yaml:10: durations_seconds: unknown key: did you mean 'duration_seconds'?" in problem(text)


def test_a_missing_key_says_what_it_is() -> None:
    text = GOOD.replace("{kind: poisson, rate_per_second: 2}", "{kind: poisson}")
    assert problem(text).startswith(
        "x.yaml:3: arrivals: kind poisson needs rate_per_second or stages or diurnal; rate_per_second is requests"
    )


def test_a_value_out_of_bounds_names_line_and_meaning() -> None:
    message = problem(GOOD.replace("count: 2", "count: -1"))
    assert message.startswith("x.yaml:5: groups.count: should be greater than or equal to 0, got -1; it is: number of")


def test_an_inner_field_of_a_range_is_found() -> None:
    message = problem(GOOD.replace("min: 1, max: 9", "min: 9, max: 1"))
    assert message.startswith("x.yaml:8: groups.unique_tokens: min 9 is above max 1: swap them")


def test_an_entry_of_a_list_is_found() -> None:
    text = GOOD + "tenants:\n  - {name: a}\n  - {name: b, weight: 0}\n"
    assert problem(text).startswith("x.yaml:12: tenants[1].weight: should be greater than 0, got 0")


def test_broken_yaml_names_its_line() -> None:
    assert problem("name: x\n  y: [\n").startswith("x.yaml:2: not valid YAML")


@pytest.mark.parametrize("text", ["- a\n", "just words\n"])
def test_something_else_than_a_map_is_refused(text: str) -> None:
    assert "expected a mapping of keys" in problem(text)


@pytest.mark.parametrize(
    ("sessions", "remedy"),
    [
        ("{turns: 2}", "think_seconds must be above 0"),
        ("{turns: {1: 0}}", "the weights add up to 0"),
        ("{turns: {0: 1}}", "should be greater than or equal to 1"),
    ],
)
def test_impossible_sessions_are_refused(sessions: str, remedy: str) -> None:
    assert remedy in problem(GOOD + f"sessions: {sessions}\n")


@pytest.mark.parametrize("popularity", ["{}", "{zipf: 1, weights: [1, 2]}", "{weights: [1]}", "{weights: [0, 0]}"])
def test_impossible_popularity_is_refused(popularity: str) -> None:
    assert "popularity" in problem(GOOD.replace("{zipf: 1}", popularity))


def test_mean_turns_weighs_the_counts() -> None:
    scenario = parse(GOOD + "sessions: {turns: {1: 3, 3: 1}, think_seconds: 1}\n", Scenario, name="x.yaml")
    assert scenario.sessions.mean_turns == 1.5


@pytest.mark.parametrize(
    ("arrivals", "remedy"),
    [
        ("{kind: closed}", "kind closed needs concurrency"),
        ("{kind: trace}", "kind trace needs file"),
        ("{kind: gamma, rate_per_second: 1, stages: [{seconds: 1, rate_per_second: 1}]}", "diurnal, one of them"),
        ("{rate_per_second: 1, concurrency: 4}", "concurrency doesn't go with kind poisson: take it out"),
        ("{kind: fast, rate_per_second: 1}", "should be 'poisson', 'gamma', 'constant', 'closed' or 'trace'"),
        ("{stages: [{seconds: 0, rate_per_second: 1}]}", "arrivals.stages[0].seconds: should be greater than 0"),
        ("{diurnal: {low_per_second: 3, high_per_second: 1}}", "low_per_second is above high_per_second: swap them"),
    ],
)
def test_impossible_arrivals_are_refused(arrivals: str, remedy: str) -> None:
    message = problem(GOOD.replace("{kind: poisson, rate_per_second: 2}", arrivals))
    assert message.startswith("x.yaml:3: arrivals")
    assert remedy in message


@pytest.mark.parametrize(
    ("length", "remedy"),
    [
        ("{min: 5}", "give a number, min and max, median and sigma, or values"),
        ("{median: 100}", "median and sigma go together"),
        ("{values: [1, 2], weights: [1]}", "weights must be 2 numbers, one a value"),
        ("{values: [1, 2], min: 1, max: 2}", "values and max, min exclude each other"),
        ("{weights: [1]}", "weights belong to values"),
        ("0", "should be greater than or equal to 1"),
    ],
)
def test_impossible_lengths_are_refused(length: str, remedy: str) -> None:
    message = problem(GOOD.replace("output_tokens: 4", f"output_tokens: {length}"))
    assert message.startswith("x.yaml:9: groups.output_tokens")
    assert remedy in message


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ("few_shot: {pool: 2, shots: 3, tokens: 5}", "shots 3 exceeds pool 2"),
        ("documents: {count: 3, per_turn: 4, tokens: 5}", "per_turn 4 is above the 3 documents"),
        ("sessions: {turns: 2, think_seconds: 1, answers: generated, handover_share: 0.5}", "goes neither with forks"),
        ("search: {start_per_second: 0.01}", "must lie between min_per_second and max_per_second"),
        ("replay: {file: a.jsonl}", "replay sends what its file has: take out arrivals, groups"),
        ("dynamic_front: {tokens: 0}", "should be greater than or equal to 1, got 0; it is: its length, tokens"),
    ],
)
def test_impossible_prompts_are_refused(more: str, remedy: str) -> None:
    message = problem(GOOD + more + "\n")
    assert message.startswith("x.yaml:")
    assert remedy in message


def test_nesting_stands_in_the_place_of_flat_groups() -> None:
    nesting = "nesting: [{name: company, count: 2, tokens: 9}]"
    message = problem(GOOD.replace("popularity: {zipf: 1}", nesting))
    assert "count, shared_tokens and nesting exclude each other" in message
    flat = "  count: 2\n  popularity: {zipf: 1}\n  shared_tokens: 100\n"
    assert "count is missing: add it" in problem(GOOD.replace(flat, ""))
    groups = parse(GOOD.replace(flat, f"  {nesting}\n"), Scenario, name="x.yaml").groups
    assert groups is not None
    assert [layer.name for layer in groups.layers] == ["company"]


def test_without_replay_arrivals_and_groups_are_needed() -> None:
    assert "arrivals is missing: add it (when requests come" in problem("name: x\nduration_seconds: 5\n")


def test_files_are_looked_for_beside_the_scenario(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: x\nduration_seconds: 5\nreplay: {file: log.jsonl}\n")
    replay = load_scenario(file).replay
    assert replay is not None
    assert replay.path == tmp_path / "log.jsonl"


@pytest.mark.parametrize(
    "arrivals",
    [
        "{rate_per_second: 2}",
        "{kind: gamma, burstiness: 0.5, stages: [{seconds: 2, rate_per_second: 1, to_rate_per_second: 4}]}",
        "{kind: constant, diurnal: {low_per_second: 1, high_per_second: 4, period_seconds: 5}}",
    ],
)
def test_another_mean_rate_keeps_the_shape(arrivals: str) -> None:
    scenario = parse(GOOD.replace("{kind: poisson, rate_per_second: 2}", arrivals), Scenario, name="x.yaml")
    assert scenario.at_rate(7.0).mean_rate == pytest.approx(7.0, rel=1e-3)
    assert scenario.at_concurrency(3).mean_rate is None


def test_every_knob_is_documented() -> None:
    def undocumented(model: type[BaseModel], seen: set[type[BaseModel]]) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(f"{model.__name__}.{name}")
            for inner in models_in(field.annotation):
                if inner not in seen:
                    found += undocumented(inner, seen | {inner})
        return found

    assert undocumented(Scenario, set()) == []


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in models_in(argument)]
