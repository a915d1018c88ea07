"""HOST:PORT as people write it: an IPv6 host in brackets, except for a HOST alone."""

from __future__ import annotations

_LAST_PORT = 65_535


def host_and_port(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Host, without brackets, and port (0 to 65,535). With a default port a HOST alone will do. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if default_port is not None and (not colon or (":" in host and not host.startswith("["))):
        host, colon, port = text, ":", str(default_port)
    if not (colon and port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
        raise ValueError(f"'{text}' is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def host_port(host: str, port: int | str) -> str:
    """The same two in one text, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
