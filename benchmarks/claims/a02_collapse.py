"""A2: cache-only placement can put a whole fleet on one worker."""

from __future__ import annotations

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.conversation_fleet import FLEET, replay
from benchmarks.claims.figures import hit_percent, ttft_s

BETAS = (0.05, 2.0)


def _run(setting: Setting) -> Finding:
    trace, limit = setting.trace("conversation"), 1500 if setting.quick else None
    only = replay(trace, limit, 0.0)
    weighed = {beta: replay(trace, limit, beta) for beta in BETAS}
    wait_s = ttft_s(only.records, 50)
    shares = {beta: result.busiest_share for beta, result in weighed.items()}
    waits_s = {beta: ttft_s(result.records, 50) for beta, result in weighed.items()}
    others = "; ".join(
        f"beta {beta:g}: share {shares[beta]:.2f}, TTFT p50 {waits_s[beta]:.2f} s, hits {hit_percent(result):.1f} %"
        for beta, result in weighed.items()
    )
    return Finding(
        figures=f"cache only: share {only.busiest_share:.3f}, TTFT p50 {wait_s:.0f} s, hits {hit_percent(only):.1f} %; "
        + others,
        checks=(
            Check("cache only: busiest worker's share above 0.9", only.busiest_share > 0.9),
            Check("beta 0.05 and 2: share below 0.3", max(shares.values()) < 0.3),
            Check("cache only waits more than 100 times as long (TTFT p50)", wait_s > 100 * max(waits_s.values())),
        ),
        seeds="policy 0",
    )


CLAIM = Claim(
    id="A2",
    claimed="Cache-only placement can put a whole fleet on one worker",
    source="own measurement on the Mooncake conversation trace, whose requests all start with one block (RT40)",
    published="share 1.00, TTFT p50 546 s and 23.5 % hits against 0.63 s and 35.5 % with beta 0.05",
    reproduced=f"loadaware with beta 0, {' and '.join(f'{beta:g}' for beta in BETAS)}; {FLEET}",
    run=_run,
    traces=("conversation",),
)
