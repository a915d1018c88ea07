"""A decision's scores in a size that headers, spans and logs can carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice

import numpy as np
import numpy.typing as npt

from prefixwatch.router.policy import Decision, ScoreArray

SCORES_SHOWN = 8
"""Workers: the chosen one and those whose scores came closest to its own."""
_DIGITS = 6
_JSON = json.JSONEncoder(separators=(",", ":"))


def shown_scores(decision: Decision) -> dict[str, float]:
    """Six digits of the scores of at most `SCORES_SHOWN` workers, the chosen one first.

    Policies differ in whether the highest or the lowest score wins, so the nearest ones are taken: the contenders.
    Empty where the policy scores nobody, as on a branch that goes by position.
    """
    scores, worker = decision.scores, decision.worker
    if worker not in scores:
        shown = dict(islice(scores.items(), SCORES_SHOWN))
    else:
        names, values = list(scores), _values(scores)
        nearest = [(names[k], values[k]) for k in _nearest(values, scores[worker])]
        shown = {worker: scores[worker], **{name: value for name, value in nearest if name != worker}}
    return {name: float(f"{value + 0.0:.{_DIGITS}g}") for name, value in islice(shown.items(), SCORES_SHOWN)}


def scores_json(decision: Decision) -> str:
    """The shown scores as one line of ASCII JSON; empty where there are none."""
    shown = shown_scores(decision)
    return _JSON.encode(shown) if shown else ""


def _values(scores: Mapping[str, float]) -> npt.NDArray[np.float64]:
    if isinstance(scores, ScoreArray):
        return scores.array
    return np.fromiter(scores.values(), dtype=float, count=len(scores))


def _nearest(scores: npt.NDArray[np.float64], chosen: float) -> list[int]:
    """The positions of the `SCORES_SHOWN` + 1 scores closest to the chosen one; of equally close ones the first."""
    distances = np.abs(scores - chosen)
    wanted = SCORES_SHOWN + 1
    if len(distances) <= wanted:
        close = np.arange(len(distances))
    else:
        close = np.flatnonzero(~(distances > np.partition(distances, wanted - 1)[wanted - 1]))  # NaN comes last
    found: list[int] = close[np.argsort(distances[close], kind="stable")[:wanted]].tolist()
    return found
