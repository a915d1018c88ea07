"""One run of the load generator in this process: prepare, send, watch itself, write what it saw."""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

from prefixwatch.documents.errors import InputError
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.client.answer_reader import Exchange
from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.plan.approximate_tokenizer import ApproximateTokenizer
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.plan.request import Plan
from prefixwatch.loadgen.request_log.records import RequestRecord, write_requests
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.loadgen.scenario.secrets import bearer, filled_in, keys_in, with_secrets, without_keys
from prefixwatch.loadgen.sending.answers import GeneratedAnswers
from prefixwatch.loadgen.sending.calibration import Calibration, calibrate
from prefixwatch.loadgen.sending.client_check import ClientLoad, check_client
from prefixwatch.loadgen.sending.open_loop import OpenLoop, RequestOptions
from prefixwatch.loadgen.sending.progress import Progress
from prefixwatch.loadgen.sending.run_config import RunConfig
from prefixwatch.loadgen.sending.served_tokenizer import ServedTokenizer

LOOP_SAMPLE_SECONDS = 0.1
RUN_SCHEMA = 1

EndListener = Callable[[RequestRecord, Exchange], None]


class LoadRun:
    """One run. `prepare` decides everything before the first byte; `send` blocks until the last answer."""

    def __init__(
        self,
        config: RunConfig,
        scenario: Scenario,
        plan: Plan,
        target: Target,
        answers: GeneratedAnswers | None = None,
    ) -> None:
        self.config = config
        self.scenario = scenario
        self.plan = plan
        self.started = False
        self.finished = Event()
        """Set when everything has been sent, answered and, if `out` is given, written."""
        self._progress = Progress()
        self._loop_lag_seconds: list[float] = []
        self._cpu_share = 0.0
        self._calibration: Calibration | None = None
        self._listener: EndListener = lambda record, exchange: None
        self._client = HttpClient(target, scenario.timeouts)
        headers = {**config.headers, **bearer(config.api_key_env)}
        self._keys = keys_in([headers, *(request.headers for request in plan.requests)])
        options = RequestOptions(
            model=config.model,
            policy=config.policy,
            repeat=config.repeat,
            tenant_header=config.tenant_header,
            session_header=config.session_header,
            session_suffix=config.sent_session_suffix,
            headers=headers,
            extra_body=scenario.extra_body,
        )
        self._answers = answers
        self._loop = OpenLoop(plan, self._client, options, on_end=self._on_end, answers=answers)

    @classmethod
    def prepare(cls, config: RunConfig, share: Callable[[Plan], Plan] = lambda plan: plan) -> LoadRun:
        """Read the scenario, plan all prompts, see that the target is there and the output folder can be.

        `share` takes out of the plan the part that this process sends, where several send it together.
        Raises InputError.
        """
        target = Target.parse(config.target)
        scenario = load_scenario(config.scenario)
        writer = writer_for(config, scenario)
        plan = make_plan(scenario, writer, seed=config.seed, nonce=config.nonce, model=config.model)
        plan = share(with_secrets(plan))
        make_folder(config.out)
        answers = GeneratedAnswers(plan, writer.encode) if plan.answers == "generated" else None
        run = cls(config, scenario, plan, target, answers)
        try:
            run._client.connect_once()
        except OSError as error:
            raise InputError(
                f"nothing answers at {config.target} ({error.strerror or error}): start the router or engine first, "
                f"or correct the target"
            ) from error
        return run

    def send(self, listener: EndListener) -> None:
        """Send the plan; `listener` hears of every ended request, when it ends."""
        self.prime()
        self.measure(listener)

    def prime(self) -> None:
        """Find out what the client itself adds, and send the prime phase."""
        self.started = True
        self._calibration = calibrate()
        # What exists by now lives to the end: a collector that walks it would only delay stamps.
        gc.freeze()
        self._loop.prime()

    def measure(self, listener: EndListener) -> None:
        """Send the measured phase, and watch this process meanwhile."""
        self._listener = listener
        watcher = gevent.spawn(self._watch_loop)
        cpu, wall = time.process_time(), time.monotonic()
        drain = self.config.drain_seconds
        self._loop.measure(self.scenario.timeouts.total_seconds if drain is None else drain)
        self._cpu_share = (time.process_time() - cpu) / max(time.monotonic() - wall, 1e-9)
        watcher.kill()
        self._client.close()

    def stop(self) -> None:
        """End the run now; `send` returns with every request logged."""
        self._loop.stop()

    def progress(self) -> dict[str, Any]:
        """How far the run is, as one flat map; what isn't known yet is None."""
        zero = self._loop.zero
        return {
            "phase": "prime" if zero is None else "measured",
            "elapsed_s": None if zero is None else round(time.monotonic() - zero, 3),
            "planned": len(self.plan.requests),
            "sent": self._progress.ended + self._loop.in_flight,
            "in_flight": self._loop.in_flight,
            **self._progress.figures(),
        }

    @property
    def records(self) -> list[RequestRecord]:
        return self._loop.records

    def report(self) -> dict[str, Any]:
        """What `run.json` says: which run this was and whether the client did its part."""
        zero = self._loop.zero
        load = ClientLoad(
            loop_lag_seconds=self._loop_lag_seconds,
            cpu_share=self._cpu_share,
            in_flight_max=self._loop.in_flight_max,
            stopped=self._loop.stopped,
            calibration=self._calibration,
        )
        check = check_client(self.records, load, lag_limit_ms=self.config.lag_limit_ms)
        return {
            "schema": RUN_SCHEMA,
            "scenario": self.scenario.name,
            "policy": self.config.policy,
            "repeat": self.config.repeat,
            "seed": self.plan.seed,
            "nonce": self.plan.nonce,
            "model": self.config.model,
            "target": self.config.target,
            "loop": self.plan.loop,
            "concurrency": self.plan.concurrency,
            "answers": self.plan.answers,
            "prompts": "approximate" if self.config.approximate_prompts else "exact",
            "retokenization_loss_tokens": None if self._answers is None else self._answers.lost_tokens,
            "zero_unix_seconds": None if zero is None else time.time() - (time.monotonic() - zero),
            **check,
        }

    def write(self, folder: Path) -> None:
        """Write `requests.parquet` and `run.json`."""
        write_run(folder, self.records, self.report())

    def _on_end(self, record: RequestRecord, exchange: Exchange) -> None:
        record.error = without_keys(record.error, self._keys)
        self._progress.add(record)
        self._listener(record, exchange)

    def _watch_loop(self) -> None:
        while True:
            before = time.monotonic()
            gevent.sleep(LOOP_SAMPLE_SECONDS)
            self._loop_lag_seconds.append(max(0.0, time.monotonic() - before - LOOP_SAMPLE_SECONDS))


def writer_for(config: RunConfig, scenario: Scenario) -> PromptWriter:
    """The source of token counts: the model's folder, or an engine that serves the model.

    Raises InputError, also for traffic that only the folder can count."""
    if config.approximate_prompts:
        return PromptWriter(ApproximateTokenizer())
    if config.model_dir is not None:
        return PromptWriter(Tokenizer(config.model_dir))
    answers = scenario.replay.answers if scenario.replay is not None else scenario.sessions.answers
    if answers == "generated":
        raise InputError(
            "answers: generated needs model_dir (--model-dir): turns that carry generated answers are counted while "
            "the run goes on, when nobody else may be asked"
        )
    if config.tokenize_url:  # another server than the target: its key stays at home
        return PromptWriter(ServedTokenizer(config.tokenize_url, config.model))
    headers = filled_in({**config.headers, **bearer(config.api_key_env)})
    return PromptWriter(ServedTokenizer(config.target, config.model, headers=headers))


def write_run(folder: Path, records: Sequence[RequestRecord], report: Mapping[str, Any]) -> None:
    """Write `requests.parquet` and `run.json`."""
    write_requests(folder / "requests.parquet", records)
    (folder / "run.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def make_folder(folder: Path | None) -> None:
    """Now rather than after the run, when it would be lost. Raises InputError."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"can't write to {folder} ({error.strerror}): choose another folder for out") from error


def raise_file_limit() -> None:
    """Allow as many open sockets as the system lets this process have: a lower limit would cap concurrency."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
