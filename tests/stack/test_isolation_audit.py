"""`prefixwatch audit` end to end: on a simulated engine, on a server that schedules by longest prefix, and refused."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prefixwatch.documents.errors import InputError
from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import free_port
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.router.config import PolicyConfig, RouterConfig
from prefixwatch.router.tenant_config import IdentityConfig
from prefixwatch.stack.audit.consent import is_loopback
from prefixwatch.stack.audit.engines import lost_hit_tokens
from prefixwatch.stack.local.fleet import as_workers, start_router
from tests.stack.command_line import Ended, prefixwatch

QUICK = ("--pause", "0.02", "--rate", "200", "--prompt-tokens", "1024")
SALTS = ("--victim-salt", "random", "--attacker-salt", "random")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    handles = asyncio.run(fleet.start_simulated(1, default_model_dir(), tmp_path_factory.mktemp("engine")))
    yield handles[0]
    asyncio.run(fleet.stop(handles))


def audit(url: str, out: Path, *options: str) -> tuple[Ended, dict[str, Any]]:
    ended = prefixwatch("audit", "isolation", "--target", url, "--out", str(out), *QUICK, *options)
    file = out / "audit.json"
    return ended, json.loads(file.read_text(encoding="utf-8"))["audit"] if file.exists() else {}


@pytest.mark.parametrize("salted", [True, False])
def test_a_simulated_engine_is_isolated_exactly_with_salts(engine: EngineHandle, tmp_path: Path, salted: bool) -> None:
    ended, document = audit(engine.url, tmp_path, "--engine", engine.url, "--samples", "30", *SALTS * salted)
    found = {each["test"] + " " + each["tier"]: each for each in document["findings"]}
    state = "isolated" if salted else "leak"
    assert {name: each["state"] for name, each in found.items() if each["test"] == "tokens"} == {
        "tokens all": state,
        "tokens gpu": state,
        "tokens outer": "unavailable",
    }
    timing = found["timing all"]["figures"]
    assert timing["power"] >= 0.99
    by_chance = salted and timing["p_value"] < 0.01  # once in a hundred runs; never as low as a leak's
    state = "inconclusive" if by_chance else state
    assert found["timing all"]["state"] == document["verdict"] == state
    assert ended.code == {"isolated": 0, "leak": 1, "inconclusive": 3}[state]
    assert document["samples"]["requests"] == 181
    assert ended.out.index("samples find a gap of") < ended.out.index("finding"), "power comes before the run"
    page = (tmp_path / "audit.html").read_text(encoding="utf-8")
    sealed = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert sealed["sha256"] in page
    assert html.escape(document["statement"]).replace("&#x27;", "&#39;") in page
    again = prefixwatch("audit", "regrade", str(tmp_path / "audit.json"), "--json")
    assert (again.code, json.loads(again.out)["statement"]) == (ended.code, document["statement"])


def test_a_salt_that_clients_choose_protects_nobody(
    engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-project/vllm#53347 (IS02). And neither key nor salt is in what is written."""
    for name in ("victim-salt", "attacker-salt", "victim-key", "attacker-key"):
        monkeypatch.setenv(name.upper().replace("-", "_"), f"hidden-{name}")
    ended, document = audit(
        engine.url,
        tmp_path,
        *("--tests", "tokens", "--samples", "6", "--forge-salt"),
        *("--victim-salt", "VICTIM_SALT", "--attacker-salt", "ATTACKER_SALT"),
        *("--victim-key-env", "VICTIM_KEY", "--attacker-key-env", "ATTACKER_KEY"),
    )
    found = {(each["arm"], each["tier"]): each["state"] for each in document["findings"]}
    assert (ended.code, found["cross", "all"], found["forged", "all"]) == (1, "isolated", "leak")
    assert "let the router derive the salt from the authenticated tenant" in document["remedies"][0]
    for file in ("audit.json", "audit.html"):
        assert "hidden-" not in (tmp_path / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("groups", "state"),
    [({}, "isolated"), ({"research": ["acme", "bolt"]}, "leak")],
    ids=["each its own", "one trust group"],
)
def test_a_router_that_derives_salts_isolates_tenants_even_from_forged_ones(
    engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, list[str]], state: str
) -> None:
    """Tenants come by API key; what they send as a salt is dropped. Tenants of one trust group share by decision."""
    keys = {"acme": "acme-key", "bolt": "bolt-key"}
    hashes = {name: [hashlib.sha256(key.encode()).hexdigest()] for name, key in keys.items()}
    secrets_file = tmp_path / "secrets.yaml"
    secrets_file.write_text(json.dumps({"namespace_key": "k" * 40, "api_keys": hashes}), encoding="utf-8")
    for name, value in {"VICTIM_KEY": "acme-key", "ATTACKER_KEY": "bolt-key", "SALT": "the victim's"}.items():
        monkeypatch.setenv(name, value)
    config = RouterConfig(
        port=free_port(),
        workers=as_workers([engine]),
        policy=PolicyConfig(name="round_robin"),
        model_dir=default_model_dir(),
        identity=IdentityConfig(secrets_file=secrets_file, api_keys=True, required=True, trust_groups=groups),
    )
    router = asyncio.run(start_router(config, tmp_path))
    try:
        ended, document = audit(
            f"http://127.0.0.1:{config.port}",
            tmp_path / "out",
            *("--engine", engine.url, "--tests", "tokens", "--samples", "6", "--tenant-header", ""),
            *("--victim-key-env", "VICTIM_KEY", "--attacker-key-env", "ATTACKER_KEY"),
            *("--forge-salt", "--victim-salt", "SALT"),
        )
    finally:
        router.stop()
    assert (ended.code, document["verdict"]) == (0 if state == "isolated" else 1, state)
    found = {(each["arm"], each["tier"]): each["state"] for each in document["findings"] if each["tier"] != "outer"}
    assert found == {(arm, tier): state for arm in ("cross", "forged") for tier in ("all", "gpu")}


def test_a_cache_that_is_off_is_inconclusive(tmp_path: Path, longest_prefix: Server) -> None:
    longest_prefix.caching = False
    ended, document = audit(longest_prefix.url, tmp_path, "--tests", "tokens", "--samples", "4")
    assert (ended.code, document["verdict"]) == (3, "inconclusive")
    assert "To do: switch prefix caching on, or raise --prompt-tokens" in ended.out


def test_a_plan_sends_nothing(tmp_path: Path) -> None:
    ended = prefixwatch("audit", "isolation", "--target", "http://127.0.0.1:9", "--plan", "--samples", "250", "--json")
    assert (ended.code, json.loads(ended.out)["plan"]["requests"]) == (0, 1501)


def test_published_audits_are_graded_by_level(tmp_path: Path) -> None:
    """B1, in the archive's own format: the level is the folder."""
    timings = json.loads((Path(__file__).parents[1] / "loadgen/audit/published_timings.json").read_text("utf-8"))
    for name, sides in timings.items():
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        keys = ("cache_hit", "cache_miss")
        rows = {key: [{"client_time": ticks / 1e4} for ticks in side] for key, side in zip(keys, sides, strict=True)}
        file.write_text(json.dumps(rows), encoding="utf-8")
    ended = prefixwatch("audit", "regrade", str(tmp_path), "--json")
    assert (ended.code, json.loads(ended.out)["levels"]) == (
        0,
        {
            "global": {"audits": 19, "leaks": 7},
            "per_org": {"audits": 6, "leaks": 4},
            "per_user": {"audits": 37, "leaks": 18},
        },
    )


def test_the_price_takes_what_real_traffic_lost_from_an_exporter(longest_prefix: Server) -> None:
    name = "prefixwatch_isolation_lost_hit_tokens_total"
    longest_prefix.metrics = f'# TYPE {name} counter\n{name}{{target="a"}} 1200.0\n{name}{{target="b"}} 34.0\n'
    assert lost_hit_tokens(longest_prefix.url) == 1234
    longest_prefix.metrics = 'prefixwatch_up{target="a"} 1.0\n'
    assert lost_hit_tokens(longest_prefix.url) is None
    with pytest.raises(InputError, match=r"--exporter http://127\.0\.0\.1:9: .* can't be read \(refused"):
        lost_hit_tokens("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "http://llm.test:8000"], "llm.test isn't on this machine: .* add --i-may-test-this --allow-host"),
        (
            ["--target", "http://llm.test:8000", "--i-may-test-this", "--allow-host", "other.test"],
            "llm.test isn't allowed: add --allow-host llm.test",
        ),
        (["--target", "http://127.0.0.1:9", "--engine", "http://10.0.0.1:8000"], "10.0.0.1 isn't on this machine"),
        (["--target", "http://127.0.0.1:9", "--max-tokens", "9"], "--max-tokens 9: the plan takes .* prompt tokens"),
        (["--target", "http://127.0.0.1:9", "--tests", "luck"], "--tests luck: choose from tokens, timing, order"),
        (["--target", "http://127.0.0.1:9", "--attacker", "audit-victim"], "send the same headers and salt"),
        (["--target", "http://127.0.0.1:9", "--forge-salt"], "--forge-salt: give the victim's salt, too"),
        (["--target", "http://127.0.0.1:9", "--empty-engine-caches"], "name the engines, too: --engine URL"),
        (["--target", "http://127.0.0.1:9", "--victim-key-env", "ABSENT"], "environment variable ABSENT is not set"),
        (["--target", "http://127.0.0.1:9"], r"127\.0\.0\.1:9/v1/models can't be read .*: start it first"),
        (["--target", "ftp://127.0.0.1"], "is not an http or https URL"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(options: list[str], message: str, tmp_path: Path) -> None:
    ended = prefixwatch("audit", "isolation", "--out", str(tmp_path), *options)
    assert ended.code == 2
    assert re.search(message, " ".join(ended.err.split())), ended.err


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.example.test", False),
        ("127.0.0.1.example.test", False),
    ],
)
def test_only_loopback_needs_no_consent(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def common(text: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(text), len(other)))


class Server:
    """Schedules what waits by the longest prefix that it has seen: per tenant if `isolated`, else of anybody."""

    def __init__(self) -> None:
        self.isolated = False
        self.caching = True
        self.refuse_after: int | None = None
        self.requests = 0
        self.metrics = ""
        self._seen: dict[str, list[str]] = {}
        self._waiting: list[tuple[int, asyncio.Event]] = []
        self._loop = asyncio.new_event_loop()
        self.url = ""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**24)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if self.refuse_after is not None and self.requests > self.refuse_after:
            return web.json_response({"error": {"message": "too many requests"}}, status=429)
        text = (await request.json())["messages"][0]["content"]
        seen = self._seen.setdefault(request.headers["x-tenant-id"] if self.isolated else "", [])
        held = max((common(text, other) for other in seen), default=0) if self.caching else 0
        turn = asyncio.Event()
        if not self._waiting:
            self._loop.call_later(0.05, lambda: self._loop.create_task(self._schedule()))
        self._waiting.append((held, turn))
        await turn.wait()
        seen.append(text)
        count = len(text.split())
        usage = {"prompt_tokens": count, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": held // 2}}
        events = [
            {"choices": [{"delta": {"content": "ok"}, "finish_reason": "length"}]},
            {"choices": [], "usage": usage},
        ]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _schedule(self) -> None:
        batch, self._waiting = self._waiting, []
        for _, turn in sorted(batch, key=lambda each: -each[0]):
            turn.set()
            await asyncio.sleep(0.003)


@pytest.fixture
def longest_prefix() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.mark.parametrize(("isolated", "code", "state"), [(True, 0, "isolated"), (False, 1, "leak")])
def test_the_order_of_answers_shows_longest_prefix_match_scheduling(
    longest_prefix: Server, tmp_path: Path, isolated: bool, code: int, state: str
) -> None:
    """IS14, B7: no time is looked at, only who is answered first."""
    longest_prefix.isolated = isolated
    ended, document = audit(longest_prefix.url, tmp_path, "--tests", "order", "--order-rounds", "12")
    (finding,) = document["findings"]
    assert (ended.code, finding["state"]) == (code, state), finding["says"]
    assert finding["figures"]["own_mean_rank"] < 2


def test_a_target_that_refuses_is_left_alone(longest_prefix: Server, tmp_path: Path) -> None:
    """After five refusals in a row; what was measured until then is judged and written."""
    longest_prefix.refuse_after = 20
    ended, document = audit(longest_prefix.url, tmp_path, "--tests", "tokens", "--samples", "50")
    assert longest_prefix.requests == 20 + 5
    assert ended.code in (1, 3)
    assert "Stopped early: 5 requests failed one after the other: refused" in document["statement"]
    longest_prefix.refuse_after = 0
    ended, _ = audit(longest_prefix.url, tmp_path / "none", "--tests", "tokens")
    assert ended.code == 2
    assert "the first request failed: refused (http_429: too many requests)" in " ".join(ended.err.split())
