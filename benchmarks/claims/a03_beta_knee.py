"""A3: load-aware routing doubles round robin's hits on a real trace, and too large a weight of load costs hits."""

from __future__ import annotations

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.conversation_fleet import FLEET, replay
from benchmarks.claims.figures import hit_percent


def _run(setting: Setting) -> Finding:
    limit = 1500 if setting.quick else None

    def hits(trace: str, beta: float | None) -> float:
        return hit_percent(replay(setting.trace(trace), limit, beta))

    blind, small, large = (hits("conversation", beta) for beta in (None, 0.05, 2.0))
    synthetic = {beta: hits("synthetic", beta) for beta in (None, 0.0, 0.05, 1.0, 2.0)}
    return Finding(
        figures=f"conversation: round robin {blind:.1f}, beta 0.05 {small:.1f}, beta 2 {large:.1f} %; synthetic: "
        f"round robin {synthetic[None]:.1f}, beta 0 {synthetic[0.0]:.1f}, 0.05 {synthetic[0.05]:.1f}, "
        f"1 {synthetic[1.0]:.1f}, 2 {synthetic[2.0]:.1f} %",
        checks=(
            Check("conversation: beta 0.05 has at least 1.9 times round robin's hits", small >= 1.9 * blind),
            Check("conversation: beta 2 lies between the two", blind < large < small),
            Check("synthetic: beta 0.05 keeps cache-only's hits within 1 point", synthetic[0.05] > synthetic[0.0] - 1),
            Check(
                "synthetic: beta 1 and 2 cost more and more hits, and stay above round robin",
                synthetic[0.05] - 5 > synthetic[1.0] > synthetic[2.0] > synthetic[None],
            ),
        ),
        seeds="policy 0",
    )


CLAIM = Claim(
    id="A3",
    claimed="On a real trace load-aware routing doubles round robin's hits; too large a beta costs hits",
    source="own measurement on the Mooncake conversation and synthetic traces",
    published="conversation: round robin 17.25, beta 0.05 35.5, beta 2 31.6 %; synthetic: 34.2, beta 0 64.0, 0.05 "
    "63.9, 1 54.8, 2 49.1 %",
    reproduced=f"loadaware and round_robin; {FLEET}",
    run=_run,
    traces=("conversation", "synthetic"),
)
