from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from documents import DocumentError, parse
from loadgen.scenario import Scenario, load_scenario, shipped_scenarios

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
    assert control.groups.count == 0
    for length in ("shared_tokens", "unique_tokens", "output_tokens"):
        assert getattr(control.groups, length) == getattr(shared.groups, length)
    assert (control.tenants, control.engine, control.slo) == (shared.tenants, shared.engine, shared.slo)


def test_a_path_is_read_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    assert load_scenario(file).groups.shared_tokens.max == 100


def test_a_wrong_name_says_which_there_are() -> None:
    with pytest.raises(DocumentError, match=r"no scenario 'shared-prefx': did you mean 'shared-prefix'\?.*smoke"):
        load_scenario("shared-prefx")


def test_an_unknown_key_names_line_and_remedy() -> None:
    text = GOOD.replace("  shared_tokens: 100", "  shared_tokens: 100\n  shraed: 1")
    assert problem(text) == (
        "x.yaml:8: groups.shraed: unknown key: "
        "keys here are count, popularity, shared_tokens, unique_tokens, output_tokens"
    )


def test_a_misspelt_key_is_recognised() -> None:
    text = GOOD + "durations_seconds: 1\n"
    assert "x.yaml:10: durations_seconds: unknown key: did you mean 'duration_seconds'?" in problem(text)


def test_a_missing_key_says_what_it_is() -> None:
    text = GOOD.replace("{kind: poisson, rate_per_second: 2}", "{kind: poisson}")
    assert problem(text).startswith("x.yaml:3: arrivals.rate_per_second: missing: add it (requests a second")


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


def test_every_knob_is_documented() -> None:
    def undocumented(model: type[BaseModel]) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(f"{model.__name__}.{name}")
            inner: Any = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found += undocumented(inner)
        return found

    assert undocumented(Scenario) == []
