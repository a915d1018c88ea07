"""Addresses as a request needs them."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import lru_cache
from typing import NamedTuple

from yarl import URL

_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_REMEMBERED = 4_096


class Address(NamedTuple):
    """Whom to connect to, and what to ask for."""

    scheme: str
    host: str
    port: int
    opening: str
    """A GET's request line and the headers that come from the address, without a line end after them."""
    has_login: bool
    """Whether there is an Authorization header among those."""


@lru_cache(_REMEMBERED)
def address_of(url: str) -> Address:
    """Raises ValueError for an address that nothing can be asked for at."""
    parts = URL(url, encoded=True)
    if parts.raw_host is None or parts.port is None or parts.scheme not in ("http", "https"):
        raise ValueError(f"'{parts.scheme}' with host '{parts.raw_host}' is no http or https address")
    if _CONTROL.search(url):
        raise ValueError("the address has a space or a control character: write them as %20 and the like")
    opening = f"GET {parts.raw_path_qs or '/'} HTTP/1.1\r\nHost: {parts.host_port_subcomponent}"
    has_login = parts.raw_user is not None or parts.raw_password is not None
    if has_login:
        login = f"{parts.user or ''}:{parts.password or ''}"
        opening += f"\r\nAuthorization: Basic {b64encode(login.encode()).decode()}"
    return Address(parts.scheme, parts.raw_host, parts.port, opening, has_login)


def redirected(url: str, location: str) -> str:
    """Where a redirect leads. Raises ValueError for one that can't be read."""
    return str(URL(url, encoded=True).join(URL(location)))
