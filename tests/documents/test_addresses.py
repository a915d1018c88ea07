"""HOST:PORT, written and read back."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixwatch.documents.addresses import host_and_port, host_port

HOSTS = st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z0-9]{1,5}(\.[a-z0-9]{1,5}){0,2}", fullmatch=True))


@given(HOSTS, st.integers(0, 65_535))
def test_what_is_written_is_read_back(host: str, port: int) -> None:
    assert host_and_port(host_port(host, port)) == (host, port)
    assert host_and_port(host_port(host, port), 53) == (host, port)


@given(HOSTS)
@example("9477")
def test_a_host_alone_gets_the_default_port_and_is_refused_without_one(host: str) -> None:
    assert host_and_port(host, 53) == (host, 53)
    if ":" not in host:
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            host_and_port(host)


@given(st.ip_addresses(v=6).map(str))
def test_an_ipv6_address_ends_where_its_brackets_do(address: str) -> None:
    assert host_and_port(f"[{address}]:8000", 53) == (address, 8000)
    assert ipaddress.ip_address(host_and_port(address, 53)[0]) == ipaddress.ip_address(address)


@pytest.mark.parametrize("port", ["", "x", "-1", "+1", " 1", "65536", "²", "٣", "1_0"])
@pytest.mark.parametrize("default", [None, 53])
def test_what_is_no_port_is_refused(port: str, default: int | None) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        host_and_port(f"host:{port}", default)
