"""A5: what an infinite cache, and one LRU cache of a given size, can find in the public traces."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.figures import hit_percent
from benchmarks.simulated import simulate_trace

PUBLISHED: Mapping[str, Mapping[int | None, float]] = {
    "conversation": {None: 36.6, 1_000: 4.5, 5_000: 11.2, 10_000: 21.2, 50_000: 35.5},
    "synthetic": {None: 64.0, 1_000: 8.4, 5_000: 27.9, 10_000: 42.4, 50_000: 64.0},
}
"""Block hit rates in percent by blocks of cache; None: without limit."""
TOLERANCE_POINTS = 0.1


def _run(setting: Setting) -> Finding:
    traces = ("synthetic",) if setting.quick else tuple(PUBLISHED)
    figures, checks = [], []
    for trace in traces:
        ours = {
            blocks: hit_percent(simulate_trace(setting.trace(trace), capacity_blocks=blocks, arrivals="serial"))
            for blocks in PUBLISHED[trace]
        }
        figures.append(f"{trace}: {' / '.join(f'{hits:.2f}' for hits in ours.values())} %")
        furthest = max(abs(ours[blocks] - hits) for blocks, hits in PUBLISHED[trace].items())
        checks.append(Check(f"{trace}: each within {TOLERANCE_POINTS} point", furthest <= TOLERANCE_POINTS))
    return Finding("; ".join(figures), tuple(checks), seeds="none")


CLAIM = Claim(
    id="A5",
    claimed="Hits that one cache can have on the Mooncake traces: without limit, and LRU of 1k, 5k, 10k, 50k blocks",
    source="own count (a report of the trace's authors says up to 50 %)",
    published="conversation: 36.6 / 4.5 / 11.2 / 21.2 / 35.5 %; synthetic: 64.0 / 8.4 / 27.9 / 42.4 / 64.0 %",
    reproduced="one engine, each request served to its end before the next one starts; whole traces",
    run=_run,
    traces=("conversation", "synthetic"),
)
