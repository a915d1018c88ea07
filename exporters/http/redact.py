"""Addresses as they may be shown: in logs, on pages and in errors."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit


def shown_url(url: str) -> str:
    """Without user name and password, and with a query's names only: tokens travel in either."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "an address that can't be read"
    query = urlencode([(name, "***") for name, _ in parse_qsl(parts.query, keep_blank_values=True)], safe="*")
    return parts._replace(netloc=host, query=query, fragment="").geturl()
