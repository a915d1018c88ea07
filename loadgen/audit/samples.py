"""What an isolation audit measures: one probe per trial, and ranks in batches that are sent at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

GPU_TIER = "gpu"


class Arm(StrEnum):
    """Who sent the probe's prefix before the attacker's probe. All arms send the same traffic otherwise."""

    COLD = "cold"
    """Nobody: the victim sent another prompt."""
    OWN = "own"
    """The attacker itself: must hit, or the cache is off."""
    CROSS = "cross"
    """The victim: must not hit."""
    FORGED = "forged"
    """The victim, and the attacker's probe carries the victim's salt in its body: must not hit either."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One answered probe."""

    arm: Arm
    emptied: bool
    """Whether the engines' own caches were emptied before it, so that only outer tiers can serve it."""
    seconds: float
    """To the first token."""
    cached_tokens: int | None = None
    """As the answer reports them; None where it doesn't."""
    prompt_tokens: int | None = None
    tiers: Mapping[str, int] | None = None
    """Hit tokens by tier, by the engines' counters; None where these don't add up to `cached_tokens`."""


@dataclass(frozen=True, slots=True)
class Order:
    """Where the candidate's first token came in a batch of which all other prompts were cold; 1 is first."""

    arm: Arm
    rank: int
    batch: int


@dataclass(slots=True)
class Samples:
    """All that one audit measured."""

    probes: list[Probe] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    prompt_tokens: int = 0
    """Of the answers that report them, and else as planned."""
    requests: int = 0
    seconds: float = 0.0
    failures: int = 0
    stopped: str = ""
    """Why the audit ended before its plan did; empty when it didn't."""

    def of(self, arm: Arm, *, emptied: bool = False) -> list[Probe]:
        return [probe for probe in self.probes if probe.arm is arm and probe.emptied is emptied]

    def ranks(self, arm: Arm) -> list[int]:
        return [order.rank for order in self.orders if order.arm is arm]

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, fields: Mapping[str, Any]) -> Samples:
        """Raises KeyError, TypeError or ValueError for anything that `document` didn't write."""
        rest = {name: value for name, value in fields.items() if name not in ("probes", "orders")}
        return cls(_probes(fields["probes"]), _orders(fields["orders"]), **rest)


def _probes(rows: Sequence[Mapping[str, Any]]) -> list[Probe]:
    return [Probe(**{**row, "arm": Arm(row["arm"])}) for row in rows]


def _orders(rows: Sequence[Mapping[str, Any]]) -> list[Order]:
    return [Order(**{**row, "arm": Arm(row["arm"])}) for row in rows]
