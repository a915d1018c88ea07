"""What a prefix is called outside: its configured name, or a keyed hash of the hash of its first block.

Chain hashes are no secrets by themselves, but whoever has one can try prompts and salts against it; so none is shown.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence

from pydantic import Field, field_validator

from prefixwatch.exporters.http.client_config import Strict
from prefixwatch.kvcache.index.prefix_tree import PrefixTree

_ID_BYTES = 8
_NAME_DIGITS = 8


class NamedPrefix(Strict):
    """A prompt's opening that has a name, such as an assistant's system prompt."""

    name: str = Field(min_length=1, max_length=100, description="what it is called in all metrics")
    fingerprint: str = Field(description="16 hex digits, made by `prefixwatch exporter fingerprint`")

    @field_validator("fingerprint")
    @classmethod
    def _is_hash(cls, fingerprint: str) -> str:
        try:
            right = len(fingerprint) == 16 and int(fingerprint, 16) >= 0
        except ValueError:
            right = False
        if not right:
            raise ValueError(
                f"'{fingerprint}' is not a fingerprint of 16 hex digits; `prefixwatch exporter fingerprint` makes one"
            )
        return fingerprint.lower()


class PrefixNames:
    """Names of the nodes of a prefix tree. Without a `secret` each process's hashes are its own."""

    def __init__(self, named: Sequence[NamedPrefix] = (), secret: str | None = None) -> None:
        self._named = {int(prefix.fingerprint, 16): prefix.name for prefix in named}
        self._key = hashlib.blake2b(secret.encode()).digest() if secret else secrets.token_bytes(32)

    def configure(self, named: Sequence[NamedPrefix]) -> None:
        """Other names from now on; the hashes stay."""
        self._named = {int(prefix.fingerprint, 16): prefix.name for prefix in named}

    @property
    def fingerprints(self) -> Sequence[int]:
        return tuple(self._named)

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._named.values())

    def id_of(self, tree: PrefixTree, node: int) -> str:
        """16 hex digits, the same for the same prefix as long as its first block begins a node."""
        first = int(tree.first_hash[node]).to_bytes(8, "little")
        return hashlib.blake2b(first, key=self._key, digest_size=_ID_BYTES).hexdigest()

    def by_node(self, tree: PrefixTree) -> dict[int, str]:
        """Configured names of the nodes that have one; of several the first."""
        found: dict[int, str] = {}
        for fingerprint, name in self._named.items():
            if fingerprint in tree.named:
                found.setdefault(tree.named[fingerprint], name)
        return found

    def nodes(self, tree: PrefixTree) -> dict[str, int | None]:
        """The node of each configured name; None for a prefix that no worker has cached."""
        return {name: tree.named.get(fingerprint) for fingerprint, name in self._named.items()}

    def name_of(self, tree: PrefixTree, node: int, configured: Mapping[int, str]) -> str:
        """The configured name, else `p-` and the beginning of its id."""
        return configured.get(node) or f"p-{self.id_of(tree, node)[:_NAME_DIGITS]}"
