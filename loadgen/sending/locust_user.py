"""The load generator as a Locust user, for `locust -f loadgen/locustfile.py` and for `loadgen.run`.

One Locust user is the whole schedule: users that wait for answers before they go on are a closed loop, which is what
`--users` and a LoadTestShape ask for (`SessionUser`). Where several processes or machines send the plan (`--processes`,
`--master` and `--worker`) each sends its share and the master merges their request logs: see
`loadgen.sending.distributed`. Locust brings its web page, its statistics and its listeners. In its tables *E2E* rows
end at the last byte and carry the body's true length, *TTFT* rows end at the first token; both count from the
scheduled time.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gevent
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner
from pydantic import ValidationError

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.sending.distributed import Master, Worker, share_of
from prefixwatch.loadgen.sending.load_run import LoadRun, raise_file_limit
from prefixwatch.loadgen.sending.reporter import LocustReporter, grade_into
from prefixwatch.loadgen.sending.run_config import RunConfig
from prefixwatch.loadgen.swarm.session_shares import Share
from prefixwatch.loadgen.swarm.verdict_tab import add_tab
from prefixwatch.loadgen.users import SharedPrefixUser, connect_users

WRITE_SECONDS = 10.0
"""How long a stopped test waits for the request log to be written."""


# Locust's hooks carry no types.
_events: Any = events


class PlanUser(User):
    """The whole plan of a run."""

    fixed_count = 1
    wait_time = constant(0)
    load_run: ClassVar[LoadRun | None] = None
    """The prepared run that this process sends by itself."""
    master: ClassVar[Master | None] = None
    write_failure: ClassVar[str] = ""
    """Why the last run's log couldn't be written; empty when it was."""

    @task
    def send_plan(self) -> None:
        run = PlanUser.load_run
        if run is not None:
            # In a greenlet of its own: Locust kills its users when a test is stopped, and then the log would be lost.
            sender = gevent.spawn(_send_and_write, run, self.environment)
            sender.join()
            gevent.spawn(_end_test, self.environment)
        gevent.sleep(float("inf"))


class SessionUser(SharedPrefixUser):
    """What `--users` and a LoadTestShape drive in place of the plan: a closed loop of the scenario's sessions."""

    listens = False

    @classmethod
    def run_config(cls, environment: Any, share: Share) -> RunConfig:
        config = _config_from(environment.parsed_options)
        given = environment.parsed_options.nonce
        return config if given else config.model_copy(update={"nonce": share.nonce})

    @classmethod
    def objectives(cls, environment: Any) -> Sequence[str] | None:
        return _slos(environment) or None


def _plays_sessions(environment: Environment) -> bool:
    """Users or their shape were asked for: then they are sessions, and the plan's times aren't kept."""
    options = environment.parsed_options
    return environment.shape_class is not None or (options is not None and options.num_users is not None)


def _slos(environment: Environment) -> list[str]:
    options = environment.parsed_options
    return [name for name in (options.slo if options is not None else "").split(",") if name]


def _send_and_write(run: LoadRun, environment: Environment) -> None:
    try:
        run.send(LocustReporter(environment, run.scenario.name))
        if run.config.out is not None:
            run.write(run.config.out)
            _grade(run.config.out, environment)
    except OSError as error:
        PlanUser.write_failure = f"can't write to {run.config.out}: {error.strerror or error}"
        print(f"prefixwatch: {PlanUser.write_failure}", file=sys.stderr, flush=True)
    finally:
        PlanUser.load_run = None
        run.finished.set()


def _end_test(environment: Environment) -> None:
    """The plan is sent: end a headless Locust, or stop the test and leave its web page up."""
    options, runner = environment.parsed_options, environment.runner
    if runner is None:
        return
    if options is not None and options.headless:
        runner.quit()
    else:
        runner.stop()


def _add_arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("prefixwatch", "Shared-prefix load")

    def add(name: str, default: Any, **more: Any) -> None:
        help_text = RunConfig.model_fields[name].description or ""
        option = "--" + name.replace("_", "-")
        variable = "PREFIXWATCH_" + name.upper()
        group.add_argument(option, env_var=variable, default=default, help=help_text.replace("%", "%%"), **more)

    add("scenario", "shared-prefix")
    add("model_dir", "")
    add("tokenize_url", "")
    add("model", "tiny")
    add("seed", 0, type=int)
    add("nonce", "")
    add("policy", "")
    add("repeat", 0, type=int)
    add("out", "")
    add("tenant_header", "x-tenant-id")
    add("api_key_env", "")
    group.add_argument(
        "--slo",
        env_var="PREFIXWATCH_SLO",
        default="",
        help="SLO documents to grade on, comma-separated; needs --out, and decides the exit code: 0, 1 or 3",
    )


def _config_from(options: Namespace) -> RunConfig:
    names = {
        "scenario",
        "model_dir",
        "tokenize_url",
        "model",
        "seed",
        "nonce",
        "policy",
        "repeat",
        "out",
        "tenant_header",
    }
    names |= {"api_key_env"}
    given = {name: getattr(options, name) for name in names if getattr(options, name) not in {"", None}}
    return RunConfig(target=options.host or "", **given)


def _connect(environment: Environment, **_: Any) -> None:
    """In a test of several processes: listen to the master, or to the workers."""
    runner = environment.runner
    if PlanUser not in environment.user_classes:
        return  # a file with users of its own
    if isinstance(runner, WorkerRunner):
        environment.user_classes.append(SessionUser)  # the master says which of them spawn
        connect_users(environment)
    elif _plays_sessions(environment):
        raise_file_limit()
        environment.user_classes[:] = [SessionUser]
        connect_users(environment)
        return
    add_tab(environment)
    if isinstance(runner, WorkerRunner):
        raise_file_limit()
        reporter = LocustReporter(environment, _scenario_name(environment))
        Worker(runner, _prepare_share, reporter)
    elif isinstance(runner, MasterRunner):
        PlanUser.master = Master(runner)


def _grade(folder: Path, environment: Environment) -> None:
    """By the SLO documents of --slo; not at all without."""
    slos = _slos(environment)
    if not slos:
        return
    try:
        grade_into(folder, slos, environment)
    except InputError as error:
        _refuse(environment, str(error))


def _scenario_name(environment: Environment) -> str:
    options = environment.parsed_options
    return Path(options.scenario).stem if options is not None else "prefixwatch"


def _prepare_share(config: RunConfig, position: int, count: int) -> LoadRun:
    return LoadRun.prepare(config, lambda plan: share_of(plan, position, count))


def _lead(environment: Environment, master: Master, config: RunConfig) -> None:
    try:
        report = master.run(config)
    except InputError as error:
        _refuse(environment, str(error))
        return
    for reason in report["reasons"]:
        print(f"prefixwatch: not valid: {reason}", file=sys.stderr, flush=True)
    if config.out is not None:
        _grade(config.out, environment)
    gevent.spawn(_end_test, environment)


def _prepare(environment: Environment, **_: Any) -> None:
    """Plan the run when a test starts, so that each test from the web page has prompts of its own."""
    options = environment.parsed_options
    if options is None or isinstance(environment.runner, WorkerRunner):  # run.py, or the master, sees to it
        return
    raise_file_limit()
    if options.slo and not options.out:
        _refuse(environment, "--slo needs --out: the results are written there")
        return
    if SessionUser in environment.user_classes:
        return
    try:
        config = _config_from(options)
        if PlanUser.master is not None:
            gevent.spawn(_lead, environment, PlanUser.master, config)
            return
        PlanUser.load_run = LoadRun.prepare(config)
    except ValidationError as error:
        fields = ", ".join("--" + str(e["loc"][0]).replace("_", "-") for e in error.errors())
        _refuse(environment, f"missing or wrong: {fields}: see locust -f loadgen/locustfile.py --help")
    except InputError as error:
        _refuse(environment, str(error))


def _stop_run(environment: Environment, **_: Any) -> None:
    """The test is stopped, by a person, a time limit or because the plan is sent: log what there is."""
    run, master = PlanUser.load_run, PlanUser.master
    if master is not None and master.running:
        master.stop()
        master.finished.wait(WRITE_SECONDS)
    elif run is not None and run.started:
        run.stop()
        run.finished.wait(WRITE_SECONDS)


def _refuse(environment: Environment, message: str) -> None:
    """Say what is wrong and end with exit code 2."""
    print(f"prefixwatch: {message}", file=sys.stderr, flush=True)
    environment.process_exit_code = 2
    gevent.spawn(_end_test, environment)


_events.init_command_line_parser.add_listener(_add_arguments)
_events.init.add_listener(_connect)
_events.test_start.add_listener(_prepare)
_events.test_stopping.add_listener(_stop_run)
