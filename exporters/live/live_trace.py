"""The newest requests as rows of a trace, for `prefixwatch trace export`.

Block ids are keyed hashes of the records' marks: equal where prompts are equal, and of no use for guessing a prompt. A
record has chain hashes at some depths only (see `kvcache.request_record.mark_depths`), so two prompts count as equal up
to the last depth at which they agree: at most a quarter too short, never too long.
"""

from __future__ import annotations

import secrets
from collections import deque
from hashlib import blake2b
from typing import Any

from aiohttp import web

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.request_record import RequestRecord, mark_depths

KEPT = 20_000
ROWS_A_PAGE = 5_000


class LiveTrace:
    """The newest `kept` requests."""

    def __init__(self, kept: int = KEPT) -> None:
        self.life = secrets.token_hex(8)
        """Changes with each start of the process: block ids of two lives don't agree."""
        self._key = secrets.token_bytes(32)
        self._records: deque[RequestRecord] = deque(maxlen=kept)
        self._added = 0

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._added += 1

    def page(self, after: int) -> dict[str, Any]:
        """Rows of the records after number `after`, up to `ROWS_A_PAGE`; `first` is the number of the first one kept
        of these, `last` that of the last one looked at, and `without_length` counts those that have no prompt length.
        """
        oldest = self._added - len(self._records)
        first = max(after, oldest)
        records = [self._records[position] for position in range(first - oldest, len(self._records))][:ROWS_A_PAGE]
        rows = [row for record in records if (row := trace_row(record, self._key)) is not None]
        return {
            "life": self.life,
            "first": first,
            "last": first + len(records),
            "added": self._added,
            "without_length": len(records) - len(rows),
            "rows": rows,
        }

    async def serve(self, request: web.Request) -> web.Response:
        """`/api/v1/trace?after=N`."""
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > 15:
            return web.Response(
                status=400, text="after is the number of a record: give the last one that you have, or 0\n"
            )
        return web.json_response(self.page(int(after)))


def trace_row(record: RequestRecord, key: bytes) -> dict[str, Any] | None:
    """The request as a row of a trace; None if the length of its prompt is unknown."""
    length = record.counted_tokens or record.prompt_tokens
    if not length:
        return None
    row: dict[str, Any] = {
        "timestamp": round((record.ended_unix_seconds - (record.e2e_seconds or 0.0)) * 1e3, 1),
        "input_length": length,
        "session_id": record.session,
        "tenant": record.tenant,
        "model": record.model,
    }
    if record.output_tokens or record.outcome != "completed":
        row["output_length"] = max(1, record.output_tokens or 1)
    size = record.block_size or DEFAULT_BLOCK_SIZE
    row |= {"block_size": size, "hash_ids": _block_ids(record, length // size, key)}
    if not record.marks:
        row["shares_unknown"] = True
    return row


def _block_ids(record: RequestRecord, blocks: int, key: bytes) -> list[int]:
    """One id per full block. Those behind the last mark are equal for equal prompts alone."""
    own = record.prompt_block if record.prompt_block is not None else secrets.randbits(64)
    names = [0] * blocks
    start = 0
    for depth, mark in zip(mark_depths(blocks), record.marks, strict=False):
        names[start:depth] = [mark] * (depth - start)
        start = depth
    names[start:] = [own] * (blocks - start)
    found: list[int] = []
    before = record.model.encode()
    for name in names:
        before = blake2b(before + name.to_bytes(8, "little"), key=key, digest_size=8).digest()
        found.append(int.from_bytes(before, "little") >> 1)
    return found
