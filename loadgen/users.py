"""A Locust user to inherit from: conversations of a scenario, with Locust's own users, spawn rate and load shapes.

    from prefixwatch.loadgen.users import SharedPrefixUser

    class Chat(SharedPrefixUser):
        scenario = "shared-prefix"
        model_dir = "models/mine"
        slo = ["ttft"]
        out = "results/locust"

Each user plays one session after another and waits for each answer, so this is a closed loop and is labelled as one.
Importing this module registers nothing; a subclass listens for the start of Locust. At the end of the test the
request log is written to `out`, graded, and the exit code is that of the verdict: 0, 1 or 3. With several processes the
sessions are dealt out, and the master writes and grades the rows of all.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import gevent
from gevent.lock import BoundedSemaphore
from locust import User, constant, events, task
from locust.exception import StopUser
from locust.runners import WorkerRunner

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.request import MEASURED, Plan, PlannedRequest
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.loadgen.scenario.secrets import bearer
from prefixwatch.loadgen.sending.client_check import ClientLoad, check_client
from prefixwatch.loadgen.sending.load_run import RUN_SCHEMA, make_folder, write_run, writer_for
from prefixwatch.loadgen.sending.open_loop import OpenLoop, RequestOptions
from prefixwatch.loadgen.sending.reporter import LocustReporter, grade_into
from prefixwatch.loadgen.sending.run_config import RunConfig
from prefixwatch.loadgen.swarm.session_shares import Collected, Share, connect, share_of
from prefixwatch.loadgen.swarm.verdict_tab import add_tab

CANCEL_SECONDS = 5.0
"""How long a stopped test waits for its cancelled requests to be logged."""


class SharedPrefixUser(User):
    """Plays the sessions of a scenario. Override `converse`, or add tasks that call `chat`."""

    abstract = True
    wait_time = constant(0)
    scenario: ClassVar[str | Path] = "shared-prefix"
    """A shipped scenario's name or a file; its arrivals are not used."""
    model: ClassVar[str] = "tiny"
    """The model that requests ask for."""
    model_dir: ClassVar[str | Path | None] = None
    """Folder with the model's tokenizer; None: the host's /tokenize is asked."""
    seed: ClassVar[int] = 0
    api_key_env: ClassVar[str] = ""
    """Environment variable with the API key."""
    slo: ClassVar[Sequence[str] | None] = None
    """SLO documents to grade on; None: the scenario's."""
    out: ClassVar[str | Path | None] = None
    """Folder for the request log and the graded results; None: nothing is written."""

    listens: ClassVar[bool] = True
    """Whether a subclass listens for the start of Locust; otherwise `connect_users` has to be called."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.listens:
            listeners: Any = events.init
            listeners.add_listener(_connect_kinds)

    @classmethod
    def run_config(cls, environment: Any, share: Share) -> RunConfig:
        """The run that this class asks for. Raises InputError."""
        return RunConfig(
            target=cls.host or environment.host or "",
            scenario=str(cls.scenario),
            model_dir=None if cls.model_dir is None else Path(cls.model_dir),
            model=cls.model,
            seed=cls.seed,
            out=None if cls.out is None else Path(cls.out),
            api_key_env=cls.api_key_env,
            nonce=share.nonce,
        )

    @classmethod
    def objectives(cls, environment: Any) -> Sequence[str] | None:
        """SLO documents to grade on; None: the scenario's."""
        return cls.slo

    def on_start(self) -> None:
        """Join the test's traffic. Stops the test with exit code 2 on bad input."""
        try:
            self._traffic = _Traffic.of(self)
        except InputError as error:
            print(f"prefixwatch: {error}", file=sys.stderr, flush=True)
            self.environment.process_exit_code = 2
            gevent.spawn(self.environment.runner.quit)
            raise StopUser from error

    @task
    def converse(self) -> None:
        """One session: each turn after the answer to the one before and its think time."""
        for request in self._traffic.next_session():
            if request.think_seconds:
                gevent.sleep(request.think_seconds)
            self.send(request)

    def send(self, request: PlannedRequest) -> RequestRecord:
        """Send one planned request now and wait for its answer; returns its row of the request log."""
        return self._traffic.send(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 64,
        tenant: str = "-",
        group: str = "-",
        session: str = "",
        request_class: str = "chat",
    ) -> RequestRecord:
        """Send a conversation of your own and wait for its answer; it is logged and graded with the others."""
        names = {"tenant": tenant, "group": group, "request_class": request_class}
        return self._traffic.send(self._traffic.own_request(messages, max_tokens, session, names))


class _Traffic:
    """What all users of one class share in one test."""

    _running: ClassVar[WeakKeyDictionary[Any, dict[type, _Traffic]]] = WeakKeyDictionary()

    def __init__(self, user: SharedPrefixUser) -> None:
        kind, environment = type(user), user.environment
        self._environment, self._kind = environment, kind
        self._share = share_of(environment)
        self._config = kind.run_config(environment, self._share)
        self._scenario: Scenario = load_scenario(self._config.scenario)
        self._writer = writer_for(self._config, self._scenario)
        self._planning = BoundedSemaphore()
        self._sessions: deque[list[PlannedRequest]] = deque()
        self._plans = 0
        self._next_index = 0
        if not isinstance(environment.runner, WorkerRunner):
            make_folder(self._config.out)
        client = HttpClient(Target.parse(self._config.target), self._scenario.timeouts)
        options = RequestOptions(
            model=self._config.model,
            session_suffix=self._config.sent_session_suffix,
            headers=bearer(self._config.api_key_env),
            extra_body=self._scenario.extra_body,
        )
        config = self._config
        empty = Plan(self._scenario.name, config.seed, config.nonce, config.model, [], concurrency=1)
        reporter = LocustReporter(environment, self._scenario.name)
        self._loop = OpenLoop(empty, client, options, on_end=reporter)
        self._loop.begin()
        environment.events.test_stopping.add_listener(self._stop)
        environment.events.test_stop.add_listener(self._finish)

    @classmethod
    def of(cls, user: SharedPrefixUser) -> _Traffic:
        """This test's traffic, made by its first user. Raises InputError."""
        kinds = cls._running.setdefault(user.environment, {})
        if type(user) not in kinds:
            kinds[type(user)] = cls(user)
        return kinds[type(user)]

    def next_session(self) -> list[PlannedRequest]:
        """The turns of a session that no user has played; plans more when they are used up."""
        with self._planning:
            while not self._sessions:
                self._plan_more()
            return self._sessions.popleft()

    def _plan_more(self) -> None:
        nonce = f"{self._config.nonce}-{self._plans}"
        plan = make_plan(
            self._scenario, self._writer, seed=self._config.seed + self._plans, nonce=nonce, model=self._config.model
        )
        sessions: dict[str, list[PlannedRequest]] = {}
        for request in plan.requests:
            if request.phase == MEASURED:
                own = replace(request, index=self._take_index(), session=f"{request.session}-{self._plans}")
                sessions.setdefault(own.session, []).append(own)
        self._plans += 1
        self._sessions.extend(list(sessions.values())[self._share.position :: self._share.count])

    def _take_index(self) -> int:
        self._next_index += 1
        return self._next_index - 1

    def own_request(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, session: str, names: Mapping[str, str]
    ) -> PlannedRequest:
        """A request that no plan has; nothing of its prompt counts as sent before."""
        index = self._take_index()
        listed = [dict(message) for message in messages]
        return PlannedRequest(
            index=index,
            phase=MEASURED,
            scheduled_s=0.0,
            session=session or f"own-{index}",
            turn=0,
            messages=listed,
            max_tokens=max_tokens,
            prompt_tokens=len(self._writer.encode(listed)),
            shared_tokens=0,
            tenant=names["tenant"],
            group=names["group"],
            request_class=names["request_class"],
        )

    def send(self, request: PlannedRequest) -> RequestRecord:
        """Raises StopUser when the test is over."""
        if self._loop.stopped:
            raise StopUser
        return self._loop.send_now(request)

    def _stop(self, **_: Any) -> None:
        """Locust kills its users next: cancelled now, their requests are logged."""
        self._loop.stop()
        with gevent.Timeout(CANCEL_SECONDS, False):
            while self._loop.in_flight:
                gevent.sleep(0.01)

    def _finish(self, **_: Any) -> None:
        self._environment.events.test_stopping.remove_listener(self._stop)
        self._environment.events.test_stop.remove_listener(self._finish)
        if isinstance(self._environment.runner, WorkerRunner):
            return  # the master asks for the rows
        self._running.pop(self._environment, None)
        _write_kind(self._environment, self._kind, *self.collected())

    def collected(self) -> tuple[list[RequestRecord], dict[str, Any]]:
        """The rows of the request log so far, and what run.json says."""
        records = sorted(self._loop.records, key=lambda record: record.index)
        load = ClientLoad([], 0.0, self._loop.in_flight_max, stopped=False)
        check = check_client(records, load, lag_limit_ms=self._config.lag_limit_ms)
        report = {
            "schema": RUN_SCHEMA,
            "scenario": self._scenario.name,
            "policy": "",
            "repeat": 0,
            "seed": self._config.seed,
            "target": self._config.target,
            "loop": "closed",
            "concurrency": self._loop.in_flight_max,
            "zero_unix_seconds": self._loop.zero_unix_seconds,
            "retokenization_loss_tokens": None,
            **check,
        }
        return records, report

    @classmethod
    def end_all(cls, environment: Any) -> Collected:
        """What all kinds of users in this process have; their requests end."""
        kinds = cls._running.pop(environment, {})
        for traffic in kinds.values():
            traffic._stop()
        return {kind.__name__: traffic.collected() for kind, traffic in kinds.items()}


def connect_users(environment: Any) -> None:
    """Share sessions with other processes of the test, and show the verdict on Locust's web page."""
    add_tab(environment)

    def write(found: Collected) -> None:
        kinds = {kind.__name__: kind for kind in environment.user_classes}
        for name, (records, report) in found.items():
            _write_kind(environment, kinds[name], records, report)

    connect(environment, lambda: _Traffic.end_all(environment), write)


_connected: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _connect_kinds(environment: Any, **_: Any) -> None:
    if environment not in _connected:  # each class listens
        _connected[environment] = True
        connect_users(environment)


def _write_kind(
    environment: Any, kind: type[SharedPrefixUser], records: list[RequestRecord], report: dict[str, Any]
) -> None:
    """Write and grade the run of one class of users."""
    try:
        config = kind.run_config(environment, Share("-"))
        if config.out is None:
            return
        make_folder(config.out)
        write_run(config.out, records, report)
        slos = kind.objectives(environment)
        grade_into(config.out, list(load_scenario(config.scenario).slo if slos is None else slos), environment)
    except (InputError, OSError) as error:
        print(f"prefixwatch: {error}", file=sys.stderr, flush=True)
        environment.process_exit_code = 2
