"""The range of every numeric option of a policy, by its name: one table for all of them.

An option that several policies have means the same in each. A plug-in's option that isn't in the table may be any
finite number.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The least and the greatest value of an option."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"from {self.least:,.16g} to {self.most:,.16g}"


_SHARE = Range(0, 1)
_PART = Range(0.001, 0.999)
"""A share that leaves something of both sides."""
_WEIGHT = Range(0, 1_000_000)
_COUNT = Range(1, 1_000_000_000_000)
_THRESHOLD = Range(0, 1_000_000_000_000_000)
"""One out of reach turns its rule off."""
_RATE = Range(0.001, 1_000_000_000_000_000)
"""Tokens or bytes a second: a worker that does nothing has no time to compare."""
_SECONDS = Range(0.001, 1_000_000_000)
"""Windows and time-outs: of none there is no mean."""
_PAUSE = Range(0, 1_000_000_000)

_NAMES: Mapping[Range, str] = {
    _SHARE: "cache_threshold decay_per_token disk_credit home_ratio host_credit kv_overload_threshold "
    "kv_pressure_start_ratio kv_spread_threshold reuse_ratio shared_credit",
    _PART: "margin_ratio share",
    _WEIGHT: "active_request_weight beta gamma hotspot_fair_shares hotspot_weight kv_pressure_weight kv_weight "
    "overlap_credit overlap_decay prefill_load_scale prefix_weight queue_weight selection_temperature temperature",
    _COUNT: "batch_size_max block_bytes chunk_characters chunk_tokens copies_blocks copies_cap copies_target "
    "kv_capacity_tokens lru_hashes max_blocks max_tree_size min_requests opening_tokens pending_max prefix_token_count",
    _THRESHOLD: "balance_abs_threshold balance_rel_threshold balancing_threshold deviation_factor "
    "expected_output_tokens home_bound hotspot_prior_requests imbalance_factor imbalance_spread kv_aware_threshold "
    "load_factor long_output_tokens long_prompt_tokens mean_prefill_tokens overload patience_ratio "
    "prefix_min_match_length prior_requests queue_patience short_output_tokens tokens_per_request",
    _RATE: "decode_tokens_per_second default_tokens_per_second intra_node_bytes_per_second prefill_tokens_per_second "
    "transfer_tokens_per_second",
    _SECONDS: "cool_down_seconds eviction_interval_seconds expire_after_seconds hotspot_window_seconds most_seconds "
    "statistics_window_seconds ttft_seconds window_seconds",
    _PAUSE: "batch_wait_ms decode_ms_per_request ledger_cache_ms slo_ms transfer_base_ms",
}
RANGES: Mapping[str, Range] = {name: allowed for allowed, names in _NAMES.items() for name in names.split()}


def check_options(policy: str, options: Any, given: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of the `given` options that isn't finite or is out of its range.

    `options` is the policy's dataclass of options, with the types that it has made of what was given.
    """
    for key in given:
        for name, where, value in _numbers(key, key, getattr(options, key)):
            if not math.isfinite(value):
                raise ValueError(f"policy {policy}: option {where} is {value}: give a finite number")
            allowed = RANGES.get(name)
            if allowed is not None and not allowed.least <= value <= allowed.most:
                raise ValueError(f"policy {policy}: option {where} is {value:g}: give a number {allowed}")


def _numbers(name: str, where: str, value: Any) -> Iterator[tuple[str, str, float]]:
    """Each number in an option's value, with the name that it has in the table and where it is."""
    if isinstance(value, Mapping):
        for key, kept in value.items():
            yield from _numbers(name, f"{where}.{key}", kept)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(field.name, f"{where}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for position, kept in enumerate(value):
            yield from _numbers(name, f"{where}[{position}]", kept)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, where, _as_float(value)


def _as_float(value: float) -> float:
    """An integer beyond what a float holds is more than any range allows."""
    try:
        return float(value)
    except OverflowError:
        return sys.float_info.max if value > 0 else -sys.float_info.max
