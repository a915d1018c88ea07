"""The keys that tell tenants apart, read again whenever their files change: they rotate without a restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from prefixwatch.documents import DocumentError, load
from prefixwatch.router.errors import RouterError
from prefixwatch.router.exchange.namespaces import is_tenant_name
from prefixwatch.router.tenant_config import IdentityConfig

CHECK_SECONDS = 2.0
"""Between two looks at the files."""
_JWKS_SECONDS = 300.0
_JWKS_BYTES = 2**20
_ADDRESS = ("http://", "https://")
_log = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")


class SecretsFile(BaseModel):
    """The file `router.identity.secrets_file`."""

    model_config = ConfigDict(extra="forbid")

    namespace_key: str | None = None
    """Salts are derived from it; at least 32 characters, the same at all routers of a fleet."""
    api_keys: dict[str, list[str]] = Field(default_factory=dict)
    """By tenant, SHA-256 hashes of its API keys in hexadecimal. Two may be valid while one replaces the other."""


class IdentityFiles:
    """What the files say. A file that can't be used any more is reported, and what it said before stays valid."""

    def __init__(self, config: IdentityConfig, changed: Callable[[bytes], None] = lambda key: None) -> None:
        """Raises RouterError where a file can't be used. `changed` gets each new namespace key."""
        self.tenant_of: dict[str, str] = {}
        """By the SHA-256 of an API key."""
        self.namespace_key: bytes | None = None
        used = {"secrets": config.secrets_file, "jwks": config.jwt}
        self.usable = {file: True for file, setting in used.items() if setting is not None}
        """Whether each could be read the last time."""
        self._config = config
        self._changed = changed
        self._signing: dict[str | None, Any] = {}
        self._unusable: dict[str, str] = {}
        """Why each could not be read; a file that is being written may be broken for another reason a moment later."""
        self._seen: dict[Path, tuple[int, int, int]] = {}
        try:
            self._read_secrets()
            self._read_jwks()
        except (OSError, ValueError) as error:
            raise RouterError(f"router.identity: {error}") from error

    def signing_key(self, kid: str | None) -> Any:
        """The JWK of this id; None for an unknown one. A set of one key needs no id."""
        return next(iter(self._signing.values())) if kid is None and len(self._signing) == 1 else self._signing.get(kid)

    async def keep_fresh(self, session: aiohttp.ClientSession) -> None:
        """Read files that changed every 2 s, and a JWKS address every 5 minutes, until cancelled."""
        jwks = self._config.jwt.jwks if self._config.jwt is not None else ""
        fetch_at = 0.0
        while True:
            if jwks.startswith(_ADDRESS) and asyncio.get_running_loop().time() >= fetch_at:
                fetched = await self._guarded("jwks", lambda: self._fetch(session, jwks))
                fetch_at = asyncio.get_running_loop().time() + (_JWKS_SECONDS if fetched else CHECK_SECONDS)
            await asyncio.sleep(CHECK_SECONDS)
            if self._config.secrets_file is not None:
                await self._guarded("secrets", lambda: asyncio.to_thread(self._read_secrets))
            if jwks and not jwks.startswith(_ADDRESS):
                await self._guarded("jwks", lambda: asyncio.to_thread(self._read_jwks))

    async def _guarded(self, what: str, read: Callable[[], Any]) -> bool:
        try:
            await read()
        except (OSError, ValueError, aiohttp.ClientError, TimeoutError) as error:
            why = _why(error)
            if self._unusable.get(what) != why:
                _log.error("identity: %s can't be used, what it said before stays valid: %s", what, why)
            self._unusable[what] = why
            self.usable[what] = False
            return False
        self._unusable.pop(what, None)
        self.usable[what] = True
        return True

    def _read_secrets(self) -> None:
        if self._config.secrets_file is not None:
            self._read_changed(self._config.secrets_file, lambda path: self._take(_loaded(path)))

    def _read_jwks(self) -> None:
        jwt = self._config.jwt
        if jwt is not None and not jwt.jwks.startswith(_ADDRESS):
            self._read_changed(Path(jwt.jwks), self._take_jwks_file)

    def _read_changed(self, path: Path, read: Callable[[Path], None]) -> None:
        state = _state(path)  # before it is read: what is written meanwhile is another change
        if self._seen.get(path) != state:
            read(path)
            self._seen[path] = state

    def _take(self, content: SecretsFile) -> None:
        key = content.namespace_key
        if key is not None and len(key) < 32:
            raise ValueError(
                f"{self._config.secrets_file}: namespace_key is shorter than 32 characters: use a random one"
            )
        tenant_of: dict[str, str] = {}
        for tenant, hashes in content.api_keys.items():
            if not is_tenant_name(tenant):
                raise ValueError(
                    f"{self._config.secrets_file}: api_keys: a tenant's name is empty, longer than 256 characters, or "
                    "has a comma, a line's end or blanks around it: no header can carry it"
                )
            for one in hashes:
                if not _SHA256.fullmatch(one):
                    raise ValueError(f"{self._config.secrets_file}: api_keys: not the SHA-256 of a key in hexadecimal")
                if tenant_of.setdefault(one, tenant) != tenant:
                    raise ValueError(f"{self._config.secrets_file}: api_keys: two tenants have the same key")
        self.tenant_of = tenant_of
        if key is not None:
            self.namespace_key = hashlib.sha256(key.encode()).digest()
            self._changed(self.namespace_key)

    async def _fetch(self, session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as answer:
            answer.raise_for_status()
            self._take_jwks((await answer.content.read(_JWKS_BYTES)).decode())

    def _take_jwks_file(self, path: Path) -> None:
        try:
            self._take_jwks(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not a JWKS (RFC 7517): {error}") from error

    def _take_jwks(self, text: str) -> None:
        import jwt  # noqa: PLC0415  # the optional extra "jwt"

        try:
            keys = jwt.PyJWKSet.from_dict(json.loads(text)).keys
        except (jwt.PyJWTError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError("the JWKS has no usable key") from error
        self._signing = {key.key_id: key for key in keys}


def _loaded(path: Path) -> SecretsFile:
    """Raises ValueError that says where the mistake is, and not what is there."""
    try:
        return load(path, SecretsFile)
    except DocumentError as error:
        places = [": ".join(line.split(": ")[:2]) for line in str(error).splitlines()]
        raise ValueError(f"{'; '.join(places)}: not as docs/multi-tenant.md describes it") from None


def _why(error: Exception) -> str:
    """Messages about files say where the mistake is; those about an address may have the address's password."""
    named = str(error) and not isinstance(error, aiohttp.ClientError)
    return str(error) if named else type(error).__name__


def _state(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
