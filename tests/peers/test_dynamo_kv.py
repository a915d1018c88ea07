"""`dynamo_kv` and the block hashes against Dynamo's own code (ai-dynamo-runtime), on random fleets."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.engines.model.accounts import BlocksStored
from prefixwatch.engines.simulated.kv_event_publisher import EventEncoder, KvEventPublisher, Prompt
from prefixwatch.kvcache.blocks import as_tokens, block_hashes, content_hashes
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Fleet, RouteRequest, Worker
from tests.peers.peer_venv import PYTHON

pytestmark = pytest.mark.peers

BLOCK = 16
WORKERS = 16
FLEETS = 1000
STATES = ("prefilling", "decoding", "ended")


class DynamoOracle:
    """The other process, and the engines whose KV events it reads: published by ours, on one socket a worker."""

    def __init__(self, environment: dict[str, str], log_file: Path) -> None:
        command = [PYTHON, Path(__file__).with_name("dynamo_oracle.py")]
        home = {"PATH": os.defpath, "HOME": str(log_file.parent)}
        with log_file.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=home | environment
            )
        self._log_file = log_file
        self._publishers = [KvEventPublisher("tcp://127.0.0.1:*") for _ in range(WORKERS)]
        # Of a block that a second engine names differently, Dynamo's index doesn't find the children.
        self._encoder = EventEncoder(BLOCK, constant=0)
        self.ask(block_size=BLOCK, kv_events=[publisher.endpoint for publisher in self._publishers])

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"Dynamo's selection service is gone: {self._log_file.read_text()}"
        return json.loads(answer)

    def store(self, worker: int, request: RouteRequest, first: int, count: int) -> None:
        """This worker's engine says that it holds these further blocks of the prompt."""
        prompt = Prompt(request.tokens, request.blocks.tolist(), None)
        events = self._encoder.encode([BlocksStored("r", first, count)], {"r": prompt})
        self._publishers[worker].publish(events)

    def held(
        self, requests: list[RouteRequest], depths: list[list[int]], patience_seconds: float = 5.0
    ) -> list[list[int]]:
        """Blocks found by Dynamo by request and worker; it waits until they are the expected ones, or gives up."""
        held = [(request.tokens.tolist(), blocks) for request, blocks in zip(requests, depths, strict=True)]
        found: list[list[int]] = self.ask(held=held, patience_seconds=patience_seconds)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
        for publisher in self._publishers:
            publisher.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DynamoOracle]]:
    oracles: list[DynamoOracle] = []

    def begin(**environment: str) -> DynamoOracle:
        oracles.append(DynamoOracle(environment, tmp_path_factory.mktemp("dynamo") / "log"))
        _subscribed(oracles[-1])
        return oracles[-1]

    yield begin
    for oracle in oracles:
        oracle.close()


def _subscribed(oracle: DynamoOracle) -> None:
    """What is published before a subscription has got through is lost, so it is published until it is read."""
    marks = [a_request(list(range(1000 * worker + 1, 1000 * worker + 1 + BLOCK))) for worker in range(WORKERS)]
    expected = [[int(worker == other) for other in range(WORKERS)] for worker in range(WORKERS)]
    for _ in range(50):
        for worker, mark in enumerate(marks):
            oracle.store(worker, mark, 0, 1)
        if oracle.held(marks, expected, 0.1) == expected:
            return
    pytest.fail("Dynamo doesn't read the KV events")


def a_request(tokens: list[int]) -> RouteRequest:
    array = as_tokens(tokens)
    return RouteRequest("r", len(tokens), array, block_hashes(array, BLOCK), BLOCK)


@dataclass(frozen=True)
class Case:
    """A random fleet: prompts that share openings, engines that hold some of them, requests under way."""

    workers: int
    prompts: list[RouteRequest]
    stored: list[tuple[int, RouteRequest, int]]
    """Worker, prompt, leading blocks."""
    earlier: list[tuple[RouteRequest, int, str]]
    request: RouteRequest


def a_case(rng: random.Random) -> Case:
    """Token ids are drawn from 32 bits: no two cases share a block."""
    workers = rng.randint(2, WORKERS)
    trunk = [rng.getrandbits(32) for _ in range(rng.choice((5, 40, 200, 1000)))]
    prompts = []
    for _ in range(rng.randint(1, 6)):
        shared = trunk[: rng.randint(0, len(trunk))]
        prompts.append(a_request(shared + [rng.getrandbits(32) for _ in range(rng.randint(1, 300))]))
    stored = []
    cacheable = [prompt for prompt in prompts if len(prompt.blocks)]
    for worker in range(workers):
        for prompt in rng.sample(cacheable, rng.randint(0, min(3, len(cacheable)))):
            stored.append((worker, prompt, rng.randint(1, len(prompt.blocks))))  # noqa: PERF401
    earlier = [
        (rng.choice(prompts), rng.randrange(workers), rng.choice(STATES)) for _ in range(rng.randint(0, 3 * workers))
    ]
    return Case(workers, prompts, stored, earlier, rng.choice(prompts))


def fill(oracle: DynamoOracle, case: Case) -> BlockIndex:
    """The engines' caches as the case has them, told to Dynamo and to an index of ours."""
    index = BlockIndex()
    for worker, prompt, blocks in case.stored:
        first = index.depths(prompt.blocks).get(str(worker), 0)
        if blocks > first:
            oracle.store(worker, prompt, first, blocks - first)
            index.store(str(worker), prompt.blocks[first:blocks].tolist())
    depths = [[index.depths(prompt.blocks).get(str(w), 0) for w in range(case.workers)] for prompt in case.prompts]
    found = oracle.held(case.prompts, depths)
    assert found == depths
    return index


def our_costs(case: Case, index: BlockIndex, options: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """The choice and the costs of `dynamo_kv` in the same situation."""
    policy = make_policy("dynamo_kv", options=dict(options))
    workers = [Worker(str(number)) for number in range(case.workers)]
    fleet = Fleet(workers, lambda request: index.depths(request.blocks), 0.0, "events")
    for prompt, worker, state in case.earlier:
        booked = a_request(prompt.tokens.tolist())
        policy.choose(booked, fleet)
        policy.on_admit(booked, str(worker), 0.0)
        if state != "prefilling":
            policy.on_first_token(booked, str(worker), 0.0)
        if state == "ended":
            policy.on_end(booked, str(worker), 0.0)
    decision = policy.choose(case.request, fleet)
    return decision.worker, dict(decision.scores)


def dynamos_costs(oracle: DynamoOracle, case: Case) -> dict[str, Any]:
    answer: dict[str, Any] = oracle.ask(
        workers=case.workers,
        earlier=[(prompt.tokens.tolist(), worker, state) for prompt, worker, state in case.earlier],
        tokens=case.request.tokens.tolist(),
    )
    return answer


OPTIONS: list[tuple[int, dict[str, float]]] = [
    (FLEETS, {}),
    (100, {"overlap_credit": 2.0, "prefill_load_scale": 0.25}),
    (100, {"overlap_credit": 0.5, "prefill_load_scale": 3.0, "active_request_weight": 1.5}),
    (200, {"overlap_decay": 0.5}),
]
"""Random fleets, and the options of both."""

VARIABLES = {
    "overlap_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "overlap_decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    "prefill_load_scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",
    "active_request_weight": "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
}


@pytest.mark.parametrize(("fleets", "options"), OPTIONS, ids=["defaults", "credit", "scale", "decay"])
def test_random_fleets_cost_what_they_cost_in_dynamo(
    start: Callable[..., DynamoOracle], fleets: int, options: dict[str, float]
) -> None:
    """Every worker's cost is the same, and so is the cheapest one's; among equals either may draw another."""
    oracle = start(**{VARIABLES[option]: str(value) for option, value in options.items()})
    rng = random.Random(1)
    for number in range(fleets):
        case = a_case(rng)
        index = fill(oracle, case)
        theirs = dynamos_costs(oracle, case)
        chosen, costs = our_costs(case, index, options)
        assert costs[str(theirs["chosen"])] == pytest.approx(theirs["cost"], rel=1e-12), f"fleet {number}"
        assert costs[chosen] == pytest.approx(theirs["cost"], rel=1e-12), f"fleet {number}"
        if "overlap_decay" not in options:  # it compares with the fleet, and these are of fleets of one
            expected = dict(zip(map(str, range(case.workers)), theirs["costs"], strict=True))
            assert costs == pytest.approx(expected, rel=1e-12), f"fleet {number}"


def test_content_hashes_are_dynamos(start: Callable[..., DynamoOracle]) -> None:
    oracle, rng = start(), random.Random(2)
    for _ in range(200):
        size = rng.choice((1, 2, 3, 7, 8, 16, 32, 64, 100, 128))
        tokens = [rng.getrandbits(rng.choice((8, 17, 32))) for _ in range(rng.randint(0, 6 * size))]
        assert content_hashes(as_tokens(tokens), size).tolist() == oracle.ask(hash=tokens, block_size=size)
