"""Reading a body whose size the other side chooses."""

from __future__ import annotations

import aiohttp


class TooLong(Exception):
    """A body is longer than it may be."""


async def read_at_most(content: aiohttp.StreamReader, limit_bytes: int) -> bytes:
    """The whole body. Raises TooLong as soon as it exceeds the limit."""
    pieces, total = [], 0
    async for piece in content.iter_any():
        pieces.append(piece)
        total += len(piece)
        if total > limit_bytes:
            raise TooLong(f"more than {limit_bytes} bytes")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
