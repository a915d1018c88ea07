"""Targets that want to know who asks, and that are asked who they are."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web
from pydantic import ValidationError

from prefixwatch.exporters.config import ExporterConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.http.client_config import ClientConfig
from prefixwatch.exporters.scraping.scrape import Scraper

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServePages = Callable[[dict[str, bytes | Handler]], Awaitable[str]]

PAGE = b"load 1\n"


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    one = Scraper(20.0, 10_000)
    yield one
    await one.close()


@pytest.fixture
async def seen(serve_pages: ServePages) -> tuple[str, list[dict[str, str]]]:
    """A target's address, and the headers of all requests to it."""
    requests: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        requests.append(dict(request.headers))
        return web.Response(body=PAGE)

    return await serve_pages({"/metrics": handler}) + "/metrics", requests


def client(**settings: Any) -> ClientConfig:
    return ClientConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "header"),
    [
        ({"authorization": {"credentials": "t"}}, "Bearer t"),
        ({"authorization": {"type": "Token", "credentials": "t"}}, "Token t"),
        ({"basic_auth": {"username": "sre", "password": "pä:ss"}}, "Basic c3JlOnDDpDpzcw=="),
    ],
)
async def test_authentication_is_sent(
    scraper: Scraper, seen: tuple[str, list[dict[str, str]]], settings: dict[str, Any], header: str
) -> None:
    url, requests = seen
    assert (await scraper.fetch(url, client(**settings))).body == PAGE
    assert requests[0]["Authorization"] == header


async def test_a_token_file_is_read_again_when_it_changes(
    scraper: Scraper, seen: tuple[str, list[dict[str, str]]], tmp_path: Path
) -> None:
    url, requests = seen
    token = tmp_path / "token"
    by_file = client(authorization={"credentials_file": str(token)})
    assert (await scraper.fetch(url, by_file)).reason == "bad_credentials"
    for text in ("first\n", "second, longer\n"):
        token.write_text(text)
        await scraper.fetch(url, by_file)
    assert [request["Authorization"] for request in requests] == ["Bearer first", "Bearer second, longer"]


async def test_headers_are_added(scraper: Scraper, seen: tuple[str, list[dict[str, str]]]) -> None:
    url, requests = seen
    await scraper.fetch(url, client(http_headers={"X-Scope-OrgID": "llm"}))
    assert requests[0]["X-Scope-OrgID"] == "llm"


async def test_a_redirect_to_another_origin_gets_no_credentials(
    scraper: Scraper, seen: tuple[str, list[dict[str, str]]], serve_pages: ServePages
) -> None:
    elsewhere, requests = seen

    async def redirects(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer t"
        return web.Response(status=307, headers={"Location": "/here/" if request.path == "/metrics" else elsewhere})

    url = await serve_pages({"/metrics": redirects, "/here/": redirects})
    settings = client(authorization={"credentials": "t"}, http_headers={"X-Key": "k"})
    assert (await scraper.fetch(url + "/metrics", settings)).body == PAGE
    assert "Authorization" not in requests[0]
    assert "X-Key" not in requests[0]


@pytest.fixture
async def https(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts a target with a certificate of a private authority, and answers with its address."""
    runners: list[web.AppRunner] = []

    async def serve(authority: trustme.CA, host: str = "127.0.0.1", *, ask_client: bool = False) -> str:
        async def handler(_: web.Request) -> web.Response:
            return web.Response(body=PAGE)

        app = web.Application()
        app.router.add_get("/metrics", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        runners.append(runner)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(host).configure_cert(context)
        if ask_client:
            authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        issued = authority.issue_cert("client")
        issued.private_key_pem.write_to_path(tmp_path / "client.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / "client.crt")
        return f"https://127.0.0.1:{runner.addresses[0][1]}/metrics"

    yield serve
    for runner in runners:
        await runner.cleanup()


async def test_a_private_certificate_needs_its_authority(
    scraper: Scraper, https: Callable[..., Awaitable[str]], tmp_path: Path
) -> None:
    """influxdata/influxdb#20045 (EM40): a target with a private or self-signed certificate could not be scraped."""
    url = await https(trustme.CA())
    refused = await scraper.fetch(url)
    assert (refused.reason, "ca_file" in refused.detail) == ("tls_verify", True)
    assert (await scraper.fetch(url, client(tls_config={"ca_file": str(tmp_path / "ca.pem")}))).body == PAGE
    assert (await scraper.fetch(url, client(tls_config={"insecure_skip_verify": True}))).body == PAGE


async def test_a_server_that_speaks_no_tls_is_not_blamed_on_its_certificate(
    scraper: Scraper, serve_pages: ServePages
) -> None:
    plain = await serve_pages({"/metrics": PAGE})
    assert (await scraper.fetch(f"https{plain.removeprefix('http')}/metrics")).reason == "tls"


async def test_a_certificate_that_nobody_checks_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """influxdata/influxdb#20045 (EM40): it works, with a warning on the page and in the log."""
    tls: dict[str, dict[str, object]] = {
        "unchecked": {"url": "https://h:1", "tls_config": {"insecure_skip_verify": True}},
        "checked": {"url": "https://h:2"},
        "plain": {"url": "http://h:3"},
    }
    targets = [{"name": name, **rest} for name, rest in tls.items()]
    exporter = Exporter(ExporterConfig.model_validate({"targets": targets}))
    flags = {target.name: target.flags(0.0).get("tls_unverified") for target in exporter.targets}
    assert flags == {"unchecked": True, "checked": False, "plain": None}
    assert [record.target for record in caplog.records if "not checked" in record.message] == ["unchecked"]  # type: ignore[attr-defined]
    await exporter.close()


async def test_a_certificate_for_another_name_needs_that_name(
    scraper: Scraper, https: Callable[..., Awaitable[str]], tmp_path: Path
) -> None:
    url = await https(trustme.CA(), "engine.internal")
    trust = {"ca_file": str(tmp_path / "ca.pem")}
    assert (await scraper.fetch(url, client(tls_config=trust))).reason == "tls_verify"
    assert (await scraper.fetch(url, client(tls_config=trust | {"server_name": "engine.internal"}))).body == PAGE


async def test_a_client_certificate_is_shown_to_a_target_that_asks(
    scraper: Scraper, https: Callable[..., Awaitable[str]], tmp_path: Path
) -> None:
    url = await https(trustme.CA(), ask_client=True)
    trust = {"ca_file": str(tmp_path / "ca.pem")}
    assert (await scraper.fetch(url, client(tls_config=trust))).body is None
    own = {"cert_file": str(tmp_path / "client.crt"), "key_file": str(tmp_path / "client.key")}
    assert (await scraper.fetch(url, client(tls_config=trust | own))).body == PAGE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"authorization": {}}, "give either credentials or credentials_file"),
        ({"basic_auth": {"username": "a", "password": "b", "password_file": "c"}}, "either password or password_file"),
        (
            {"authorization": {"credentials": "t"}, "basic_auth": {"username": "a", "password": "b"}},
            "exclude each other",
        ),
        ({"tls_config": {"cert_file": "a"}}, "belong together"),
        ({"http_headers": {"A:": "b"}}, "is not a header's name"),
        ({"http_headers": {"A": "b\r\nC: d"}}, "control character"),
        ({"http_headers": {"Authorization": "b"}}, "use authorization or basic_auth"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClientConfig.model_validate(settings)


async def test_files_that_are_no_certificates_are_named(
    scraper: Scraper, seen: tuple[str, list[dict[str, str]]], tmp_path: Path
) -> None:
    (tmp_path / "x.pem").write_text("x")
    scrape = await scraper.fetch(seen[0], client(tls_config={"ca_file": str(tmp_path / "x.pem")}))
    assert (scrape.reason, str(tmp_path / "x.pem") in scrape.detail) == ("bad_credentials", True)
