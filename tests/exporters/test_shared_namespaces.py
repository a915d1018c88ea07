"""Two tenants whose blocks engines keep in one namespace, from KV events and request records to findings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.requests.ledger import ROUTER, RequestLedger
from prefixwatch.kvcache.blocks import as_tokens, block_hashes, namespace_root
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.index.block_table import BlockTable
from prefixwatch.kvcache.index.prefix_tree import PrefixTree, prefix_tree
from prefixwatch.kvcache.request_record import RequestRecord
from tests.exporters.requests import done, ledger_of
from tests.exporters.test_isolation_cost import stored

PROMPT = list(range(1000, 1160))


def hashes(tokens: list[int], salt: str | None) -> list[int]:
    made: list[int] = block_hashes(as_tokens(tokens), root=namespace_root(salt)).tolist()
    return made


class Fleet:
    """An engine's events in a table, and a ledger that looks into its tree."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self.feed = TableFeed("w0", self.table)
        self.tree: PrefixTree | None = None
        self.ledger: RequestLedger = ledger_of(tree=lambda: self.tree)
        self.batches = 0
        self.number = 0

    def engine_stores(self, tokens: list[int], salt: str | None) -> None:
        self.feed.apply(self.batches, msgspec.msgpack.encode([1e9, [stored(tokens, salt)], 0]), 0.0)
        self.batches += 1

    def sent(self, tenant: str, tokens: list[int], salt: str | None, **fields: Any) -> RequestRecord:
        """A router's record of this prompt under this salt."""
        self.number += 1
        read_at = fields.pop("read_at", "router")
        record = done(
            tenant=tenant, salted=salt is not None, prompt_block=hashes(tokens, salt)[-1],
            request=f"r{self.number}", own_tokens=None, **fields,
        )  # fmt: skip
        self.ledger.record(record, ROUTER, read_at)
        return record

    def found(self) -> list[dict[str, Any]]:
        """The findings after a look at all that was sent."""
        self.tree = prefix_tree(self.table.snapshot(), self._asked())
        latest: list[dict[str, Any]] = self.ledger.document(100.0)["isolation"]["latest_findings"]
        return [
            {key: one.get(key) for key in ("kind", "certainty", "tier", "tenant", "other_tenant", "evidence")}
            for one in latest
        ]

    def _asked(self) -> set[int]:
        counts = self.ledger.prefix_counts(100.0)
        return set(counts.both.ended) if counts else set()


@pytest.mark.parametrize(
    ("salts", "kind"),
    [((None, None), "stored_unsalted"), (("common", "common"), "stored_salt_shared"), (("a", "b"), None)],
)
def test_two_tenants_whose_prompts_run_through_the_same_blocks_share_a_namespace(
    salts: tuple[str | None, str | None], kind: str | None
) -> None:
    """Only their opening is the same; the rest of each prompt is its own."""
    fleet = Fleet()
    for tenant, salt in zip(("acme", "bolt"), salts, strict=True):
        tokens = [*PROMPT[:64], *range(ord(tenant[0]), ord(tenant[0]) + 32)]
        fleet.engine_stores(tokens, salt)
        fleet.sent(tenant, tokens, salt)
    expected = {
        "kind": kind, "certainty": "configuration", "tier": "gpu", "tenant": "bolt", "other_tenant": "acme",
        "evidence": ["r2", "r1"],
    }  # fmt: skip
    assert fleet.found() == ([expected] if kind else [])


def test_what_engines_store_counts_not_what_the_router_asked_for() -> None:
    """A salt that the engine's events don't name: the router's blocks are nowhere in the tree, and nothing is said."""
    fleet = Fleet()
    for tenant in ("acme", "bolt"):
        fleet.engine_stores(PROMPT, None)
        fleet.sent(tenant, PROMPT, f"salt of {tenant}")
    assert fleet.found() == []


def test_a_trust_group_shares_by_intent_and_the_anonymous_are_nobody() -> None:
    fleet = Fleet()
    fleet.engine_stores(PROMPT, "common")
    for tenant in ("lab-a", "lab-b"):
        fleet.sent(tenant, PROMPT, "common", trust_group="research")
    fleet.engine_stores(PROMPT, None)
    for tenant in ("", "acme", ""):
        fleet.sent(tenant, PROMPT, None)
    assert fleet.found() == []


def test_a_prompt_that_is_not_in_the_tree_yet_waits_and_each_request_counts_once() -> None:
    fleet = Fleet()
    fleet.sent("acme", PROMPT, None)
    fleet.sent("bolt", PROMPT, None)
    assert fleet.found() == []
    fleet.engine_stores(PROMPT, None)
    for _ in range(2):
        assert [one["kind"] for one in fleet.found()] == ["stored_unsalted"]
    (shown,) = fleet.ledger.document(100.0)["isolation"]["latest_findings"]
    assert shown["requests"] == 1


def test_pseudonyms_are_other_tenants_only_where_both_were_in_use_at_once() -> None:
    """After a router's restart, or at a router with another secret, the same tenant has another pseudonym."""
    fleet = Fleet()
    fleet.engine_stores(PROMPT, None)
    fleet.sent("#1", PROMPT, None)
    fleet.sent("#2", PROMPT, None)  # as after a restart
    fleet.sent("#3", PROMPT, None, read_at="another")
    assert fleet.found() == []
    fleet.sent("#1", PROMPT, None)
    assert [(one["tenant"], one["other_tenant"]) for one in fleet.found()] == [("#1", "#2")]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=25),
    st.sets(st.integers(0, 3)),
)
def test_a_finding_names_a_tenant_whose_salt_and_opening_are_the_same(
    requests: list[tuple[int, int, int]], shared: set[int]
) -> None:
    """Against a plain model: tenants in `shared` have one salt; four of them send three openings with three ends."""
    fleet = Fleet()
    before: dict[tuple[str, int], set[int]] = {}
    expected = set()
    for tenant, opening, end in requests:
        salt = "common" if tenant in shared else f"salt {tenant}"
        tokens = [*range(opening * 1000, opening * 1000 + 64), *range(end * 100, end * 100 + 32)]
        fleet.engine_stores(tokens, salt)
        fleet.sent(f"t{tenant}", tokens, salt)
        senders = before.setdefault((salt, opening), set())
        if senders - {tenant}:
            expected.add(f"t{tenant}")
        senders.add(tenant)
    found = fleet.found()
    assert {one["tenant"] for one in found} == expected
    assert all(int(str(one["other_tenant"])[1:]) in shared for one in found)


async def test_the_exporter_joins_events_and_records_on_its_page() -> None:
    exporter = Exporter(ExporterConfig(targets=(TargetConfig(name="w0", url="http://127.0.0.1:1/metrics"),)))
    feed = TableFeed("w0", exporter.prefixes.table)
    feed.apply(0, msgspec.msgpack.encode([1e9, [stored(PROMPT, "one salt of two tenants")], 0]), 0.0)
    for tenant in ("acme", "bolt"):
        block = hashes(PROMPT, "one salt of two tenants")[-1]
        exporter.ledger.record(done(tenant=tenant, salted=True, prompt_block=block, request=f"r-{tenant}"), ROUTER, "r")
    await exporter.prefixes.refresh()
    families = {family.name: family for family in exporter.ledger.metrics(100.0)}
    counted = {
        (sample.labels["kind"], sample.labels["tier"]): sample.value
        for sample in families["prefixwatch_isolation_findings"].samples
        if sample.name.endswith("_total") and sample.value
    }
    assert counted == {("stored_salt_shared", "gpu"): 1}
    assert "one salt of two tenants" not in str(exporter.ledger.document(100.0))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=25))
def test_one_tenant_under_the_names_that_restarts_give_it_is_never_two(requests: list[tuple[int, bool]]) -> None:
    """Each life of each router has a pseudonym of its own for it; then it is named, and at last in a trust group."""
    fleet = Fleet()
    fleet.engine_stores(PROMPT, None)
    lives = [0, 0, 0]
    for router, restarts in requests:
        lives[router] += restarts
        name = f"#{router}{lives[router]}" if lives[router] < 3 else "acme"
        group = "research" if lives[router] > 4 else ""
        fleet.sent(name, PROMPT, None, read_at=f"router {router}", trust_group=group)
        assert fleet.found() == []
