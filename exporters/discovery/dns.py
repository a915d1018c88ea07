"""Targets from A, AAAA and SRV records."""

from __future__ import annotations

import asyncio

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver
from dns.rdatatype import RdataType

from prefixwatch.documents.addresses import host_port
from prefixwatch.exporters.discovery.config import DnsSdConfig, split_nameserver
from prefixwatch.exporters.discovery.provider import DiscoveryError, Found
from prefixwatch.exporters.discovery.relabel import Labels

_LIFETIME_SECONDS = 5.0


class DnsDiscovery:
    """Looks the names up every `refresh_interval`; a name that can't be looked up keeps its last records."""

    name = "dns_sd"

    def __init__(self, config: DnsSdConfig) -> None:
        self._config = config
        self._last_good: dict[str, list[Labels]] = {}

    async def fetch(self) -> Found:
        resolver = self._resolver()
        answers = await asyncio.gather(*(self._look_up(resolver, name) for name in self._config.names))
        problems = []
        for name, answer in zip(self._config.names, answers, strict=True):
            if isinstance(answer, str):
                problems.append(answer)
            else:
                self._last_good[name] = answer
        return Found(
            [labels for name in self._config.names for labels in self._last_good.get(name, ())], tuple(problems)
        )

    async def changed(self) -> None:
        await asyncio.sleep(self._config.refresh_interval)

    async def close(self) -> None:
        """No connection stays open."""

    def _resolver(self) -> dns.asyncresolver.Resolver:
        if not self._config.nameservers:
            try:
                return dns.asyncresolver.Resolver()
            except dns.resolver.NoResolverConfiguration as error:
                raise DiscoveryError(f"dns_sd: {error}; name the servers to ask in nameservers") from error
        resolver = dns.asyncresolver.Resolver(configure=False)
        servers: list[str | dns.nameserver.Nameserver] = [
            dns.nameserver.Do53Nameserver(*split_nameserver(server)) for server in self._config.nameservers
        ]
        resolver.nameservers = servers
        return resolver

    async def _look_up(self, resolver: dns.asyncresolver.Resolver, name: str) -> list[Labels] | str:
        """One name's targets, or why they aren't known. A name that doesn't exist has none: that is an answer."""
        kind = RdataType.from_text(self._config.type)
        try:
            answer = await resolver.resolve(
                name, kind, raise_on_no_answer=False, lifetime=_LIFETIME_SECONDS, search=True
            )
        except dns.resolver.NXDOMAIN:
            return []
        except dns.exception.DNSException as error:
            return f"dns_sd {name} {self._config.type}: {error}; its last records stay in use"
        return [self._labels(name, record) for record in sorted(answer, key=str)]

    def _labels(self, name: str, record: object) -> Labels:
        labels = {"__meta_dns_name": name}
        if self._config.type == "SRV":
            host, port = str(getattr(record, "target")), int(getattr(record, "port"))  # noqa: B009
            labels |= {"__meta_dns_srv_record_target": host, "__meta_dns_srv_record_port": str(port)}
            return labels | {"__address__": f"{host.rstrip('.')}:{port}"}
        return labels | {"__address__": host_port(str(record), str(self._config.port))}
