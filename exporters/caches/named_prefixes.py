"""Named prefixes before and now: whose requests still open with it, and how many of these find it cached.

A prefix whose opening was changed gets no requests any more: they have another prefix. Traffic comes in spans
(`exporters.caches.prefix_traffic`); the span that runs is held against the last one, each by its share of the span's
requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from prefixwatch.exporters.caches.prefix_traffic import NodeTraffic
from prefixwatch.exporters.metrics_page.rows import rows

LEAST_REQUESTS = 20
"""Of a span: fewer prove nothing."""


@dataclass(frozen=True, slots=True)
class PrefixShare:
    """One named prefix in one span."""

    requests: int
    """Whose prompts open with it."""
    reused: int
    """Those that found it cached."""


@dataclass(slots=True)
class NamedPrefixes:
    """The last span and the one that runs."""

    span: int = -1
    before: Mapping[str, PrefixShare] = field(default_factory=dict)
    before_requests: int = 0
    now: Mapping[str, PrefixShare] = field(default_factory=dict)
    now_requests: int = 0

    def look(self, span: int, found: Mapping[str, PrefixShare], requests: int) -> None:
        """What the running span has so far; the first look at the next span makes it the last one."""
        if span != self.span:
            follows = span == self.span + 1
            self.before, self.before_requests = (self.now, self.now_requests) if follows else ({}, 0)
            self.span = span
        self.now, self.now_requests = found, requests

    def metrics(self) -> Iterator[Metric]:
        shares, hits = rows("named_prefix_request_share_ratio"), rows("named_prefix_hit_share_ratio")
        spans = (("before", self.before, self.before_requests), ("now", self.now, self.now_requests))
        for span, found, requests in spans:
            for name, prefix in found.items() if requests >= LEAST_REQUESTS else ():
                shares.add_metric([name, span], prefix.requests / requests)
                if prefix.requests >= LEAST_REQUESTS:
                    hits.add_metric([name, span], prefix.reused / prefix.requests)
        yield from (shares, hits)


def named_shares(names: Mapping[str, int | None], traffic: NodeTraffic) -> dict[str, PrefixShare]:
    """By name; `names` has the nodes of the tree, None for a prefix that no worker caches: nobody opens with it."""
    return {
        name: PrefixShare(0, 0) if node is None else PrefixShare(int(traffic.requests[node]), int(traffic.reused[node]))
        for name, node in names.items()
    }
