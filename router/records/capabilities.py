"""What the router knows of its workers' hardware, for people and for metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from prefixwatch.router.policy import Worker


def describe_worker(worker: Worker) -> dict[str, Any]:
    """One worker, JSON-ready: its place, its rates as its answers have shown them, its engine's KV capacity."""
    prompts, answers = worker.rates.samples
    return {
        "name": worker.name,
        **worker.place._asdict(),
        **{name: getter(worker) for name, (_, getter) in _FIGURES.items()},
        "learnt_from": {"prompts": prompts, "answers": answers},
    }


def capability_families(workers: Sequence[Worker], namespace: str) -> Iterator[Metric]:
    """A gauge per figure; a worker whose figure isn't known has no sample."""
    for name, (text, getter) in _FIGURES.items():
        family = GaugeMetricFamily(f"{namespace}_worker_{name}", text, labels=["worker"])
        for worker in workers:
            value = getter(worker)
            if value is not None:
                family.add_metric([worker.name], value)
        yield family


def _capacity(worker: Worker) -> float | None:
    return None if worker.report is None else worker.report.kv_capacity_tokens


_FIGURES: Mapping[str, tuple[str, Callable[[Worker], float | None]]] = {
    "prefill_tokens_per_second": (
        "Prompt tokens that it computes in a second, learnt from its answers.",
        lambda worker: worker.rates.prefill_tokens_per_second,
    ),
    "decode_tokens_per_second": (
        "Tokens that it generates in a second for a request that is alone, learnt from its answers.",
        lambda worker: worker.rates.decode_tokens_per_second,
    ),
    "kv_capacity_tokens": ("KV that its engine reports to hold, for policies that read its load.", _capacity),
}
