"""Attacks on a tenant's namespace by kinds: bodies as text, spellings, fields, encodings, claims, broken files."""

from __future__ import annotations

import gzip
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.router.exchange.namespaces import is_tenant_name, names_a_salt, with_only_this_salt
from prefixwatch.router.serving import identity_files
from prefixwatch.router.serving.identity_files import IdentityFiles
from prefixwatch.router.tenant_config import IdentityConfig
from tests.router.conftest import Start
from tests.router.fake_engine import FakeEngine, until
from tests.router.test_identity import ACME, BOLT, by_key, by_proxy, key_set, salts, status, token, written
from tests.router.test_request_log import page

FIELDS = (
    "cache_salt", "extra_key", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "session_params", "session_id", "disaggregated_params", "id_slot", "slot_id",
)  # fmt: skip
EXTENSIONS = ("extra_body", "extra_args", "vllm_xargs", "nvext", "sampling_params", "custom_params")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate")


def letters(name: str) -> str:
    """What stays of a name for the most lenient reader."""
    return "".join(c for c in unicodedata.normalize("NFKC", name).casefold() if c.isalnum())


LETTERS = {letters(name) for name in FIELDS}


@st.composite
def spellings(draw: st.DrawFn, of: Sequence[str] = FIELDS) -> str:
    """A field's name in some case, width and separation, with invisible characters."""
    words = draw(st.sampled_from(of)).split("_")
    style = draw(st.sampled_from(["snake", "kebab", "camel", "upper", "dotted", "joined", "spaced"]))
    if style == "camel":
        name = words[0] + "".join(word.title() for word in words[1:])
    else:
        separator = {"kebab": "-", "dotted": ".", "joined": "", "spaced": " "}.get(style, "_")
        name = separator.join(words)
        name = name.upper() if style == "upper" else name
    if draw(st.booleans()):
        name = "".join(chr(ord(c) + 0xFEE0) if draw(st.booleans()) and "!" <= c <= "~" else c for c in name)
    at = draw(st.integers(0, len(name)))
    return name[:at] + draw(st.sampled_from(["", " ", "\u200b", "\u00ad", "\ufeff", "\u2060", "\t", "_"])) + name[at:]


@st.composite
def json_texts(draw: st.DrawFn, depth: int = 2) -> str:
    """A JSON object as text: fields twice, escaped letter by letter, of any type, in any extension."""
    parts = []
    for _ in range(draw(st.integers(0, 5))):
        extension = depth > 0 and draw(st.booleans())
        name = draw(spellings(EXTENSIONS) if extension else spellings())
        escaped = "".join(f"\\u{ord(c):04x}" if draw(st.booleans()) or c < " " else c for c in name)
        value = draw(json_texts(depth - 1)) if extension else draw(st.sampled_from(VALUES))
        if extension and draw(st.booleans()):
            value = f"[{value}, {draw(json_texts(depth - 1))}]"
        parts.append(f'{draw(st.sampled_from(["", " ", chr(10)]))}"{escaped}" : {value}')
    return "{" + ",".join(parts) + "}"


VALUES = ('"evil"', '["evil", "evil"]', '{"salt": "evil"}', "1", "null", "true", '[[], {"a": "evil"}]', '""')


def names_in(value: Any) -> list[str]:
    """Every name in it, those that come twice included."""
    if isinstance(value, Pairs):
        return [name for key, one in value.pairs for name in (key, *names_in(one))]
    return [name for one in value for name in names_in(one)] if isinstance(value, list) else []


class Pairs:
    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


@settings(max_examples=300)
@given(json_texts(), st.sampled_from(PATHS))
def test_whatever_a_body_says_its_only_namespace_is_the_derived_one(text: str, path: str) -> None:
    """Read as leniently as can be: any spelling, the first or the last of two, inside any extension."""
    sent = with_only_this_salt(text.encode(), path, "OWN")
    names = names_in(json.loads(sent, object_pairs_hook=Pairs))
    own = ["cache_salt", "extra_key"] if path == "/generate" else ["cache_salt"]
    assert sorted(name for name in names if letters(name) in LETTERS) == own
    assert {json.loads(sent)[name] for name in own} == {"OWN"}
    assert b"evil" not in sent


@given(spellings(("cache_salt", "extra_key", "kv_transfer_params")), st.sampled_from(["", "x-", "X-Vllm-"]))
def test_a_header_called_like_a_namespace_is_not_sent_on(name: str, before: str) -> None:
    assert names_a_salt(before + name)


@given(st.sampled_from(["x-session-id", "x-request-id", "authorization", "content-type", "accept", "traceparent"]))
def test_other_headers_are(name: str) -> None:
    assert not names_a_salt(name)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
async def test_a_compressed_body_is_in_the_derived_namespace_too(
    start: Start, engines: list[FakeEngine], tmp_path: Path, encoding: str
) -> None:
    client = await start(engines[:1], **by_key(written(tmp_path / "secrets.yaml")))
    plain = json.dumps(
        {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "x"}], "cache_salt": "evil"}
    ).encode()
    body = {"gzip": gzip.compress(plain), "deflate": zlib.compress(plain), "identity": plain}[encoding]
    headers = {"x-api-key": ACME, "Content-Encoding": encoding, "Content-Type": "application/json"}
    url = f"{client.url}/v1/chat/completions?cache_salt=evil&extra_key=evil"
    async with client.session.post(url, data=body, headers=headers) as answer:
        await answer.read()
        assert answer.status == 200
    assert await status(client, {"x-api-key": ACME}) == 200
    first, second = salts(engines[0])
    assert first == second
    assert b"evil" not in engines[0].bodies[0]


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"null", b'"x"', b'[{"messages": [], "cache_salt": "evil"}]', b"", b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"cache_salt": "evil"}', b'{"cache_salt": "evil"}{"a": 1}', b'{"cache_salt": "\xff"}',
        b"{" + b'"a":[' * 5000 + b"]" * 5000 + b"}", b"prompt=x&cache_salt=evil", b'{"a": NaN, "cache_salt": "evil"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"])
async def test_what_is_no_json_object_reaches_no_engine(
    start: Start, engines: list[FakeEngine], tmp_path: Path, path: str, body: bytes
) -> None:
    client = await start(engines[:1], **by_key(written(tmp_path / "secrets.yaml")))
    async with client.session.post(f"{client.url}{path}", data=body, headers={"x-api-key": ACME}) as answer:
        assert answer.status in (400, 404)
    assert engines[0].bodies == []


async def test_a_request_sent_again_by_another_tenant_is_in_the_others_namespace(
    start: Start, engines: list[FakeEngine], tmp_path: Path
) -> None:
    """A replay of all that can be seen of a request, the salt that reached the engine included."""
    client = await start(engines[:1], **by_key(written(tmp_path / "secrets.yaml")))
    assert await status(client, {"x-api-key": ACME, "x-session-id": "s", "x-request-id": "r"}) == 200
    seen = json.loads(engines[0].bodies[0])
    headers = {**engines[0].headers[0], "x-api-key": BOLT}
    sent_on = {name: value for name, value in headers.items() if name.lower().startswith("x-")}
    kept = {name: value for name, value in sent_on.items() if name.lower() != "x-tenant-id"}
    async with client.session.post(f"{client.url}/v1/chat/completions", json=seen, headers=sent_on) as refused:
        assert refused.status == 403, "the victim's tenant header from no proxy"
    async with client.session.post(f"{client.url}/v1/chat/completions", json=seen, headers=kept) as answer:
        assert answer.status == 200
        await answer.read()
    first, second = salts(engines[0])
    assert second != first == seen["cache_salt"]
    assert [record.finding for record in (await page(client)).records if record.outcome == "completed"] == ["", ""]


@pytest.mark.parametrize(
    "claim",
    ["acme,bolt", "acme ", " acme", "acmé", "acme\u2028", "acme\x7f", "acme\u200b", "\ud800", "x" * 256, "=", "\xa0"],
)
async def test_odd_names_in_a_token_are_refused_or_tenants_of_their_own(
    start: Start, engines: list[FakeEngine], tmp_path: Path, claim: str
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    file = tmp_path / "jwks.json"
    file.write_text(key_set(one=key))
    settings = {"jwks": str(file), "audience": "llm", "issuer": "idp"}
    secrets = written(tmp_path / "secrets.yaml")
    client = await start(engines[:1], identity={"secrets_file": str(secrets), "jwt": settings, "required": True})
    got = await status(client, {"Authorization": f"Bearer {token(key, 'one', tenant=claim)}"})
    assert await status(client, {"Authorization": f"Bearer {token(key, 'one', tenant='acme')}"}) == 200
    assert got in (200, 400)
    *odd, acme = salts(engines[0])
    assert len(odd) == (got == 200)
    assert acme not in odd
    if odd:
        assert engines[0].headers[0]["x-tenant-id"] == claim, "a router behind this one reads the same name"


@pytest.mark.parametrize("name", ["acme", "acme\u200b", "acm\u00e9"])
async def test_a_trusted_proxys_name_reaches_the_router_behind_as_it_is(
    start: Start, engines: list[FakeEngine], tmp_path: Path, name: str
) -> None:
    client = await start(engines[:1], **by_proxy(written(tmp_path / "secrets.yaml")))
    assert await status(client, {"x-tenant-id": name}) == 200
    assert engines[0].headers[0]["x-tenant-id"] == name


async def test_a_broken_file_keeps_no_other_from_being_read(
    tmp_path: Path, start: Start, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the secrets are broken a signing key is taken back: its tokens must not stay valid for that."""
    monkeypatch.setattr(identity_files, "CHECK_SECONDS", 0.01)
    old, new = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    jwks, secrets = tmp_path / "jwks.json", written(tmp_path / "secrets.yaml")
    jwks.write_text(key_set(one=old))
    settings = {"jwks": str(jwks), "audience": "llm", "issuer": "idp"}
    client = await start(engines[:1], identity={"secrets_file": str(secrets), "jwt": settings, "required": True})
    files = client.router.identity_files
    secrets.unlink()
    await until(lambda: not files.usable["secrets"])
    jwks.write_text(key_set(another=new))
    await until(lambda: files.signing_key("another") is not None)
    assert await status(client, {"Authorization": f"Bearer {token(old, 'one')}"}) == 401
    assert await status(client, {"Authorization": f"Bearer {token(new, 'another')}"}) == 200
    assert (files.usable["secrets"], files.usable["jwks"]) == (False, True)
    jwks.write_text("{")
    await until(lambda: not files.usable["jwks"])
    written(secrets)
    await until(lambda: files.usable["secrets"])
    assert client.value("identity_files_usable", file="jwks") == 0
    assert client.value("identity_files_usable", file="secrets") == 1


def test_only_files_that_are_configured_are_said_to_be_usable(tmp_path: Path) -> None:
    assert IdentityFiles(IdentityConfig()).usable == {}
    assert IdentityFiles(IdentityConfig(secrets_file=written(tmp_path / "s.yaml"), api_keys=True)).usable == {
        "secrets": True
    }


@given(st.lists(st.tuples(st.text(max_size=5), st.integers(0, 4)), min_size=1, max_size=8))
def test_an_api_key_is_one_tenants_or_the_file_is_refused(entries: list[tuple[str, int]]) -> None:
    """Whatever the file lists, no key opens two tenants' namespaces."""
    by_tenant: dict[str, list[str]] = {}
    entries = [(f"t{name}t", key) for name, key in entries if is_tenant_name(f"t{name}t")]
    for tenant, key in entries:
        by_tenant.setdefault(tenant, []).append(hashlib.sha256(str(key).encode()).hexdigest())
    owners = [
        {tenant for tenant, keys in by_tenant.items() if each in keys} for keys in by_tenant.values() for each in keys
    ]
    files = IdentityFiles(IdentityConfig())
    content = identity_files.SecretsFile.model_validate(yaml.safe_load(yaml.safe_dump({"api_keys": by_tenant})))
    if any(len(each) > 1 for each in owners):
        with pytest.raises(ValueError, match="two tenants have the same key"):
            files._take(content)
    else:
        files._take(content)
        assert set(files.tenant_of.values()) == set(by_tenant)
