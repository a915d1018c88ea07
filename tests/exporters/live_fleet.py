"""A fleet to look at: an exporter filled in-process, with a prefix tree and requests as chat traffic has them."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from aiohttp import web
from pydantic import SecretStr

from prefixwatch.exporters.caches.prefix_names import NamedPrefix
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.requests.ledger import ROUTER
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.web import web_app
from prefixwatch.kvcache.blocks import as_tokens, block_hashes, content_hashes
from prefixwatch.kvcache.index.block_table import Runs, WorkerBlocks
from prefixwatch.kvcache.index.table_layout import STORED_AFTER, STORED_BARE
from prefixwatch.kvcache.request_record import RequestRecord

BLOCK = 16
APPS = ("support-bot system prompt v12", "code review", "search answers", "meeting notes", "translation", "agents")
_PAGE = """\
vllm:num_requests_running{{model_name="m",engine="0"}} {running}
vllm:num_requests_waiting{{model_name="m",engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{model_name="m",engine="0"}} {usage}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{model_name="m",engine="0"}} {hits}
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{model_name="m",engine="0"}} {queries}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{model_name="m",engine="0",le="0.1"}} {fast}
vllm:time_to_first_token_seconds_bucket{{model_name="m",engine="0",le="0.5"}} {some}
vllm:time_to_first_token_seconds_bucket{{model_name="m",engine="0",le="2.5"}} {some}
vllm:time_to_first_token_seconds_bucket{{model_name="m",engine="0",le="+Inf"}} {some}
vllm:time_to_first_token_seconds_sum{{model_name="m",engine="0"}} {fast}
vllm:time_to_first_token_seconds_count{{model_name="m",engine="0"}} {some}
"""


def _opening(app: int) -> list[int]:
    return [1000 + app] * (BLOCK * (8 + 6 * app))


def _named(app: int, name: str) -> NamedPrefix:
    return NamedPrefix(name=name, fingerprint=f"{int(block_hashes(as_tokens(_opening(app)))[-1]):016x}")


class LiveFleet:
    """So many workers; `sessions` are spread over them after the openings of six applications."""

    def __init__(
        self,
        workers: int = 8,
        sessions: int = 400,
        *,
        kv_events: bool = True,
        seed: int = 1,
        called: Sequence[str] = (),
        prefixes: Sequence[str] = APPS[:4],
    ) -> None:
        """`called` are names of the first workers, instead of w0, w1 and so on."""
        self.rng = random.Random(seed)
        urls = [f"http://10.0.{k // 250}.{k % 250}:8000" for k in range(workers)]
        all_called = [*called, *(f"w{k}" for k in range(len(called), workers))]
        targets = tuple(TargetConfig(name=name, url=url) for name, url in zip(all_called, urls, strict=True))
        named = tuple(_named(app, name) for app, name in enumerate(prefixes))
        self.exporter = Exporter(
            ExporterConfig(targets=targets, prefixes=named, prefix_secret=SecretStr("one key"), interval_seconds=3600.0)
        )
        self.scrapes = 0
        self._sessions = 0
        names = [target.name for target in targets] if kv_events else []
        self._caches = {name: self.exporter.prefixes.table.join(name) for name in names}
        self.add_sessions(sessions)

    def add_sessions(self, sessions: int) -> None:
        """Conversations, most at one worker each; few applications and documents have most of them."""
        by_worker: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self._caches}
        for session in range(self._sessions, self._sessions + sessions):
            app = min(int(self.rng.paretovariate(1.1)) - 1, len(APPS) - 1)
            document = int(self.rng.paretovariate(0.9)) % 60
            copies = 3 if self.rng.random() < 0.03 else 1
            for name in self.rng.sample(list(by_worker), min(copies, len(by_worker))):
                by_worker[name].append((app, document, session))
        self._sessions += sessions
        for name, paths in by_worker.items():
            self._store(self._caches[name], paths)

    def forget_all(self) -> None:
        """Every worker drops its cache."""
        for worker in self._caches.values():
            worker.clear()

    def _store(self, worker: WorkerBlocks, paths: list[tuple[int, int, int]]) -> None:
        """Openings, documents and turns as an engine tells them: each run of blocks after the one that it continues."""
        runs: list[tuple[int, int, int]] = []
        ids: list[int] = []
        contents: list[np.ndarray] = []
        ends: dict[tuple[int, ...], int] = {}

        def store(path: tuple[int, ...], blocks: np.ndarray) -> None:
            if path in ends:
                return
            parent = ends.get(path[:-1], 0)
            runs.append((STORED_AFTER if parent else STORED_BARE, len(blocks), parent))
            ids.extend(range(len(ids) + 1, len(ids) + 1 + len(blocks)))
            contents.append(blocks)
            ends[path] = len(ids)

        for app, document, session in paths:
            store((app,), content_hashes(as_tokens(_opening(app)), BLOCK))
            store((app, document), _some_blocks((app, document), 4 + document % 9))
            store((app, document, session), _some_blocks((app, document, session), 2 + session % 5))
            for branch in range(session % 3):
                store((app, document, session, branch), _some_blocks((app, document, session, branch), 1 + session % 3))
        if runs:
            worker.apply(Runs.of(runs, np.array(ids, dtype=np.uint64), np.concatenate(contents), BLOCK), time.time())

    async def tell(self, *, hot: str = "", down: str = "", miss_seconds: float = 0.8) -> None:
        """A scrape of every worker, a second's requests, and the tree as it is now."""
        self.scrapes += 1
        now = time.monotonic()
        for k, target in enumerate(self.exporter.targets):
            if target.name == down:
                target.ingest(Scrape(0.01, reason="refused", detail="connection refused"), now)
                continue
            served = self.scrapes * (40 + k % 7)
            page = _PAGE.format(
                running=40 if target.name == hot else 3 + k % 4,
                waiting=25 if target.name == hot else 0,
                usage=round(0.35 + 0.07 * (k % 8), 2),
                hits=served * (50 + k % 30),
                queries=served * 100,
                fast=served * 0.7,
                some=served,
            )
            target.ingest(Scrape(0.01, page.encode()), now)
        self.requests(60, miss_seconds=miss_seconds)
        await self.exporter.prefixes.refresh()

    def _paths(self) -> list[list[int]]:
        """Some prompts, each as the chain hashes of its blocks, the last first."""
        rows = self.exporter.prefixes.table.snapshot().blocks
        leaves = np.flatnonzero(rows["children"] == 0)
        paths = []
        for leaf in self.rng.sample(leaves.tolist(), min(200, len(leaves))):
            path = []
            row = leaf
            while row >= 0:
                path.append(int(rows["hash"][row]))
                row = int(rows["parent"][row])
            paths.append(path)
        return paths

    def requests(self, number: int, *, miss_seconds: float = 0.8, own_tokens: int = 1024) -> None:
        """A miss after three hits, as the router's records tell them."""
        paths = self._paths()
        for k in range(number):
            hit = k % 4 > 0
            path = paths[k % len(paths)] if paths else [None]
            ttft = (0.09 if hit else miss_seconds) * self.rng.uniform(0.8, 1.3)
            self.exporter.ledger.record(
                RequestRecord(
                    ended_unix_seconds=time.time(), outcome="completed", worker=f"w{k % 8}", model="m", tenant="acme",
                    session=f"s{k % 20}", salted=True, prompt_tokens=1024, cached_tokens=1008 if hit else 0,
                    own_tokens=own_tokens, block_size=BLOCK, output_tokens=64, ttft_seconds=ttft, tpot_seconds=0.02,
                    e2e_seconds=ttft + 1.3, policy="cache_aware", reason="match",
                    prompt_block=path[0], reused_block=path[self.rng.randrange(len(path))] if hit else None,
                ),
                ROUTER,
            )  # fmt: skip

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """The exporter's pages at this port; nothing is scraped but by `tell`."""

        async def reload() -> str:
            return ""

        await self.exporter.open()
        runner = web.AppRunner(web_app(self.exporter, reload), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            await self.exporter.close()


def _some_blocks(path: tuple[int, ...], blocks: int) -> np.ndarray:
    """The same for the same path, at whichever worker."""
    return np.random.default_rng(path).integers(1, 2**64, blocks, dtype=np.uint64)
