"""Tenants whose blocks engines keep in one namespace, by their own KV events.

An event's extra keys name the salt, and with it the chain hashes that `kvcache.index.block_table` knows blocks by. A
router's record names the last block of its prompt by the hash under the tenant's own salt. Where the blocks that two
tenants' prompts run through in the tree are the same, the engine stored them without a salt, or with one that both
have: whatever one of them sends, the other finds. Nothing need have been reused yet.

Only openings that both sent can show it, and only what lies on the GPU: events of other tiers aren't in the tree.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from prefixwatch.exporters.requests.request import Request
from prefixwatch.kvcache.index.prefix_tree import NO_PARENT, PrefixTree
from prefixwatch.kvcache.isolation_findings import FindingKind
from prefixwatch.kvcache.request_record import owner

STORED_KINDS = (FindingKind.STORED_UNSALTED, FindingKind.STORED_SALT_SHARED)

_LONGEST_WAIT_SECONDS = 60.0
"""For a prompt's blocks to show in the tree."""
_WAITING = 10_000
_OPENINGS = 10_000
_OWNERS = 10_000
_SENDERS_PER_OPENING = 4

TreeNow = Callable[[], PrefixTree | None]


def no_tree() -> PrefixTree | None:
    """Where no engine's KV events are heard."""
    return None


class _Sender(NamedTuple):
    read_at: str
    owner: str
    request: str
    number: int


class Report(Protocol):
    """What is done with a finding."""

    def __call__(self, request: Request, kind: FindingKind, *, other: str, evidence: tuple[str, ...]) -> None: ...


class SharedNamespaces:
    """Who sent which openings, in bounded memory.

    `judged` gets each request whose blocks were found, `report` those that show a finding.
    """

    def __init__(self, tree: TreeNow, judged: Callable[[Request], None], report: Report) -> None:
        self._tree, self._judged, self._report = tree, judged, report
        self._looked_at: PrefixTree | None = None
        self._waiting: deque[Request] = deque(maxlen=_WAITING)
        self._openings: OrderedDict[int, OrderedDict[tuple[str, str], _Sender]] = OrderedDict()
        """By the chain hash of the first block."""
        self._first: OrderedDict[tuple[str, str], int] = OrderedDict()
        """The number of an owner's first request at a router."""
        self._number = 0

    def record(self, request: Request) -> None:
        record = request.record
        if request.completed and record.prompt_block is not None and record.tenant:
            self._waiting.append(request)

    def settle(self) -> None:
        """Judge the requests whose blocks are in the tree by now."""
        tree = self._tree()
        if tree is None or tree is self._looked_at:
            return
        self._looked_at = tree
        newest = self._waiting[-1].at_seconds if self._waiting else 0.0
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            node = tree.named.get(request.record.prompt_block or 0)
            if node is not None:
                self._judge(request, tree, node)
            elif newest - request.at_seconds < _LONGEST_WAIT_SECONDS:
                self._waiting.append(request)

    def _judge(self, request: Request, tree: PrefixTree, node: int) -> None:
        while (above := int(tree.parent[node])) != NO_PARENT:
            node = above
        self._judged(request)
        self._number += 1
        own = _Sender(request.read_at, owner(request.record), request.record.request, self._number)
        name = own.read_at, own.owner
        senders = self._openings.setdefault(int(tree.first_hash[node]), OrderedDict())
        self._openings.move_to_end(int(tree.first_hash[node]))
        first = self._first.setdefault(name, own.number)
        self._first.move_to_end(name)
        other = next((each for each in reversed(senders.values()) if _differ(own, first, each)), None)
        senders[name] = own
        senders.move_to_end(name)
        for table, most in ((senders, _SENDERS_PER_OPENING), (self._openings, _OPENINGS), (self._first, _OWNERS)):
            if len(table) > most:
                table.popitem(last=False)
        if other is not None:
            kind = FindingKind.STORED_SALT_SHARED if tree.salted[node] else FindingKind.STORED_UNSALTED
            evidence = tuple(each for each in (own.request, other.request) if each)
            self._report(request, kind, other=other.owner, evidence=evidence)


def _differ(own: _Sender, first: int, other: _Sender) -> bool:
    """Whether they are certainly two owners. A pseudonym, or a trust group, may be another name that the same tenant
    had before the router's restart: unless the first name was in use before and after the other."""
    if own.owner == other.owner:
        return False
    if own.owner.startswith(_PASSING) or other.owner.startswith(_PASSING):
        return own.read_at == other.read_at and first < other.number
    return True


_PASSING = ("#", "group ")
