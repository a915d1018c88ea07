"""Our copies of published policies against the real routers: the same requests in the same order, the same shape.

Three fake workers keep every request until they are told to answer, and each request is sent when the one before has
arrived. So what is in flight at each decision is known, and the counts below follow from the rules alone: they are
exact for both sides, up to which worker comes first. Where a router draws ties, the bounds say what a draw may do.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from prefixwatch.engines.process import ManagedProcess, free_ports
from prefixwatch.engines.tiny_model import default_model_dir, words
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import ROUTER, create_app
from tests.peers.fake_worker import HELD, MODEL, FakeWorker
from tests.peers.peer_venv import PYTHON

pytestmark = [pytest.mark.peers, pytest.mark.timeout(60)]

WORKERS = 3
COMMANDS = {
    "sglang-router": ["sglang_router.launch_router", "--policy", "cache_aware"],
    "vllm-router": ["vllm_router.launch_router", "--policy", "cache_aware"],
    "smg": ["smg", "launch", "--policy", "cache_aware"],
    "smg prefix_hash": ["smg", "launch", "--policy", "prefix_hash"],
}
OURS: dict[str, tuple[str, dict[str, str]]] = {
    "cache_aware_v1": ("cache_aware_v1", {}),
    "cache_aware_v1 least_loaded": ("cache_aware_v1", {"owner": "least_loaded"}),
    "cache_aware": ("cache_aware", {}),
    "prefix_hash": ("prefix_hash", {}),
}
GENERATION_1 = ["sglang-router", "vllm-router", "cache_aware_v1", "cache_aware_v1 least_loaded"]
GENERATION_2 = ["smg", "cache_aware"]
PREFIX_HASH = ["smg prefix_hash", "prefix_hash"]


class Bench:
    """A router in front of three workers that hold their requests."""

    def __init__(self, url: str, session: aiohttp.ClientSession, arrivals: asyncio.Queue[int], open_: asyncio.Event):
        self._url = url
        self._session = session
        self._arrivals = arrivals
        self._open = open_
        self._held: list[asyncio.Task[None]] = []

    async def hold(self, prompt: str) -> int:
        """Send a request that stays in flight; the worker it came to."""
        self._held.append(asyncio.create_task(self._complete(prompt)))
        return await asyncio.wait_for(self._arrivals.get(), 10)

    async def release(self) -> None:
        """All held requests are answered, and nothing is in flight."""
        self._open.set()
        await asyncio.gather(*self._held)
        self._held.clear()
        self._open.clear()

    async def serve(self, prompt: str) -> int:
        """Send a request and have it answered; what is held stays so. The worker it came to."""
        await self._complete(prompt, user="answered")
        return self._arrivals.get_nowait()

    async def _complete(self, prompt: str, user: str = HELD) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "user": user}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()


Begin = Callable[[str], Awaitable[Bench]]


@pytest.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Begin]:
    """Starts a real router, or ours with the policy of that name."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def start(name: str) -> Bench:
            arrivals, open_ = asyncio.Queue[int](), asyncio.Event()
            workers = [FakeWorker(number, arrivals, open_) for number in range(WORKERS)]
            for worker in workers:
                await worker.start()
                stack.push_async_callback(worker.stop)
            urls = [worker.url for worker in workers]
            running = _real(COMMANDS[name], urls, tmp_path / "log") if name in COMMANDS else _ours(name, urls)
            bench = Bench(await stack.enter_async_context(running), session, arrivals, open_)
            stack.push_async_callback(bench.release)
            return bench

        yield start


@asynccontextmanager
async def _real(command: list[str], workers: list[str], log_file: Path) -> AsyncIterator[str]:
    port, metrics_port = free_ports(2)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    process = ManagedProcess(command[0], [str(PYTHON), "-m", *command, *arguments, *metrics], log_file)
    try:
        url = f"http://127.0.0.1:{port}"
        await process.wait_ready(f"{url}/readiness", timeout_seconds=30)
        await _all_workers(process, url)
        yield url
    finally:
        process.stop(grace_seconds=1)


async def _all_workers(process: ManagedProcess, url: str) -> None:
    """Ready means one worker to some of them."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while True:
            process.check()
            async with session.get(f"{url}/workers") as response:
                if response.status == 404:
                    return
                listed = (await response.json())["workers"]
            if len(listed) == WORKERS and all(worker.get("is_healthy", True) for worker in listed):
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _ours(name: str, workers: list[str]) -> AsyncIterator[str]:
    named = [{"name": f"w{number}", "url": url} for number, url in enumerate(workers)]
    config = RouterConfig.model_validate({"workers": named})
    policy, options = OURS[name]
    app = create_app(config, policy=make_policy(policy, options=options), tokenizer=Tokenizer(default_model_dir()))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await app[ROUTER].wait_for_workers()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def prompt(seed: int, count: int = 400) -> str:
    return " ".join(random.Random(seed).choices(words(), k=count))


def burst(seed: int = 1) -> list[str]:
    """120 prompts that share all but their end, of which not a character: some trees match by characters."""
    shared = prompt(seed)
    return [f"{shared} {8 * chr(0x4E00 + number)}" for number in range(120)]


def by_appearance(chosen: list[int]) -> list[int]:
    """The same sequence with workers numbered as they first appear."""
    order = list(dict.fromkeys(chosen))
    return [order.index(worker) for worker in chosen]


async def one_at_a_time(bench: Bench) -> Counter[int]:
    """21 new prompts, each served before the next."""
    return Counter([await bench.serve(prompt(number)) for number in range(21)])


async def all_at_once(bench: Bench) -> list[int]:
    """The burst, all of it in flight at the end."""
    return by_appearance([await bench.hold(each) for each in burst()])


@pytest.mark.parametrize("router", GENERATION_1)
async def test_f1_an_idle_fleet_sends_every_new_prompt_to_one_worker(begin: Begin, router: str) -> None:
    """sgl-project/sglang#32983 (F-1)."""
    assert list((await one_at_a_time(await begin(router))).values()) == [21]


@pytest.mark.parametrize("router", [*GENERATION_2, *PREFIX_HASH])
async def test_f1_fixed_an_idle_fleet_spreads_new_prompts(begin: Begin, router: str) -> None:
    """Drawn or hashed: with 45 % of the ring at one worker, 19 or more of 21 go there in 1 run of 20,000."""
    assert max((await one_at_a_time(await begin(router))).values()) < 19


async def test_a_burst_at_sglang_router_and_at_cache_aware_v1(begin: Begin) -> None:
    """65 go to the first worker, 65 − 0 > 64. From there on it takes one of three, as often as it leads by 64 only."""
    theirs = await all_at_once(await begin("sglang-router"))
    assert theirs == await all_at_once(await begin("cache_aware_v1"))
    assert theirs == 65 * [0] + 18 * [1, 2, 0] + [1]


async def test_a_burst_at_vllm_router_and_at_cache_aware_v1_with_the_least_loaded_owner(begin: Begin) -> None:
    """From the 66th on everybody has the opening, and the two others are the less loaded."""
    theirs = await all_at_once(await begin("vllm-router"))
    assert theirs == await all_at_once(await begin("cache_aware_v1 least_loaded"))
    assert theirs == 65 * [0] + 27 * [1, 2] + [1]


async def test_a_burst_at_smg_and_at_prefix_hash(begin: Begin) -> None:
    """16 go home, 16 > (16 + 1) / 3 + 10. From there on home takes one of three, the others what home leaves."""
    theirs = await all_at_once(await begin("smg prefix_hash"))
    assert theirs == await all_at_once(await begin("prefix_hash"))
    assert theirs == 16 * [0] + 34 * [1, 0, 2] + [1, 0]


@pytest.mark.parametrize("router", GENERATION_2)
async def test_a_burst_at_smg_and_at_cache_aware(begin: Begin, router: str) -> None:
    """7 go to the first worker, 7 > 7 / 3 + 4. The second then catches up; neither leads the mean by more again, so
    the third gets nothing. Ties between the two are drawn.
    """
    chosen = await all_at_once(await begin(router))
    assert chosen[:14] == 7 * [0] + 7 * [1]
    assert Counter(chosen) == {0: 60, 1: 60}


async def beside_a_hot_worker(bench: Bench, hot: int) -> int:
    """Of 12 requests for prompts that two workers have, how many get there, while the third has `hot` in flight."""
    owners: dict[int, str] = {}
    for number in range(30):
        owners.setdefault(await bench.hold(prompt(number)), prompt(number))
        if len(owners) == WORKERS:
            break
    await bench.release()
    (busy, popular), *others = owners.items()
    assert {await bench.hold(popular) for _ in range(hot)} == {busy}
    sent = 3 * [owner for owner in others for _ in range(2)]
    return sum([await bench.serve(wanted) == worker for worker, wanted in sent])


@pytest.mark.parametrize("router", GENERATION_1)
async def test_f2_one_hot_worker_turns_affinity_off_for_all(begin: Begin, router: str) -> None:
    """sgl-project/sglang#32195 (F-2): at 65 − 0 the prompts of the others are placed by load alone.

    Each goes to either of two, in pairs: 6 of 12 by chance, and a load seen late moves no more than one of a pair.
    """
    assert 3 <= await beside_a_hot_worker(await begin(router), 65) <= 9


@pytest.mark.parametrize(
    ("router", "hot"), [*((router, 7) for router in GENERATION_2), *((r, 16) for r in PREFIX_HASH)]
)
async def test_f2_fixed_one_hot_worker_leaves_the_others_theirs(begin: Begin, router: str, hot: int) -> None:
    """As much as the hot one takes before it spills."""
    assert await beside_a_hot_worker(await begin(router), hot) == 12
