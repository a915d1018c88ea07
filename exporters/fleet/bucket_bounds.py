"""Targets whose histograms have different bucket bounds, and what that does to the sums over the fleet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from prefixwatch.exporters.scraping.target import Target

_ADDED_UP: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("request_hit_tokens", "request_hit_tokens", ("router",), ()),
    ("ttft_seconds", "ttft_by_cache", ("router",), ("cache",)),
    ("router_decision_seconds", "router_decision", ("router",), ("step",)),
    ("prefill_wait_seconds", "queue_seconds", ("engine",), ()),
    ("engine_ttft_seconds", "ttft_seconds", ("engine",), ("model",)),
    ("engine_inter_token_seconds", "inter_token_seconds", ("engine",), ("model",)),
    ("engine_tpot_seconds", "tpot_seconds", ("engine",), ("model",)),
    ("engine_prefill_seconds", "prefill_seconds", ("engine",), ("model",)),
    ("engine_request_prompt_tokens", "request_prompt_tokens", ("engine",), ("model",)),
    ("engine_request_computed_tokens", "request_computed_tokens", ("engine",), ("model",)),
    ("engine_request_generation_tokens", "request_generation_tokens", ("engine",), ("model",)),
    ("engine_e2e_seconds", "e2e_seconds", ("engine",), ("model",)),
    ("engine_queue_seconds", "queue_seconds", ("engine",), ("model",)),
    ("kv_transfer_seconds", "kv_transfer", ("engine", "router", "cache", "transfer"), ("source", "destination")),
)
"""Histograms that are added up over targets: family, signal, the targets' roles, and the labels that stay."""


def coarsened(targets: Sequence[Target]) -> dict[str, tuple[str, frozenset[str]]]:
    """Families whose targets have different bucket bounds: what happened to the buckets, and which targets they are.

    Counts can only be added at bounds that all have; the others are dropped (ray-project/ray#65892).
    """
    alike: dict[tuple[str, int], list[Target]] = defaultdict(list)
    for target in targets:
        if target.store:
            alike[target.store.system.role, id(target.store.book)].append(target)
    found = {}
    for family, signal, roles, labels in _ADDED_UP:
        bounds: dict[tuple[str, ...], set[tuple[float, ...]]] = defaultdict(set)
        names: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for (role, _), same in alike.items():
            if role in roles and same[0].store:
                for values, own in same[0].store.bounds_of(signal, *labels).items():
                    bounds[values] |= own
                    names[values].update(target.name for target in same)
        mixed = [values for values, different in bounds.items() if len(different) > 1]
        if mixed:
            kept = min(len(set.intersection(*map(set, bounds[values]))) for values in mixed)
            note = f"targets' bucket bounds differ: only the {kept} that all have are kept, +Inf included"
            found[family] = (note, frozenset().union(*(names[values] for values in mixed)))
    return found
