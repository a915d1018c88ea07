"""An isolation audit as one HTML page for a security review: the verdict, what it rests on, its power and its price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prefixwatch.loadgen.audit.samples import Arm, Samples
from prefixwatch.loadgen.grading.wording import number
from prefixwatch.loadgen.report.charts import CURVE_POINTS, LOG_AXIS, Chart, line
from prefixwatch.loadgen.report.page import render_page

_STATES = {"leak": "fail", "isolated": "pass"}
_CLASSES = {"leak": "missed", "isolated": "met", "inconclusive": "undecided", "unavailable": "muted"}
_SIGNS = {"leak": "✗", "isolated": "✓", "inconclusive": "?", "unavailable": "–"}
_TIERS = {"all": "all tiers", "gpu": "GPU tier", "outer": "outer tiers"}
_ARMS = {
    Arm.COLD: "nobody sent it",
    Arm.OWN: "the attacker sent it",
    Arm.CROSS: "the victim sent it",
    Arm.FORGED: "the victim sent it, forged salt",
}
_DASHES = {Arm.COLD: "dot", Arm.OWN: "dash", Arm.CROSS: "solid", Arm.FORGED: "dashdot"}


def render_audit(document: Mapping[str, Any]) -> str:
    """The page of a document as `loadgen.audit.document.sealed` gives it."""
    audit = document["audit"]
    charts = [chart for chart in map(_curves, [audit] * 2, (False, True)) if chart.traces]
    return render_page(
        "audit.html.j2",
        charts,
        {name: audit[name] for name in ("target", "engines", "model", "settings")},
        state=_STATES.get(audit["verdict"], "inconclusive"),
        sign=_SIGNS[audit["verdict"]],
        audit=audit,
        sha256=document["sha256"],
        findings=[_finding(each) for each in audit["findings"]],
        prices=_prices(audit["price"]),
        charts=charts,
    )


def _finding(found: Mapping[str, Any]) -> dict[str, Any]:
    forged = ", victim's salt forged" if found["arm"] == Arm.FORGED else ""
    return {
        **found,
        "name": f"{found['test']}, {_TIERS[found['tier']]}{forged}",
        "class": _CLASSES[found["state"]],
        "sign": _SIGNS[found["state"]],
    }


def _prices(price: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, per prompt that two tenants share, in the traffic that the exporter saw)."""

    def shown(value: float | None, unit: str) -> str:
        return "unknown" if value is None else f"{number(value)} {unit}".strip()

    return [
        ("hit tokens", shown(price["hit_tokens"], "tokens"), shown(price["lost_hit_tokens"], "tokens")),
        ("worker time", shown(price["seconds"], "s"), "unknown"),
        ("GPU time", shown(price["gpu_seconds"], "GPU s"), shown(price["lost_gpu_seconds"], "GPU s")),
        ("money", shown(price["money"], ""), shown(price["lost_money"], "")),
    ]


def _curves(audit: Mapping[str, Any], emptied: bool) -> Chart:
    samples = Samples.from_document(audit["samples"])
    traces, rows = [], []
    for place, arm in enumerate(Arm):
        values = np.sort([probe.seconds * 1e3 for probe in samples.of(arm, emptied=emptied)])
        if not len(values):
            continue
        shares = np.linspace(0, 1, min(CURVE_POINTS, max(2, len(values))))
        x, y = np.round(np.quantile(values, shares), 3).tolist(), np.round(shares * 100, 2).tolist()
        traces.append(line(place, _ARMS[arm], x, y, dash=_DASHES[arm], markers=False))
        quantiles = [number(float(each)) for each in np.quantile(values, (0.05, 0.5, 0.95))]
        rows.append([_ARMS[arm], f"{len(values):,}", *quantiles])
    tier = "with the engines' own caches emptied" if emptied else "as deployed"
    return Chart(
        id="first-tokens-outer" if emptied else "first-tokens",
        title=f"Time to the probe's first token, {tier}",
        description="Share of the probes answered within a time. Isolation holds where what the victim sent (solid) is "
        "as slow as what nobody sent (dotted), and the attacker's own repeats (dashed) are faster.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "time to first token, ms (logarithmic)"}, **LOG_AXIS},
            "yaxis": {"title": {"text": "probes, %"}, "range": [0, 101]},
        },
        header=["probe", "samples", "p5 ms", "p50 ms", "p95 ms"],
        rows=rows,
    )
