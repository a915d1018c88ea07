"""Keys are named in files and filled in when a run is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.plan.request import Plan, PlannedRequest
from prefixwatch.loadgen.scenario.secrets import (
    bearer,
    keys_in,
    literal_secret,
    with_secrets,
    without_keys,
)
from prefixwatch.loadgen.scenario.section import without_controls

REQUEST = PlannedRequest(
    index=0,
    phase="measured",
    scheduled_s=0.0,
    tenant="acme",
    session="s",
    turn=0,
    group="g",
    request_class="interactive",
    messages=[],
    max_tokens=1,
    prompt_tokens=1,
    shared_tokens=0,
)


def test_variables_are_filled_in_where_headers_name_them() -> None:
    requests = [replace(REQUEST, headers={"X-Api-Key": "${A}-${B}", "x-plain": "$A"}), REQUEST]
    plan = with_secrets(Plan("x", 0, "n", "m", requests), {"A": "1", "B": "2"})
    assert [request.headers for request in plan.requests] == [{"x-api-key": "1-2", "x-plain": "$A"}, {}]


def test_a_plan_without_variables_is_the_same_object() -> None:
    plan = Plan("x", 0, "n", "m", [REQUEST])
    assert with_secrets(plan, {}) is plan


@pytest.mark.parametrize("environment", [{}, {"KEY": ""}, {"KEY": " "}])
def test_a_variable_that_is_not_set_is_named(environment: dict[str, str]) -> None:
    plan = Plan("x", 0, "n", "m", [replace(REQUEST, headers={"authorization": "Bearer ${KEY}"})])
    for fill in (lambda: with_secrets(plan, environment), lambda: bearer("KEY", environment)):
        with pytest.raises(InputError, match="environment variable KEY is not set"):
            fill()


def test_a_key_becomes_a_bearer_token() -> None:
    assert bearer("KEY", {"KEY": "sk-1\n"}) == {"authorization": "Bearer sk-1"}
    assert bearer("", {}) == {}


def test_a_key_that_a_server_quotes_is_taken_out_of_its_message() -> None:
    keys = keys_in([{"Authorization": "Bearer sk-1"}, {"x-api-key": "sk-1-more"}, {"x-plain": "http_401"}])
    assert keys == ["sk-1-more", "sk-1"]
    assert without_keys("http_401: neither sk-1-more nor sk-1", keys) == "http_401: neither (API key) nor (API key)"


def test_headers_that_hold_nothing_but_secrets_may_not_hold_them_literally() -> None:
    assert literal_secret({"x-a": "b", "Authorization": "Bearer sk-1"}) == "Authorization"
    assert literal_secret({"x-a": "b", "Authorization": "Bearer ${KEY}"}) is None


def test_names_of_a_recording_can_be_sent_and_stay_different() -> None:
    assert [without_controls(name) for name in ("a\nb", "a\rb", "日本", " a ")] == ["a%0Ab", "a%0Db", "日本", "a"]
