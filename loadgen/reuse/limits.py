"""Reuse that a run cannot explain: another tenant's cache entries, or tokens that nobody in the run had sent.

The log has, per request, how much of its prompt the plan had sent before in the same namespace (tenant). Three facts
correct that bound before anybody is accused:

- Requests reach an engine in another order than planned: a closed loop sends them so, and on the way to the engine one
  overtakes another. So a request can reuse what its own tenant sent at any time before its first token.
- A router that sends a request a second time may find what the first attempt computed.
- Another tenant can only have left in the cache what it sent: at most the opening that the group shares.

What goes beyond both was never sent. The figure then can't be a cache hit: behind a prefill/decode split, servers
report transferred tokens as cached (vllm#43370), or the caches were warm.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefixwatch.loadgen.plan.request import COOL_DOWN
from prefixwatch.loadgen.request_log.columns import Bools, Columns, Ints, Texts
from prefixwatch.slo.objective import Floats


class UnexplainedReuse(NamedTuple):
    """Which requests reused more than a block beyond what their own tenant had sent."""

    leaked: Bools
    """Another tenant had sent it."""
    impossible: Bools
    """Nobody had sent it in this run."""
    whole_prompt: bool
    """Most of the impossible ones report all of the prompt except its last token."""


def unexplained_reuse(columns: Columns) -> UnexplainedReuse:
    """Of all requests; those whose engine reports no reuse are in neither."""
    own = np.fmax(np.fmax(columns.shared, columns.template), _overtaken_by(columns))
    own[columns.retries > 0] = np.inf
    beyond = np.asarray(columns.cached > own + columns.block_size, dtype=np.bool_)
    leaked = beyond & (columns.cached <= _others_opening(columns) + columns.block_size)
    impossible = beyond & ~leaked
    whole = columns.cached[impossible] >= columns.prompt[impossible] - 1
    return UnexplainedReuse(leaked, impossible, bool(len(whole)) and bool(whole.mean() > 0.5))


def _overtaken_by(columns: Columns) -> Floats:
    """The longest opening that a request may share with one of its tenant's that was planned after it, but sent before
    its first token; 0 without one.

    Of its own group that is the group's opening, of another group what that one's first request shared with others.
    Infinite where the request may have been overtaken by one of the cool-down, which isn't among these.
    """
    limits: Floats = np.zeros(len(columns))
    first_token = columns.scheduled + columns.ttft
    computed = np.where(np.isnan(first_token), np.nan_to_num(columns.end, nan=np.inf), first_token)
    for repeat in {repeat for repeat, _ in columns.trimmed.get(COOL_DOWN, ())}:
        mine = columns.repeat == repeat
        limits[mine & (computed > columns.scheduled[mine].max(initial=-np.inf))] = np.inf
    opens = columns.turn == 0
    owner = _numbered(columns.repeat, columns.tenant)
    group = _numbered(owner, columns.group)
    rows = np.flatnonzero(opens)[np.argsort(columns.index[opens], kind="stable")]
    groups, first = np.unique(group[rows], return_index=True)
    common: Floats = np.zeros(int(group.max(initial=0)) + 1)
    common[groups] = columns.shared[rows[first]]
    for key, openings in ((group, columns.shared), (owner, common[group])):
        limits = np.fmax(limits, _longest_before(columns, key, computed, np.where(opens, openings, 0.0)))
    return limits


def _longest_before(columns: Columns, key: Ints, until: Floats, openings: Floats) -> Floats:
    """For each request the longest of the openings with its key that were sent until then, if a request that was
    planned after it is among them; else 0."""
    longest: Floats = np.zeros(len(columns))
    sent = columns.scheduled + columns.lag
    order = np.lexsort((sent, key))  # those that were never sent are the last of their key
    bounds = np.flatnonzero(np.diff(key[order])) + 1
    for mine in np.split(order, bounds):
        rows = mine[~np.isnan(sent[mine])]
        if not len(rows):
            continue
        before = np.searchsorted(sent[rows], until[mine], side="right") - 1
        latest = np.maximum.accumulate(columns.index[rows])[before]
        overtaken = (before >= 0) & (latest > columns.index[mine])
        longest[mine] = np.where(overtaken, np.fmax.accumulate(openings[rows])[before], 0.0)
    return longest


def _numbered(*labels: Ints | Texts) -> Ints:
    """A number from 0 for each combination of labels."""
    numbers: Ints = np.zeros(len(labels[0]), dtype=np.int64)
    for each in labels:
        _, place = np.unique(each if each.dtype != object else each.astype(str), return_inverse=True)
        _, numbers = np.unique(numbers * (int(place.max(initial=0)) + 1) + place, return_inverse=True)
    return numbers


def _others_opening(columns: Columns) -> Floats:
    """The longest opening that tenants other than a request's own can have sent: that of its group, where several
    tenants use it. Infinite where the log doesn't show how long the openings of its groups are."""
    names, group = np.unique(columns.group.astype(str), return_inverse=True)
    openings = np.where(columns.turn == 0, columns.shared, 0.0)
    longest: Floats = np.zeros(len(names))
    np.maximum.at(longest, group, np.nan_to_num(openings))
    longest[longest == 0] = longest.max(initial=0.0) or np.inf
    users = [len(set(columns.tenant[group == place])) for place in range(len(names))]
    several = np.array([count > 1 and name not in ("", "-") for name, count in zip(names, users, strict=True)])
    return np.asarray(np.where(several[group], longest[group], 0.0), dtype=np.float64)
