"""One JSON document of an exporter: a login in the address is sent, and never shown."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import read_json
from tests.stack.json_server import JsonAnswers, serving


class Answers(JsonAnswers):
    """What it was asked with, `[]` below `/list`, 403 without a login."""

    def do_GET(self) -> None:
        login = self.headers.get("Authorization")
        asked = {"login": login, "host": self.headers["Host"], "path": self.path}
        self.answer([] if self.path.startswith("/list") else asked, 200 if login else 403)


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    with serving(Answers) as address:
        yield address.rpartition(":")[2]


@pytest.mark.parametrize(("login", "sent"), [("ops:se:cret", "ops:se:cret"), ("ops", "ops:")])
def test_a_login_in_the_address_is_sent_in_its_header(port: str, login: str, sent: str) -> None:
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
def test_what_is_wrong_is_said_without_what_is_secret(port: str, place: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_json(place.format(port=port), "--exporter")
    assert message.format(port=port) in str(raised.value)
    assert "secret" not in str(raised.value)
