"""Where reused tokens came from, and what was moved for it: rows of the page's table, and one for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from prefixwatch.loadgen.grading.wording import UNKNOWN, number, percent
from prefixwatch.loadgen.request_log.cache_moves import CacheFigures

CACHES = (
    "policy",
    "cache",
    "window",
    "hit tokens",
    "in the GPU",
    "by tier",
    "pulled",
    "written",
    "recomputed tokens",
    "after a failed pull",
    "failed pulls",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "break-even tokens, model / measured",
)
_WINDOWS = {"run": "all", "before": "60 s before the loss", "after": "60 s after the restart"}


def cache_row(own: CacheFigures) -> list[str]:
    """One line of the page's table."""
    return [
        own.policy,
        own.architecture,
        _WINDOWS[own.window],
        _share(own.logical_hit_tokens, own),
        _share(own.physical_hit_tokens, own),
        ", ".join(f"{tier} {tier_figures.hit_tokens:,}" for tier, tier_figures in own.tiers.items()),
        gigabytes(sum(tier.pulled_bytes for tier in own.tiers.values())),
        gigabytes(sum(tier.written_bytes for tier in own.tiers.values())) if own.window == "run" else "",
        f"{own.recomputed_tokens:,}",
        f"{own.failed_tokens:,}",
        f"{own.failed_pulls:,} of {own.pulls:,}",
        number(own.ttft_p50_ms),
        number(own.ttft_p95_ms),
        break_even(own) if own.window == "run" else "",
    ]


def cache_table(figures: Sequence[CacheFigures]) -> Table:
    """The same for a terminal."""
    table = Table(title="Caches: where reused tokens were", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("policy", overflow="fold")
    table.add_column("60 s", no_wrap=True)
    for name in ("hits %", "GPU %", "pulled GB", "recomp. k", "failed", "TTFT p50", "p95 ms"):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    previous = ""
    for own in figures:
        table.add_row(
            "" if own.policy == previous else own.policy,
            {"run": "all", "before": "before", "after": "after"}[own.window],
            _percents(own.logical_hit_tokens, own),
            _percents(own.physical_hit_tokens, own),
            f"{sum(tier.pulled_bytes for tier in own.tiers.values()) / 1e9:,.1f}",
            f"{own.recomputed_tokens / 1e3:,.0f}",
            f"{own.failed_pulls:,}/{own.pulls:,}",
            number(own.ttft_p50_ms),
            number(own.ttft_p95_ms),
        )
        previous = own.policy
    table.caption = (
        "Before / after: the first worker is lost / is back. GPU: hits that nothing was moved for. Recomp.: thousand "
        "tokens computed although an earlier request had them computed. Failed: pulls."
    )
    return table


def break_even_lines(figures: Sequence[CacheFigures]) -> list[str]:
    """A line for each policy whose KV moves: the shortest prefix worth a pull."""
    return [
        f"{own.policy}: break-even prefix in tokens, by an idle link's price / as measured: {break_even(own)}"
        for own in figures
        if own.window == "run" and len(own.tiers) > 1
    ]


def gigabytes(size_bytes: float) -> str:
    """A size in GB, 10⁹ bytes."""
    return f"{size_bytes / 1e9:,.1f} GB"


def break_even(own: CacheFigures) -> str:
    """The shortest prefix worth a pull from each tier, by its price and as measured."""
    return ", ".join(
        f"{tier} {_tokens(found.break_even_model_tokens)} / {_tokens(found.break_even_measured_tokens)}"
        for tier, found in own.tiers.items()
        if tier != "gpu"
    )


def _tokens(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _share(tokens: int, own: CacheFigures) -> str:
    return percent(tokens / own.prompt_tokens) if own.prompt_tokens else UNKNOWN


def _percents(tokens: int, own: CacheFigures) -> str:
    return f"{tokens / own.prompt_tokens:.1%}".rstrip("%") if own.prompt_tokens else UNKNOWN
