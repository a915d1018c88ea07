"""Where reuse is and for whom: by block class, by named prefix, by session, and as one weighted figure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prefixwatch.kvcache.locality import DIMENSIONS, Locality, Use, norm
from prefixwatch.loadgen.grading.figures import Measure
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import PartReuse, ReuseGrade, SessionReuse, WeightedReuse
from prefixwatch.loadgen.grading.resampling import Sample
from prefixwatch.loadgen.plan.request import BLOCK_CLASSES
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.scenario.reuse_section import ReuseObjective
from prefixwatch.slo.wilson import wilson

MOST_PREFIXES = 20
GOOD_SESSION = 0.8
COPIES_WINDOW_SECONDS = 30.0
_NO_GROUP = "-"
_PREFIX_CLASS = BLOCK_CLASSES.index("system")
_P99 = Measure("ttft", "TTFT", "ms", lambda m: m.columns.wait * 1e3, (0.99,))


def grade_reuse(measured: Measured, objective: ReuseObjective | None = None) -> ReuseGrade | None:
    """None where no engine reports reuse."""
    columns = measured.columns.where(~np.isnan(measured.columns.cached))
    if not len(columns):
        return None
    return ReuseGrade(
        block_classes=_largest(_classes(columns)),
        prefixes=_largest(_prefixes(columns))[:MOST_PREFIXES],
        sessions=_sessions(columns),
        copies_mean=_copies(columns),
        locality=_locality(columns),
        weighted=_weighted(measured, objective) if objective is not None else None,
    )


def _largest(parts: Iterator[PartReuse]) -> list[PartReuse]:
    return sorted((part for part in parts if part.prompt_tokens), key=lambda part: (-part.prompt_tokens, part.name))


def _classes(columns: Columns) -> Iterator[PartReuse]:
    for k in range(columns.part_tokens.shape[1]):
        tokens, hits = columns.part_tokens[:, k], columns.part_hit_tokens[:, k]
        yield PartReuse(
            name=BLOCK_CLASSES[k],
            requests=int((tokens > 0).sum()),
            prompt_tokens=int(tokens.sum()),
            hit_tokens=int(hits.sum()),
        )


def _prefixes(columns: Columns) -> Iterator[PartReuse]:
    """Each group's system tokens; sessions with an opening of their own have no named one."""
    if not columns.part_tokens.shape[1]:
        return
    names, places = np.unique(columns.group.astype(str), return_inverse=True)
    tokens, hits = (each[:, _PREFIX_CLASS] for each in (columns.part_tokens, columns.part_hit_tokens))
    for k, name in enumerate(names.tolist()):
        if name != _NO_GROUP:
            own = places == k
            yield PartReuse(
                name=name,
                requests=int(own.sum()),
                prompt_tokens=int(tokens[own].sum()),
                hit_tokens=int(hits[own].sum()),
            )


def _sessions(columns: Columns) -> SessionReuse | None:
    later = columns.where(columns.turn > 0)
    if not len(later):
        return None
    keys = np.array([f"{k} {name}" for k, name in zip(later.repeat.tolist(), later.session, strict=True)])
    names, places = np.unique(keys, return_inverse=True)
    hits, prompts = (np.bincount(places, values, len(names)) for values in (later.cached, later.prompt))
    ratios = np.minimum(hits / np.maximum(prompts, 1), 1.0)
    below = int((ratios < GOOD_SESSION).sum())
    return SessionReuse(
        sessions=len(names),
        by_tenth=np.bincount(np.minimum((ratios * 10 + 1e-9).astype(np.int64), 9), minlength=10).tolist(),
        below_80_share=below / len(names),
        below_80_ci95=wilson(below, len(names)),
    )


def _copies(columns: Columns) -> float | None:
    """A worker that serves a prefix holds it from then on, so those that serve it are its copies in use."""
    named = (columns.group != _NO_GROUP) & (columns.worker != "")
    if not named.any():
        return None
    window = np.floor(columns.scheduled[named] / COPIES_WINDOW_SECONDS).astype(np.int64)
    group, worker = (
        np.unique(each[named].astype(str), return_inverse=True)[1] for each in (columns.group, columns.worker)
    )
    cells = np.column_stack([columns.repeat[named], window, group])
    requests = np.unique(cells, axis=0, return_counts=True)[1]
    pairs = np.unique(np.column_stack([cells, worker]), axis=0)
    workers = np.unique(pairs[:, :3], axis=0, return_counts=True)[1]
    return float(np.average(workers, weights=requests))


def _locality(columns: Columns) -> dict[str, float]:
    """By dimension; the mean of the repeats that know it."""
    found = [_locality_of(columns.where(columns.repeat == repeat)) for repeat in np.unique(columns.repeat)]
    means = {
        name: float(np.mean([ratios[name] for ratios in found if name in ratios]))
        for name in DIMENSIONS
        if any(name in ratios for ratios in found)
    }
    return means | norm(means)


def _locality_of(columns: Columns) -> dict[str, float]:
    locality = Locality()
    reusable = columns.reusable()
    for k in np.argsort(columns.scheduled, kind="stable").tolist():
        group, hit_tokens = str(columns.group[k]), int(columns.cached[k])
        planned = not np.isnan(reusable[k])
        locality.add(
            Use(
                at_s=float(columns.scheduled[k]),
                hit_tokens=hit_tokens,
                session=str(columns.session[k]),
                user=str(columns.user[k]),
                prefix="" if group == _NO_GROUP else group,
                held_tokens=int(reusable[k]) if planned else None,
                near_tokens=hit_tokens if planned else None,
            )
        )
    return locality.ratios()


def _weighted(measured: Measured, objective: ReuseObjective) -> WeightedReuse | None:
    columns = measured.columns
    if not columns.part_tokens.shape[1]:
        return None
    weights = np.array([objective.weights.get(name, 0.0) for name in BLOCK_CLASSES])
    unknown = np.isnan(columns.cached)
    hits = np.where(unknown, np.nan, columns.part_hit_tokens @ weights)
    sample = Sample(hits, weights=columns.part_tokens @ weights)
    (ratio,) = Measure("weighted_hit_ratio", "", "ratio", lambda m: sample, better="higher").figures(measured)
    (tail,) = _P99.figures(measured)
    if ratio.value is None or tail.value is None:
        return None
    price = objective.tail_weight_per_second
    limits = None
    if ratio.ci95 is not None and tail.ci95 is not None:
        limits = (ratio.ci95[0] - price * tail.ci95[1] / 1e3, ratio.ci95[1] - price * tail.ci95[0] / 1e3)
    return WeightedReuse(
        value=ratio.value - price * tail.value / 1e3,
        ci95=limits,
        weighted_hit_ratio=ratio.value,
        ttft_p99_seconds=tail.value / 1e3,
        tail_weight_per_second=price,
        at_least=objective.at_least,
    )
