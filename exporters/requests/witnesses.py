"""Request records held against what engines count, and against what can be cached at all.

Both sides report cached tokens of the same requests. Where they differ by much, or where a prompt that nobody sent is
reported as cached except for its last token, one of them doesn't count what it seems to. Pure: clock values come from
outside.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.scraping.quality import reuse
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.request_record import RequestRecord

RECORDS_DISAGREE = "records_disagree"
ALL_BUT_ONE = "cached_all_but_one"
MISSES_UNREPORTED = "misses_unreported"

_MOST_REQUESTS = 20_000
_SAME_REQUESTS_RATIO = 0.1
"""Records and engine are of the same requests if their numbers differ by no more."""
_RATIO_DIFFERENCE = 0.2
"""Hit ratios of the same requests may differ by this much: the two windows begin and end at other moments."""
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class _Seen:
    at_seconds: float
    router: str
    prompt_tokens: int | None
    cached_tokens: int | None
    all_but_one: bool | None
    """Whether all but the last token were reported as cached, of a prompt that could not be cached so far."""


class RecordWitness:
    """Completed requests of the window, by worker."""

    def __init__(self) -> None:
        self._by_worker: dict[str, deque[_Seen]] = defaultdict(lambda: deque(maxlen=_MOST_REQUESTS))

    def add(self, router: str, worker: str, record: RequestRecord, now_seconds: float) -> None:
        """A request that this router's records report of this worker; others than completed ones are passed over."""
        if record.outcome == "completed" and worker:
            seen = _Seen(now_seconds, router, record.prompt_tokens, record.cached_tokens, _all_but_one(record))
            self._by_worker[worker].append(seen)

    def workers(self) -> list[str]:
        """Workers with a record since they were last seen idle."""
        return list(self._by_worker)

    def of_engine(self, worker: str, store: SignalStore, now_seconds: float) -> str | None:
        """Both hit ratios of the window where they differ; empty where they agree, None where they are of different
        requests or one of them is unknown."""
        window, finished, reused = store.increase, store.grown("finished_requests"), reuse(store)
        if window is None or not finished or reused is None:
            return None
        every = self._since(worker, now_seconds - window.seconds)
        known = [one for one in every if one.prompt_tokens and one.cached_tokens is not None]
        if len(known) < MIN_OBSERVATIONS or len(known) < (1 - _SAME_REQUESTS_RATIO) * len(every):
            return None
        if abs(finished - len(every)) > _SAME_REQUESTS_RATIO * finished:
            return None
        cached = sum(one.cached_tokens or 0 for one in known) / sum(one.prompt_tokens or 0 for one in known)
        counted = reused[0] / reused[1]
        if abs(cached - counted) <= _RATIO_DIFFERENCE:
            return ""
        return f"{cached:.1%} of the prompt tokens were cached by {len(known)} records, {counted:.1%} by its counters"

    def of_router(self, router: str, now_seconds: float, window_seconds: float) -> str | None:
        """The worst worker whose new prompts are all reported as cached except for one token; empty if there is none,
        None if no worker had enough new prompts."""
        shares: dict[str, tuple[float, int, int]] = {}
        for worker in self._by_worker:
            judged = [
                bool(one.all_but_one)
                for one in self._since(worker, now_seconds - window_seconds)
                if one.router == router and one.all_but_one is not None
            ]
            if len(judged) >= MIN_OBSERVATIONS:
                shares[worker] = sum(judged) / len(judged), sum(judged), len(judged)
        if not shares:
            return None
        worker, (share, count, judged_count) = max(shares.items(), key=lambda item: item[1])
        if share < _NEARLY_ALL:
            return ""
        return f"{worker}: {count} of {judged_count} new prompts are reported as cached except for one token"

    def misses(self, router: str, now_seconds: float, window_seconds: float) -> str | None:
        """The first worker whose answers report cached tokens where there are some and leave the count out elsewhere,
        with the bounds of its hit ratio; empty if there is none, None if no worker's answers report enough.

        Several engines leave a 0 out, and gateways lose counts: which of the two it was can't be known, and a ratio of
        the answers that report any figure is too high. vllm-project/vllm#44377.
        """
        found = None
        for worker in sorted(self._by_worker):
            every = [one for one in self._since(worker, now_seconds - window_seconds) if one.router == router]
            every = [one for one in every if one.prompt_tokens]
            known = [one for one in every if one.cached_tokens is not None]
            if len(known) < MIN_OBSERVATIONS:
                continue
            found = found or ""
            if len(every) - len(known) < MIN_OBSERVATIONS or not all(one.cached_tokens for one in known):
                continue
            cached = sum(one.cached_tokens or 0 for one in known)
            low, high = (cached / sum(one.prompt_tokens or 0 for one in some) for some in (every, known))
            return (
                f"{worker}: {len(known)} answers report cached tokens, none of them 0, and {len(every) - len(known)} "
                f"report none: its hit ratio is {low:.1%} if those were misses, and at most {high:.1%}"
            )
        return found

    def _since(self, worker: str, at_seconds: float) -> list[_Seen]:
        return [one for one in self._by_worker.get(worker, ()) if one.at_seconds > at_seconds]

    def forget(self, before_seconds: float) -> None:
        """Let go of what is older."""
        for worker, seen in list(self._by_worker.items()):
            while seen and seen[0].at_seconds <= before_seconds:
                seen.popleft()
            if not seen:
                del self._by_worker[worker]


def _all_but_one(record: RequestRecord) -> bool | None:
    """None where the prompt may have been cached as a whole, or where that isn't known."""
    prompt, cached, reusable = record.prompt_tokens, record.cached_tokens, record.reusable_tokens
    if prompt is None or cached is None or reusable is None:
        return None
    if prompt - 1 <= reusable + (record.block_size or DEFAULT_BLOCK_SIZE):
        return None
    return cached == prompt - 1
