"""`prefixwatch diagnose --preflight`: the checklist before a launch, with evidence for each item."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.runbooks.evidence import TIMEOUT_SECONDS, Evidence, PrometheusEvidence, watch_exporter
from prefixwatch.runbooks.page import at
from prefixwatch.slo.promql import QueryError
from prefixwatch.stack.config import PrefixwatchConfig, load_config
from prefixwatch.stack.diagnose.command import DiagnoseOptions
from prefixwatch.stack.diagnose.preflight import METRIC_QUERIES, Facts, Item, checklist
from prefixwatch.stack.diagnose.preflight_hashing import hash_algorithms
from prefixwatch.stack.diagnose.preflight_probes import compare_tokens, probe
from prefixwatch.stack.errors import UsageError

_MARKS = {
    "passed": "[green]✓[/green]",
    "failed": "[red]✗[/red]",
    "not verifiable here": "[bright_black]?[/bright_black]",
}


def run_preflight(options: DiagnoseOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Print the list unless JSON is wanted; 1 if an item failed, 3 if none could be verified, else 0.

    Raises InputError.
    """
    if not (options.target or options.config or options.prometheus or options.exporter):
        raise UsageError("--preflight needs something to judge by: --target, --config, --prometheus or --exporter")
    options.check()
    with console.status("asking …"):
        items = checklist(asyncio.run(gather(options)))
    if options.markdown:
        print(as_markdown(items))
    elif not options.as_json:
        console.print(_table(items))
    document = {"schema": 1, "items": [{"name": i.name, "state": i.state, "evidence": i.evidence} for i in items]}
    return document, _exit_code(items)


async def gather(options: DiagnoseOptions) -> Facts:
    """Everything that the options allow to know. Raises InputError."""
    config = load_config(options.config) if options.config else None
    facts: dict[str, Any] = {"config": config} | await _metrics(options)
    if options.target:
        named = [tenant.name for tenant in config.tenants] if config else []
        pair = (named[0], named[1]) if len(named) > 1 else ("preflight-a", "preflight-b")
        facts["probes"] = await probe(options.target, pair, tenant_header=_tenant_header(config))
    if config is not None:
        facts["tokens_equal"], facts["tokens_why"] = await compare_tokens(config)
        facts["hash_algorithms"] = await hash_algorithms(config)
    return Facts(**facts)


async def _metrics(options: DiagnoseOptions) -> dict[str, Any]:
    """The facts that a Prometheus or an exporter gives."""
    if not options.prometheus and not options.exporter:
        return {}
    given, retention = options.access, ""
    async with new_session(given.headers, given.tls, TIMEOUT_SECONDS) as session:
        if options.prometheus:
            evidence: Evidence = PrometheusEvidence(options.prometheus, session)
            retention = await Prometheus(options.prometheus, session).retention()
        else:
            evidence = await watch_exporter(options.exporter or "", session, seconds=options.seconds)
        metrics = {name: await _number(evidence, query, options.window) for name, query in METRIC_QUERIES.items()}
        return {"metrics": metrics, "retention": retention}


async def _number(evidence: Evidence, query: str, window: str) -> float | None:
    try:
        vector = await evidence.query(at(query, window))
    except QueryError:
        return None
    return vector[0].value if vector else None


def _tenant_header(config: PrefixwatchConfig | None) -> str:
    return config.router.tenant_header if config else "x-tenant-id"


def _exit_code(items: list[Item]) -> int:
    states = {item.state for item in items}
    if "failed" in states:
        return 1
    return 0 if "passed" in states else 3


def _table(items: list[Item]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title="Before the launch", title_justify="left")
    for item in items:
        evidence = escape(item.evidence)
        if item.state == "not verifiable here":
            evidence = f"[bright_black]not verifiable here: {evidence}[/bright_black]"
        table.add_row(_MARKS[item.state], escape(item.name), evidence)
    return table


def as_markdown(items: list[Item]) -> str:
    """A task list for a launch ticket."""
    lines = ["## Before the launch", ""]
    for item in items:
        box = "x" if item.state == "passed" else " "
        lines.append(f"- [{box}] **{item.name}** ({item.state}): {item.evidence}")
    return "\n".join(lines)
