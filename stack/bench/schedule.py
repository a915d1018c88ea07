"""In which order the runs of a bench are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a policy under one repeat of the plan. `position` counts runs from 1."""

    position: int
    policy: str
    repeat: int


def interleaved(policies: Sequence[str], repeats: int) -> list[Run]:
    """A B, B A, A B, …: every repeat runs all policies, in turns forwards and backwards.

    A drift of the machine (heat, neighbours) then weighs on all policies alike.
    """
    runs: list[Run] = []
    for repeat in range(repeats):
        order = policies if repeat % 2 == 0 else list(reversed(policies))
        for policy in order:
            runs.append(Run(len(runs) + 1, policy, repeat))
    return runs


def session_suffix(run: Run, *, own_engines: bool, live: bool) -> str | None:
    """What ends the session ids that a run sends; None: the run's nonce, for a target may know earlier runs.

    Fresh routers know no other run: they get the ids as planned, and place equal ids alike. One exporter that watches
    all runs (`live`) would take equal ids for one session.
    """
    if not own_engines:
        return None
    return str(run.position) if live else ""
