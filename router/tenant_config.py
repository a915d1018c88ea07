"""Who a tenant is, what its caches are kept apart by, and what is watched and limited for that."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from prefixwatch.documents.section import Settings
from prefixwatch.documents.units import TokensOrNone, WaitSeconds

CLIENT_SALT_PREFIX = "client:"


class TenantsConfig(Settings):
    """Who sent a request, by a header that the gateway in front has authenticated, and the tenant's cache salt.

    A tenant with a salt always gets that salt. Where any salt is set, other callers' own salts are prefixed,
    so that nobody reaches a tenant's blocks by sending its salt. With `trust_client_salt`, or without salts
    here, the request's own `cache_salt` counts.
    """

    header: str = "x-tenant-id"
    session_header: str = "x-session-id"
    user_header: str = "x-user-id"
    """Says whose session it is: what a user's other sessions left is the locality of identity."""
    class_header: str = "x-request-class"
    """Says which objectives a request is judged by."""
    names: list[str] = Field(default_factory=list)
    """Tenants without a salt. These and the salted ones are called by name in records, all others by a keyed hash."""
    salts: dict[str, str] = Field(default_factory=dict)
    trust_client_salt: bool = False

    @field_validator("salts")
    @classmethod
    def _usable_salts(cls, salts: dict[str, str]) -> dict[str, str]:
        for tenant, salt in salts.items():
            if not salt or salt.startswith(CLIENT_SALT_PREFIX):
                raise ValueError(f"the salt of tenant '{tenant}' is empty or begins with '{CLIENT_SALT_PREFIX}'")
        return salts

    @property
    def known(self) -> frozenset[str]:
        """Tenants that are configured."""
        return frozenset((*self.names, *self.salts))

    @property
    def guards_salts(self) -> bool:
        """Whether clients' own salts must not reach a tenant's blocks."""
        return bool(self.salts) and not self.trust_client_salt

    def salt_for(self, tenant: str, claimed: str | None) -> str | None:
        """The `cache_salt` to send for a request of `tenant` that came with the salt `claimed`."""
        if self.trust_client_salt and claimed:
            return claimed
        own = self.salts.get(tenant)
        if own:
            return own
        if self.guards_salts and claimed:
            return CLIENT_SALT_PREFIX + claimed
        return claimed


class JwtConfig(Settings):
    """Tokens that name the tenant in a claim. Only signatures with a public key count, and only before they expire."""

    jwks: str = Field(min_length=1)
    """The file or https:// address of the keys that sign (RFC 7517). A file is read again when it changes, an address
    every 5 minutes."""
    claim: str = Field(default="tenant", min_length=1)
    """The claim that holds the tenant's name."""
    audience: str | None = None
    """What `aud` must name; not checked where not given."""
    issuer: str | None = None
    """What `iss` must be; not checked where not given."""


class IdentityConfig(Settings):
    """Who a tenant is, authenticated by the router itself, and the cache salt derived from that.

    With `trusted_proxies`, `api_keys` or `jwt`, what clients say of themselves no longer counts: the tenant header does
    only from those proxies. With a `namespace_key`, cache salts in bodies and headers are dropped.
    """

    trusted_proxies: list[str] = Field(default_factory=list)
    """Addresses or networks, such as 10.0.0.0/8, whose tenant header counts. From others it is refused."""
    secrets_file: Path | None = None
    """YAML with `namespace_key`, from which each tenant's salt is derived (HMAC-SHA256), and `api_keys`: by tenant, the
    SHA-256 hashes of its keys. Read again when it changes."""
    api_keys: bool = False
    """Clients send an API key of the secrets file, as `Authorization: Bearer KEY` or `x-api-key`."""
    jwt: JwtConfig | None = None
    """Clients send a token as `Authorization: Bearer TOKEN`; needs the optional extra `jwt`."""
    required: bool = False
    """Refuse requests without an identity. Otherwise they share a namespace of their own."""
    trust_groups: dict[str, list[str]] = Field(default_factory=dict)
    """Tenants that may share their caches, by the group's name; each tenant is in one group at most. Prompts common to
    all of a group are computed and kept once, and its tenants can find out what the others sent."""

    @property
    def authenticates(self) -> bool:
        """Whether the tenant header alone no longer counts."""
        return bool(self.trusted_proxies or self.api_keys or self.jwt)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, given: list[str]) -> list[str]:
        for one in given:
            try:
                ipaddress.ip_network(one, strict=False)
            except ValueError:
                raise ValueError(f"'{one}' is not an address or network (example: 10.0.0.0/8)") from None
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.api_keys and self.secrets_file is None:
            raise ValueError("api_keys needs the secrets_file that has them")
        if (self.required or self.secrets_file is not None) and not self.authenticates:
            raise ValueError("who a tenant is must be certain: add trusted_proxies, api_keys or jwt")
        group_of: dict[str, str] = {}
        for group, tenants in self.trust_groups.items():
            for tenant in tenants:
                if group_of.setdefault(tenant, group) != group:
                    raise ValueError(f"tenant '{tenant}' is in two trust_groups: '{group_of[tenant]}' and '{group}'")
        return self


class IsolationConfig(Settings):
    """What is remembered of each tenant's prompts, to see whose cache a request reused. No prompt can be read from it.

    `caches_at_start` says what engines held that already ran when the router started: `ask` reads from their metrics
    whether they had served anything, `empty` trusts that they had not, `unknown` never does. Set it to `unknown` where
    anything but this router sends to the engines: reuse of what it never saw proves nothing. (Several routers that one
    exporter scrapes are seen to share engines, and don't need it.)
    """

    remember: bool = True
    """false switches the audit off, and its memory."""
    blocks: int = Field(default=4_194_304, ge=1024, le=2**30)
    """Blocks remembered of all tenants together, 16 to 60 bytes each: at least as many as the engines' caches hold. A
    tenant that sends more than an equal share is remembered less far back."""
    tenants: int = Field(default=10_000, ge=0, le=2**30)
    """Tenants remembered beside the configured ones."""
    caches_at_start: Literal["ask", "empty", "unknown"] = "ask"
    """What engines held before the router started; see above."""


class FairnessConfig(Settings):
    """How much of the caches one tenant, or trust group, may fill while others use them. Off without `cache_tokens`."""

    cache_tokens: TokensOrNone = None
    """What all engines' caches hold together, in tokens. With several routers, each one's part of it. More: tenants are
    refused later."""
    share: float = Field(default=0.5, gt=0, le=1)
    """The part of it that one tenant may fill within the window. Beyond it gets a 429 with Retry-After. Lower: a flood
    costs others fewer hits, and large tenants are refused sooner."""
    window_seconds: WaitSeconds = 60.0
    """How long others' prompts should stay cached between two uses. Longer: a tenant may fill its share more slowly."""
