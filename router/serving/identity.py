"""Who sent a request, authenticated: a header from a trusted proxy, an API key, or a JWT.

What a client merely says of itself never counts. A request that names two tenants, or one that it can't prove, is
refused. Neither keys nor names appear in messages.
"""

from __future__ import annotations

import hashlib
import ipaddress
from functools import lru_cache
from typing import Any

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from prefixwatch.router.errors import BadRequest, RouterError
from prefixwatch.router.exchange.namespaces import is_tenant_name, names_a_salt
from prefixwatch.router.serving.identity_files import IdentityFiles
from prefixwatch.router.tenant_config import IdentityConfig

_API_KEY_HEADER = "x-api-key"
_CREDENTIALS = frozenset({"authorization", _API_KEY_HEADER})
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""All with a public key. With a shared secret whoever can verify a token can make one."""


class Identities:
    """Authenticates requests. `secrets` has the current API keys and the keys that sign tokens."""

    def __init__(self, config: IdentityConfig, header: str, secrets: IdentityFiles) -> None:
        self._config = config
        self._header = header
        self._underscored = header.replace("-", "_")
        self._secrets = secrets
        self._by_credential = config.jwt is not None or config.api_keys
        self._is_proxy = lru_cache(4096)(self._in_networks)
        self._networks = [ipaddress.ip_network(each, strict=False) for each in config.trusted_proxies]
        if config.jwt is not None:
            _jwt()  # missing: say so at the start

    def tenant(self, request: web.Request) -> str:
        """The tenant; empty for an anonymous caller. Raises BadRequest."""
        named, proven = self._named(request), self._proven(request.headers)
        if named and proven and named != proven:
            raise BadRequest("the tenant header and the credentials name different tenants", "two_tenants", 403)
        tenant = proven or named
        if not tenant and self._config.required:
            raise BadRequest("this router needs to know who asks: send an API key or a token", "no_identity", 401)
        return tenant

    def onward(self, headers: CIMultiDict[str], tenant: str) -> CIMultiDict[str]:
        """The headers for the engine: without credentials for this router, salts, and tenants that weren't proven."""
        dropped = _CREDENTIALS if self._by_credential and tenant else ()
        kept = CIMultiDict(
            (name, value)
            for name, value in headers.items()
            if (low := name.lower()) not in dropped and low not in (self._header, self._underscored)
            and not names_a_salt(low)
        )  # fmt: skip
        if tenant:
            kept[self._header] = tenant
        return kept

    def _named(self, request: web.Request) -> str:
        """What the tenant header says, where it counts."""
        values = request.headers.getall(self._header, ())
        if self._underscored != self._header and self._underscored in request.headers:
            raise BadRequest(f"a header is called like {self._header}, with underscores", "two_tenants")
        if len(values) > 1 or (values and "," in values[0]):  # a proxy may have joined two
            raise BadRequest(f"more than one tenant in {self._header}", "two_tenants")
        if not values or not values[0]:
            return ""
        if not self._is_proxy(request.remote or ""):
            raise BadRequest(f"{self._header} counts only from a trusted proxy", "untrusted_tenant", 403)
        return _name(values[0])

    def _proven(self, headers: CIMultiDictProxy[str]) -> str:
        """The tenant that the credentials belong to; empty without credentials."""
        if not self._by_credential:
            return ""
        given = [*headers.getall("Authorization", ()), *headers.getall(_API_KEY_HEADER, ())]
        if not given:
            return ""
        if len(given) > 1:
            raise BadRequest("more than one credential", "two_tenants")
        scheme, _, token = given[0].partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else given[0]
        tenant = self._of_api_key(token) if self._config.api_keys else None
        if tenant is None and self._config.jwt is not None:
            tenant = self._of_token(token)
        if tenant is None:
            raise BadRequest("the API key or token isn't valid here", "bad_identity", 401)
        return tenant

    def _of_api_key(self, key: str) -> str | None:
        """Keys are looked up by their hashes, so the time that it takes says nothing of any key."""
        return self._secrets.tenant_of.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest())

    def _of_token(self, token: str) -> str | None:
        settings, jwt = self._config.jwt, _jwt()
        assert settings is not None
        try:
            header = jwt.get_unverified_header(token)
            key = self._secrets.signing_key(header.get("kid"))
            if key is None or header.get("alg") not in _ALGORITHMS:
                return None
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(_ALGORITHMS),
                audience=settings.audience,
                issuer=settings.issuer,
                options={"require": ["exp"], "verify_aud": settings.audience is not None},
            )
        except (jwt.PyJWTError, ValueError, TypeError, AttributeError, RecursionError):
            return None
        claim = claims.get(settings.claim)
        return _name(claim) if isinstance(claim, str) and claim else None

    def _in_networks(self, peer: str) -> bool:
        try:
            address: Any = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._networks)


def _name(name: str) -> str:
    if not is_tenant_name(name):
        raise BadRequest("the tenant's name is too long, or has characters that a header can't carry", "bad_identity")
    return name


def _jwt() -> Any:
    try:
        import jwt  # noqa: PLC0415  # the optional extra "jwt"
    except ImportError as error:
        raise RouterError("router.identity.jwt needs PyJWT: pip install 'prefixwatch[jwt]'") from error
    return jwt
