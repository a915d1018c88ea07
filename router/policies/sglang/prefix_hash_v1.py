"""Prefix hash, first generation: as `prefix_hash`, with a purely relative overload test.

    overloaded  ⇔  T > 0  and  in_flight > (T + 1) / n × load_factor

At a few requests in flight a worker this mostly measures chance (smg#2150: about 18 % false trips at a mean of 10), so
affinity is given up without need; kept as its authors wrote it. The gateway refuses a prompt without token
ids here; this router sends it to the least loaded worker and says `no_tokens`.

Defaults: prefix_token_count 256, load_factor 1.25. Deterministic.

Source: SGLang gateway and smg up to 2026-08, `prefix_hash`.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixwatch.router.policies.sglang.prefix_hash import PrefixHash


@dataclass(frozen=True, slots=True)
class PrefixHashV1Options:
    prefix_token_count: int = 256
    load_factor: float = 1.25


class PrefixHashV1(PrefixHash):
    """The older prefix_hash: spills as soon as the home is a quarter above the average."""

    name = "prefix_hash_v1"
    source = "SGLang gateway prefix_hash (before smg#2150)"
    Options = PrefixHashV1Options

    def _limit(self, total_in_flight: int, workers: int) -> float:
        if not total_in_flight:
            return 0.0
        average = (total_in_flight + 1) / workers
        return average * float(self.options.load_factor)
