"""Where reuse is and for whom, as tables: by block class, by named prefix, by session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from prefixwatch.kvcache.locality import DIMENSIONS, NORM
from prefixwatch.loadgen.grading.model import PartReuse, PolicyGrade, ReuseGrade
from prefixwatch.loadgen.grading.summary import Summary
from prefixwatch.loadgen.grading.wording import UNKNOWN, number, percent, percent_interval, signed

PARTS = ("kind", "name", "prompt tokens")
SESSIONS = ("sessions by hit ratio", "policy", *(f"{tenth}0 %" for tenth in range(10)), "below 80 %", "95 % CI")


def parts_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the hit ratio of each block class and named prefix, and locality, a column per policy."""
    found = {name: own.reuse for name, own in summary.policies.items() if own.reuse is not None}
    localities = [reuse.locality for reuse in found.values()]
    rows = [
        [kind, name, f"{tokens:,}", *(percent(_ratio(_of(reuse, kind), name)) for reuse in found.values())]
        for kind in ("block class", "prefix")
        for name, tokens in _names(found.values(), kind).items()
    ]
    copies = [reuse.copies_mean for reuse in found.values()]
    if rows and any(each is not None for each in copies):
        rows.append(["copies", "of a prefix, mean", "", *(number(each) for each in copies)])
    rows += [
        ["locality", name, "", *(percent(each.get(name)) for each in localities)]
        for name in (*DIMENSIONS, NORM)
        if rows and any(name in each for each in localities)
    ]
    return [*PARTS, *found], rows


def session_rows(summary: Summary) -> list[list[str]]:
    """In the order of `SESSIONS`: how many sessions have which hit ratio."""
    return [
        [
            f"{found.sessions:,}",
            name,
            *(f"{count:,}" for count in found.by_tenth),
            percent(found.below_80_share),
            percent_interval(found.below_80_ci95),
        ]
        for name, own in summary.policies.items()
        if own.reuse is not None and (found := own.reuse.sessions) is not None
    ]


def weighted_sentences(summary: Summary) -> list[str]:
    """The weighted figure of each policy that has one, with its two terms."""
    return [
        f"{name}: weighted reuse {signed(found.value)} = {number(found.weighted_hit_ratio)} "
        f"− {number(found.tail_weight_per_second)} × {number(found.ttft_p99_seconds)} s P99"
        for name, own in summary.policies.items()
        if own.reuse is not None and (found := own.reuse.weighted) is not None
    ]


def reuse_table(summary: Summary) -> Table | None:
    """The same for a terminal, without the prefixes; None where the plan names no parts."""
    header, rows = parts_table(summary)
    if not rows:
        return None
    table = Table(title="Hit tokens by part of the prompt", box=box.SIMPLE_HEAD, show_edge=False)
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < 2 else "right")
    for row in rows:
        if row[0] != "prefix":
            table.add_row(*row)
    below = [_below(own) for own in summary.policies.values() if own.reuse is not None]
    if set(below) != {UNKNOWN}:
        table.add_row("sessions", "below 80 %", "", *below)
    table.caption = "\n".join(weighted_sentences(summary)) or None
    return table


def _below(own: PolicyGrade) -> str:
    sessions = None if own.reuse is None else own.reuse.sessions
    return UNKNOWN if sessions is None else percent(sessions.below_80_share)


def _of(reuse: ReuseGrade, kind: str) -> Sequence[PartReuse]:
    return reuse.block_classes if kind == "block class" else reuse.prefixes


def _names(found: Iterable[ReuseGrade], kind: str) -> dict[str, int]:
    """Each name and its prompt tokens, as of the first policy that has it."""
    names: dict[str, int] = {}
    for reuse in found:
        for part in _of(reuse, kind):
            names.setdefault(part.name, part.prompt_tokens)
    return names


def _ratio(parts: Sequence[PartReuse], name: str) -> float | None:
    return next((part.ratio for part in parts if part.name == name), None)
