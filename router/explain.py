"""A decision's scores in a size that headers, spans and logs can carry."""

from __future__ import annotations

import json
from heapq import nsmallest

from router.policy import Decision

SCORES_SHOWN = 8
"""Workers: the chosen one and those whose scores came closest to its own."""
_DIGITS = 6


def shown_scores(decision: Decision) -> dict[str, float]:
    """Six digits of the scores of at most `SCORES_SHOWN` workers, the chosen one first.

    Policies differ in whether the highest or the lowest score wins, so the nearest ones are taken: the contenders.
    Empty where the policy scores nobody, as on a branch that goes by position.
    """
    scores, chosen = decision.scores, decision.scores.get(decision.worker)
    if chosen is None:
        names = list(scores)[:SCORES_SHOWN]
    else:
        names = nsmallest(
            SCORES_SHOWN, scores, key=lambda name: (name != decision.worker, abs(scores[name] - chosen))
        )  # fmt: skip
    return {name: float(f"{scores[name] + 0.0:.{_DIGITS}g}") for name in names}


def scores_json(decision: Decision) -> str:
    """The shown scores as one line of ASCII JSON; empty where there are none."""
    shown = shown_scores(decision)
    return json.dumps(shown, separators=(",", ":")) if shown else ""
