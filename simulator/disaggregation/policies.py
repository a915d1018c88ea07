"""Prefill and decode apart: a prompt is computed on one worker, its KV moves, and another generates the answer.

Each side is a fleet of its own with a policy of its own, scored by that side's signals alone: the prefill policy sees
what prefill workers cache and owe, the decode policy sees the decode workers' KV and running requests. Both workers
are chosen when the request arrives, as FlexLB's master and Mooncake's Conductor do it; the decode side books the
request from then on, so that it counts while the prompt is still being computed.

Conditional disaggregation (NVIDIA Dynamo 1.6.1): the decode worker computes the prompt itself where little of it is to
be computed there, uncached tokens < 2,048 and uncached tokens / prompt tokens < 0.7. Such a request takes no prefill
worker and moves nothing.

Far prefill (Prefill-as-a-Service): with a rate of the link, transfers take turns on it, for tokens / rate each.

Moving KV takes base + tokens · per token. Defaults: 26 ms + 4.2 µs a token, the line through the end points of llm-d's
published times of pulling KV from a peer (2,048 tokens: 35 ms; 49,152 tokens: 235 ms).

Pure, for the simulator (`simulator.disaggregation.fleet`): the live router proxies engines that serve whole requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixwatch.kvcache.transfer_link import Wire
from prefixwatch.router.policy import Decision, Fleet, Policy, RouteRequest


@dataclass(frozen=True, slots=True)
class DisaggregationOptions:
    """When prefill stays on the decode worker, and what moving KV costs."""

    conditional: bool = False
    local_below_tokens: int = 2048
    local_below_ratio: float = 0.7
    transfer_base_seconds: float = 0.026
    transfer_seconds_per_token: float = 4.2e-6
    link_tokens_per_second: float | None = None
    """What the one link from a far prefill side carries of KV, one transfer at a time. None: each has its own."""

    def stays_local(self, prompt_tokens: int, cached_tokens: int) -> bool:
        """Whether a decode worker that holds so much of a prompt computes the rest itself."""
        uncached = prompt_tokens - cached_tokens
        return (
            self.conditional
            and uncached < self.local_below_tokens
            and uncached < self.local_below_ratio * prompt_tokens
        )

    def transfer_seconds(self, tokens: int) -> float:
        """Time to move the KV of a number of tokens; no tokens take no time."""
        return self.transfer_base_seconds + self.transfer_seconds_per_token * tokens if tokens else 0.0

    def wire(self) -> Wire:
        """The shared link, where one token counts as a byte; nothing queues for it where no rate is given."""
        rate = self.link_tokens_per_second
        return Wire(rate * 8 / 1e9 if rate else None)


@dataclass(frozen=True, slots=True)
class Split:
    """Where a request's two halves go; `prefill` None: the decode worker computes the prompt."""

    prefill: Decision | None
    decode: Decision
    decode_hit_blocks: int | None
    """Leading blocks believed to be at the decode worker; None where nobody looked."""


class Disaggregated:
    """Two policies, each of which sees only its own side."""

    def __init__(self, prefill: Policy, decode: Policy, options: DisaggregationOptions | None = None) -> None:
        self.prefill = prefill
        self.decode = decode
        self.options = options or DisaggregationOptions()

    @property
    def looks_at_decode_caches(self) -> bool:
        """Whether the decode side's fleet is asked what it holds."""
        return self.options.conditional or self.decode.needs.cache_view

    def choose(self, request: RouteRequest, prefill_fleet: Fleet, decode_fleet: Fleet) -> Split:
        """A worker of each side; the prefill policy isn't asked where the prompt stays with the decode worker.

        Raises NoWorkers where a side has none for the request.
        """
        decode = self.decode.choose(request, decode_fleet)
        held = None
        if self.decode.needs.cache_view:
            held = decode.hit_blocks
        elif self.options.conditional:
            held = decode_fleet.lookup(request).get(decode.worker, 0)
        cached_tokens = min((held or 0) * request.block_size, request.prompt_tokens)
        if self.options.stays_local(request.prompt_tokens, cached_tokens):
            return Split(None, decode, held)
        return Split(self.prefill.choose(request, prefill_fleet), decode, held)

    def on_admit(self, request: RouteRequest, split: Split, now_seconds: float) -> None:
        """The request is on its way to the prefill worker, if it has one, and expected at the decode worker."""
        if split.prefill is not None:
            self.prefill.on_admit(request, split.prefill.worker, now_seconds)
        self.decode.on_admit(request, split.decode.worker, now_seconds)

    def on_prefilled(self, request: RouteRequest, split: Split, now_seconds: float) -> None:
        """The prefill worker is done with the request."""
        if split.prefill is not None:
            self.prefill.on_first_token(request, split.prefill.worker, now_seconds)
            self.prefill.on_end(request, split.prefill.worker, now_seconds)

    def on_prefill_failed(self, request: RouteRequest, split: Split, now_seconds: float) -> None:
        """The request left the prefill worker without its prompt computed."""
        if split.prefill is not None:
            self.prefill.on_end(request, split.prefill.worker, now_seconds)

    def on_first_token(self, request: RouteRequest, split: Split, now_seconds: float) -> None:
        """The decode worker's first token came back."""
        self.decode.on_first_token(request, split.decode.worker, now_seconds)

    def on_end(self, request: RouteRequest, split: Split, now_seconds: float) -> None:
        """The request left the decode worker."""
        self.decode.on_end(request, split.decode.worker, now_seconds)
