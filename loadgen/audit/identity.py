"""The two tenants of an audit: the headers and salts that they send, and what of it may be written down."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.scenario.secrets import SECRET_HEADERS, bearer, filled_in, keys_in, literal_secret

RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Identity:
    """One tenant as it appears to the target."""

    name: str
    headers: Mapping[str, str] = field(repr=False)
    """With the secrets filled in."""
    salt: str = field(default="", repr=False)
    """Its `cache_salt`; empty: it sends none."""
    salt_from: str = ""

    def document(self) -> dict[str, Any]:
        """What the report may hold: no key and no salt."""
        shown = {name: "(secret)" if name in SECRET_HEADERS else value for name, value in self.headers.items()}
        return {"headers": shown, "cache_salt": self.salt_from or "none"}


def identity(
    name: str,
    *,
    tenant_header: str = "x-tenant-id",
    headers: Sequence[str] = (),
    api_key_env: str = "",
    salt: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Identity:
    """From options. `headers` are `NAME: VALUE`, with `${VARIABLE}` for secrets; `salt` is empty, `random`, or the name
    of the environment variable that holds it. Raises InputError.
    """
    given: dict[str, str] = {tenant_header: name} if tenant_header else {}
    for line in headers:
        header, colon, value = line.partition(":")
        if not colon or not header.strip() or "\n" in line or "\r" in line:
            raise InputError(f"header '{header}' of {name}: write it as 'NAME: VALUE'")
        given[header.strip()] = value.strip()
    if (secret := literal_secret(given)) is not None:
        raise InputError(f"header {secret} of {name}: its value is a secret: write '{secret}: ${{VARIABLE}}' instead")
    filled = filled_in(given, environment) | bearer(api_key_env, environment)
    if salt in ("", RANDOM):
        return Identity(name, filled, secrets.token_urlsafe(16) if salt else "", salt)
    value = environment.get(salt, "")
    if not value:
        raise InputError(f"environment variable {salt} is not set: put the salt of {name} into it, or write 'random'")
    return Identity(name, filled, value, f"from {salt}")


def check_distinct(victim: Identity, attacker: Identity) -> None:
    """Raises InputError for identities that the target can't distinguish."""
    if (dict(victim.headers), victim.salt) == (dict(attacker.headers), attacker.salt):
        raise InputError(
            f"victim and attacker send the same headers and salt ({victim.name}): give them different names, keys or "
            "salts, or the audit compares a tenant with itself"
        )


def secrets_of(*identities: Identity) -> list[str]:
    """What messages must not quote."""
    salts = [each.salt for each in identities if each.salt]
    return sorted({*keys_in([each.headers for each in identities]), *salts}, key=len, reverse=True)
