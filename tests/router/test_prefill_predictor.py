from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwatch.router.policies.flexlb.prefill_predictor import (
    CalibratedPredictor,
    FormulaPredictor,
    LearningPredictor,
    Prefill,
)

INITIAL_MS = {
    ((4096, 0),): 320.4663191451795,
    ((4096, 4096),): 318.51875514828225,
    ((32768, 0),): 357.0390721763423,
    ((2048, 1024),) * 4: 321.42467916473606,
}
LABELLED_MS = {((4096, 0),): 315.2341946914987, ((32768, 0),): 348.46856628900105}
LABELLED_WEIGHTS = [
    -4.42738432604287,
    10.500208701202377,
    1.5043093890711503,
    21.379034191187632,
    0.08945680735428248,
    0.08305932028650383,
    1.429617309598213,
    1.0048830123611967,
    -4.427384326042869,
]
GOLDEN = Path(__file__).parents[3] / "shared" / "design" / "golden" / "routing-vectors.json"


def batch(members: tuple[tuple[int, int], ...]) -> list[Prefill]:
    return [Prefill(*member) for member in members]


@pytest.mark.skipif(not GOLDEN.is_file(), reason=f"the golden vectors are not in {GOLDEN}")
def test_the_vectors_here_are_the_golden_ones() -> None:
    golden = json.loads(GOLDEN.read_text())["flexlb_learning"]
    assert {str(list(members)): ms for members, ms in INITIAL_MS.items()} == golden["predict_init"]
    assert {str(list(members)): ms for members, ms in LABELLED_MS.items()} == golden[
        "after_4_labels_of_200ms_on_4096_0"
    ]
    assert golden["w_after"] == LABELLED_WEIGHTS


@pytest.mark.parametrize(("prompt", "cached", "milliseconds"), [(4096, 0, 4096.0), (4096, 3072, 1945.6)])
def test_the_formula_prices_computed_and_cached_tokens(prompt: int, cached: int, milliseconds: float) -> None:
    predictor = FormulaPredictor()
    predictor.learn([Prefill(prompt, cached)], 1.0)
    assert predictor.predict_ms([Prefill(prompt, cached)]) == pytest.approx(milliseconds, rel=1e-12)


@pytest.mark.parametrize(("members", "milliseconds"), INITIAL_MS.items())
def test_the_learning_predictor_starts_with_flexlbs_weights(
    members: tuple[tuple[int, int], ...], milliseconds: float
) -> None:
    assert LearningPredictor().predict_ms(batch(members)) == pytest.approx(milliseconds, rel=1e-9)


def test_the_learning_predictor_moves_after_every_fourth_label() -> None:
    predictor = LearningPredictor()
    for _ in range(3):
        predictor.learn([Prefill(4096, 0)], 200.0)
    assert predictor.predict_ms([Prefill(4096, 0)]) == pytest.approx(INITIAL_MS[(4096, 0),], rel=1e-12)
    predictor.learn([Prefill(4096, 0)], 200.0)
    assert predictor.weights == pytest.approx(LABELLED_WEIGHTS, rel=1e-9)
    for members, milliseconds in LABELLED_MS.items():
        assert predictor.predict_ms(batch(members)) == pytest.approx(milliseconds, rel=1e-9)


@pytest.mark.parametrize("ms_per_token", [0.05, 0.2, 1.0])
def test_the_learning_predictor_stays_blind_to_the_cache_for_hundreds_of_batches(ms_per_token: float) -> None:
    """F-17: after 200 batches a hit of 7,168 of 8,192 tokens is credited with a few ms of the hundreds it saves."""
    predictor = LearningPredictor()
    for k in range(200):
        member = Prefill(8192, 7168 if k % 2 else 0)
        predictor.learn([member], 20 + ms_per_token * (member.prompt_tokens - member.cached_tokens))
    cold, warm = predictor.predict_ms([Prefill(8192, 0)]), predictor.predict_ms([Prefill(8192, 7168)])
    assert 0 < cold - warm < 0.05 * 7168 * ms_per_token + 5


def test_calibration_recovers_base_tokens_and_attention() -> None:
    true = CalibratedPredictor(base_ms=12.0, ms_per_token=0.08, ms_per_token_context=2e-6)
    rows = [(p, c, true.predict_ms([Prefill(p, c)])) for p in (512, 4096, 32_768) for c in (0, p // 2, p - 16)]
    fitted = CalibratedPredictor.fit(rows)
    assert fitted.base_ms == pytest.approx(12.0, rel=1e-6)
    assert fitted.ms_per_token == pytest.approx(0.08, rel=1e-6)
    assert fitted.ms_per_token_context == pytest.approx(2e-6, rel=1e-6)


def test_calibration_never_goes_below_zero() -> None:
    fitted = CalibratedPredictor.fit([(1000, 0, 100.0), (2000, 0, 190.0), (4000, 0, 340.0)])
    assert min(fitted.base_ms, fitted.ms_per_token, fitted.ms_per_token_context) >= 0
    assert fitted.predict_ms([Prefill(2000, 0)]) == pytest.approx(190.0, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([(1000, 0, 100.0)], "at least 2 measured times above 0 ms, got 1"),
        ([(1000, 0, 100.0), (2000, 0, 0.0)], "above 0 ms"),
        ([(1000, 0, 100.0), (2000, 1000, 100.0)], "same number of tokens"),
    ],
)
def test_a_calibration_that_says_too_little_is_refused(rows: list[tuple[int, int, float]], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        CalibratedPredictor.fit(rows)
