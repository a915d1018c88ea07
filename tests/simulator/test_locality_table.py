"""Each knob moves its own dimension of locality, by as much as the definition says."""

from __future__ import annotations

import pytest

from benchmarks.locality import Turn, changed, run, sessions_of, turns

SEED = 0


@pytest.mark.parametrize(
    "turn", turns(changed({}), sessions_of(SEED)), ids=lambda turn: f"{turn.dimension}, {turn.knob}"
)
def test_a_knob_moves_its_dimension_by_the_expected_amount(turn: Turn) -> None:
    assert run(turn, SEED).locality[turn.dimension] == pytest.approx(turn.expected, abs=0.05)
