"""How long one routing decision takes: hash the prompt, look its blocks up, choose. Tokenising is timed apart.

    python -m benchmarks.router_decision [--policies a,b | all] [--workers 8,64,256] [--tokens 4096,32768] [--json]

Prompts arrive as token arrays (32,768 tokens are 2,048 blocks of 16). The index is filled as a fleet's would be: a
system prompt that every worker holds, and conversations, each held by a few workers to different depths, several
hundred thousand blocks in all. Every prompt opens with the system prompt; most continue a known conversation.
Policies with a memory of their own are first shown conversations to fill it. Beside the decision stands what the
policy then does when the request is sent (`admit`), where several of them learn.

Every figure is also a ratio to round robin's decision in the same run, which looks at nothing. `cache_aware
(walk)` is cache_aware with the block-by-block lookup that the bisection is audited against. Garbage collection is
frozen after set-up, as in the live router. Beside the wall clock stands the thread's own CPU time, which a busy
machine doesn't spoil. Growth is the exponent e of cost ~ size^e between two sizes: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from prefixwatch.engines.tiny_model import make_tiny_model, words
from prefixwatch.kvcache.blocks import Hashes, Tokens, block_hashes
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.policies import POLICIES, make_policy
from prefixwatch.router.policy import NO_TOKENS, Fleet, LoadReport, Policy, RouteRequest, Worker

TEXT_TOKENS = 32_768
BLOCK_SIZE = 16
SYSTEM_SHARE = 8
"""The system prompt is one part in this many of each prompt."""
CONVERSATIONS = 240
HOLDERS = 3
BASELINE = "round_robin"
QUICK = (BASELINE, "prefix_hash", "cache_aware", "score", "cache_aware (walk)")
ALL = (*(name for name, policy in POLICIES.items() if not policy.needs.truth), "cache_aware (walk)")
AIM_P99_US, AIM_WORKERS = 100.0, 64
WARM_UP = 50
STEEP = 1.3
"""Growth above this is marked: clearly more than linear."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One policy at one fleet size and prompt length, microseconds."""

    policy: str
    workers: int
    prompt_tokens: int
    p50_us: float
    p95_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    admit_p50_us: float
    ratio_to_baseline: float
    """Of the medians."""

    @property
    def meets_aim(self) -> bool | None:
        """Whether the p99 is below the aim; None at a fleet size that the aim isn't for."""
        return self.p99_us < AIM_P99_US if self.workers == AIM_WORKERS else None


@dataclass(frozen=True, slots=True)
class Growth:
    """How a policy's median CPU time grows: the steepest exponent between neighbouring sizes, None with one size."""

    policy: str
    of_workers: float | None
    of_tokens: float | None

    @property
    def steep(self) -> bool:
        return max(self.of_workers or 0.0, self.of_tokens or 0.0) > STEEP


@dataclass(frozen=True, slots=True)
class Traffic:
    """A filled index and prompts that meet it."""

    index: BlockIndex
    prompts: list[Tokens]


def make_traffic(workers: int, prompt_tokens: int, decisions: int, rng: np.random.Generator) -> Traffic:
    """An index of `workers` workers and `decisions` prompts, most of which continue a conversation it holds."""
    index = BlockIndex()
    names = [f"worker-{k}" for k in range(workers)]
    system = _tokens(rng, prompt_tokens // SYSTEM_SHARE)
    for name in names:
        index.store(name, block_hashes(system).tolist())
    conversations = [np.concatenate([system, _tokens(rng, prompt_tokens - len(system))]) for _ in range(CONVERSATIONS)]
    for conversation in conversations:
        hashes = block_hashes(conversation)
        for name in rng.choice(names, HOLDERS, replace=False):
            index.store(str(name), hashes[: rng.integers(len(hashes) // 2, len(hashes) + 1)].tolist())
    return Traffic(index, [_prompt(conversations, system, prompt_tokens, rng) for _ in range(decisions)])


def measure(cases: Sequence[str], workers: int, prompt_tokens: int, decisions: int, seed: int = 1) -> list[Timing]:
    """Every case at this size, on the same prompts; cases take turns, so that noise falls on all alike."""
    traffic = make_traffic(workers, prompt_tokens, decisions, np.random.default_rng(seed))
    report = LoadReport(0.0, running=3, waiting=1, kv_usage_ratio=0.5)
    fleet = [Worker(f"worker-{k}", k % 7, 997 * (k % 5), report=report) for k in range(workers)]
    deciders = {case: _decider(case, traffic.index, fleet) for case in cases}
    for decide in deciders.values():
        for k in range(WARM_UP):
            decide(traffic.prompts[k % decisions], k)
    gc.collect()
    gc.freeze()
    samples: dict[str, list[_Sample]] = {case: [] for case in cases}
    for k in range(decisions):
        for position, (case, decide) in enumerate(deciders.items()):
            other = (k + position * decisions // len(cases)) % decisions  # blocks that no other case has just looked up
            prompt = traffic.prompts[other].copy()  # just written, as a tokenizer leaves it
            samples[case].append(decide(prompt, WARM_UP + k))
    gc.unfreeze()
    baseline_us = float(np.median([wall for wall, _, _ in samples[BASELINE]])) / 1000
    return [_timing(case, workers, prompt_tokens, samples[case], baseline_us) for case in cases]


def growths(timings: Sequence[Timing]) -> list[Growth]:
    """One a policy, in the order of the timings."""
    return [
        Growth(
            policy,
            of_workers=_steepest([(t.prompt_tokens, t.workers, t.cpu_p50_us) for t in timings if t.policy == policy]),
            of_tokens=_steepest([(t.workers, t.prompt_tokens, t.cpu_p50_us) for t in timings if t.policy == policy]),
        )
        for policy in dict.fromkeys(timing.policy for timing in timings)
    ]


def tokenise_ms(repeats: int = 5) -> float:
    """Median milliseconds to turn a text of about TEXT_TOKENS tokens into ids, by the built-in tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(make_tiny_model(Path(folder) / "model"))
    text = " ".join(random.Random(1).choices(words(), k=TEXT_TOKENS))
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        tokenizer.encode(text)
        times.append((time.perf_counter_ns() - start) / 1e6)
    return float(np.median(times))


_Sample = tuple[int, int, int]
"""Nanoseconds: wall and CPU of the decision, wall of `on_admit`."""


def _decider(case: str, index: BlockIndex, workers: Sequence[Worker]) -> Callable[[Tokens, int], _Sample]:
    policy: Policy = make_policy(case.removesuffix(" (walk)"))
    depths = index.depths_by_walk if case.endswith("(walk)") else index.depths
    needs = policy.needs

    def lookup(request: RouteRequest) -> Mapping[str, int]:
        return depths(request.blocks)

    def decide(prompt: Tokens, number: int) -> _Sample:
        cpu, start = time.thread_time_ns(), time.perf_counter_ns()
        blocks = block_hashes(prompt, BLOCK_SIZE) if needs.cache_view else _NO_BLOCKS
        tokens = prompt if needs.tokens or needs.text else NO_TOKENS
        request = RouteRequest(str(number), len(prompt), tokens, blocks, BLOCK_SIZE)
        now_s = 0.1 * number
        decision = policy.choose(request, Fleet(workers, lookup, now_s))
        wall, cpu = time.perf_counter_ns() - start, time.thread_time_ns() - cpu
        start = time.perf_counter_ns()
        policy.on_admit(request, decision.worker, now_s)
        admit = time.perf_counter_ns() - start
        policy.on_first_token(request, decision.worker, now_s)
        policy.on_end(request, decision.worker, now_s)
        return wall, cpu, admit

    return decide


def _prompt(conversations: Sequence[Tokens], system: Tokens, prompt_tokens: int, rng: np.random.Generator) -> Tokens:
    """A later turn of a known conversation (7 in 10), the system prompt and news (2 in 10), or all news."""
    kind = rng.random()
    if kind < 0.7:
        known = conversations[int(rng.integers(len(conversations)))]
        kept = int(rng.integers(len(known) // 2, len(known) + 1))
        return np.concatenate([known[:kept], _tokens(rng, prompt_tokens - kept)])
    if kind < 0.9:
        return np.concatenate([system, _tokens(rng, prompt_tokens - len(system))])
    return _tokens(rng, prompt_tokens)


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, 128_000, count, dtype=np.uint32)


def _timing(case: str, workers: int, prompt_tokens: int, samples: Sequence[_Sample], baseline_us: float) -> Timing:
    percentiles = np.percentile(samples, (50, 95, 99), axis=0) / 1000
    (p50, cpu_p50, admit_p50), (p95, _, _), (p99, cpu_p99, _) = percentiles.tolist()
    return Timing(
        policy=case,
        workers=workers,
        prompt_tokens=prompt_tokens,
        p50_us=round(p50, 1),
        p95_us=round(p95, 1),
        p99_us=round(p99, 1),
        cpu_p50_us=round(cpu_p50, 1),
        cpu_p99_us=round(cpu_p99, 1),
        admit_p50_us=round(admit_p50, 1),
        ratio_to_baseline=round(p50 / baseline_us, 2),
    )


def _steepest(costs: Sequence[tuple[int, int, float]]) -> float | None:
    """The steepest growth over size of these (what is held equal, size, microseconds)."""
    exponents = [
        math.log(large_us / small_us) / math.log(large / small)
        for (held, small, small_us), (also_held, large, large_us) in itertools.pairwise(sorted(costs))
        if held == also_held
    ]
    return round(max(exponents), 2) if exponents else None


def _print(timings: Sequence[Timing]) -> None:
    print(f"Tokenising about {TEXT_TOKENS} tokens of text: {tokenise_ms():.1f} ms, not part of what follows")
    print(f"Decision from a token array, µs; ratio of medians to {BASELINE}; aim: p99 below {AIM_P99_US:g} µs")
    print(
        f"{'policy':<20}{'workers':>8}{'tokens':>8}{'p50':>9}{'p95':>9}{'p99':>9}{'CPU p50':>9}{'CPU p99':>9}"
        f"{'admit':>9}{'ratio':>8}  aim"
    )
    for t in timings:
        aim = {True: "met", False: "missed", None: ""}[t.meets_aim]
        print(
            f"{t.policy:<20}{t.workers:>8}{t.prompt_tokens:>8}{t.p50_us:>9}{t.p95_us:>9}{t.p99_us:>9}{t.cpu_p50_us:>9}"
            f"{t.cpu_p99_us:>9}{t.admit_p50_us:>9}{t.ratio_to_baseline:>8}  {aim}"
        )
    print(f"\n{'growth of CPU p50':<20}{'workers':>9}{'tokens':>8}   1: linear, 2: quadratic")
    for growth in growths(timings):
        exponents = [("-" if value is None else f"{value:.2f}") for value in (growth.of_workers, growth.of_tokens)]
        print(f"{growth.policy:<20}{exponents[0]:>9}{exponents[1]:>8}{'   more than linear' if growth.steep else ''}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policies", default=",".join(QUICK), help="comma-separated, or 'all' (default: %(default)s)")
    parser.add_argument("--decisions", type=int, default=400, help="decisions timed for each policy and size")
    parser.add_argument("--workers", default="8,64,256", help="fleet sizes, comma-separated")
    parser.add_argument("--tokens", default="4096,32768", help="prompt lengths, comma-separated")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    cases = ALL if arguments.policies == "all" else arguments.policies.split(",")
    for case in cases:
        if case not in ALL:
            parser.error(f"no decision of '{case}' can be timed; known: {', '.join(ALL)}")
    arguments.policies = [BASELINE, *(case for case in cases if case != BASELINE)]
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    sizes = [
        (workers, tokens)
        for tokens in map(int, arguments.tokens.split(","))
        for workers in map(int, arguments.workers.split(","))
    ]
    timings = [timing for size in sizes for timing in measure(arguments.policies, *size, arguments.decisions)]
    if arguments.json:
        figures = {
            "tokenise_ms": tokenise_ms(),
            "decisions": [asdict(timing) for timing in timings],
            "growth": [asdict(growth) for growth in growths(timings)],
        }
        print(json.dumps(figures, indent=2))
    else:
        _print(timings)


_NO_BLOCKS: Hashes = np.empty(0, dtype=np.uint64)


if __name__ == "__main__":
    main()
