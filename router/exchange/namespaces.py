"""Whose blocks a request may share: a tenant, or its trust group, and the cache salt that keeps them apart.

The salt is an HMAC-SHA256 (RFC 2104) of who it is, under a key that only the routers have. Nobody can compute a
tenant's salt, and no salt says whose it is. Its parts are length-prefixed, so two different owners never give the same
bytes.
"""

from __future__ import annotations

import base64
import hmac
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_PURPOSE = "prefixwatch cache salt 1"
_SALT_BYTES = 24
_NAME_CHARACTERS = 256
_NAMESPACES = ("cachesalt", "extrakey", "kvtransferparams")
"""Fields by which a client could choose its namespace: vLLM's, SGLang's; and with vLLM the blocks that it gets."""
_CHOSEN_BY_CLIENTS = frozenset(
    {
        *_NAMESPACES,
        *("bootstraphost", "bootstrapport", "bootstraproom", "bootstrappairkey"),  # SGLang: the KV of another request
        *("sessionparams", "sessionid"),  # SGLang: to go on where any session ended
        "disaggregatedparams",  # TensorRT-LLM: the KV of a context request
        *("idslot", "slotid"),  # llama.cpp: the cache of a slot
    }
)
"""Those, and others by which it could get at what another tenant's request left in a cache."""
_EXTENSIONS = frozenset({"extrabody", "extraargs", "vllmxargs", "nvext", "samplingparams", "customparams"})
"""Objects in which engines take more fields."""
_PLACES: Mapping[str, Sequence[str]] = {"/generate": ("cache_salt", "extra_key")}
_NO_PROMPT = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})


class Namespaces:
    """Salts by tenant. `key` may change at any time: from then on all salts are others."""

    def __init__(self, key: bytes, groups: Mapping[str, Sequence[str]]) -> None:
        """`groups`: the tenants that may share, by the group's name."""
        self.key = key
        self._group_of = {tenant: group for group, tenants in groups.items() for tenant in tenants}

    def salt(self, tenant: str) -> str:
        """32 characters. Callers without a tenant have a namespace of their own."""
        group = self._group_of.get(tenant)
        kind, name = ("tenant" if tenant else "anonymous", tenant) if group is None else ("group", group)
        digest = hmac.digest(self.key, framed(_PURPOSE, kind, name), "sha256")
        return base64.urlsafe_b64encode(digest[:_SALT_BYTES]).decode()


def framed(*parts: str) -> bytes:
    """The parts, each behind its length: different parts always give different bytes."""
    encoded = (part.encode("utf-8", "surrogatepass") for part in parts)
    return b"".join(len(one).to_bytes(8, "big") + one for one in encoded)


def is_tenant_name(name: str) -> bool:
    """Whether a header carries this name as it is, so that a router behind this one reads the same: no blanks at its
    ends, no comma (two headers may be joined by one), nothing that ends a line or isn't a character."""
    odd = {"Cc", "Cs", "Zl", "Zp"}
    readable = name == name.strip() and "," not in name and odd.isdisjoint(map(unicodedata.category, name))
    return readable and 0 < len(name) <= _NAME_CHARACTERS


def with_only_this_salt(body: bytes, path: str, salt: str) -> bytes:
    """The body with this salt and no other that an engine could take for one, wherever the client put it.

    Raises msgspec.DecodeError, or RecursionError, for what isn't a JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        plain = _plain(name)
        if plain in _EXTENSIONS:
            kept[name] = _without_choices(msgspec.json.decode(value))
        elif plain not in _CHOSEN_BY_CLIENTS:
            kept[name] = value
    if path not in _NO_PROMPT:
        kept |= dict.fromkeys(_PLACES.get(path, ("cache_salt",)), salt)
    return msgspec.json.encode(kept)


def names_a_salt(header: str) -> bool:
    """Whether a header could be taken for a salt by an engine or a router behind this one."""
    plain = _plain(header)
    return any(name in plain for name in _NAMESPACES)


def _plain(name: str) -> str:
    """A name without the differences that a lenient reader could overlook: its letters and digits, in one case. So
    `cacheSalt`, which JSON made from Protobuf may say, is `cache_salt`."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", name).casefold()))


def _without_choices(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_choices(one) for name, one in value.items() if _plain(name) not in _CHOSEN_BY_CLIENTS}
    return [_without_choices(one) for one in value] if isinstance(value, list) else value
