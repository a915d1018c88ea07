"""What of some traffic a prefix cache could reuse, what breaks it, and how much cache that takes. Pure.

Three questions: how much do prompts open like earlier ones (an infinite cache), how much of that does a cache of a
given size keep, and how much text comes again that no prefix cache can reuse, because something before it differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixwatch.kvcache.blocks import Hashes, Tokens
from prefixwatch.kvcache.reuse import ReuseProfile, SeenOpenings, reuse_profile

CAPACITY_STEPS = 12
TOP = 5
_WINDOW = 16
_SAMPLED = 16
"""One in this number of token windows is remembered, chosen by its content so that moved text is found again."""
_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384)
_BEFORE, _AFTER = 6, 8
"""Tokens shown on either side of a point at which prompts part."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """A prompt of the traffic; `tokens` None where only its blocks are known."""

    arrival_s: float | None
    namespace: str
    """Prompts of different namespaces (salt, model) share nothing."""
    session: str
    prompt_tokens: int
    blocks: Hashes
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class PartingPoint:
    """Where prompts stop being like any earlier one, though what follows has been seen before."""

    at_token: int
    requests: int
    lost_tokens: int
    """Tokens behind it that earlier prompts had too; an estimate from samples."""
    text: str
    """The text around it, before ⟂ after, in one of the requests."""


@dataclass(frozen=True, slots=True)
class TopPrefix:
    """An opening that many requests have."""

    tokens: int
    requests: int
    saved_tokens: int
    """What caching it saves: its tokens, for each request but the first."""
    text: str


@dataclass(frozen=True, slots=True)
class TrafficAnalysis:
    """All figures; lengths in tokens."""

    requests: int
    sessions: int
    seconds: float | None
    prompt_tokens: int
    block_size: int
    profile: ReuseProfile
    hit_tokens: int
    hit_tokens_in_session: int
    """Of these, what the same session had sent."""
    parting: dict[str, int]
    """Requests by the length of the opening that they share with an earlier one."""
    lost_tokens: int | None
    """Tokens that came again behind a difference; None where texts aren't known."""
    parting_points: list[PartingPoint]
    top_prefixes: list[TopPrefix]
    reuse_known: bool = True
    """False for lengths alone: then nothing can be said about reuse."""

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Capacity in blocks, and the share of all blocks that it reuses."""
        total = self.profile.capacity_for(1.0)
        if total is None:
            return []
        steps = np.unique(np.geomspace(max(1, total / 2**CAPACITY_STEPS), total, CAPACITY_STEPS).astype(np.int64))
        return [(int(capacity), self.profile.hit_ratio(int(capacity)) or 0.0) for capacity in steps]

    def as_json(self) -> dict[str, Any]:
        profile = self.profile
        return {
            "requests": self.requests,
            "sessions": self.sessions,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "block_size": self.block_size,
            "infinite_cache": {
                "hit_tokens": self.hit_tokens if self.reuse_known else None,
                "hit_tokens_in_session": self.hit_tokens_in_session if self.reuse_known else None,
                "hit_ratio": self.hit_tokens / self.prompt_tokens if self.prompt_tokens and self.reuse_known else None,
                "block_hit_ratio": profile.hit_ratio(),
            },
            "capacity_blocks_for": {f"{share:.0%}": profile.capacity_for(share) for share in (0.5, 0.9, 0.99, 1.0)},
            "curve": [{"capacity_blocks": blocks, "block_hit_ratio": ratio} for blocks, ratio in self.curve],
            "first_divergence": self.parting,
            "lost_tokens": self.lost_tokens,
            "parting_points": [
                {"at_token": p.at_token, "requests": p.requests, "lost_tokens": p.lost_tokens, "text": p.text}
                for p in self.parting_points
            ],
            "top_prefixes": [
                {"tokens": p.tokens, "requests": p.requests, "saved_tokens": p.saved_tokens, "text": p.text}
                for p in self.top_prefixes
            ],
        }


def analyze(prompts: Sequence[SeenPrompt], block_size: int, decode: Decode = lambda ids: "") -> TrafficAnalysis:
    """Analyse prompts in their order; `decode` makes text of token ids, for what is shown."""
    profile = reuse_profile([prompt.blocks for prompt in prompts])
    hits = np.minimum(profile.reused_blocks * block_size, [prompt.prompt_tokens for prompt in prompts])
    in_session = _session_hits(prompts, block_size)
    shared = _shared_tokens(prompts, hits)
    lost = _LostReuse(decode)
    if prompts and all(prompt.tokens is not None for prompt in prompts):
        for prompt, opening in zip(prompts, shared, strict=True):
            lost.add(prompt, opening)
    times = [prompt.arrival_s for prompt in prompts if prompt.arrival_s is not None]
    return TrafficAnalysis(
        requests=len(prompts),
        sessions=len({(p.namespace, p.session) for p in prompts}),
        seconds=max(times) - min(times) if len(times) > 1 else None,
        prompt_tokens=sum(prompt.prompt_tokens for prompt in prompts),
        block_size=block_size,
        profile=profile,
        hit_tokens=int(hits.sum()),
        hit_tokens_in_session=int(np.minimum(hits, in_session).sum()),
        parting=_histogram(shared),
        lost_tokens=lost.total if lost.known else None,
        parting_points=lost.points(),
        top_prefixes=_top_prefixes(prompts, block_size, decode),
    )


def _session_hits(prompts: Sequence[SeenPrompt], block_size: int) -> npt.NDArray[np.int64]:
    """Leading tokens that the same session had sent."""
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    found = []
    for prompt in prompts:
        own = seen[prompt.namespace, prompt.session]
        blocks = prompt.blocks.tolist()
        depth = next((k for k, block in enumerate(blocks) if block not in own), len(blocks))
        own.update(blocks)
        found.append(depth * block_size)
    return np.array(found, dtype=np.int64)


def _shared_tokens(prompts: Sequence[SeenPrompt], hits: npt.NDArray[np.int64]) -> list[int]:
    """The opening that each prompt shares with an earlier one; to the token where tokens are known, else in blocks."""
    openings: dict[str, SeenOpenings] = defaultdict(SeenOpenings)
    return [
        openings[prompt.namespace].add(prompt.tokens) if prompt.tokens is not None else int(hit)
        for prompt, hit in zip(prompts, hits.tolist(), strict=True)
    ]


def _histogram(shared: Sequence[int]) -> dict[str, int]:
    names = [f"{low}-{high - 1}" for low, high in pairwise(_BUCKETS)] + [f"{_BUCKETS[-1]}+"]
    counts = Counter(names[int(np.searchsorted(_BUCKETS, tokens, side="right")) - 1] for tokens in shared)
    return {name: counts[name] for name in names}


class _LostReuse:
    """Text that came again behind a difference, by the point of the difference."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._seen: dict[str, set[int]] = defaultdict(set)
        self._at: dict[int, list[Any]] = {}
        self.known = False
        self.total = 0

    def add(self, prompt: SeenPrompt, opening: int) -> None:
        """A prompt whose first `opening` tokens an earlier one had."""
        assert prompt.tokens is not None
        self.known = True
        starts, windows = sampled_windows(prompt.tokens)
        seen = self._seen[prompt.namespace]
        again = sum(
            window in seen for start, window in zip(starts.tolist(), windows.tolist(), strict=True) if start >= opening
        )
        seen.update(windows.tolist())
        if not again:
            return
        lost = min(again * _SAMPLED, prompt.prompt_tokens - opening)
        self.total += lost
        requests, tokens, text = self._at.get(opening, (0, 0, ""))
        self._at[opening] = [requests + 1, tokens + lost, text or self._around(prompt.tokens, opening)]

    def points(self) -> list[PartingPoint]:
        """Those that cost most, most first."""
        worst = sorted(self._at.items(), key=lambda item: -item[1][1])[:TOP]
        return [PartingPoint(at, requests, lost, text) for at, (requests, lost, text) in worst]

    def _around(self, tokens: Tokens, at: int) -> str:
        before, after = tokens[max(0, at - _BEFORE) : at], tokens[at : at + _AFTER]
        return f"{self._decode(before.tolist())}⟂{self._decode(after.tolist())}"


def sampled_windows(tokens: Tokens) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Starts and hashes of one in sixteen windows of 16 tokens, chosen by content: equal text gives equal windows,
    wherever it stands."""
    count = len(tokens) - _WINDOW + 1
    if count <= 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    wide = tokens.astype(np.uint64) + np.uint64(1)
    for k in range(_WINDOW):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + wide[k : k + count]
        hashes ^= hashes >> np.uint64(29)
    chosen = np.flatnonzero(hashes % np.uint64(_SAMPLED) == 0)
    return chosen, hashes[chosen]


def _top_prefixes(prompts: Sequence[SeenPrompt], block_size: int, decode: Decode) -> list[TopPrefix]:
    """Openings that save most, each counted at its full length; those inside a better one are left out."""
    counts: Counter[int] = Counter()
    for prompt in prompts:
        counts.update(prompt.blocks.tolist())
    best: dict[int, tuple[int, int, SeenPrompt]] = {}
    for prompt in prompts:
        uses = [counts[block] for block in prompt.blocks.tolist()]
        for depth, (block, requests) in enumerate(zip(prompt.blocks.tolist(), uses, strict=True), start=1):
            ends = depth == len(uses) or uses[depth] < requests
            if requests > 1 and ends and block not in best:
                best[block] = (depth * block_size, requests, prompt)
    ranked = sorted(best.values(), key=lambda item: -item[0] * (item[1] - 1))[:TOP]
    return [
        TopPrefix(tokens, requests, tokens * (requests - 1), _opening_text(prompt, decode))
        for tokens, requests, prompt in ranked
    ]


def _opening_text(prompt: SeenPrompt, decode: Decode) -> str:
    return "" if prompt.tokens is None else decode(prompt.tokens[: _BEFORE + _AFTER].tolist())
