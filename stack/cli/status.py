"""`prefixwatch status`: the fleet in one block of figures by model, from an exporter or from a Prometheus."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefixwatch.exporters.fleet.status import TITLES
from prefixwatch.stack.cli.command import JsonFlag, new_app, output_option, plain_console, target_option
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import read_json

app = new_app(invoke_without_command=True)

_UNKNOWN = "–"
_WINDOW = "5m"


def _rate(name: str, selector: str = "", by: str = "model") -> str:
    return f"sum by ({by}) (rate(prefixwatch_{name}{selector}[{_WINDOW}]))"


def _ttft(quantile: float, cache: str) -> str:
    buckets = _rate("ttft_seconds_bucket", f'{{cache="{cache}"}}', by="model, le")
    return f"histogram_quantile({quantile}, {buckets})"


QUERIES: Mapping[str, str] = {
    "hit_tokens_per_second": _rate("prefix_hit_tokens_total"),
    "hit_ratio": f"{_rate('prefix_hit_tokens_total')} / {_rate('prefix_query_tokens_total')}",
    "ttft_hit_p50": f"{_ttft(0.5, 'hit')} or {_ttft(0.5, 'partial')}",
    "ttft_hit_p95": f"{_ttft(0.95, 'hit')} or {_ttft(0.95, 'partial')}",
    "ttft_miss_p50": _ttft(0.5, "miss"),
    "ttft_miss_p95": _ttft(0.95, "miss"),
    "ttft_miss_minus_hit_p50": 'max by (model) (prefixwatch_ttft_miss_minus_hit_seconds{quantile="0.5"})',
    "goodput_ratio": f"{_rate('goodput_requests_total')} / {_rate('requests_total')}",
    "hotspot_max_over_mean": "max by (model) (prefixwatch_hotspot_max_over_mean)",
    "evicted_blocks": f"sum by (model) (increase(prefixwatch_kv_blocks_evicted_total[{_WINDOW}]))",
    "regret_ratio": f"{_rate('kv_blocks_regretted_total')} / ({_rate('kv_blocks_evicted_total')} > 0)",
    "kv_transfer_bytes_per_second": f"sum(rate(prefixwatch_kv_transfer_bytes_total[{_WINDOW}]))",
    "router_decision_p99": f"histogram_quantile(0.99, {_rate('router_decision_seconds_bucket', by='le')})",
    "isolation_violations": 'sum by (model) (prefixwatch_isolation_violations_total{kind="cross_tenant_hit"})',
    "isolation_audited_ratio": "min by (model) (prefixwatch_isolation_audited_ratio)",
}
"""The same figures from a Prometheus that scrapes exporters, over 5 minutes."""


@app.callback()
def status(
    exporter: Annotated[str | None, target_option(help="URL of an exporter; default: http://127.0.0.1:9477.")] = None,
    prometheus: Annotated[str | None, target_option(help="URL of a Prometheus that scrapes exporters.")] = None,
    watch: Annotated[bool, output_option("--watch", help="Show it again every 5 seconds until Ctrl-C.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the fleet's figures by model in one screen: reuse, TTFT of hits and misses, goodput, hotspot, evictions,
    transfers, decision time, isolation. A figure that is not known is a dash, with the reason below.

    Example: `prefixwatch status --exporter http://127.0.0.1:9477 --watch`
    """
    if exporter and prometheus:
        raise UsageError("give either --exporter or --prometheus, not both")
    read: Callable[[], dict[str, Any]]
    if prometheus:
        base = prometheus.rstrip("/")
        read = lambda: from_prometheus(base)  # noqa: E731
    else:
        base = (exporter or "http://127.0.0.1:9477").rstrip("/")
        read = lambda: read_json(f"{base}/api/v1/status", "--exporter")  # noqa: E731
    if as_json:
        typer.echo(json.dumps(read(), indent=2, ensure_ascii=False))
        return
    console = plain_console()
    if not watch:
        console.print(block(read()))
        return
    with Live(block(read()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(5.0)
            live.update(block(read()), refresh=True)


def from_prometheus(base: str) -> dict[str, Any]:
    """The document of `/api/v1/status`, by queries."""
    models: defaultdict[str, dict[str, float]] = defaultdict(dict)
    everywhere: dict[str, float] = {}
    for name, query in QUERIES.items():
        answer = read_json(f"{base}/api/v1/query?{urlencode({'query': query})}", "--prometheus")
        for series in answer.get("data", {}).get("result", ()):
            value = float(series["value"][1])
            if not math.isnan(value):  # a ratio of nothing
                if "model" in series["metric"] or "by (model" in query:
                    models[series["metric"].get("model", "")][name] = value
                else:
                    everywhere[name] = value
    up = read_json(f"{base}/api/v1/query?{urlencode({'query': 'prefixwatch_target_up'})}", "--prometheus")
    found = [float(series["value"][1]) for series in up.get("data", {}).get("result", ())]
    why = "Prometheus has no such series"
    return {
        "schema": 1,
        "targets": {"up": int(sum(found)), "all": len(found)},
        "models": {
            model: [
                {
                    "name": name,
                    "title": title,
                    "unit": unit,
                    "value": (known := {**everywhere, **figures}.get(name)),
                    "window": "total" if name == "isolation_violations" else f"last {_WINDOW}",
                    "why": "" if known is not None else why,
                }
                for name, (title, unit) in TITLES.items()
            ]
            for model, figures in sorted(models.items(), key=lambda item: (not item[0], item[0]))
        },
    }


def block(document: Mapping[str, Any]) -> Table:
    """The document as one table: a row for each figure, a column for each model."""
    targets, models = document["targets"], document["models"]
    notes: dict[str, list[str]] = defaultdict(list)
    caption = ["no model is known yet"] if not models else []
    table = Table(title=f"{targets['up']} of {targets['all']} targets up", title_justify="left", caption_justify="left")
    table.add_column("figure")
    for model in models:
        table.add_column(model or "(no model)", justify="right")
    table.add_column("window")
    for name, (title, _) in TITLES.items():
        row = [next((one for one in figures if one["name"] == name), None) for figures in models.values()]
        known = [one for one in row if one is not None]
        for one in known:
            if one["why"] and title not in notes[one["why"]]:
                notes[one["why"]].append(title)
        table.add_row(title, *(_shown(one) for one in row), known[0]["window"] if known else "")
    caption += [f"{_UNKNOWN} {', '.join(titles)}: {why}" for why, titles in notes.items()]
    table.caption = Text("\n".join(caption))
    return table


def _shown(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["value"] is None:
        return _UNKNOWN
    value, unit = float(figure["value"]), figure["unit"]
    if unit == "ratio":
        return f"{value:.1%}"
    if unit == "s":
        return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1000:.3g} ms"
    if unit == "×":
        return f"{value:.2f}×"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (prefix != "k" and abs(value) >= size):
            return f"{value / size:.3g} {prefix} {unit}"
    return f"{value:,.0f} {unit}" if abs(value) >= 10 or value == int(value) else f"{value:.2g} {unit}"
