"""Hit ratio at other cache sizes: a miss-ratio curve of a few workers of each model, from request records.

A record has the hashes of its prompt's blocks at growing depths (`RequestRecord.marks`): each names the piece of the
prefix since the one before. What the curve doesn't know: answers, whose blocks take space until they come back in a
prompt, and engines that evict otherwise than by least recent use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.requests.request import Request
from prefixwatch.kvcache.request_record import RequestRecord, mark_depths
from prefixwatch.kvcache.reuse_distance import ReuseDistances

SIZES: Mapping[str, float] = {"0.5": 0.5, "1": 1.0, "1.2": 1.2, "2": 2.0, "4": 4.0}
"""Cache sizes over today's, by label."""
WORKERS_OF_A_MODEL = 4
"""Peers see alike traffic: a few stand for all. Each takes about 1 MB."""
_MOST_WORKERS = 32
_HALF_LIFE_SECONDS = 600.0
_FADE_SECONDS = 60.0
_SILENT_SECONDS = 600.0
_LOW_BITS = 0xFFFFFFFF
_END = 0x5BD1E995
"""The last piece has the name of the block that a mark may have, too, and is another piece."""

Capacity = Callable[[str], float | None]
"""Tokens that a worker's cache holds; None where that isn't known."""


class CacheSizes:
    """A part of the request ledger."""

    def __init__(self, most_pieces: int = 4_096) -> None:
        self._most_pieces = most_pieces
        self._curves: dict[tuple[str, str], ReuseDistances] = {}
        self._prompts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._tokens: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._asked_at: dict[tuple[str, str], float] = {}
        self._faded_at: float | None = None

    def record(self, request: Request) -> None:
        record, key = request.record, (request.identity.model, request.record.worker)
        pieces = _pieces(record) if request.completed and record.worker else None
        if pieces is None or record.prompt_tokens is None:
            return
        self._fade(request.at_seconds)
        curve = self._curve(key, request.at_seconds)
        if curve is None:
            return
        rest = max(record.prompt_tokens - sum(size for _, size in pieces), 0)
        curve.prompt(pieces, rest, record.reusable_tokens or 0)
        self._prompts[key] += 1
        self._tokens[key] += record.prompt_tokens

    def hit_ratios(self, now_seconds: float, capacity: Capacity) -> Mapping[tuple[str, str], float]:
        """By model and label of the size. A worker counts once it has looked up as many tokens as its cache holds."""
        self._fade(now_seconds)
        hits: defaultdict[tuple[str, str], float] = defaultdict(float)
        looked_up: defaultdict[str, float] = defaultdict(float)
        for (model, worker), curve in self._curves.items():
            tokens = capacity(worker)
            if not tokens or self._prompts[model, worker] < MIN_OBSERVATIONS or self._tokens[model, worker] < tokens:
                continue
            ratios = curve.hit_ratios(tokens * times for times in SIZES.values())
            if ratios is not None:
                looked_up[model] += curve.looked_up_tokens
                for label, ratio in zip(SIZES, ratios, strict=True):
                    hits[model, label] += ratio * curve.looked_up_tokens
        return {(model, label): tokens / looked_up[model] for (model, label), tokens in hits.items()}

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        """None of its own: the sizes of the caches are the engines' to say."""
        yield from ()

    def _curve(self, key: tuple[str, str], now_seconds: float) -> ReuseDistances | None:
        """The worker's; None where others stand for it. Those that are gone make room for those that follow them."""
        if key not in self._curves:
            peers = [each for each in self._curves if each[0] == key[0]]
            if len(peers) >= WORKERS_OF_A_MODEL and not self._forget_silent(peers, now_seconds):
                return None
            if len(self._curves) >= _MOST_WORKERS and not self._forget_silent(self._curves, now_seconds):
                return None
            self._curves[key] = ReuseDistances(self._most_pieces)
        self._asked_at[key] = now_seconds
        return self._curves[key]

    def _forget_silent(self, keys: Iterable[tuple[str, str]], now_seconds: float) -> bool:
        """Whether one of these was without requests for so long that it could be given up."""
        oldest = min(keys, key=self._asked_at.__getitem__)
        if now_seconds - self._asked_at[oldest] < _SILENT_SECONDS:
            return False
        del self._curves[oldest], self._asked_at[oldest], self._prompts[oldest], self._tokens[oldest]
        return True

    def _fade(self, now_seconds: float) -> None:
        if self._faded_at is None:
            self._faded_at = now_seconds
        if (passed := now_seconds - self._faded_at) >= _FADE_SECONDS:
            for curve in self._curves.values():
                curve.fade(0.5 ** (passed / _HALF_LIFE_SECONDS))
            self._faded_at = now_seconds


def _pieces(record: RequestRecord) -> list[tuple[int, float]] | None:
    """Names and tokens of a prompt's pieces; None where the record doesn't say."""
    size, prompt = record.block_size, record.counted_tokens or record.prompt_tokens
    if not record.marks or not size or prompt is None:
        return None
    blocks = prompt // size
    depths = mark_depths(blocks)
    if len(depths) != len(record.marks):
        return None
    starts = [0, *depths]
    found = [
        (mark, float((depth - start) * size)) for mark, depth, start in zip(record.marks, depths, starts, strict=False)
    ]
    if record.prompt_block is not None and blocks > depths[-1]:
        found.append(((record.prompt_block & _LOW_BITS) ^ _END, float((blocks - depths[-1]) * size)))
    return found
