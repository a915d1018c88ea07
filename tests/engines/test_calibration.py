"""A step time is found again from the requests that it served, and what doesn't fit is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwatch.engines.model.calibration import Calibration, Served, calibrate
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.hardware import as_yaml
from prefixwatch.engines.model.profiles import profile
from prefixwatch.engines.model.sequence import SimRequest
from prefixwatch.engines.model.step_time import StepTime, StepTimeError
from prefixwatch.simulator.event_engine import EventEngine

TRUE = StepTime(0.004, 2e-5, 2e-9, 1e-3, 2e-4, 2e-7)
BUDGET = 2048
BATCHES = (1, 1, 2, 4, 8)
LENGTHS = (64, 200, 500, 900, 1500, 3000, 5000)


def serve(step_time: StepTime = TRUE) -> list[Served]:
    """Prompts one after another, then batches that arrive together; on an idle engine each time."""
    engine, found, now_s = EventEngine(EngineConfig(step_time, max_num_batched_tokens=BUDGET)), [], 0.0
    for prompts in ([[tokens] for tokens in LENGTHS * 2], [[64] * batch for batch in BATCHES * 2]):
        for together in prompts:
            sent = [engine.submit(SimRequest(f"{now_s}-{k}", [], n, 40), now_s) for k, n in enumerate(together)]
            begun_s = now_s
            while engine.begin(now_s):
                now_s = engine.ends_s
                engine.end(now_s)
            for each in sent:
                assert each.first_token_s is not None
                found.append(Served("w", begun_s, each.first_token_s, now_s, each.prompt_tokens, 0, 40))
            now_s += 1.0
    return found


@pytest.fixture(scope="module")
def fitted() -> Calibration:
    return calibrate(serve(), BUDGET)


def test_the_step_time_is_found_again(fitted: Calibration) -> None:
    for tokens in (100, 1000, 6000):
        assert fitted.step_time.prefill_s(tokens, 0, BUDGET) == pytest.approx(
            TRUE.prefill_s(tokens, 0, BUDGET), rel=0.02
        )
    for batch in (1, 4, 8):
        work = {"decode_sequences": batch, "context_tokens": batch * 300}
        assert fitted.step_time.duration_s(**work) == pytest.approx(TRUE.duration_s(**work), rel=0.02)
    assert fitted.poor == []
    low, high = fitted.intervals["per_prefill_token_s"]
    assert low <= TRUE.per_prefill_token_s * 1.02
    assert high >= TRUE.per_prefill_token_s * 0.98


def test_a_profile_file_of_it_simulates_the_same(fitted: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "fitted.yaml"
    file.write_text(as_yaml(fitted.profile("a test", BUDGET, 16, None)))

    read = profile(str(file))

    assert read.capacity_blocks is None
    assert read.step_time.prefill_s(3000, 0, BUDGET) == pytest.approx(TRUE.prefill_s(3000, 0, BUDGET), rel=0.03)
    step_s = read.step_time.duration_s(decode_sequences=6, context_tokens=1800)
    assert step_s == pytest.approx(TRUE.duration_s(decode_sequences=6, context_tokens=1800), rel=0.03)


def test_what_does_not_fit_is_named() -> None:
    """Prompts of a middle length that take six times as long as the others suggest."""
    slow = [
        replace(each, first_token_s=each.sent_s + 6 * (each.first_token_s - each.sent_s))
        if each.prompt_tokens in {500, 900}
        else each
        for each in serve()
    ]
    assert calibrate(slow, BUDGET).poor != []


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "0 first tokens of requests that were alone on their engine, and at least 8 are needed: send some"),
        (
            [Served("w", float(k), k + 0.1, k + 0.1, 100 + k, 0, 1) for k in range(9)],
            "0 generations that no other prompt disturbed, and at least 8 are needed: ask for longer answers",
        ),
        ([Served("w", 0.0, 0.1, 0.9, 100, 0, 5) for _ in range(20)], "0 first tokens"),
    ],
)
def test_too_little_is_refused(requests: Sequence[Served], said: str) -> None:
    with pytest.raises(StepTimeError, match=said):
        calibrate(requests, BUDGET)
