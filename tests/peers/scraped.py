"""A real process's metrics page, fetched and read by our exporter's parts."""

from __future__ import annotations

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.scrape import Scraper
from prefixwatch.exporters.scraping.target import Target


async def scraped(*urls: str) -> list[Target]:
    """The targets after one scrape of each."""
    configs = tuple(TargetConfig(name=f"t{number}", url=url) for number, url in enumerate(urls))
    settings = ExporterConfig(targets=configs)
    scraper = Scraper(settings.timeout_seconds, settings.limits.body_bytes)
    targets = [Target(config, settings, shipped_catalogue()) for config in configs]
    try:
        for target in targets:
            target.ingest(await scraper.fetch(target.config.url), 0.0)
            assert target.up, f"{target.config.url}: {target.reason}: {target.detail}"
    finally:
        await scraper.close()
    return targets
