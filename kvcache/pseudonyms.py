"""What stands in records and metrics for the names that clients give themselves."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from hashlib import blake2b


class Pseudonyms:
    """Keyed hashes in place of what clients call themselves: equal for equal names, and of no use without the key.

    Without a secret the key is this process's own, so two lives of it don't agree.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._key = blake2b(secret.encode()).digest() if secret else secrets.token_bytes(32)

    def session(self, key: str) -> str:
        """Of a sticky key; empty when there is none."""
        return self._hash(b"session", key, 8) if key else ""

    def tenant(self, name: str, known: Collection[str]) -> str:
        """Known tenants by name, others as `#` and 8 hex digits; empty when no tenant was named."""
        return name if not name or name in known else f"#{self._hash(b'tenant', name, 4)}"

    def _hash(self, purpose: bytes, text: str, size: int) -> str:
        return blake2b(
            text.encode("utf-8", "surrogateescape"), key=self._key, person=purpose, digest_size=size
        ).hexdigest()
