"""What a page has beside what is read from it: families that nobody reads, and declarations that contradict the
catalogue. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from prefixwatch.exporters.catalogue.model import Family, Signal, System

SUFFIXES = ("_bucket", "_sum", "_count", "_total")

_TYPE = re.compile(rb"^# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) ([a-z]+)", re.M)
_OF_THE_PROCESS = ("process_", "python_", "go_", "promhttp_", "jvm_", "nodejs_", "target_info")
"""What client libraries add by themselves; nobody need read it."""

_TELLING = re.compile(
    r"cache|prefix|kv|queue|wait|latency|ttft|first_token|inter_token|token|evict|preempt|transfer|offload"
)
"""In the names of families that would interest us."""


@dataclass(frozen=True, slots=True)
class PageReview:
    """Of one page; families by their declared names."""

    unread: tuple[str, ...] = ()
    """Families that look like cache, queue, latency or token signals, and that no signal of the system reads."""
    mistyped: tuple[str, ...] = ()
    """Families whose declared kind isn't the catalogue's, with both kinds."""
    twice: tuple[str, ...] = ()
    """Families that are declared more than once."""


def declared_kinds(body: bytes) -> dict[str, str]:
    """The kinds that a page declares, by family."""
    return {name.decode(): kind.decode() for name, kind in _TYPE.findall(body)}


def review(system: System, body: bytes, names: Collection[str]) -> PageReview:
    """Look at a page of this system; `names` are those of its samples."""
    declared = Counter(name.decode() for name, _ in _TYPE.findall(body))
    kinds = declared_kinds(body)
    return PageReview(
        unread=tuple(name for name in unused(names, system, kinds) if _TELLING.search(name)),
        mistyped=tuple(sorted(set(_mistyped(system, kinds, names)))),
        twice=tuple(sorted(name for name, count in declared.items() if count > 1)),
    )


def unused(names: Collection[str], system: System, kinds: Mapping[str, str]) -> dict[str, str]:
    """Families that no signal reads → their kind; by their declared names, those without a declaration by their
    samples'."""
    wanted = system.wanted_names()
    left: dict[str, str] = {}
    for name in sorted(set(names) - wanted):
        family = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.removesuffix(suffix) in kinds), name)
        used = any(family + suffix in wanted for suffix in ("", *SUFFIXES))
        if not used and not name.startswith(_OF_THE_PROCESS) and not name.endswith("_created"):
            left[family] = kinds.get(family, "unknown")
    return left


def contradiction(signal: Signal, family: Family, kinds: Mapping[str, str]) -> str | None:
    """The kind that a page declares for a family, where it isn't the one that the catalogue reads it as."""
    declared = kinds.get(family.name) or kinds.get(family.name.removesuffix("_total"))
    expected = "counter" if family.buckets_from else {"info": "gauge"}.get(signal.kind, signal.kind)
    part_of_a_histogram = family.name.endswith(("_sum", "_count"))
    if declared and declared not in (expected, "unknown", "untyped") and not part_of_a_histogram:
        return declared
    return None


def _mistyped(system: System, kinds: Mapping[str, str], names: Collection[str]) -> Iterator[str]:
    for signal in system.signals.values():
        source = signal.source_on(names)
        for family in source.families if source else ():
            declared = contradiction(signal, family, kinds)
            if declared is not None:
                yield f"{family.name}: declared a {declared}, read as a {signal.kind}"
