"""Where one request's tokens go: straight to its connection, or nowhere until the last one."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from prefixwatch.engines.model.sequence import TokenOut
from prefixwatch.engines.simulated.openai_api import AnswerEncoder
from prefixwatch.engines.simulated.output_words import OutputWords
from prefixwatch.kvcache.blocks import Tokens


class Answer:
    """The answer to one request; `last` is its last token, once there is one."""

    def __init__(self, words: OutputWords, prompt: Tokens, encoder: AnswerEncoder) -> None:
        self._words = words
        self._encoder = encoder
        self._transport: asyncio.Transport | None = None
        self._chunked = False
        self.sequence = words.sequence(prompt)
        self.last: asyncio.Future[TokenOut] = asyncio.get_running_loop().create_future()

    def stream_to(self, request: web.Request) -> None:
        """Events are written past aiohttp's writer, which would cost a task switch a token."""
        self._transport = request.transport
        self._chunked = request.version >= HttpVersion11

    def on_token(self, token: TokenOut) -> None:
        if self._transport is not None:
            if token.position == 0:
                self._write(self._encoder.opening())
            text = self._words.json_texts[self._words.index(self.sequence, token.position)]
            self._write(self._encoder.token(text, token.position, token.finish_reason))
        if token.finish_reason is not None and not self.last.done():
            if self._transport is not None:
                self._write(self._encoder.closing(token.position + 1, token.sequence.cached_tokens or 0))
            self.last.set_result(token)

    def _write(self, event: bytes) -> None:
        transport = self._transport
        if event and transport is not None and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
