"""Targets from DNS: asked of a real server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from pydantic import ValidationError

from prefixwatch.exporters.discovery.config import DnsSdConfig, split_nameserver
from prefixwatch.exporters.discovery.dns import DnsDiscovery
from prefixwatch.exporters.discovery.provider import Found


@dataclass
class Zone(asyncio.DatagramProtocol):
    """Answers from `records`; what isn't there doesn't exist."""

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    failing: bool = False
    port: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        values = self.records.get((name, kind))
        if self.failing:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif values is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif values:
            answer.answer.append(dns.rrset.from_text(name, 5, "IN", kind, *values))
        self.transport.sendto(answer.to_wire(), address)


@pytest.fixture
async def zone() -> AsyncIterator[Zone]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(Zone, local_addr=("127.0.0.1", 0))
    yield protocol
    transport.close()


def discovery(zone: Zone, name: str, **options: object) -> DnsDiscovery:
    return DnsDiscovery(
        DnsSdConfig.model_validate({"names": [name], "nameservers": [f"127.0.0.1:{zone.port}"], **options})
    )


async def test_srv_records_give_host_and_port(zone: Zone) -> None:
    zone.records["_metrics._tcp.vllm.test.", "SRV"] = ["0 1 8000 one.test.", "0 1 8001 two.test."]
    found = (await discovery(zone, "_metrics._tcp.vllm.test").fetch()).targets
    assert found == [
        {
            "__meta_dns_name": "_metrics._tcp.vllm.test",
            "__meta_dns_srv_record_target": f"{host}.test.",
            "__meta_dns_srv_record_port": port,
            "__address__": f"{host}.test:{port}",
        }
        for host, port in (("one", "8000"), ("two", "8001"))
    ]


@pytest.mark.parametrize(
    ("kind", "record", "address"), [("A", "192.0.2.7", "192.0.2.7:8000"), ("AAAA", "2001:db8::7", "[2001:db8::7]:8000")]
)
async def test_addresses_get_the_configured_port(zone: Zone, kind: str, record: str, address: str) -> None:
    zone.records["vllm.test.", kind] = [record]
    (found,) = (await discovery(zone, "vllm.test", type=kind, port=8000).fetch()).targets
    assert found["__address__"] == address


async def test_a_name_that_is_gone_has_no_targets_and_one_that_fails_keeps_its_last(zone: Zone) -> None:
    zone.records["vllm.test.", "A"] = ["192.0.2.7"]
    looked = discovery(zone, "vllm.test", type="A", port=1)
    await looked.fetch()
    zone.failing = True
    found = await looked.fetch()
    assert [labels["__address__"] for labels in found.targets] == ["192.0.2.7:1"]
    assert "its last records stay in use" in found.problems[0]
    zone.failing = False
    del zone.records["vllm.test.", "A"]
    assert await looked.fetch() == Found([])


async def test_a_name_with_records_of_another_type_has_no_targets(zone: Zone) -> None:
    zone.records["vllm.test.", "A"] = []
    assert await discovery(zone, "vllm.test", type="A", port=1).fetch() == Found([])


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("10.0.0.2", ("10.0.0.2", 53)),
        ("10.0.0.2:5353", ("10.0.0.2", 5353)),
        ("::1", ("::1", 53)),
        ("[::1]:5353", ("::1", 5353)),
    ],
)
def test_a_server_to_ask_is_an_address(server: str, found: tuple[str, int]) -> None:
    assert split_nameserver(server) == found


@pytest.mark.parametrize(
    "server", ["dns.internal:53", "10.0.0.2:", "10.0.0.2:x", "10.0.0.2:0", "[::1]", "", "10.0.0.2:70000"]
)
def test_a_server_that_is_none_is_refused_when_the_file_is_read(server: str) -> None:
    with pytest.raises(ValidationError, match=r"is not the IP address of a DNS server such as 10\.0\.0\.2:53"):
        DnsSdConfig(names=("x",), type="A", port=1, nameservers=(server,))
