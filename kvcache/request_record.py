"""What one request did to the prefix caches: the record that a router keeps and the exporter reads.

The router serves records as JSON at `/router/requests`; spans and probes are brought into the same form. No token,
text or salt is in it, and a session is a keyed hash. Chain
hashes name blocks by their content; the exporter shows none of them.
"""

from __future__ import annotations

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request. None, or an empty text, is unknown."""

    ended_unix_seconds: float
    outcome: str
    """`completed`, `refused`, `rejected`, `failed`, `timed_out` or `disconnected`."""
    worker: str = ""
    """Empty when no worker was reached."""
    model: str = ""
    tenant: str = ""
    session: str = ""
    """A keyed hash of the sticky key; equal for equal keys of one router's life, or of one configured secret."""
    request_class: str = ""
    policy: str = ""
    reason: str = ""
    """The policy's branch."""
    retries: int = 0
    salted: bool | None = None
    """Whether the engine was told to keep the tenant's blocks apart."""
    prompt_tokens: int | None = None
    """As the engine counted them, else as the router did."""
    cached_tokens: int | None = None
    """As the engine reports them."""
    predicted_tokens: int | None = None
    """Cached tokens that the router expected at the chosen worker."""
    held_tokens: int | None = None
    """Cached tokens at the worker that held most of this prompt when it was placed."""
    held_by: str = ""
    """That worker; the chosen one if it holds as much."""
    own_tokens: int | None = None
    """The longest opening that this tenant sent before, in full blocks, or with the answers to it where those explain
    more of `cached_tokens`; None when that isn't known."""
    block_size: int | None = None
    prompt_block: int | None = None
    """Chain hash of the prompt's last full block: where in the prefix tree it ended."""
    reused_block: int | None = None
    """Chain hash of the last block that the engine reused."""
    output_tokens: int | None = None
    decision_seconds: float | None = None
    ttft_seconds: float | None = None
    """From arrival to first content; None when nothing was streamed."""
    e2e_seconds: float | None = None
    tpot_seconds: float | None = None
    trace_id: str = ""


class RequestPage(msgspec.Struct, frozen=True):
    """An answer of `/router/requests?after=N`: records numbered `first`, `first + 1`, …

    `started` names the router's life: after a restart numbers begin again. A `first` beyond what was asked for
    means that the records between were overwritten.
    """

    started: str
    first: int
    records: list[RequestRecord]
