"""Oracle: the worker that gives the first token soonest, knowing what no router can know. For the simulator only.

    TTFT_i = backlog_i + prefill(L, H_i)          [s, lowest wins]

    backlog_i   true seconds until engine i has done what is ahead of a newcomer
    H_i         what its cache will hold of the prompt when its turn comes: its own pool and the prompts before it
    prefill     the engine's own step time for the rest of the prompt

Ties: more blocks held, then fewer requests in flight, then random. Greedy: each request gets the best there is for it
now, so it bounds what better information brings to a policy of this kind, and not every plan with foresight.

No defaults. Source: ours.
"""

from __future__ import annotations

from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest, Worker


class Oracle(Policy):
    """The soonest first token, by the engines' true state (simulator only)."""

    name = "oracle"
    source = "prefixwatch"
    needs = Needs(tokens=True, cache_view=True, truth=True)
    reasons = ("soonest_first_token",)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        if fleet.prefill_seconds is None:
            raise ValueError("policy oracle needs the simulator: no live router knows an engine's true state")
        depths = fleet.lookup(request)
        scores: dict[str, float] = {}
        for worker in fleet.workers:
            if worker.backlog_seconds is None:
                raise ValueError(f"policy oracle needs the true backlog of {worker.name}, which only the simulator has")
            cached = min(depths.get(worker.name, 0) * request.block_size, request.prompt_tokens)
            scores[worker.name] = worker.backlog_seconds + fleet.prefill_seconds(request.prompt_tokens, cached)

        def rank(worker: Worker) -> tuple[float, int, int]:
            return scores[worker.name], -depths.get(worker.name, 0), worker.in_flight

        best = min(map(rank, fleet.workers))
        chosen = self.rng.choice([worker.name for worker in fleet.workers if rank(worker) == best])
        backlogs = {worker.name: worker.backlog_seconds or 0.0 for worker in fleet.workers}
        return Decision(
            chosen,
            "soonest_first_token",
            depths.get(chosen, 0),
            scores,
            predicted_queue_seconds=backlogs[chosen],
            predicted_prefill_seconds=scores[chosen] - backlogs[chosen],
        )
