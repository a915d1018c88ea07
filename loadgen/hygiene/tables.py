"""What `analyze` found, as tables for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixwatch.loadgen.grading.wording import number, percent
from prefixwatch.loadgen.hygiene.causes import Diagnosis
from prefixwatch.loadgen.recordings.analysis import TrafficAnalysis
from prefixwatch.loadgen.report.charts import COLOURS, Chart
from prefixwatch.loadgen.report.page import render_page

Curve = Sequence[Mapping[str, float | int | None]]


@dataclass(frozen=True, slots=True)
class ShownTable:
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


def tables(
    found: TrafficAnalysis, diagnosis: Diagnosis | None, curve: Curve, seconds_per_token: float
) -> Iterator[ShownTable]:
    """In the order in which a reader wants them: causes, tenants, block sizes, capacity, lengths, prefixes."""
    if diagnosis is not None and diagnosis.causes:
        yield _causes(found, diagnosis, seconds_per_token)
    if diagnosis is not None and len(diagnosis.tenants) > 1:
        yield _tenants(diagnosis)
    if diagnosis is not None:
        rows = [[str(size), percent(ratio)] for size, ratio in diagnosis.by_block_size.items()]
        yield ShownTable("Reuse by tokens per block", ["block size", "could hit"], rows)
    if curve:
        yield _capacity(found, curve)
    yield ShownTable(
        "First tokens shared with an earlier request",
        ["tokens", "requests"],
        [[name, f"{count:,}"] for name, count in found.parting.items()],
    )
    if found.top_prefixes:
        texts = any(prefix.text for prefix in found.top_prefixes)
        rows = [
            [f"{p.tokens:,}", f"{p.requests:,}", f"{p.saved_tokens:,}", *([repr(p.text)] if texts else [])]
            for p in found.top_prefixes
        ]
        header = ["tokens", "requests", "saved tokens", *(["begins"] if texts else [])]
        yield ShownTable("Openings that save most", header, rows)


def _causes(found: TrafficAnalysis, diagnosis: Diagnosis, seconds_per_token: float) -> ShownTable:
    rows = [
        [
            cause.title,
            f"{cause.requests:,}",
            f"{cause.lost_tokens:,}",
            percent(cause.lost_tokens / found.prompt_tokens if found.prompt_tokens else None),
            number(cause.lost_tokens * seconds_per_token),
            percent(cause.ratio_after),
            cause.remedy,
        ]
        for cause in diagnosis.causes
    ]
    header = ["cause", "requests", "tokens lost", "of all", "GPU s", "after", "remedy"]
    note = (
        "Tokens lost: what a cause would still cost if all others were mended; GPU s: their prefill, by the profile. "
        "After: with this one alone mended, which gains nothing while another hides it."
    )
    return ShownTable("What breaks reuse", header, rows, note)


def _tenants(diagnosis: Diagnosis) -> ShownTable:
    rows = [
        [t.tenant, f"{t.requests:,}", f"{t.prompt_tokens:,}", percent(t.hit_ratio), percent(t.ratio_after)]
        for t in diagnosis.tenants
    ]
    return ShownTable("By tenant", ["tenant", "requests", "prompt tokens", "could hit", "after mending all"], rows)


def _capacity(found: TrafficAnalysis, curve: Curve) -> ShownTable:
    rows = []
    for point in curve:
        blocks = int(point["capacity_blocks"] or 0)
        ratios = [percent(point[name]) for name in ("lru", "frequency", "clairvoyant")]
        rows.append([f"{blocks:,}", f"{blocks * found.block_size:,}", *ratios, percent(found.profile.hit_ratio())])
    return ShownTable(
        f"One cache, by its size in blocks of {found.block_size} tokens",
        ["blocks", "tokens", "LRU", "by frequency", "clairvoyant", "without limit"],
        rows,
        "Shares of all blocks. LRU is what engines do; no eviction reuses more than the clairvoyant one.",
    )


def page(
    title: str, sentences: Sequence[str], shown: Sequence[ShownTable], curve: Curve, again: Mapping[str, Any]
) -> str:
    """All of it as one HTML page."""
    return render_page(
        "analyzed.html.j2",
        charts := [_chart(curve)] if curve else [],
        again,
        state="pass",
        title=Path(title).name,
        sentences=sentences,
        tables=shown,
        charts=charts,
    )


def _chart(curve: Curve) -> Chart:
    names = {"lru": "LRU", "frequency": "by frequency", "clairvoyant": "clairvoyant bound"}
    return Chart(
        id="capacity",
        title="How much cache does it take?",
        description="Share of all blocks that one cache reuses, by its size. No eviction reuses more than the bound.",
        traces=[
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": shown,
                "x": [point["capacity_blocks"] for point in curve],
                "y": [None if point[name] is None else round(100 * float(point[name] or 0.0), 3) for point in curve],
                "line": {"color": COLOURS[position]},
            }
            for position, (name, shown) in enumerate(names.items())
        ],
        layout={
            "xaxis": {"title": {"text": "blocks"}, "type": "log"},
            "yaxis": {"title": {"text": "blocks reused"}, "ticksuffix": " %", "rangemode": "tozero"},
        },
        header=["blocks", *names.values()],
        rows=[
            [f"{int(point['capacity_blocks'] or 0):,}", *(percent(point[name]) for name in names)] for point in curve
        ],
    )
