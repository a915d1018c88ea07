"""A scenario's plan as the simulator's requests: the token ids of the prompts that a bench would send, hashed."""

from __future__ import annotations

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE, Tokens, block_hashes, namespace_root
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.planner import planned_prompts
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.plan.request import PlannedRequest
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.simulator.traffic.trace import SimulatedRequest


class ScenarioTraffic:
    """Requests of a scenario, by seed."""

    def __init__(self, scenario: Scenario, block_size: int | None = None) -> None:
        """`block_size`: tokens of a block; None: as the scenario's engines have it."""
        self._scenario = scenario
        self._block_size = block_size or scenario.engine.block_size or DEFAULT_BLOCK_SIZE
        self._writer = PromptWriter(Tokenizer(default_model_dir()))

    def requests(self, seed: int) -> list[SimulatedRequest]:
        """The measured requests of one run, in order of arrival (of a closed loop: of its plan)."""
        planned = planned_prompts(self._scenario, self._writer, seed=seed, nonce=f"simulated-{seed}", texts=False)
        return [self._simulated(request, tokens) for request, tokens in planned if request.phase == "measured"]

    def _simulated(self, request: PlannedRequest, tokens: Tokens) -> SimulatedRequest:
        root = namespace_root(request.salt, request.model or None)
        return SimulatedRequest(
            id=f"r{request.index}",
            arrival_s=request.scheduled_s,
            prompt_tokens=len(tokens),
            output_tokens=request.max_tokens,
            blocks=block_hashes(tokens, self._block_size, root=root),
            tokens=lambda: tokens,
            tenant=request.tenant,
            session=request.session,
            group=request.group,
            turn=request.turn,
            request_class=request.request_class,
            think_seconds=request.think_seconds,
            shared_tokens=request.shared_tokens if self._scenario.isolation else None,
            user=request.user,
            parts=request.parts,
        )
