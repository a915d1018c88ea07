"""Policies with options as text, and files of named variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.documents import DocumentError
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.spec import PolicySpec, parse_spec, read_variants, split
from prefixwatch.router.policy import LoadReport
from tests.router.fleets import a_fleet, a_request


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("score", ("score", "score", {})),
        (" loadaware{beta=0.5} ", ("loadaware{beta=0.5}", "loadaware", {"beta": 0.5})),
        ("loadaware{ beta = 2 }", ("loadaware{beta=2}", "loadaware", {"beta": 2})),
        ("a{x=1, y=true,z=auto}", ("a{x=1,y=true,z=auto}", "a", {"x": 1, "y": True, "z": "auto"})),
        ("a{x=[1, 2],y={b: 3, c: [4]}}", ("a{x=[1, 2],y={b: 3, c: [4]}}", "a", {"x": [1, 2], "y": {"b": 3, "c": [4]}})),
        ("a{x='1,2}'}", ("a{x='1,2}'}", "a", {"x": "1,2}"})),
        ("gentle:loadaware{beta=0.5}", ("gentle", "loadaware", {"beta": 0.5})),
        ("score{}", ("score", "score", {})),
    ],
)
def test_a_spec_is_a_name_with_options(text: str, spec: tuple[str, str, dict[str, Any]]) -> None:
    assert parse_spec(text) == PolicySpec(*spec)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a policy: write name or name{option=value"),
        ("score{beta=1", "is not a policy"),
        ("score}", "is not a policy"),
        ("score{beta}", "'beta' in 'score{beta}' is not an option: write option=value"),
        ("score{beta=}", "is not an option"),
        ("score{beta=1,beta=2}", "option 'beta' is given twice"),
        ("score{beta=[1}", "can't be read"),
        (
            "score{beta=0.5}",
            "policy score has no option 'beta'; it has prefill_tokens_per_second, ",
        ),
        ("loadaware{beta=high}", "policy loadaware: Expected `float`"),
        ("scor{x=1}", "unknown policy 'scor': did you mean 'score'?"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the message is looked at
        make_policy(text)
    assert said in str(refused.value)


def test_specs_are_split_outside_of_braces() -> None:
    text = "loadaware{beta=0.5,gamma=[1,2]}, score ,,a{x='},'}"
    assert split(text) == ["loadaware{beta=0.5,gamma=[1,2]}", "score", "a{x='},'}"]
    assert split(r'a{x="\",\\"},b{y=1,z=2}') == [r'a{x="\",\\"}', "b{y=1,z=2}"]
    assert split("") == []


_text = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), max_size=5)
_key = st.text("ab", min_size=1, max_size=2)
_value = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | _text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_key, inner, max_size=2),
    max_leaves=4,
)
_options = st.dictionaries(st.text("abc_", min_size=1, max_size=4), _value, max_size=3)


@given(st.text("abc-_.9", min_size=1, max_size=5), st.text("abc_", min_size=1, max_size=5), _options)
def test_a_specs_text_reads_back_as_the_spec(label: str, name: str, options: dict[str, Any]) -> None:
    spec = PolicySpec(label, name, options)
    assert parse_spec(spec.text) == spec
    assert split(f"x,{spec.text},y") == ["x", spec.text, "y"]


def test_a_variant_is_called_by_its_label_and_behaves_by_its_options() -> None:
    policy = make_policy("gentle:loadaware{beta=0.25}")
    assert (policy.label, policy.name, policy.options.beta) == ("gentle", "loadaware", 0.25)
    assert make_policy("loadaware{beta=1}", options={"beta": 3}).options.beta == 3


def test_a_file_names_variants(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text("policies:\n  gentle: {policy: loadaware, options: {beta: 0.5}}\n  plain: {policy: score}\n")
    gentle, plain = read_variants(file)
    assert (gentle, plain) == (("gentle", "loadaware", {"beta": 0.5}), ("plain", "score", {}))
    assert [make_policy(spec.text).label for spec in (gentle, plain)] == ["gentle", "plain"]
    file.write_text("policies:\n  gentle: {polcy: loadaware}\n")
    with pytest.raises(DocumentError, match=r"policies.yaml:2"):
        read_variants(file)


def test_score_takes_the_capacity_that_each_engine_reports() -> None:
    plain = {"queue_patience": 1.0, "hotspot_weight": 0.0, "prefill_tokens_per_second": 1000.0}
    reports = [LoadReport(0.0, kv_usage_ratio=1.0, kv_capacity_tokens=tokens) for tokens in (1600, 16_000, None)]
    fleet = a_fleet([0, 0, 0], report=reports)
    automatic = make_policy("score{kv_capacity_tokens=auto}", options=plain).choose(a_request(), fleet).scores
    for worker, capacity in (("w0", 1600), ("w1", 16_000), ("w2", 1600)):
        fixed = make_policy(f"score{{kv_capacity_tokens={capacity}}}", options=plain).choose(a_request(), fleet).scores
        assert automatic[worker] == pytest.approx(fixed[worker])
    assert automatic["w1"] < automatic["w0"] < 0
    unknown = a_fleet([0], report=[LoadReport(0.0, kv_usage_ratio=1.0)])
    assert make_policy("score{kv_capacity_tokens=auto}", options=plain).choose(a_request(), unknown).scores == {"w0": 0}


def test_options_are_json_in_the_text() -> None:
    assert PolicySpec("v", "p", {"a": [1], "b": "x y"}).text == f"v:p{{a=[1],b={json.dumps('x y')}}}"
