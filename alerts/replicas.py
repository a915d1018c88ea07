"""HA pairs: of what two exporters count over one fleet, the larger counts once.

Where replicas differ in a label, each range is reduced by `max without (that label)` before anything is added up. Two
shards that split a fleet share no series and have no such label: their counts add up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from prefixwatch.slo.promql import closing

_CALL = re.compile(r"(?<![\w:])(?:rate|increase)\(")
_SUM = re.compile(r"(?<![\w:])(?:sum|count)(?: by \([^)]*\))? \((?P<selector>prefixwatch_\w+(?:\{[^}]*\})?)\)")
"""An average or a quantile is the same with every sample twice."""
_ADDED = "prefixwatch_probe_tokens_total"
"""Each exporter sends probes of its own, and engines count both's."""


def once(series: str, replica_labels: Sequence[str]) -> str:
    """One series of those that differ in a replica label only."""
    return f"max without ({', '.join(replica_labels)}) ({series})" if replica_labels else series


def deduplicated(expr: str, replica_labels: Sequence[str]) -> str:
    """The expression with every rate, increase and summed series of the exporter taken once."""
    if not replica_labels:
        return expr
    parts: list[str] = []
    position = 0
    while match := _CALL.search(expr, position):
        end = closing(expr, match.end())
        call = expr[match.start() : end]
        parts += [expr[position : match.start()], call if _ADDED in call else once(call, replica_labels)]
        position = end
    text = "".join([*parts, expr[position:]])
    return _SUM.sub(lambda m: m[0].replace(m["selector"], once(m["selector"], replica_labels)), text)
