"""Why predicted and delivered hit tokens differ, as far as a request log can tell.

The log knows who was where and when, not what engines evicted or dropped: what the router counts as `cleared` or
`evicted_since` is `over_credited` here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.prediction import prediction_cause
from prefixwatch.loadgen.request_log.records import RequestRecord


def note_prediction_causes(records: Sequence[RequestRecord]) -> None:
    """Fill in `prediction_cause` of one run's requests that had a first token.

    Two requests count as concurrent at a worker when the later one was sent between the other's sending and first
    token, in the same tenant and prefix group (or session). What they share is taken as what the plan says the
    later one shares.
    """
    peers: dict[tuple[str, ...], list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.sent_s if record.sent_s is not None else 0.0):
        if record.first_token_s is None or record.sent_s is None:
            continue
        keys = _keys(record)
        concurrent = any(_still_computing(peers[key], record.sent_s) for key in keys)
        record.prediction_cause = prediction_cause(
            record.predicted_tokens,
            record.cached_tokens,
            block_size=DEFAULT_BLOCK_SIZE,
            computing_tokens=record.planned_shared_tokens if concurrent else 0,
        )
        for key in keys:
            peers[key].append(record)


def _keys(record: RequestRecord) -> list[tuple[str, ...]]:
    """What makes two requests share an opening at one worker."""
    names = (("group", record.group), ("session", record.session))
    return [(record.worker, record.tenant, kind, name) for kind, name in names if name and record.worker]


def _still_computing(peers: list[RequestRecord], now_s: float) -> bool:
    """Whether any has no first token yet; those that do are dropped, for later requests come later."""
    peers[:] = [peer for peer in peers if peer.first_token_s is not None and peer.first_token_s > now_s]
    return bool(peers)
