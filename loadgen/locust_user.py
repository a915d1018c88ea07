"""The load generator as a Locust user, for `locust -f loadgen/locustfile.py` and for `loadgen.run`.

One Locust user is the whole schedule: users that wait for answers before they go on would be a closed loop. Where
several processes or machines send it (`--processes`, `--master` and `--worker`) each sends its share of the plan and
the master merges their request logs: see `loadgen.distributed`. Locust brings its web page, its statistics and its
listeners. In its tables *E2E* rows end at the last byte and carry the body's true length, *TTFT* rows end at the
first token; both count from the scheduled time.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

import gevent
import locust.stats
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner
from pydantic import ValidationError

from documents import DocumentError
from kvcache.tokenizer import TokenizerError
from loadgen.answer_reader import Exchange
from loadgen.distributed import DistributedError, Master, Worker, share_of
from loadgen.load_run import LoadRun, UnreachableError, raise_file_limit
from loadgen.prompts import PromptError
from loadgen.records import Outcome, RequestRecord
from loadgen.run_config import RunConfig, RunConfigError
from loadgen.secret_headers import SecretError

INPUT_ERRORS = (
    DocumentError,
    TokenizerError,
    PromptError,
    SecretError,
    UnreachableError,
    RunConfigError,
    ValueError,
)
"""What `LoadRun.prepare` raises for input that has to be put right."""

SHAPE_REFUSED = (
    "a LoadTestShape has nothing to shape here: it sets the number of users, and the plan sends each request at its "
    "time whatever that is. Put the shape into the scenario as arrivals.stages or arrivals.diurnal (docs/scenarios.md)"
)
WRITE_SECONDS = 10.0
"""How long a stopped test waits for the request log to be written."""


def _exact_bucket(response_time: float) -> float:
    """Locust's key for counting equal times: tenths of a millisecond, where its own keeps two digits.

    Rounded down, so that no percentile passes the maximum.
    """
    return math.floor(response_time * 10.0) / 10.0


# Locust's hooks carry no types.
_events: Any = events
_stats: Any = locust.stats

# Locust documents this name as the place to change how it rounds.
_stats.bucket_response_time = _exact_bucket


class RequestNotGoodError(Exception):
    """How Locust's failure table names a request that didn't complete."""


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
            sender = gevent.spawn(_send_and_write, run, LocustReporter(self.environment, run.scenario.name))
            sender.join()
            gevent.spawn(_end_test, self.environment)
        gevent.sleep(float("inf"))


def _send_and_write(run: LoadRun, reporter: LocustReporter) -> None:
    try:
        run.send(reporter)
        if run.config.out is not None:
            run.write(run.config.out)
    except OSError as error:
        PlanUser.write_failure = f"can't write to {run.config.out}: {error.strerror or error}"
        print(f"prefixwatch: {PlanUser.write_failure}", file=sys.stderr, flush=True)
    finally:
        PlanUser.load_run = None
        run.finished.set()


class LocustReporter:
    """Tells Locust's statistics of each ended request."""

    def __init__(self, environment: Environment, name: str) -> None:
        self._stats: Any = environment.stats
        self._fire: Any = environment.events.request.fire
        self._name = name

    def __call__(self, record: RequestRecord, exchange: Exchange) -> None:
        if record.phase != "measured" or record.end_s is None:
            return
        if record.ttft_s is not None:
            # Past the request event, which would count this request a second time in the Aggregated row.
            self._stats.get(self._name, "TTFT").log(record.ttft_s * 1000.0, 0)
        failure = None
        if record.outcome is not Outcome.COMPLETED:
            failure = RequestNotGoodError(f"{record.outcome.value}: {record.error}")
        self._fire(
            request_type="E2E",
            name=self._name,
            response_time=(record.end_s - record.scheduled_s) * 1000.0,
            response_length=exchange.body_bytes,
            exception=failure,
            context={"tenant": record.tenant, "group": record.group},
        )


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
    if isinstance(runner, WorkerRunner):
        raise_file_limit()
        reporter = LocustReporter(environment, _scenario_name(environment))
        Worker(runner, _prepare_share, reporter, (*INPUT_ERRORS, ValidationError))
    elif isinstance(runner, MasterRunner):
        PlanUser.master = Master(runner)


def _scenario_name(environment: Environment) -> str:
    options = environment.parsed_options
    return Path(options.scenario).stem if options is not None else "prefixwatch"


def _prepare_share(config: RunConfig, position: int, count: int) -> LoadRun:
    return LoadRun.prepare(config, lambda plan: share_of(plan, position, count))


def _lead(environment: Environment, master: Master, config: RunConfig) -> None:
    try:
        report = master.run(config)
    except (DistributedError, RunConfigError) as error:
        _refuse(environment, str(error))
        return
    for reason in report["reasons"]:
        print(f"prefixwatch: not valid: {reason}", file=sys.stderr, flush=True)
    gevent.spawn(_end_test, environment)


def _prepare(environment: Environment, **_: Any) -> None:
    """Plan the run when a test starts, so that each test from the web page has prompts of its own."""
    options = environment.parsed_options
    if options is None or isinstance(environment.runner, WorkerRunner):  # run.py, or the master, sees to it
        return
    if environment.shape_class is not None:
        _refuse(environment, SHAPE_REFUSED)
        return
    raise_file_limit()
    try:
        config = _config_from(options)
        if PlanUser.master is not None:
            gevent.spawn(_lead, environment, PlanUser.master, config)
            return
        PlanUser.load_run = LoadRun.prepare(config)
    except ValidationError as error:
        fields = ", ".join("--" + str(e["loc"][0]).replace("_", "-") for e in error.errors())
        _refuse(environment, f"missing or wrong: {fields}: see locust -f loadgen/locustfile.py --help")
    except INPUT_ERRORS as error:
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
