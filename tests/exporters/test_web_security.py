"""The exporter's own pages behind TLS and basic authentication, by the file that Prometheus' exporters share."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import bcrypt
import pytest
import trustme
import yaml

from prefixwatch.documents import DocumentError
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.http.web_config import WebSecurity

PASSWORD = "correct horse"
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
CONFIG = ExporterConfig(targets=(TargetConfig(name="a", url="http://127.0.0.1:1"),), listen="127.0.0.1:0")


def web_config(folder: Path, **content: object) -> Path:
    file = folder / "web.yml"
    file.write_text(yaml.safe_dump(content))
    return file


def certificates(folder: Path, authority: trustme.CA) -> dict[str, object]:
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "server.key")
    (folder / "server.crt").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return {"cert_file": "server.crt", "key_file": "server.key"}


@asynccontextmanager
async def serving(file: Path) -> AsyncIterator[Exporter]:
    async with running(CONFIG, security=WebSecurity(file)) as exporter:
        yield exporter


async def status(exporter: Exporter, authorization: str | None = None, tls: ssl.SSLContext | bool = True) -> int:
    headers = {"Authorization": authorization} if authorization else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{exporter.url}/metrics", headers=headers, ssl=tls) as response,
    ):
        return response.status


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def test_only_users_with_their_password_see_pages(tmp_path: Path) -> None:
    async with serving(web_config(tmp_path, basic_auth_users={"sre": HASH})) as exporter:
        assert await status(exporter, basic("sre", PASSWORD)) == 200
        for refused in (None, basic("sre", "wrong"), basic("other", PASSWORD), basic("", ""), "Basic !", "Bearer x"):
            assert await status(exporter, refused) == 401
        assert await status(exporter, basic("sre", "x" * 100)) == 401
        assert await status(exporter, basic("sre", PASSWORD)) == 200


async def test_every_page_asks_for_the_password(tmp_path: Path) -> None:
    async with (
        serving(web_config(tmp_path, basic_auth_users={"sre": HASH})) as exporter,
        aiohttp.ClientSession() as session,
    ):
        for method, path in (("GET", "/"), ("GET", "/api/v1/fleet"), ("GET", "/-/healthy"), ("POST", "/-/reload")):
            async with session.request(method, exporter.url + path) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, 'Basic realm="prefixwatch"')


async def test_a_password_is_hashed_once_and_then_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    security = WebSecurity(web_config(tmp_path, basic_auth_users={"sre": HASH}))
    hashed: list[bytes] = []
    check = bcrypt.checkpw

    def noted(password: bytes, known: bytes) -> bool:
        hashed.append(password)
        return check(password, known)

    monkeypatch.setattr(bcrypt, "checkpw", noted)
    answers = [await security.allows(basic("sre", word)) for word in (PASSWORD, "wrong", PASSWORD, "wrong")]
    assert (answers, hashed) == ([True, False, True, False], [PASSWORD.encode(), b"wrong"])


@pytest.mark.parametrize(
    ("user", "password"),
    [("cheap", b"right"), ("cheap", b"wrong"), ("dear", b"wrong"), ("nobody", b"wrong"), ("dear", b"x" * 100),
     ("cheap", b"a\0b"), ("", b"")],
)  # fmt: skip
async def test_every_login_takes_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, password: bytes
) -> None:
    """L2: bcrypt's rounds, added up, don't say whether there is such a user."""
    users = {name: bcrypt.hashpw(b"right", bcrypt.gensalt(cost)).decode() for name, cost in (("cheap", 4), ("dear", 7))}
    security = WebSecurity(web_config(tmp_path, basic_auth_users=users))
    rounds: list[int] = []

    def counted(work: Callable[[bytes, bytes], Any]) -> Callable[[bytes, bytes], Any]:
        def call(word: bytes, salt_or_hash: bytes) -> Any:
            rounds.append(2 ** int(salt_or_hash.split(b"$")[2]))
            return work(word, salt_or_hash)

        return call

    monkeypatch.setattr(bcrypt, "checkpw", counted(bcrypt.checkpw))
    monkeypatch.setattr(bcrypt, "hashpw", counted(bcrypt.hashpw))
    allowed = await security.allows("Basic " + base64.b64encode(user.encode() + b":" + password).decode())
    assert (allowed, sum(rounds)) == ((user, password) == ("cheap", b"right"), 2**7)


async def test_new_logins_beyond_what_can_be_checked_are_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: known logins go on, and nobody waits behind a hundred wrong ones."""
    async with serving(web_config(tmp_path, basic_auth_users={"sre": HASH})) as exporter:
        assert await status(exporter, basic("sre", PASSWORD)) == 200
        free, check = threading.Event(), bcrypt.checkpw

        def slow(password: bytes, known: bytes) -> bool:
            free.wait(60)
            return check(password, known)

        monkeypatch.setattr(bcrypt, "checkpw", slow)
        guesses = [asyncio.create_task(status(exporter, basic("sre", f"guess {k}"))) for k in range(100)]
        turned_away, _ = await asyncio.wait(guesses, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in turned_away} == {503}
        assert await status(exporter, basic("sre", PASSWORD)) == 200
        free.set()
        assert Counter(await asyncio.gather(*guesses)) == {401: 32, 503: 68}


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ({}, 200),
        ({"Origin": "{own}"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_a_page_of_another_site_reloads_nothing(tmp_path: Path, headers: dict[str, str], answer: int) -> None:
    """L8: a browser sends the request for whatever page asks it to."""
    async with serving(web_config(tmp_path)) as exporter, aiohttp.ClientSession() as session:
        sent = {name: value.format(own=exporter.url) for name, value in headers.items()}
        async with session.post(f"{exporter.url}/-/reload", headers=sent) as response:
            assert response.status == answer


async def test_https_with_the_configured_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    file = web_config(tmp_path, tls_server_config=certificates(tmp_path, authority))
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with serving(file) as exporter:
        assert exporter.url.startswith("https://")
        assert await status(exporter, tls=trusting) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(exporter)


async def test_client_certificates_are_required_when_the_file_says_so(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = certificates(tmp_path, authority)
    tls |= {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem", "min_version": "TLS12"}
    without = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    with_one = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    authority.issue_cert("client").configure_cert(with_one)
    async with serving(web_config(tmp_path, tls_server_config=tls)) as exporter:
        assert await status(exporter, tls=with_one) == 200
        with pytest.raises(aiohttp.ClientError):
            await status(exporter, tls=without)


async def test_a_renewed_certificate_is_served_after_a_reload(tmp_path: Path) -> None:
    file = web_config(tmp_path, tls_server_config=certificates(tmp_path, trustme.CA()))
    security = WebSecurity(file)
    async with running(CONFIG, security=security) as exporter:
        renewed = trustme.CA()
        certificates(tmp_path, renewed)
        assert security.changed()
        security.use(security.prepare())
        assert not security.changed()
        assert await status(exporter, tls=ssl.create_default_context(cafile=tmp_path / "ca.pem")) == 200


async def test_pages_carry_security_headers(tmp_path: Path) -> None:
    headers = {"X-Frame-Options": "SAMEORIGIN", "Strict-Transport-Security": "max-age=1"}
    async with (
        serving(web_config(tmp_path, http_server_config={"headers": headers})) as exporter,
        aiohttp.ClientSession() as session,
    ):
        for path in ("/metrics", "/nowhere"):
            async with session.get(exporter.url + path) as response:
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["X-Frame-Options"] == "SAMEORIGIN"
                assert response.headers["Strict-Transport-Security"] == "max-age=1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"basic_auth_users": {"sre": "plain"}},
            r"web\.yml:1: basic_auth_users: the password of 'sre' is not a",
        ),
        ({"tls_server_config": {"cert_file": "a"}}, r"tls_server_config\.key_file: missing: add it"),
        ({"basic_auth": {}}, "unknown key: did you mean 'basic_auth_users'"),
        (
            {"tls_server_config": {"cert_file": "a", "key_file": "b", "client_auth_type": "VerifyClientCertIfGiven"}},
            "needs client_ca_file",
        ),
        ({"http_server_config": {"headers": {"Server": "x"}}}, "'Server' can't be set"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, content: dict[str, object], message: str) -> None:
    with pytest.raises(DocumentError, match=message) as failure:
        WebSecurity(web_config(tmp_path, **content))
    assert "plain'" not in str(failure.value)


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = web_config(tmp_path, tls_server_config={"cert_file": "no.crt", "key_file": "no.key"})
    with pytest.raises(ExporterError, match=r"no\.crt.*No such file"):
        WebSecurity(file)
