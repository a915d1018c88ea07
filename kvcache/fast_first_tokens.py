"""Do prompts that are cold for their tenant get their first token too soon? A sequential test within an alarm budget.

An engine may share a cache and report nothing. Then only time shows it: a prompt that this tenant never sent, but
another one did, has its first token as soon as a hit. Each such prompt is ranked among prompts that *nobody* had sent,
taken shortly before it and from 80 to 100 % of its length. If the cache isn't shared, none of them takes longer to
prefill, so the rank p is uniform or higher, and since each reference serves one test only the ranks are independent,
however the load changes meanwhile. A bet on small p,

    f(p) = ∫₀¹ ε p^(ε-1) dε = (1 - p + p ln p) / (p ln² p),

has mean 1 under uniform p, so wealth that starts at 1 and is multiplied by f(p) reaches 1/α with probability α at most,
at whatever time one looks (Ville 1939; power martingales: Vovk, Nouretdinov, Gammerman, ICML 2003). The i-th alarm may
spend 2^-i of the budget, so all false alarms together have an expectation below the budget.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque

MIN_REFERENCES = 9
"""Cold prompts that a test needs, of the same stratum."""
MAX_REFERENCES = 31
"""Older ones give way: they say nothing about the load now."""
_SHORTEST_REFERENCE = 0.8
_STRATA = 10_000


class FastFirstTokens:
    """Wealth of the bet that first tokens come too soon.

    `budget`: the expected number of false alarms, however long it runs.
    """

    def __init__(self, budget: float = 0.01, seed: int = 0) -> None:
        if not 0 < budget < 1:
            raise ValueError(f"a false-alarm budget must be above 0 and below 1, got {budget}")
        self.budget = budget
        self.alarms = 0
        self.wealth = 1.0
        self.tests = 0
        self.untested = 0
        """Prompts that had too few references."""
        self._references: OrderedDict[str, deque[tuple[int, float]]] = OrderedDict()
        self._rng = random.Random(seed)

    @property
    def needed_wealth(self) -> float:
        """From this wealth on there is an alarm."""
        return float(2 ** (self.alarms + 1)) / self.budget

    def reference(self, stratum: str, prompt_tokens: int, seconds: float) -> None:
        """First token of a prompt that nobody had sent before. `stratum`: its worker, where they differ in speed."""
        references = self._references.pop(stratum, None)
        self._references[stratum] = references = deque(maxlen=MAX_REFERENCES) if references is None else references
        if len(self._references) > _STRATA:
            self._references.popitem(last=False)
        references.append((prompt_tokens, seconds))

    def rank(self, stratum: str, prompt_tokens: int, seconds: float) -> float | None:
        """Where the first token of a prompt that is cold for its tenant, but that another tenant sent, is among its
        references: near 0 for the fastest. None if there are too few of them."""
        kept = self._references.get(stratum, ())
        fits = range(math.ceil(_SHORTEST_REFERENCE * prompt_tokens), prompt_tokens + 1)
        references = [reference for tokens, reference in kept if tokens in fits]
        if len(references) < MIN_REFERENCES:
            self.untested += 1
            return None
        sooner = sum(reference < seconds for reference in references)
        equal = sum(reference == seconds for reference in references)
        rest = [each for each in kept if each[0] not in fits]
        self._references[stratum] = deque(rest, maxlen=MAX_REFERENCES)
        return (sooner + self._rng.random() * (equal + 1)) / (len(references) + 1)

    def stake(self, rank: float) -> bool:
        """Bet on this rank, drawn by `rank` for a request that is certainly cold for its tenant. True for an alarm."""
        self.tests += 1
        self.wealth *= bet(rank)
        if self.wealth < self.needed_wealth:
            return False
        self.alarms += 1
        self.wealth = 1.0
        return True


def bet(rank: float) -> float:
    """Payoff for a rank in (0, 1); its mean over uniform ranks is 1."""
    p = min(max(rank, 1e-12), 1.0)
    log = math.log(p)
    if log > -1e-4:  # the limit at 1 is 1/2
        return 0.5 - log / 3
    return (1 - p + p * log) / (p * log * log)
