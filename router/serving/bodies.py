"""Bodies of requests: each within a limit, and all that are held at once within another."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from prefixwatch.router.errors import BadRequest
from prefixwatch.router.exchange.exchange import Exchange


class Bodies:
    """Reads bodies and counts the bytes that are held. A client that sends slowly holds only what it has sent."""

    def __init__(self, each_bytes: int, all_bytes: int) -> None:
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self._held_bytes = 0

    async def read(self, request: web.Request, exchange: Exchange) -> bytes:
        """The whole body; release `exchange.body_bytes` later. Raises BadRequest at a limit, or if it is garbled."""
        pieces = []
        try:
            async for piece in request.content.iter_any():
                pieces.append(piece)
                exchange.body_bytes += len(piece)
                self._held_bytes += len(piece)
                if exchange.body_bytes > self._each_bytes:
                    raise BadRequest(f"the body is larger than {self._each_bytes} bytes", "too_large", 413)
                if self._held_bytes > self._all_bytes:
                    raise BadRequest("too many large requests at once: try again later", "too_many_bytes", 503)
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise BadRequest(f"the body can't be read: {error}", "not_json") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self, held_bytes: int) -> None:
        """The body is no longer needed."""
        self._held_bytes -= held_bytes
