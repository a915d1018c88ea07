"""A14: KV that is stored 3.5 times smaller comes over a slow link sooner than a long context is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.simulator.caches.fleet import simulate_caches
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest

CONTEXTS = 60
SECONDS = 20.0
"""Between requests: nothing ever queues."""
ENGINE = EngineConfig(StepTime(base_s=0.03, per_prefill_token_s=1 / 3_000), capacity_blocks=1_100)
"""Fits one context: the next one's question finds nothing in the GPU."""
LINK = {"architecture": "shared", "link_gbit_per_second": 3.0, "latency_ms": 5.0}


def _run(setting: Setting) -> Finding:
    requests = _questions(12 if setting.quick else CONTEXTS)
    text = simulate_requests(requests, policy="round_robin", workers=1, engine=ENGINE, arrivals="trace")
    plain, packed, fast = (
        simulate_caches(requests, Cache.model_validate({**LINK, **more}), policy="round_robin", engines=[ENGINE])
        for more in ({}, {"compression": 3.5}, {"link_gbit_per_second": 30.0})
    )
    computed_s, packed_s = _ttfts(text), _ttfts(packed)
    falls = 1 - packed_s / computed_s
    plain_fall, fast_fall = (float(np.mean(1 - _ttfts(result) / computed_s)) for result in (plain, fast))
    return Finding(
        figures=f"TTFT {np.mean(computed_s):.2f} → {np.mean(packed_s):.2f} s (−{100 * falls.min():.0f} … "
        f"−{100 * falls.max():.0f} %) at 3 Gbit/s and 3.5 : 1; as it is −{100 * plain_fall:.0f} %, at 30 Gbit/s "
        f"−{100 * fast_fall:.0f} %",
        checks=(
            Check("compressed: every context's TTFT falls by at least half", float(falls.min()) > 0.5),
            Check("uncompressed at 3 Gbit/s: the mean falls by less than a tenth", abs(plain_fall) < 0.1),
            Check("uncompressed over a link ten times as fast it falls by at least half", fast_fall > 0.5),
        ),
        seeds="traffic 0",
        remark="No time to decompress, and no loss of quality. The prefill rate is assumed: the faster the engine, the "
        "less there is to gain.",
    )


def _questions(contexts: int) -> list[SimulatedRequest]:
    """Each context once, and later again with another question: the second times are the ones that count."""
    lengths = np.random.default_rng(0).integers(6_000, 16_000, contexts) // 16
    first = [session_requests(1, 1, system_blocks=int(n), turn_blocks=2, seed=k)[0] for k, n in enumerate(lengths)]
    rounds = [replace(request, id=f"{turn}-{k}") for turn in range(2) for k, request in enumerate(first)]
    return [replace(request, arrival_s=SECONDS * k) for k, request in enumerate(rounds)]


def _ttfts(result: SimulationResult) -> np.ndarray:
    """Of the second round, seconds."""
    again = result.records[len(result.records) // 2 :]
    return np.array([record.ttft_s for record in again], dtype=float)


CLAIM = Claim(
    id="A14",
    claimed="Compressed KV over a slow link beats computing a long context",
    source="CacheGen (SIGCOMM'24), abstract; the TTFT is secondhand",
    published="3.5 to 4.3 times smaller; at 3 Gbit/s TTFT −68 to −79 % against computing the text",
    reproduced=f"one engine, assumed to prefill 3,000 tokens/s; {CONTEXTS} contexts of 6,000 to 16,000 tokens, KV of "
    "131,072 bytes a token (8B), each asked for twice, from a store at 3 Gbit/s the second time",
    run=_run,
)
