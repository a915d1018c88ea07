"""Score with a target and a cap for the copies of an opening."""

from __future__ import annotations

import pytest

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.reuse.grade import grade_reuse
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.fleet import FleetSimulation

ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 8000), block_size=64, capacity_blocks=5000)
WORKLOAD = SharedPrefixWorkload(
    requests=400, rate_per_second=12, groups=4, zipf_exponent=1.0, shared_blocks=20, unique_blocks=2,
    output_tokens=8, block_size=64,
)  # fmt: skip


def copies(**options: int) -> tuple[int, float]:
    """The most workers that a group was served by, and the graded mean."""
    policy = make_policy("score", options={"copies_blocks": 20, **options})
    result = FleetSimulation([policy], ENGINE, 4).run(shared_prefix_requests(WORKLOAD, seed=1))
    served: dict[str, set[str]] = {}
    for record in result.records:
        served.setdefault(record.group, set()).add(record.worker)
    reuse = grade_reuse(Measured(Columns.of(result.records)))
    assert reuse is not None
    assert reuse.copies_mean is not None
    return max(map(len, served.values())), reuse.copies_mean


def test_a_cap_keeps_an_opening_at_few_workers_and_a_target_spreads_it() -> None:
    assert copies(copies_cap=1) == (1, 1.0)
    most, mean = copies(copies_cap=2)
    assert most <= 2
    free = copies()[1]
    assert mean <= free <= copies(copies_target=4)[1]
    assert copies(copies_target=4)[0] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies_cap": 0}, "option copies_cap is 0: give a number from 1 to"),
        ({"copies_blocks": 0}, "option copies_blocks is 0: give a number from 1 to"),
        ({"copies_cap": 2, "copies_target": 3}, "copies_target 3 exceeds copies_cap 2"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy("score", options=options)
