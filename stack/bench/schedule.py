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
