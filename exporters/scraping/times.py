"""An engine's times held against its load, against each other and against the clock. Pure.

A time in the wrong unit, or summed over the ranks of an engine, passes for a slow engine; a gauge of load that is stuck
passes for an idle one. Each finding is a flag: both values where they differ, an empty text where they agree, absent
where it can't be known.
"""

from __future__ import annotations

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.scraping.histogram import Histogram
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.window import LoadWindow

_MIN_LOAD_SAMPLES = 5
_REQUESTS_IN_A_WINDOW = 4
_LOAD_FACTOR = 3.0
"""How many times the load by gauges may differ from the load by request times, and by how many requests besides."""

_WHOLE_FACTOR = 1.5
"""How many times the sum of a part may exceed that of the whole: they are booked at different moments."""
_SAME_REQUESTS_RATIO = 0.1
_ANOTHER_UNIT = 20.0
"""A sum that is this many times what it should be at most, or at least, is of another unit."""

_PARTS = ("ttft_seconds", "queue_seconds", "prefill_seconds", "inter_token_seconds")
"""Of a request's whole time, `e2e_seconds`. Each happens at most once at a time in a request."""


def time_contradictions(store: SignalStore, loads: LoadWindow) -> dict[str, str]:
    """The flags `load_disagrees` and `times_disagree` of an engine, as far as they can be known."""
    if store.system.role != "engine":
        return {}
    load = _load_disagrees(store, loads)
    found = {} if load is None else {"load_disagrees": load}
    times = [_beyond_the_whole(store, part) for part in _PARTS]
    times += [_another_unit(store)]
    if not load:  # a gauge that stands still would put the blame on the times
        times += [_beyond_the_clock(store, loads, signal) for signal in (*_PARTS, "e2e_seconds", "kv_transfer")]
    known = [each for each in times if each is not None]
    return found | ({"times_disagree": "; ".join(filter(None, known))} if known else {})


def _load_disagrees(store: SignalStore, loads: LoadWindow) -> str | None:
    """By Little's law the requests at an engine are the time that requests took over the time that passed."""
    window, finished, took = store.increase, store.grown("e2e_seconds", "count"), store.grown("e2e_seconds", "sum")
    if len(loads.samples) < _MIN_LOAD_SAMPLES or window is None or finished is None or took is None:
        return None
    if finished < MIN_OBSERVATIONS or took / finished > window.seconds / _REQUESTS_IN_A_WINDOW:
        return None  # most requests began before the window or end after it
    by_times, by_gauges = took / window.seconds, sum(loads.means().values())
    if max(by_times, by_gauges) <= _LOAD_FACTOR * min(by_times, by_gauges) + _LOAD_FACTOR:
        return ""
    return f"{by_gauges:.3g} requests by its gauges, {by_times:.3g} by the time that requests took"


def _beyond_the_whole(store: SignalStore, part: str) -> str | None:
    """A part of the requests' times is larger than all of it."""
    own, whole = store.total(part, "sum"), store.total("e2e_seconds", "sum")
    observed, requests = store.total(part, "count"), store.total("e2e_seconds", "count")
    if not own or not whole or not observed or not requests or requests < MIN_OBSERVATIONS:
        return None
    if part == "inter_token_seconds":  # one a token, also of requests under way
        if observed < requests:
            return None
    elif abs(observed - requests) > _SAME_REQUESTS_RATIO * requests:
        return None  # not the same requests: many were aborted before their first token, or after it
    under_way = sum(sum(store.gauges_of(name).values()) for name in ("running_requests", "waiting_requests"))
    if own <= _WHOLE_FACTOR * (whole + under_way * whole / requests):
        return ""
    return f"{part}: {own:.4g} s of {whole:.4g} s that requests took in all"


def _another_unit(store: SignalStore) -> str | None:
    """The requests' whole time is far more than first tokens and tokens took, or far less than KV transfers did."""
    whole, requests = store.total("e2e_seconds", "sum"), store.total("e2e_seconds", "count")
    if not whole or not requests or requests < MIN_OBSERVATIONS:
        return None
    moved = store.total("kv_transfer", "sum")
    if moved is not None and moved > _ANOTHER_UNIT * whole:
        return f"kv_transfer: {moved:.4g} s of {whole:.4g} s that requests took in all"
    first, tokens = store.total("ttft_seconds", "sum"), store.total("inter_token_seconds", "sum")
    firsts, gaps = store.total("ttft_seconds", "count"), store.total("inter_token_seconds", "count")
    generated = store.total("generation_tokens")
    if not first or tokens is None or firsts is None or gaps is None or generated is None:
        return None if moved is None else ""
    if gaps + firsts < generated / 2 or firsts < requests / 2:  # only streamed answers have these times
        return None if moved is None else ""
    if whole <= _ANOTHER_UNIT * (first + tokens):
        return ""
    return f"e2e_seconds: {whole:.4g} s, of which first tokens and tokens took {first + tokens:.4g} s"


def _beyond_the_clock(store: SignalStore, loads: LoadWindow, signal: str) -> str | None:
    """More of this time passed in the window than its requests had.

    Whoever spent some seconds here in the window was running or waiting as long. Of each observation only its bucket's
    lower bound is counted, at most the window's length, so a healthy engine stays below its own load whatever the
    distribution.
    """
    window, count, took = store.increase, store.grown(signal, "count"), store.grown(signal, "sum")
    if len(loads.samples) < _MIN_LOAD_SAMPLES or window is None or count is None or count < MIN_OBSERVATIONS:
        return None
    by_gauges = sum(loads.means().values())
    limit = _LOAD_FACTOR * by_gauges + _LOAD_FACTOR
    if took is not None and took <= limit * window.seconds:
        return ""
    observed = store.merged(signal, grown=True)
    if observed is None:
        return None
    least = _least_seconds(observed, window.seconds) / window.seconds
    if least <= limit:
        return ""
    return f"{signal}: at least {least:.3g} s of it in each second, with {by_gauges:.3g} requests at a time"


def _least_seconds(observed: Histogram, most_seconds: float) -> float:
    """What all observations took together at the least, each counted up to `most_seconds`."""
    least, below, low = 0.0, 0.0, 0.0
    for bound, count in zip(observed.bounds, observed.counts, strict=True):
        least += (count - below) * min(max(low, 0.0), most_seconds)
        below, low = count, bound
    return least
