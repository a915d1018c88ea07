"""Which families of a page are a catalogued family under another name.

Three patterns are followed: with or without `_total`; another prefix (`vllm:` and `vllm_`, or a prefix of the
deployment's own under which the whole page lies); and what a catalogue file itself writes with `*`, such as a
connector's suffix. Names that fit a pattern and aren't followed, because something else may be meant, are listed. Pure.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

from prefixwatch.exporters.catalogue.model import Family, Signal, Source, System

_LEAST_SIGNALS = 3
"""A foreign prefix is the system's if this many of its signals are found under it: fewer may be a coincidence."""

_BOUNDARY = re.compile(r"[:_]")
_ANYTHING = "[A-Za-z0-9_]+?"
_SHARED = ("process_",)

_MOST_FOLLOWED = 64
_MOST_NAMES = 5_000
"""What is remembered of pages is bounded, whatever they hold."""


@dataclass(frozen=True, slots=True)
class Renames:
    """What a page calls the families of a system."""

    families: Mapping[str, str] = field(default_factory=dict)
    """The page's name → the catalogue's."""
    not_followed: tuple[str, ...] = ()
    """Names of samples that look like a family of a signal that the page doesn't give."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A system as one page writes it."""

    system: System
    renames: Renames
    names: frozenset[str]
    """The page's names, and for each that was followed the catalogue's."""
    own_prefix: bool
    """Its names begin as the system's do, in whatever spelling."""


def follow(system: System, names: frozenset[str]) -> Followed:
    """The system with the names that this page has. The very same system where nothing is renamed.

    Worked out once for all pages of a system that have these names: a fleet's pages are of few kinds.
    """
    if len(names) > _MOST_NAMES:
        return _follow(system, names)
    key = id(system), names
    found = _FOLLOWED.get(key)
    if found is None or found[0] is not system:
        found = _FOLLOWED[key] = system, _follow(system, names)
        if len(_FOLLOWED) > _MOST_FOLLOWED:
            _FOLLOWED.popitem(last=False)
    _FOLLOWED.move_to_end(key)
    return found[1]


def _follow(system: System, names: frozenset[str]) -> Followed:
    foreign = names - system.wanted_names()
    signals, renames = {}, dict[str, str]()
    taken = _Lookup(system, names, foreign)
    for name, signal in system.signals.items():
        signals[name] = _followed(signal, names, taken, renames)
    if all(signals[name] is signal for name, signal in system.signals.items()):
        resolved = system
    else:
        resolved = system.model_copy(update={"signals": signals})
    left = foreign - resolved.wanted_names()
    meant = {
        family.marker(signal.kind)
        for signal in system.signals.values()
        for source in signal.sources
        for family in source.families
        if family.name in renames.values()
    }
    not_followed = tuple(_look_alikes(resolved, names, left, taken))
    return Followed(resolved, Renames(renames, not_followed), names | meant, taken.custom is None)


def detected(systems: Iterable[System], names: frozenset[str]) -> System | None:
    """The system whose names these are by pattern, for a page that has none of any system's own.

    One with the system's own prefix before one with a foreign prefix, then the one with most signals; None where no
    system has three.
    """
    best, most = None, (False, _LEAST_SIGNALS - 1, 0)
    for system in systems:
        found = follow(system, names)
        count = sum(signal.source_on(names) is not None for signal in found.system.signals.values())
        rank = (found.own_prefix, count, -len(system.system))
        if found.renames.families and count >= _LEAST_SIGNALS and rank > most and system.matches(found.names):
            best, most = system, rank
    return best


_FOLLOWED: OrderedDict[tuple[int, frozenset[str]], tuple[System, Followed]] = OrderedDict()
"""By a system's identity, which holds while the system is kept beside, and a page's names; the latest used last."""


class _Lookup:
    """The page's names by how a catalogued one could be spelled."""

    def __init__(self, system: System, names: frozenset[str], foreign: frozenset[str]) -> None:
        self._foreign = foreign
        self._plain: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names):
            self._plain[_plain(name)].append(name)
        self.prefixes = _prefixes(system)
        self.custom = self._custom_prefix(system, names)

    def find(self, family: Family, signal: Signal) -> str | None:
        """The page's name of this family of the signal, or None."""
        marker = family.marker(signal.kind)
        suffix = marker[len(family.name) :]
        own = {other.marker(signal.kind) for source in signal.sources for other in source.families}
        for name in _spellings(family.name):
            found = next((one for one in self._plain.get(_plain(name + suffix), ()) if one not in own), None)
            if found is None and self.custom is not None and name.startswith(self.custom[1]):
                found = self.custom[0] + name.removeprefix(self.custom[1]) + suffix
                found = found if found in self._foreign else None
            if found is not None:
                return found.removesuffix(suffix)
        return None

    def matching(self, pattern: str, suffix: str) -> list[str]:
        """The page's names that a name with `*` stands for."""
        wanted = _pattern(pattern + suffix)
        return sorted(name.removesuffix(suffix) for name in self._foreign if wanted.fullmatch(name))

    def _custom_prefix(self, system: System, names: frozenset[str]) -> tuple[str, str] | None:
        """The prefix that the whole page has instead of the system's, and that one."""
        votes: dict[tuple[str, str], set[str]] = defaultdict(set)
        for prefix in self.prefixes:
            if any(name.startswith(prefix) for name in names):
                continue
            tails = dict(_tails(system, prefix))
            for name in self._foreign:
                for cut in _BOUNDARY.finditer(name):
                    if signal := tails.get(name[cut.end() :]):
                        votes[name[: cut.end()], prefix].add(signal)
        best = max(votes, key=lambda pair: (len(votes[pair]), pair), default=None)
        return best if best is not None and len(votes[best]) >= _LEAST_SIGNALS else None


def _followed(signal: Signal, names: frozenset[str], taken: _Lookup, renames: dict[str, str]) -> Signal:
    better = _preferred(signal, names)
    sources = []
    for source in signal.sources:
        families: list[Family] = []
        for family in source.families:
            suffix = family.marker(signal.kind)[len(family.name) :]
            if "*" in family.name:
                found = taken.matching(family.name, suffix)
                renames.update(dict.fromkeys(found, family.name))
                families += [family.model_copy(update={"name": name}) for name in found] or [family]
            elif (
                any(source is one for one in better)
                and family.marker(signal.kind) not in names
                and (name := taken.find(family, signal))
            ):
                renames[name] = family.name
                families.append(family.model_copy(update={"name": name}))
            else:
                families.append(family)
        same = len(families) == len(source.families) and all(map(operator.is_, families, source.families))
        sources.append(source if same else source.model_copy(update={"families": tuple(families)}))
    if all(map(operator.is_, sources, signal.sources)):
        return signal
    return signal.model_copy(update={"sources": tuple(sources)})


def _look_alikes(system: System, names: frozenset[str], left: frozenset[str], taken: _Lookup) -> Iterator[str]:
    """Names with another prefix, or with a suffix more, than a family that the page lacks."""
    lacking = [
        marker
        for signal in system.signals.values()
        for source in _preferred(signal, names)
        for family in source.families
        if "*" not in family.name and (marker := family.marker(signal.kind)) not in names
    ]
    tails = {_tail(marker, taken.prefixes) for marker in lacking}
    suffixed = [_suffixed(marker) for marker in lacking]
    for name in sorted(left):
        own_tails = {spelled for cut in _BOUNDARY.finditer(name) for spelled in _spellings(name[cut.end() :])}
        if own_tails & tails or any(pattern.fullmatch(name) for pattern in suffixed):
            yield name


def _preferred(signal: Signal, names: frozenset[str]) -> tuple[Source, ...]:
    """The source that is read and those that would be preferred to it; all where none is read."""
    present = signal.source_on(names)
    return signal.sources if present is None else signal.sources[: signal.sources.index(present) + 1]


def _tails(system: System, prefix: str) -> Iterator[tuple[str, str]]:
    for name, signal in system.signals.items():
        for source in signal.sources:
            for family in source.families:
                marker = family.marker(signal.kind)
                if marker.startswith(prefix):
                    for spelled in _spellings(marker.removeprefix(prefix)):
                        yield spelled, name


def _tail(name: str, prefixes: Collection[str]) -> str:
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)


def _prefixes(system: System) -> tuple[str, ...]:
    """What the system's names begin with: up to a colon, as its detection says, or what all others share."""
    every = [name for name in system.wanted_names() if not name.startswith(_SHARED)]
    found = {name[: name.index(":") + 1] for name in every if ":" in name}
    found |= {pattern[:-1] for pattern in system.detect.any_of if pattern.endswith("*") and len(pattern) > 2}
    rest = [name for name in every if not name.startswith(tuple(found))]
    shared = "".join(letters[0] for letters in takewhile(_all_equal, zip(*rest, strict=False)))
    found.add(shared[: shared.rfind("_") + 1])
    return tuple(sorted(found - {""}, key=len, reverse=True))


def _all_equal(letters: tuple[str, ...]) -> bool:
    return len(set(letters)) == 1


def _plain(name: str) -> str:
    return name.replace(":", "_").lower()


@lru_cache(maxsize=4096)
def _spellings(name: str) -> tuple[str, ...]:
    """The name, and with or without `_total`; of a part of a histogram, also the histogram's."""
    part = next((part for part in ("_sum", "_count") if name.endswith(part)), "")
    bases = [name] if not part else [name, name.removesuffix(part)]
    toggled = [base.removesuffix("_total") if base.endswith("_total") else f"{base}_total" for base in bases]
    return name, toggled[0], *(base + part for base in toggled[1:])


@lru_cache(maxsize=1024)
def _suffixed(marker: str) -> re.Pattern[str]:
    """With a suffix more, before its kind's own or at the end."""
    stem = re.sub(r"_(total|bucket|count|sum)$", "", marker)
    ends = re.escape(marker[len(stem) :])
    return re.compile(f"{re.escape(stem)}(?:_{_ANYTHING}{ends}|{ends}_{_ANYTHING})")


@lru_cache(maxsize=1024)
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_ANYTHING.join(map(re.escape, name.split("*"))))
