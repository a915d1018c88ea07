"""Terms of policies that are about memory and objectives decide where engines' memories are unlike."""

from __future__ import annotations

from benchmarks.claims.figures import ttft_s
from benchmarks.memory_term import FLEETS, good_share, run


def test_where_memories_are_unlike_the_memory_term_serves_more_requests_in_time() -> None:
    without = run("score", FLEETS["unlike"], seed=2)
    within = run("score{kv_capacity_tokens=auto}", FLEETS["unlike"], seed=2)
    assert good_share(within) > good_share(without) + 0.05
    small = [sum(r.worker in ("worker-0", "worker-1") for r in each.records) for each in (without, within)]
    assert small[1] < small[0], "the smaller engines get fewer requests"


def test_flexlbs_wait_by_the_objective_has_a_shorter_tail_than_its_fixed_window() -> None:
    fixed = run("flexlb_formula", FLEETS["unlike"], seed=2)
    by_objective = run("flexlb_formula{batcher=slo_budget}", FLEETS["unlike"], seed=2)
    assert ttft_s(by_objective.records, 95) < ttft_s(fixed.records, 95)
