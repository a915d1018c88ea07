"""One JSON document of an exporter: a login in the address is sent, and never shown."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import read_json


class Answers(BaseHTTPRequestHandler):
    """What it was asked with, `[]` below `/list`, 403 without a login."""

    def do_GET(self) -> None:
        login = self.headers.get("Authorization")
        self.send_response(200 if login else 403)
        self.end_headers()
        document: object = {"login": login, "host": self.headers["Host"], "path": self.path}
        self.wfile.write(json.dumps([] if self.path.startswith("/list") else document).encode())

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.mark.parametrize(("login", "sent"), [("ops:se:cret", "ops:se:cret"), ("ops", "ops:")])
def test_a_login_in_the_address_is_sent_in_its_header(port: int, login: str, sent: str) -> None:
    found = read_json(f"http://{login}@127.0.0.1:{port}/page?after=3", "--exporter")
    assert found == {
        "login": f"Basic {base64.b64encode(sent.encode()).decode()}",
        "host": f"127.0.0.1:{port}",
        "path": "/page?after=3",
    }


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("http://127.0.0.1:{port}/page?token=secret", "--exporter: http://127.0.0.1:{port}/page answers 403; "),
        ("http://a:secret@127.0.0.1:{port}/list", "--exporter: http://127.0.0.1:{port}/list: the answer is not a JSON"),
        ("http://a:secret@127.0.0.1:1/page?after=secret", "--exporter: http://127.0.0.1:1/page: "),
        ("http://a:secret@127.0.0.1:abc/page", "--exporter: http://127.0.0.1:abc/page: nonnumeric port"),
        ("a:secret@127.0.0.1/page", "is not an http(s) URL"),
    ],
)
def test_what_is_wrong_is_said_without_what_is_secret(port: int, place: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_json(place.format(port=port), "--exporter")
    assert message.format(port=port) in str(raised.value)
    assert "secret" not in str(raised.value)
