"""Targets from a server, in Prometheus' http_sd format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from prefixwatch.exporters.discovery.config import HttpSdConfig
from prefixwatch.exporters.discovery.provider import DiscoveryError, Found, label_sets
from prefixwatch.exporters.discovery.relabel import Labels
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.scraping.scrape import ScrapeFault, Scraper


class HttpDiscovery:
    """Asks every `refresh_interval`."""

    name = "http_sd"

    def __init__(self, config: HttpSdConfig, scraper: Scraper) -> None:
        self._config = config
        self._scraper = scraper
        self._client = config.client()

    async def fetch(self) -> Found:
        shown = shown_url(self._config.url)
        headers = {
            "Accept": "application/json",
            "X-Prometheus-Refresh-Interval-Seconds": f"{self._config.refresh_interval:g}",
        }
        try:
            body = await self._scraper.get(self._config.url, self._client, headers)
        except ScrapeFault as fault:
            raise DiscoveryError(f"http_sd {shown}: {fault}; the last good list stays in use") from fault
        targets = await asyncio.to_thread(_parsed, body, f"http_sd {shown}", {"__meta_url": shown})
        return Found(targets)

    async def changed(self) -> None:
        await asyncio.sleep(self._config.refresh_interval)

    async def close(self) -> None:
        """The connection is the scraper's."""


def _parsed(body: bytes, where: str, meta: Mapping[str, str]) -> list[Labels]:
    """Off the event loop: a long list takes seconds."""
    try:
        groups = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DiscoveryError(f"{where}: the answer is not JSON: {error}") from error
    return label_sets(groups, where, meta)
