"""What one request did to the prefix caches: the record that a router keeps and the exporter reads.

The router serves records as JSON at `/router/requests`; spans and probes are brought into the same form. No token,
text or salt is in it, and a session is a keyed hash. Chain
hashes name blocks by their content; the exporter shows none of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from hashlib import blake2b

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request. None, or an empty text, is unknown."""

    ended_unix_seconds: float
    outcome: str
    """`completed`, `refused`, `rejected`, `failed`, `timed_out` or `disconnected`."""
    worker: str = ""
    """Empty when no worker was reached."""
    role: str = ""
    """Of the worker, as are the next three: `prefill` or `decode`, where the two are split."""
    pool: str = ""
    namespace: str = ""
    cluster: str = ""
    model: str = ""
    tenant: str = ""
    trust_group: str = ""
    """Of the tenants that may share caches with this one; empty for none."""
    session: str = ""
    """A keyed hash of the sticky key; equal for equal keys of one router's life, or of one configured secret."""
    user: str = ""
    """The same of who the session belongs to, where the client says so."""
    request_class: str = ""
    policy: str = ""
    reason: str = ""
    """The policy's branch."""
    retries: int = 0
    salted: bool | None = None
    """Whether the engine was asked to keep the tenant's blocks apart."""
    prompt_tokens: int | None = None
    """As the engine counted them, else as the router did."""
    counted_tokens: int | None = None
    """The prompt's tokens as the router itself counted them, where the engine counted them too."""
    cached_tokens: int | None = None
    """As the engine reports them."""
    predicted_tokens: int | None = None
    """Cached tokens that the router expected at the chosen worker."""
    held_tokens: int | None = None
    """Cached tokens at the worker that held most of this prompt when it was placed."""
    held_by: str = ""
    """That worker; the chosen one if it holds as much."""
    reusable_tokens: int | None = None
    """The longest opening that could have been reused: what its tenant sent before, or what some worker held; in full
    blocks. What cache classes are measured against; see `kvcache.cache_class`."""
    own_tokens: int | None = None
    """The longest opening that this tenant sent before, in full blocks, or with the answers to it where those explain
    more of `cached_tokens`; None when that isn't known."""
    finding: str = ""
    """A `kvcache.isolation_findings.FindingKind`, where this request shows one. It is certain only where no other
    router can have warmed the worker."""
    finding_tenant: str = ""
    """Whose blocks were reused, or who has the same salt; empty if unknown."""
    finding_requests: tuple[str, ...] = ()
    """Ids of the requests that show it, this one first."""
    opening_sent_by: str = ""
    """Who had sent the prompt's opening through this router before: `nobody`, or `another_tenant`; empty for itself and
    where that isn't known."""
    block_size: int | None = None
    prompt_block: int | None = None
    """Chain hash of the prompt's last full block: where in the prefix tree it ended."""
    reused_block: int | None = None
    """Chain hash of the last block that the engine reused."""
    marks: tuple[int, ...] = ()
    """Low 32 bits of the chain hashes of the prompt's full blocks at `mark_depths`: enough to compare openings."""
    output_tokens: int | None = None
    decision_seconds: float | None = None
    ttft_seconds: float | None = None
    """From arrival to first content; None when nothing was streamed."""
    e2e_seconds: float | None = None
    tpot_seconds: float | None = None
    miss_prefill_seconds: float | None = None
    """Of `ttft_seconds`, what computing the uncached tokens takes, by the first tokens that the router saw."""
    miss_queue_seconds: float | None = None
    """The wait for that: what is left of `ttft_seconds`."""
    miss_migrate_seconds: float | None = None
    """What a moved session's blocks took on their way; 0 where none were."""
    move: str = ""
    """`soft` or `hard` for the first request of a session that was moved on purpose."""
    move_why: str = ""
    """What decided: `blocks_sooner`, `prefill_sooner`, `held_there`, `source_dead`, `no_connector`, `price_unknown`."""
    move_trigger: str = ""
    """`drain`, `death`, `overload` or `scale_in`."""
    move_soft_seconds: float | None = None
    """What the soft move was expected to take until a first token; None where there was no way, or it isn't known."""
    move_hard_seconds: float | None = None
    trace_id: str = ""
    request: str = ""
    """Its id, as far as it is kept: what findings name it by."""


def owner(record: RequestRecord) -> str:
    """Whose caches the request may reuse: the tenant's trust group, or the tenant."""
    return f"group {record.trust_group}" if record.trust_group else record.tenant


def mark_depths(blocks: int) -> list[int]:
    """Numbers of leading blocks at which a prompt's chain hashes are kept: 1, 2, 3, 4, 5, 6, 8, 10, … up to `blocks`,
    each a quarter more than the last."""
    depths = []
    depth = 1
    while depth <= blocks:
        depths.append(depth)
        depth = max(depth + 1, depth * 5 // 4)
    return depths


class RequestPage(msgspec.Struct, frozen=True):
    """An answer of `/router/requests?after=N`: records numbered `first`, `first + 1`, …

    `started` names the router's life: after a restart numbers begin again. A `first` beyond what was asked for
    means that the records between were overwritten.
    """

    started: str
    first: int
    records: list[RequestRecord]


class Pseudonyms:
    """Keyed hashes in place of what clients call themselves: equal for equal names, and of no use without the key.

    Without a secret the key is this process's own, so two lives of it don't agree.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._key = blake2b(secret.encode()).digest() if secret else secrets.token_bytes(32)

    def session(self, key: str) -> str:
        """Of a sticky key; empty when there is none."""
        return self._hash(b"session", key, 8) if key else ""

    def user(self, name: str) -> str:
        """Of a user; empty when there is none."""
        return self._hash(b"user", name, 8) if name else ""

    def tenant(self, name: str, known: Collection[str]) -> str:
        """Known tenants by name, others as `#` and 8 hex digits; empty when no tenant was named."""
        return name if not name or name in known else f"#{self._hash(b'tenant', name, 4)}"

    def _hash(self, purpose: bytes, text: str, size: int) -> str:
        return blake2b(
            text.encode("utf-8", "surrogateescape"), key=self._key, person=purpose, digest_size=size
        ).hexdigest()
