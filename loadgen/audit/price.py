"""What isolation costs, by what the audit measured: the reuse between tenants that it rules out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prefixwatch.loadgen.audit.samples import Arm, Samples


@dataclass(frozen=True, slots=True)
class Prices:
    """What an operator knows of the fleet; None for what isn't known."""

    gpus_per_worker: int | None = None
    gpu_hour_price: float | None = None
    lost_hit_tokens: float | None = None
    """Of real traffic: tokens that a worker held under another tenant's salt (an exporter counts them)."""


@dataclass(frozen=True, slots=True)
class Price:
    """Of one prompt that two tenants have in common, and of the traffic that an exporter saw."""

    hit_tokens: float | None
    """Mean cached tokens of the attacker's own repeats: what a shared cache would have given a tenant."""
    seconds: float | None
    """Median first token of a cold probe less that of an own repeat: the worker time that a hit saves."""
    gpu_seconds: float | None
    money: float | None
    lost_hit_tokens: float | None
    lost_gpu_seconds: float | None
    lost_money: float | None
    unknown: tuple[str, ...]
    """Why figures are missing."""

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "unknown": list(self.unknown)}


def price(samples: Samples, known: Prices) -> Price:
    """What a request pays that may not reuse another tenant's cache of the same prompt."""
    own, cold = samples.of(Arm.OWN), samples.of(Arm.COLD)
    cached = [probe.cached_tokens for probe in own if probe.cached_tokens is not None]
    tokens = float(np.mean(cached)) if cached else None
    gap = None
    if own and cold:
        gap = float(np.median([p.seconds for p in cold]) - np.median([p.seconds for p in own]))
    seconds = gap if gap is not None and gap > 0 else None
    gpu_seconds = _product(seconds, known.gpus_per_worker)
    per_token = gpu_seconds / tokens if gpu_seconds is not None and tokens else None
    lost_gpu_seconds = _product(known.lost_hit_tokens, per_token)
    hourly = None if known.gpu_hour_price is None else known.gpu_hour_price / 3600
    missing = {
        "answers report no cached tokens": tokens is None,
        "own repeats aren't faster than cold probes": seconds is None,
        "GPUs of a worker: give --gpus-per-worker": known.gpus_per_worker is None,
        "price of a GPU hour: give --gpu-hour-price": known.gpu_hour_price is None,
        "reuse lost in real traffic: give --exporter": known.lost_hit_tokens is None,
    }
    return Price(
        tokens,
        seconds,
        gpu_seconds,
        _product(gpu_seconds, hourly),
        known.lost_hit_tokens,
        lost_gpu_seconds,
        _product(lost_gpu_seconds, hourly),
        tuple(reason for reason, is_missing in missing.items() if is_missing),
    )


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other
