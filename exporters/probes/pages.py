"""What the probes found, for the metrics page and the fleet API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.rows import histograms, rows
from prefixwatch.exporters.probes.config import ProbeTarget
from prefixwatch.exporters.probes.findings import Findings, Pair
from prefixwatch.exporters.probes.plan import TargetPlan, TokenBudget
from prefixwatch.exporters.probes.prefill_baseline import PrefillBaseline, PrefillBaselines
from prefixwatch.exporters.probes.request import ProbeAnswer
from prefixwatch.exporters.requests.tally import Distribution
from prefixwatch.slo.buckets import LATENCY_SECONDS


@dataclass(slots=True)
class TargetState:
    """What is known of one probed target."""

    config: ProbeTarget
    plan: TargetPlan
    budget: TokenBudget
    findings: Findings
    outcomes: Counter[str] = field(default_factory=Counter)
    canaries: Counter[str] = field(default_factory=Counter)
    """By result: `miss` (kept apart) or `hit`."""
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Sent and found cached, by model and kind."""
    rounds: int = 0
    model: str = ""
    last: Pair | None = None
    ttft: dict[str, Distribution] = field(default_factory=dict)
    """Times to first token of `cold` prompts and of their `repeat`."""
    paused: str = ""
    """Why the round that was due wasn't sent."""
    problem: str = ""
    """What was wrong with the last round's probe that failed."""

    def learn(self, pair: Pair, baseline: PrefillBaseline) -> None:
        """A cold prompt and its repeat were answered. One that wasn't cold after all says nothing about misses."""
        self.last = pair
        self.findings.add(pair)
        cold, repeat = pair.cold, pair.repeat
        if pair.was_cold and cold.ttft_seconds is not None:
            self._observe("cold", cold.ttft_seconds)
            if cold.prompt_tokens:
                baseline.add(self.config.name, cold.prompt_tokens - (cold.cached_tokens or 0), cold.ttft_seconds)
        if repeat.ttft_seconds is not None:
            self._observe("repeat", repeat.ttft_seconds)

    def spend(self, answer: ProbeAnswer, *, repeat: bool = False) -> None:
        """A probe was answered: its tokens are among those that the engine counts. A repeat hits by construction."""
        if answer.outcome != "completed":
            return
        prompt, cached = answer.prompt_tokens or 0, answer.cached_tokens
        self.tokens[self.model, "prompt"] += prompt
        self.tokens[self.model, "cached"] += (prompt if repeat else 0) if cached is None else cached

    def _observe(self, temperature: str, seconds: float) -> None:
        self.ttft.setdefault(temperature, Distribution(LATENCY_SECONDS)).observe(seconds)


def probe_families(targets: Iterable[TargetState], baselines: PrefillBaselines) -> list[Metric]:
    """Every family of the group `probes`, and the baseline."""
    ttft, requests = histograms("probe_ttft_seconds"), rows("probe_requests")
    cached, prompt = rows("probe_cached_tokens"), rows("probe_prompt_tokens")
    canaries, findings = rows("probe_canaries"), rows("probe_finding")
    sent = rows("probe_tokens")
    by_length = rows("cold_prefill_baseline_seconds")
    for state in targets:
        name, pair = state.config.name, state.last
        for temperature, distribution in state.ttft.items():
            distribution.add_to(ttft, [name, temperature])
        for outcome, count in state.outcomes.items():
            requests.add_metric([name, outcome], count)
        for (model, kind), count in state.tokens.items():
            sent.add_metric([name, model, kind], count)
        for result, count in state.canaries.items():
            canaries.add_metric([name, result], count)
        if pair is not None:
            for temperature, tokens in (("cold", pair.cold_tokens), ("repeat", pair.repeat.cached_tokens)):
                if tokens is not None:
                    cached.add_metric([name, temperature], tokens)
            if pair.cold.prompt_tokens is not None:
                prompt.add_metric([name], pair.cold.prompt_tokens)
        for finding, found in state.findings.flags().items():
            findings.add_metric([name, finding], float(found))
    for (model, length), estimate in baselines.estimates().items():
        by_length.add_metric([model, length], estimate.seconds)
    return [ttft, requests, sent, cached, prompt, canaries, findings, by_length]


def probe_document(
    targets: Iterable[TargetState], baselines: PrefillBaselines, now_seconds: float
) -> Mapping[str, Any]:
    """The section `probes`: by target, and the baseline with how sure it is."""
    return {
        "targets": {state.config.name: _target(state, now_seconds) for state in targets},
        "cold_prefill_baseline": [
            {"model": model, "length": length, **asdict(estimate)}
            for (model, length), estimate in baselines.estimates().items()
        ],
        "absent": {} if baselines.estimates() else {"cold_prefill_baseline": "no cold probe was answered yet"},
    }


def _target(state: TargetState, now_seconds: float) -> Mapping[str, Any]:
    pair = state.last
    found: dict[str, Any] = {
        "outcomes": dict(state.outcomes),
        "canaries": dict(state.canaries),
        "findings": state.findings.flags(),
        "prompt_lengths": list(state.plan.lengths),
        "next_round_in_seconds": max(0.0, state.plan.due_seconds - now_seconds),
        "tokens_last_minute": state.budget.spent(now_seconds),
    }
    if pair is not None:
        found["last"] = {"cold": asdict(pair.cold), "repeat": asdict(pair.repeat)}
    if both := state.findings.counted_hits.both:
        found["hits"] = {"reported_tokens": both[0], "counted_tokens": both[1]}
    if state.paused:
        found["paused"] = state.paused
    if state.problem:
        found["problem"] = state.problem
    return found
