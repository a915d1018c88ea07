"""Whom an audit may send to: loopback, and hosts that the operator has consented to test and allows by name."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from prefixwatch.loadgen.client.http_client import Target
from prefixwatch.stack.errors import UsageError


def check_allowed(urls: Iterable[str], allowed: Sequence[str], *, consent: bool) -> None:
    """Raises UsageError for an address beyond loopback without consent, or whose host isn't allowed."""
    hosts = [Target.parse(url).host.lower().rstrip(".") for url in urls]
    known = {host.lower().rstrip(".") for host in allowed}
    for host in hosts:
        if is_loopback(host):
            continue
        if not consent:
            raise UsageError(
                f"{host} isn't on this machine: an audit sends other tenants' requests and measures them. If you may "
                f"test it, add --i-may-test-this --allow-host {host}"
            )
        if host not in known:
            raise UsageError(f"{host} isn't allowed: add --allow-host {host}, or correct the address")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name alone; a name that DNS points here isn't trusted."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
