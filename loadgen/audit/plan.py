"""What an isolation audit will send, what that costs, and what it could find: all of it before the first request."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.audit.samples import Arm
from prefixwatch.loadgen.audit.statistics import DOUBT_LEVEL, LEAK_LEVEL, least_samples, smallest_gap_sd, warm_share
from prefixwatch.loadgen.grading.wording import percent

TESTS = ("tokens", "timing", "order")
_WARM_SHARE = 0.95
"""Share of the probes that must reach a replica that the victim reached."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """How an audit is made. Raises InputError for figures that can't be used."""

    samples: int = 100
    """Probes per arm."""
    prompt_tokens: int = 2048
    victim_requests: int = 0
    """How often a prefix is sent before it is probed; 0: enough for `replicas`."""
    replicas: int = 1
    shared_part: float = 1.0
    """Part of a probe's prompt that was sent before. 1 finds caches that are keyed by whole prompts, too; the published
    audit has 1 and 0.95."""
    pause_seconds: float = 1.0
    """Between the last of them and the probe."""
    tests: Sequence[str] = ("tokens", "timing")
    forged: bool = False
    emptied: bool = False
    """Also probe with the engines' own caches emptied."""
    order_rounds: int = 10
    order_batch: int = 16
    rate_per_second: float = 4.0
    max_requests: int = 3000
    max_tokens: int = 5_000_000
    max_seconds: float = 1800.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.tests if name not in TESTS]
        if unknown or not self.tests:
            raise InputError(f"--tests {','.join(self.tests)}: choose from {', '.join(TESTS)}")
        least = {"samples": 2, "prompt_tokens": 32, "replicas": 1, "order_rounds": 1, "order_batch": 2}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {lowest}")
        if not (math.isfinite(self.rate_per_second) and self.rate_per_second > 0):
            raise InputError(f"--rate {self.rate_per_second:g}: must be above 0")
        if not (math.isfinite(self.pause_seconds) and self.pause_seconds >= 0):
            raise InputError(f"--pause {self.pause_seconds:g}: must be 0 or more seconds")
        if not 0.1 <= self.shared_part <= 1:
            raise InputError(f"--shared-part {self.shared_part:g}: must be from 0.1 to 1")
        if self.victim_requests < 0:
            raise InputError(f"--victim-requests {self.victim_requests}: must be 1 or more")

    @property
    def victims(self) -> int:
        """Requests before each probe."""
        if self.victim_requests:
            return self.victim_requests
        return 1 if self.replicas == 1 else math.ceil(math.log(1 - _WARM_SHARE) / math.log(1 - 1 / self.replicas))

    @property
    def arms(self) -> list[Arm]:
        return [Arm.COLD, Arm.OWN, Arm.CROSS, *([Arm.FORGED] if self.forged else [])]

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "tests": list(self.tests), "victim_requests": self.victims}


@dataclass(frozen=True, slots=True)
class Trial:
    """One probe and what is sent before it."""

    arm: Arm
    emptied: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plan takes at most."""

    requests: int
    tokens: int
    seconds: float
    """At least: by rate and pauses, without the answers' own time."""


def trials(settings: AuditSettings, rng: random.Random) -> list[Trial]:
    """Every arm equally often, in random order, so that drift of the target's speed spoils no arm."""
    if not {"tokens", "timing"} & set(settings.tests):
        return []
    ways = (False, True) if settings.emptied else (False,)
    planned = [Trial(arm, emptied) for arm in settings.arms for emptied in ways for _ in range(settings.samples)]
    rng.shuffle(planned)
    return planned


def order_trials(settings: AuditSettings, rng: random.Random) -> list[Arm]:
    """Own and cross batches in random order."""
    if "order" not in settings.tests:
        return []
    planned = [arm for arm in (Arm.OWN, Arm.CROSS) for _ in range(settings.order_rounds)]
    rng.shuffle(planned)
    return planned


def cost(settings: AuditSettings) -> Cost:
    """Of the whole plan, the calibrating request included."""
    singles, batches = len(trials(settings, random.Random(0))), len(order_trials(settings, random.Random(0)))
    requests = 1 + singles * (settings.victims + 1) + batches * (settings.victims + settings.order_batch)
    seconds = requests / settings.rate_per_second + (singles + batches) * settings.pause_seconds
    return Cost(requests, requests * settings.prompt_tokens, seconds)


def check_budget(settings: AuditSettings) -> Cost:
    """The plan's cost. Raises InputError where it is above a limit, before anything is sent."""
    planned = cost(settings)
    for what, needed, limit, option in (
        ("requests", planned.requests, settings.max_requests, "--max-requests"),
        ("prompt tokens", planned.tokens, settings.max_tokens, "--max-tokens"),
        ("seconds", planned.seconds, settings.max_seconds, "--max-seconds"),
    ):
        if needed > limit:
            raise InputError(
                f"{option} {limit:,.0f}: the plan takes {needed:,.0f} {what}: raise {option}, or lower --samples "
                f"({settings.samples}), --victim-requests ({settings.victims}) or --prompt-tokens "
                f"({settings.prompt_tokens:,})"
            )
    return planned


def power_analysis(settings: AuditSettings) -> list[str]:
    """What this plan could find, in sentences: printed before the run."""
    share = warm_share(settings.replicas, settings.victims)
    replicas = "1 replica" if settings.replicas == 1 else f"{settings.replicas} replicas"
    lines = [
        f"A prompt is sent {settings.victims}× before its probe: with {replicas}, {percent(share)} of the probes "
        "reach one that has it."
    ]
    if "timing" in settings.tests:
        for level in (LEAK_LEVEL, DOUBT_LEVEL):
            gap = smallest_gap_sd(settings.samples, share, level)
            lines.append(
                f"Timing: {settings.samples} + {settings.samples} samples find a gap of {gap:g} sd with 99 % power at "
                f"p < {level:g}."
                if gap is not None
                else f"Timing: {settings.samples} + {settings.samples} samples find no gap at p < {level:g}: it takes "
                f"{least_samples(level)} or more, and probes that mostly reach a warm replica."
            )
    if "tokens" in settings.tests:
        least = 1 - 0.01 ** (1 / settings.samples)
        lines.append(
            f"Tokens: {settings.samples} probes find a leak that shows in {percent(least)} of them with 99 % power."
        )
    if "order" in settings.tests:
        lines.append(
            f"Order: {settings.order_rounds} batches of {settings.order_batch}; p is {_first_always(settings):.1g} if "
            "the candidate always comes first."
        )
    return lines


def prompt(letters: int, rng: random.Random, prefix: str = "") -> str:
    """Random letters with blanks between them, which nobody sent before and which say nothing; begins with `prefix`."""
    begun = prefix.split()
    return " ".join([*begun, *rng.choices(string.ascii_lowercase, k=letters - len(begun))])


def shared_prefix(text: str, part: float) -> str:
    """The part of a sent prompt that its probe repeats."""
    words = text.split()
    return " ".join(words[: round(len(words) * part)])


def _first_always(settings: AuditSettings) -> float:
    return float(settings.order_batch) ** -settings.order_rounds
