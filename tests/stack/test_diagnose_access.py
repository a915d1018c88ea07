"""`prefixwatch diagnose` where asking isn't plain: logins, gateways, stores without targets, a slow query, no data."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from aiohttp import web
from typer.testing import CliRunner

from prefixwatch.alerts.prometheus import PrometheusError, new_session, why_unanswered
from prefixwatch.runbooks.evidence import PrometheusEvidence, ask_all
from prefixwatch.runbooks.page import shipped_runbooks
from prefixwatch.stack.cli.main import app
from prefixwatch.stack.diagnose.command import DiagnoseOptions, Finding, find
from prefixwatch.stack.local.access import Access, access

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def nothing(kind: str = "vector") -> web.Response:
    return web.json_response({"status": "success", "data": {"resultType": kind, "result": []}})


async def empty(_: web.Request) -> web.StreamResponse:
    return nothing()


@asynccontextmanager
async def a_prometheus(query: Handler, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Answers `/api/v1/query` only, as a store without targets does."""
    application = web.Application()
    application.router.add_post("/api/v1/query", query)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def diagnosed(url: str, given: Access | None = None) -> Finding:
    return await find(DiagnoseOptions(prometheus=url), shipped_runbooks(), given)


async def test_an_empty_prometheus_is_told_from_a_healthy_fleet() -> None:
    async with a_prometheus(empty) as url:
        finding = await diagnosed(url)

    assert finding.diagnosis.found is not None
    assert finding.diagnosis.found.id == "exporter_unseen"
    assert [o.step.id for o in finding.diagnosis.observations if o.state == "ok"] == []


async def test_a_store_that_wants_headers_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROM_TOKEN", "s3cret")
    seen: set[tuple[str | None, str | None]] = set()

    async def query(request: web.Request) -> web.StreamResponse:
        seen.add((request.headers.get("Authorization"), request.headers.get("X-Scope-OrgID")))
        return nothing()

    given = access(["Authorization: Bearer ${PROM_TOKEN}", "X-Scope-OrgID: llm"], None)
    async with a_prometheus(query) as url:
        await diagnosed(url, given)

    assert seen == {("Bearer s3cret", "llm")}


async def test_a_private_authority_is_trusted_when_its_certificate_is_given(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    async with a_prometheus(empty, tls=tls) as url:
        with pytest.raises(
            PrometheusError, match=r"certificate can't be trusted: .*: give its authority's as --ca-file"
        ):
            await diagnosed(url)
        finding = await diagnosed(url, access([], tmp_path / "ca.pem"))

    assert finding.source == f"Prometheus {url}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.HTTPUnauthorized, r"it answers 401: give what it wants as --header 'Authorization: Bearer \$\{TOKEN\}'"),
        (web.HTTPForbidden, "it answers 403: give what it wants"),
        (web.HTTPNotFound, "its answer, 404, is not that of a Prometheus' API"),
        (web.HTTPServiceUnavailable, "its answer, 503, is not that of a Prometheus' API"),
    ],
)
async def test_what_refuses_to_answer_is_one_message(answer: type[web.HTTPException], message: str) -> None:
    async def query(_: web.Request) -> web.StreamResponse:
        raise answer

    async with a_prometheus(query) as url:
        with pytest.raises(PrometheusError, match=message):
            await diagnosed(url)


async def test_a_login_page_is_no_prometheus() -> None:
    async def query(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>Sign in</html>", content_type="text/html")

    async with a_prometheus(query) as url:
        with pytest.raises(PrometheusError, match="its answer, 200, is not that of a Prometheus' API"):
            await diagnosed(url)


async def test_one_query_without_an_answer_leaves_the_others_standing() -> None:
    """A Prometheus in trouble is no reason to tell nothing at three in the morning."""

    async def query(request: web.Request) -> web.StreamResponse:
        if "kv_events_lag" in str((await request.post())["query"]) and request.transport is not None:
            request.transport.close()
        return nothing()

    steps = [s for s in shipped_runbooks().steps.values() if s.id in ("events-lag", "exporter-seen")]
    async with a_prometheus(query) as url, new_session() as session:
        answers = await ask_all(steps, PrometheusEvidence(url, session), "5m")

    told = {step.id: answer.why_absent for step, answer in zip(steps, answers, strict=True)}
    assert told["exporter-seen"] == "nothing measures it, or there was too little traffic"
    assert f"--prometheus {url}: can't be asked (Server disconnected)" in told["events-lag"]


def test_a_time_out_is_said_in_words() -> None:
    assert why_unanswered(TimeoutError()) == "no answer in time"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prometheus", "127.0.0.1:9090"], "--prometheus 127.0.0.1:9090: give it as http://HOST:PORT"),
        (["--exporter", "localhost:9477"], "--exporter localhost:9477: give it as http://HOST:PORT"),
        (["--prometheus", "http://me:pw@a"], "--prometheus: a password in the address would appear in every report"),
        (["--preflight", "--prometheus", "http://me:pw@a"], "a password in the address would appear in every report"),
        (["--prometheus", "http://a", "--header", "Authorization: Bearer x"], "a secret on the command line is seen"),
        (["--prometheus", "http://a", "--header", "X-Tenant"], "--header X-Tenant: write it as 'Name: value'"),
        (["--prometheus", "http://a", "--header", "X-Key: ${NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE is not set"),
        (["--prometheus", "http://a", "--ca-file", "/no/such.pem"], "--ca-file /no/such.pem: no certificates"),
        (["--prometheus", "http://a", "--json", "--markdown"], "give one of --markdown and --json"),
        (["PrefixHitLow", "--prometheus", "http://a"], "'PrefixHitLow': did you mean 'PrefixHitRateLow'?"),
    ],
)
def test_wrong_options_are_one_message(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["diagnose", *arguments])

    assert message in str(result.exception)
    assert "pw" not in str(result.exception).replace("password", "")
