"""Who asks, and whose blocks it may share: what clients say of themselves never counts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from pathlib import Path
from time import time
from typing import Any

import aiohttp
import jwt
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from prefixwatch.kvcache.isolation_findings import FindingKind
from prefixwatch.router.errors import RouterError
from prefixwatch.router.serving import identity_files
from prefixwatch.router.serving.identity_files import IdentityFiles
from prefixwatch.router.tenant_config import IdentityConfig
from tests.router.conftest import Client, Start
from tests.router.fake_engine import FakeEngine, until
from tests.router.test_request_log import answering, page

KEY, ACME, BOLT = "k" * 40, "acme-s3cr3t-api-key", "bolt-s3cr3t-api-key"


@pytest.fixture
def secrets_file(tmp_path: Path) -> Path:
    return written(tmp_path / "secrets.yaml")


def written(path: Path, key: str = KEY, **tenants: str) -> Path:
    keys = tenants or {"acme": ACME, "bolt": BOLT}
    content = {
        "namespace_key": key,
        "api_keys": {name: [hashlib.sha256(one.encode()).hexdigest()] for name, one in keys.items()},
    }
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(content))
    os.replace(new, path)
    return path


def by_key(secrets_file: Path, **fields: Any) -> dict[str, Any]:
    return {"identity": {"secrets_file": str(secrets_file), "api_keys": True, **fields}}


def by_proxy(secrets_file: Path, proxies: str = "127.0.0.0/8", **fields: Any) -> dict[str, Any]:
    return {"identity": {"secrets_file": str(secrets_file), "trusted_proxies": [proxies], **fields}}


async def status(client: Client, headers: Any = None, **fields: Any) -> int:
    async with client.chat("x" * 64, headers=headers, **fields) as answer:
        await answer.read()
        return int(answer.status)


def salts(engine: FakeEngine) -> list[Any]:
    return [json.loads(body).get("cache_salt") for body in engine.bodies]


async def test_an_api_key_makes_the_tenant_and_its_salt(
    start: Start, engines: list[FakeEngine], secrets_file: Path
) -> None:
    client = await start(engines[:1], policy="cache_aware", **by_key(secrets_file))
    assert await status(client, {"Authorization": f"Bearer {ACME}"}, cache_salt="mine") == 200
    assert await status(client, {"x-api-key": BOLT}, extra_key="mine") == 200
    assert await status(client, {"Authorization": f"Bearer {ACME}"}) == 200
    assert await status(client) == 200
    acme, bolt, again, anonymous = salts(engines[0])
    assert acme == again
    assert len({acme, bolt, anonymous}) == 3
    assert all(len(salt) == 32 for salt in (acme, bolt, anonymous))
    assert not any("mine" in body.decode() for body in engines[0].bodies)
    for headers in engines[0].headers:
        assert "Authorization" not in headers, "the key is for this router"
        assert "x-api-key" not in headers
    assert [headers.get("x-tenant-id") for headers in engines[0].headers] == ["acme", "bolt", "acme", None]
    records = (await page(client)).records
    assert [record.finding for record in records] == [""] * 4
    shown = str(records) + (await (await client.session.get(f"{client.url}/metrics")).text())
    assert not any(secret in shown for secret in (ACME, BOLT, acme, bolt, KEY, "acme", "bolt"))


@pytest.mark.parametrize(
    ("headers", "expected", "reason"),
    [
        ({"Authorization": "Bearer wrong"}, 401, "bad_identity"),
        ({"Authorization": f"Bearer {ACME} "}, 200, ""),
        ({"Authorization": f"Bearer {ACME.upper()}"}, 401, "bad_identity"),
        ({"Authorization": f"Bearer {ACME}", "x-api-key": BOLT}, 400, "two_tenants"),
        ([("Authorization", f"Bearer {ACME}"), ("Authorization", f"Bearer {BOLT}")], 400, "two_tenants"),
        ({"Authorization": f"Bearer {ACME}", "x-tenant-id": "bolt"}, 403, "untrusted_tenant"),
        ({"x-tenant-id": "bolt"}, 403, "untrusted_tenant"),
        ({"x_tenant_id": "bolt", "Authorization": f"Bearer {ACME}"}, 400, "two_tenants"),
        ({}, 401, "no_identity"),
    ],
)
async def test_forged_and_doubled_identities_are_refused(
    start: Start, engines: list[FakeEngine], secrets_file: Path, *, headers: Any, expected: int, reason: str
) -> None:
    client = await start(engines[:1], **by_key(secrets_file, required=True))
    assert await status(client, headers) == expected
    assert len(engines[0].bodies) == (1 if expected == 200 else 0)
    if reason:
        assert client.value("refusals_total", reason=reason) == 1


@pytest.mark.parametrize(
    ("proxies", "headers", "expected"),
    [
        ("127.0.0.0/8", {"x-tenant-id": "acme"}, 200),
        ("127.0.0.1", {"X-TENANT-ID": "acme"}, 200),
        ("10.0.0.0/8", {"x-tenant-id": "acme"}, 403),
        ("10.0.0.0/8", {"x-tenant-id": "acme", "X-Forwarded-For": "10.0.0.1", "Forwarded": "for=10.0.0.1"}, 403),
        ("127.0.0.0/8", {"x-tenant-id": "acme, bolt"}, 400),
        ("127.0.0.0/8", [("x-tenant-id", "acme"), ("x-tenant-id", "acme")], 400),
        ("127.0.0.0/8", {"x-tenant-id": "a" * 257}, 400),
        ("127.0.0.0/8", {"x-tenant-id": ""}, 200),
    ],
)
async def test_the_tenant_header_counts_from_a_trusted_proxy_alone(
    start: Start, engines: list[FakeEngine], secrets_file: Path, *, proxies: str, headers: Any, expected: int
) -> None:
    client = await start(engines[:1], **by_proxy(secrets_file, proxies))
    assert await status(client, headers) == expected


BODY = b'{"model":"tiny","messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n" % len(BODY)


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"x-tenant-id: acme\r\nX-TENANT-ID: bolt\r\n\r\n" + BODY,
        HEAD + b"x-tenant-id: acme\r\nx_tenant_id: bolt\r\n\r\n" + BODY,
        HEAD + b"x-tenant-id : acme\r\n\r\n" + BODY,
        HEAD + b"x-a: 1\r\n x-tenant-id: acme\r\n\r\n" + BODY,
        HEAD + b"x-tenant-id: acme\x00bolt\r\n\r\n" + BODY,
        HEAD + b"x-a: 1\nx-tenant-id: acme\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding: chunked\r\nx-tenant-id: acme\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nx-tenant-id: acme\r\n\r\n" + BODY,
    ],
)
async def test_no_tenant_is_smuggled_past_the_parser(
    start: Start, engines: list[FakeEngine], secrets_file: Path, sent: bytes
) -> None:
    client = await start(engines[:1], **by_proxy(secrets_file))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert b" 400 " in answer.splitlines()[0]
    assert engines[0].bodies == []


async def test_tenants_whose_names_look_alike_share_nothing(
    start: Start, engines: list[FakeEngine], secrets_file: Path
) -> None:
    client = await start(engines[:1], **by_proxy(secrets_file))
    alike = ["acme", "ACME", "Acme", "acme.", "ａｃｍｅ", "аcme", "acme\u200b", "anonymous", "group", "tenant"]
    for name in alike:
        assert await status(client, {"x-tenant-id": name}) == 200
    assert await status(client, {"cache-salt": "x", "X-Cache-Salt": "x", "x_extra_key": "x"}) == 200
    assert len(set(salts(engines[0]))) == len(alike) + 1
    assert not any("salt" in name.lower() or "extra" in name.lower() for name in engines[0].headers[-1])


async def test_a_trust_group_shares_and_is_no_finding(
    start: Start, engines: list[FakeEngine], secrets_file: Path
) -> None:
    groups: dict[str, Any] = {"trust_groups": {"family": ["acme", "bolt"]}}
    client = await start(
        engines[:1], policy="cache_aware", isolation={"caches_at_start": "empty"}, **by_proxy(secrets_file, **groups)
    )
    for tenant, cached in (("acme", 0), ("bolt", 64), ("other", 64)):
        engines[0].behaviour = answering(cached)
        assert await status(client, {"x-tenant-id": tenant}) == 200
    acme, bolt, other = salts(engines[0])
    assert acme == bolt != other
    first, second, third = (await page(client)).records
    assert (first.trust_group, second.trust_group, third.trust_group) == ("family", "family", "")
    assert (second.own_tokens, second.finding) == (80, "")
    assert (third.own_tokens, third.finding, third.finding_tenant) == (0, FindingKind.SALT_IGNORED, "group family")


async def test_keys_rotate_without_a_restart(
    start: Start, engines: list[FakeEngine], secrets_file: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(identity_files, "CHECK_SECONDS", 0.01)
    client = await start(engines[:1], **by_key(secrets_file))

    async def accepted(key: str) -> bool:
        return await status(client, {"x-api-key": key}) == 200

    assert await accepted(ACME)
    written(secrets_file, key="n" * 40, acme="a-new-key-of-acme")
    await until(lambda: len(client.router.identity_files.tenant_of) == 1)
    assert await accepted("a-new-key-of-acme")
    assert not await accepted(ACME)
    old, new = salts(engines[0])
    assert old != new
    secrets_file.write_text("namespace_key: too-short-a-secret\n")
    await until(lambda: not client.router.identity_files.usable["secrets"])
    assert await accepted("a-new-key-of-acme"), "what was valid stays so"
    assert client.value("identity_files_usable", file="secrets") == 0
    await until(lambda: f"{secrets_file}: namespace_key is shorter than 32 characters" in caplog.text)
    assert "too-short-a-secret" not in caplog.text
    assert salts(engines[0])[-1] == new


async def test_the_log_names_the_file_and_the_place_and_quotes_nothing(
    secrets_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is what the runbook sends the reader to."""
    monkeypatch.setattr(identity_files, "CHECK_SECONDS", 0.01)
    jwks = tmp_path / "jwks.json"
    jwks.write_text(key_set(one=ec.generate_private_key(ec.SECP256R1())))
    files = IdentityFiles(
        IdentityConfig.model_validate({"secrets_file": secrets_file, "jwt": {"jwks": str(jwks), "audience": "llm"}})
    )
    async with aiohttp.ClientSession() as session:
        fresh = asyncio.create_task(files.keep_fresh(session))
        secrets_file.write_text("api_keys: {}\nnamespace_keys: s3cret\n")
        jwks.write_text('{"keys": "s3cret"')
        secrets = rf"secrets can't be used.*{secrets_file}:2: namespace_keys: .*docs/multi-tenant.md"
        signing = rf"jwks can't be used.*{jwks}: not a JWKS .*line 1 column"
        await until(lambda: all(re.search(message, caplog.text) for message in (secrets, signing)))
        fresh.cancel()
    assert "s3cret" not in caplog.text


def test_what_is_written_while_a_file_is_read_is_read_the_next_time(
    secrets_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = IdentityFiles(IdentityConfig(secrets_file=secrets_file, api_keys=True))
    read = identity_files._loaded

    def overtaken(path: Path) -> identity_files.SecretsFile:
        content = read(path)
        written(secrets_file, latest="the latest key")
        return content

    written(secrets_file, earlier="an earlier key")
    monkeypatch.setattr(identity_files, "_loaded", overtaken)
    files._read_secrets()
    monkeypatch.undo()
    files._read_secrets()
    assert set(files.tenant_of.values()) == {"latest"}


def token(key: Any, kid: str = "one", algorithm: str = "ES256", **claims: Any) -> str:
    payload = {"tenant": "acme", "exp": time() + 60, "aud": "llm", "iss": "idp", **claims}
    return jwt.encode({k: v for k, v in payload.items() if v is not None}, key, algorithm, headers={"kid": kid})


async def test_a_token_names_the_tenant_if_everything_about_it_is_right(
    start: Start, engines: list[FakeEngine], secrets_file: Path, tmp_path: Path
) -> None:
    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    jwks = tmp_path / "jwks.json"
    jwks.write_text(key_set(one=key))
    settings = {"jwks": str(jwks), "audience": "llm", "issuer": "idp"}
    client = await start(engines[:1], identity={"secrets_file": str(secrets_file), "jwt": settings, "required": True})
    unsigned = jwt.encode({"tenant": "acme", "exp": time() + 60, "aud": "llm", "iss": "idp"}, "", "none")
    shared = token("k" * 64, algorithm="HS256")
    wrong = [
        token(other), token(key, kid="two"), token(key, exp=time() - 60), token(key, exp=None), token(key, aud="web"),
        token(key, iss="evil"), token(key, tenant=5), token(key, tenant=""), token(key, tenant=["acme"]),
        token(key)[:-4], unsigned, shared, "a.b.c", "", "{}",
    ]  # fmt: skip
    for one in wrong:
        assert await status(client, {"Authorization": f"Bearer {one}"}) == 401, one
    assert await status(client, {"Authorization": f"Bearer {token(key)}"}) == 200
    assert await status(client, {"Authorization": f"Bearer {token(key)}"}) == 200, "a replay is the same tenant's"
    assert [headers["x-tenant-id"] for headers in engines[0].headers] == ["acme", "acme"]
    assert len(set(salts(engines[0]))) == 1


def key_set(**keys: ec.EllipticCurvePrivateKey) -> str:
    """A JWKS document: public keys by their id."""
    public = {kid: json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key())) for kid, key in keys.items()}
    return json.dumps({"keys": [{**one, "kid": kid} for kid, one in public.items()]})


async def test_keys_at_an_address_rotate_and_outlive_its_failures(
    start: Start, engines: list[FakeEngine], secrets_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_files, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(identity_files, "_JWKS_SECONDS", 0.02)
    old, new = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    answers: dict[str, Any] = {"status": 200, "text": key_set(one=old)}

    async def jwks(_request: web.Request) -> web.Response:
        return web.Response(**answers)

    app = web.Application()
    app.router.add_get("/jwks.json", jwks)
    address = TestServer(app)
    await address.start_server()
    settings = {"jwks": str(address.make_url("/jwks.json")), "audience": "llm", "issuer": "idp"}
    client = await start(engines[:1], identity={"secrets_file": str(secrets_file), "jwt": settings, "required": True})
    files = client.router.identity_files

    async def accepted(key: Any, kid: str) -> bool:
        return await status(client, {"Authorization": f"Bearer {token(key, kid)}"}) == 200

    await until(lambda: files.signing_key("one") is not None)
    assert await accepted(old, "one")
    answers["text"] = key_set(two=new)
    await until(lambda: files.signing_key("two") is not None)
    assert await accepted(new, "two")
    assert not await accepted(old, "one"), "its key was withdrawn"
    for broken in ({"status": 503, "text": key_set(one=old)}, {"status": 200, "text": '{"keys": []}'}):
        answers.update(broken)
        await until(lambda: not files.usable["jwks"])
        assert client.value("identity_files_usable", file="jwks") == 0
        assert await accepted(new, "two"), "what was valid stays so"
        assert not await accepted(old, "one")
        answers.update(status=200, text=key_set(two=new))
        await until(lambda: files.usable["jwks"])
    await address.close()
    await until(lambda: not files.usable["jwks"])
    assert await accepted(new, "two"), "nobody listens at the address any more"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trusted_proxies": ["10.0.0.0/99"]}, "not an address or network"),
        ({"api_keys": True}, "needs the secrets_file"),
        ({"required": True}, "add trusted_proxies, api_keys or jwt"),
        ({"secrets_file": "x"}, "add trusted_proxies, api_keys or jwt"),
        ({"trust_groups": {"a": ["t"], "b": ["t"]}}, "'t' is in two trust_groups"),
    ],
)
def test_settings_that_would_not_isolate_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        IdentityConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("namespace_key: s3cret-short", "shorter than 32"),
        ("api_keys: {acme: [s3cret-no-hash]}", "api_keys"),
        ("namespace_keys: s3cret", "namespace_key"),
        (yaml.safe_dump({"api_keys": {"a": ["0" * 64], "b": ["0" * 64]}}), "two tenants have the same key"),
        (None, "can't be read|No such file"),
    ],
)
def test_a_secrets_file_that_cannot_be_used_is_named_and_not_quoted(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "secrets.yaml"
    if content is not None:
        path.write_text(content)
    config = IdentityConfig(secrets_file=path, api_keys=True)
    with pytest.raises(RouterError, match=message) as refused:
        IdentityFiles(config)
    assert "secrets.yaml" in str(refused.value)
    assert "s3cret-" not in str(refused.value)
