"""What to do after a run: one to three sentences for the report's first screen, most urgent first."""

from __future__ import annotations

from collections.abc import Iterator

from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.grading.summary import Summary, decided, fell_behind, judged_policies
from prefixwatch.loadgen.grading.wording import effect, percent

MOST = 3
LOW_REUSE = 0.8
"""Of the hits that one cache for the whole fleet would give. Below it routing is the first thing to look at."""
_LATENCIES = ("ttft", "tpot", "itl", "e2e")


def what_to_do(summary: Summary) -> list[str]:
    """By what the run shows, and nothing that it doesn't."""
    if not summary.validity.valid:
        more = len(summary.validity.reasons) - 1
        others = f" The other {'reason is' if more == 1 else f'{more} reasons are'} under Validity." if more else ""
        return [f"Decide nothing by this run. {_remedy(summary.validity.reasons[0])}{others}"]
    found: list[str] = []
    for name, own in judged_policies(summary).items():
        found += _of_policy(summary, name, own)
    return list(dict.fromkeys(found))[:MOST]


def _remedy(reason: str) -> str:
    """The reason's own, which is its last clause."""
    remedy = reason.rpartition(": ")[2].strip()
    return f"{remedy[:1].upper()}{remedy[1:]}."


def _of_policy(summary: Summary, name: str, own: PolicyGrade) -> Iterator[str]:
    if own.isolation_violations:
        yield (
            "Give every tenant a cache salt of its own (docs/multi-tenant.md), and find out who sent the prompts that "
            "were reused."
        )
    missed = [o for o in own.objectives if decided(o) == "fail"]
    if (missed or fell_behind(own)) and (share := _reuse_share(own)) is not None and share < LOW_REUSE:
        yield (
            f"{name} reaches {percent(share)} of the hits that one cache would give: compare policies that look at "
            "caches, or give engines more KV cache (`prefixwatch simulate`, `prefixwatch plan`)."
        )
    if fell_behind(own) or any(o.name.startswith(_LATENCIES) or o.name == "goodput" for o in missed):
        yield "Lower the rate or add workers; `bench --search-rate` finds the highest rate that meets the objectives."
    elif missed:
        yield f"Look at the requests that failed {missed[0].name}: requests.parquet has outcome and error of each."
    if not missed and any(decided(o) == "inconclusive" for o in own.objectives):
        yield "Run longer, or with more --repeats: an interval still contains its objective."
    if not missed and not fell_behind(own):
        yield from _choice(summary, name, own)


def _choice(summary: Summary, name: str, own: PolicyGrade) -> Iterator[str]:
    """Between this policy and the baseline, by the figures that differ significantly."""
    own_changes = [each for each in summary.comparison if each.a == name and each.significant]
    worse = [each for each in own_changes if effect(each) == "worse"]
    if summary.baseline is None:
        if own.objectives and all(decided(o) == "pass" for o in own.objectives):
            yield "Keep this run as the baseline: `prefixwatch compare THIS NEXT` says whether the next one is worse."
    elif not own_changes:
        yield f"Nothing speaks for {name} over {summary.baseline}, or against it, in this traffic."
    elif worse:
        yield f"Weigh what {name} gains against what it loses, under What changed."
    else:
        yield f"Prefer {name} to {summary.baseline} for this traffic: it is better or equal in all that was compared."


def _reuse_share(own: PolicyGrade) -> float | None:
    hits, expected = own.value("hit_tokens"), own.value("expected_hit_tokens")
    return None if hits is None or not expected else hits / expected
