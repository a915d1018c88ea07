"""Step time: fitted to samples, never negative, honest about samples that don't determine it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.engines.model.profiles import profile, profiles
from prefixwatch.engines.model.step_time import (
    StepSample,
    StepTime,
    StepTimeError,
    StepWork,
    fit,
    prefill_work,
    token_contexts,
)

WORKS = [
    StepWork(prefill_tokens=512, prefill_token_contexts=token_contexts(0, 512), prefill_sequences=1),
    StepWork(prefill_tokens=64, prefill_token_contexts=token_contexts(4000, 64), prefill_sequences=1),
    StepWork(prefill_tokens=2048, prefill_token_contexts=token_contexts(0, 2048), prefill_sequences=3),
    StepWork(prefill_tokens=16, prefill_token_contexts=token_contexts(9000, 16), prefill_sequences=2),
    StepWork(decode_sequences=1, context_tokens=1000),
    StepWork(decode_sequences=32, context_tokens=9000),
    StepWork(decode_sequences=16, context_tokens=90_000),
]

coefficient = st.floats(1e-6, 1e-2)


def duration(step_time: StepTime, work: StepWork) -> float:
    values = dataclasses.asdict(work)
    del values["steps"]
    return step_time.duration_s(**values)


@given(st.tuples(*[coefficient] * 6))
def test_fit_finds_the_step_time_that_made_the_samples(values: tuple[float, ...]) -> None:
    true = StepTime(*values)
    found = fit([StepSample(work, duration(true, work)) for work in WORKS])
    for work in WORKS:
        assert duration(found, work) == pytest.approx(duration(true, work), rel=1e-6)


@given(st.lists(st.floats(0.001, 1), min_size=len(WORKS), max_size=len(WORKS)))
def test_no_sample_makes_a_coefficient_negative(durations: list[float]) -> None:
    found = fit([StepSample(work, seconds) for work, seconds in zip(WORKS, durations, strict=True)])
    assert min(dataclasses.astuple(found)) >= 0


def test_a_kind_of_work_that_is_in_no_sample_costs_nothing() -> None:
    samples = [StepSample(StepWork(decode_sequences=n), 0.01 + n / 1000) for n in (1, 2, 8)]
    found = fit(samples)
    assert dataclasses.astuple(found) == pytest.approx((0.01, 0, 0, 0, 0.001, 0))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "0 samples"),
        ([StepSample(StepWork(decode_sequences=1), 0.01)], "1 samples can't tell 2 kinds"),
        ([StepSample(StepWork(decode_sequences=4), 0.01)] * 5, "don't tell these apart: base_s, per_decode_sequence_s"),
        ([StepSample(StepWork(), 0.0)], "above 0 seconds"),
        ([StepSample(StepWork(), float("nan"))], "above 0 seconds"),
    ],
)
def test_samples_that_determine_nothing_are_refused(samples: list[StepSample], message: str) -> None:
    with pytest.raises(StepTimeError, match=message):
        fit(samples)


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    work = prefill_work(prompt_tokens=5000, cached_tokens=1000, max_num_batched_tokens=2048)
    assert (work.steps, work.prefill_tokens) == (2, 4000)
    assert work.prefill_token_contexts == sum(range(1000, 5000))


def test_every_profile_is_within_a_third_of_each_of_its_figures() -> None:
    for name, found in profiles().items():
        for sample in found.samples:
            fitted = sum(
                factor * value
                for factor, value in zip(
                    dataclasses.astuple(sample.work), dataclasses.astuple(found.step_time), strict=True
                )
            )
            assert fitted == pytest.approx(sample.duration_s, rel=1 / 3), (name, sample)


def test_h100_prefill_has_the_published_shape() -> None:
    """llm-d P2P blog, recompute column: 38 ms per 1,000 tokens at 2k, 31 at 8k to 16k, 40 at 49k."""
    per_1k = [
        1000 * profile("h100-blog").step_time.prefill_s(n, max_num_batched_tokens=8192) / (n / 1000)
        for n in (2048, 8192, 16384, 49152)
    ]
    assert np.allclose(per_1k, [38.1, 30.5, 31.1, 40.4], rtol=0.05)


def test_the_default_profile_queues_at_some_tens_of_requests_a_second_over_four_engines() -> None:
    miss_s = profile("assumed-gpu").step_time.prefill_s(1024)
    hit_s = profile("assumed-gpu").step_time.prefill_s(1024, cached_tokens=1008)
    assert 0.04 < miss_s < 0.15
    assert 20 < 4 / miss_s < 100
    assert hit_s < miss_s / 5
    assert 0.010 < profile("assumed-gpu").step_time.duration_s(decode_sequences=8, context_tokens=8192) < 0.015


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(StepTimeError, match="no step time profile 'h200': choose one of a100-llama-8b"):
        profile("h200")
