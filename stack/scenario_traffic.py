"""A scenario's plan as the simulator's requests: the very prompts that a bench would send, tokenised and hashed."""

from __future__ import annotations

from engines.tiny_model import MODEL_NAME, default_model_dir
from kvcache.blocks import DEFAULT_BLOCK_SIZE, block_hashes, namespace_root
from kvcache.tokenizer import Tokenizer
from loadgen.plan import PlannedRequest
from loadgen.planner import make_plan
from loadgen.prompts import PromptWriter
from loadgen.scenario import Scenario
from stack.trace import SimulatedRequest


class ScenarioTraffic:
    """Requests of a scenario, by seed."""

    def __init__(self, scenario: Scenario, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self._scenario = scenario
        self._block_size = block_size
        self._tokenizer = Tokenizer(default_model_dir())
        self._writer = PromptWriter(self._tokenizer)

    def requests(self, seed: int) -> list[SimulatedRequest]:
        """The measured requests of one run, in order of arrival."""
        plan = make_plan(self._scenario, self._writer, seed=seed, nonce=f"simulated-{seed}", model=MODEL_NAME)
        return [self._simulated(request) for request in plan.requests if request.phase == "measured"]

    def _simulated(self, request: PlannedRequest) -> SimulatedRequest:
        tokens = self._tokenizer.encode_chat(request.messages)
        root = namespace_root(request.salt)
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
        )
