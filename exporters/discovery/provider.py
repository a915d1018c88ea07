"""What every way of finding targets offers, and the format in which files and servers list them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from prefixwatch.exporters.discovery.config import StaticConfig
from prefixwatch.exporters.discovery.relabel import Labels

_GROUPS = TypeAdapter(list[StaticConfig])

MOST_LISTED = 100_000
"""Addresses in one list: more are a mistake, or an attack on the exporter's memory."""


class DiscoveryError(Exception):
    """A look-up failed as a whole; the targets of the last one stay. The message names the place and the remedy."""


@dataclass(frozen=True, slots=True)
class Found:
    """All targets that a look-up found, as labels with `__address__`."""

    targets: list[Labels]
    problems: tuple[str, ...] = ()
    """What failed in part: of several files, the one that can't be read. Its last good list is among `targets`."""


class Provider(Protocol):
    """One place to look in."""

    @property
    def name(self) -> str:
        """The mechanism, as its key in the configuration without `_configs`."""

    async def fetch(self) -> Found:
        """Look now. Raises DiscoveryError."""

    async def changed(self) -> None:
        """Return when it is time to look again."""

    async def close(self) -> None:
        """Let go of connections."""


def label_sets(groups: object, where: str, meta: Mapping[str, str]) -> list[Labels]:
    """Target groups, `[{"targets": ["host:port"], "labels": {…}}]`, as one label set a target.

    Raises DiscoveryError naming `where` and the group that is wrong.
    """
    try:
        parsed = _GROUPS.validate_python([] if groups is None else groups)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise DiscoveryError(
            f'{where}: {path.lstrip(".") or "document"}: {first["msg"]}; expected [{{"targets": ["host:port"], '
            '"labels": {"name": "value"}}]'
        ) from error
    listed = sum(len(group.targets) for group in parsed)
    if listed > MOST_LISTED:
        raise DiscoveryError(f"{where}: lists {listed} targets, at most {MOST_LISTED} can be read: split the list")
    return [{**group.labels, **meta, "__address__": address} for group in parsed for address in group.targets]
