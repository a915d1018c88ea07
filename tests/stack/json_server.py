"""A server in a thread that answers with JSON documents."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonAnswers(BaseHTTPRequestHandler):
    """Write `do_GET` with `answer`."""

    def answer(self, document: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: object) -> None:
        """Silent."""


@contextlib.contextmanager
def serving(handler: type[JsonAnswers]) -> Iterator[str]:
    """The server's address, while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
