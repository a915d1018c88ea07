"""One headless run sent by several processes: this one leads as Locust's master, the others are its workers.

The workers are processes of this machine that the master starts, or, with `locust_master`, Locust workers anywhere
that connect to it (`locust -f loadgen/locustfile.py --worker --master-host HOST`).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gevent
from locust.env import Environment
from locust.exception import RPCError

from prefixwatch.documents.addresses import host_and_port, host_port
from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.sending.distributed import Master, Worker, share_of
from prefixwatch.loadgen.sending.load_run import LoadRun
from prefixwatch.loadgen.sending.run_config import RunConfig, master_address

CONNECT_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_END_SECONDS = 5.0


class Led:
    """A run of several processes, as `loadgen.sending.headless` drives one."""

    def __init__(self, config: RunConfig) -> None:
        """Raises InputError for an address that can't be listened on."""
        self._config = config
        host, port = master_address(config.locust_master)
        try:
            socket.getaddrinfo(host, port)  # Locust prints why a name can't be resolved where our progress goes
            self._runner: Any = Environment(user_classes=[]).create_master_runner(host, port)
        except (OSError, ValueError, RPCError, SystemExit) as error:  # Locust exits where the port is taken
            raise InputError(f"locust_master: can't listen on {host}:{port}: name a free port as HOST:PORT") from error
        self._host, self._port = host, self._runner.server.port
        self._master = Master(self._runner)

    def send(self) -> dict[str, Any]:
        """Return run.json's content. Raises InputError where workers don't come, or can't do their part."""
        with self._own_workers():
            self._await_workers()
            return self._master.run(self._config)

    def stop(self) -> None:
        """End the run now; what the workers have is logged."""
        self._master.stop()

    def progress(self) -> dict[str, Any]:
        """How far the run is, by what the workers said last."""
        return self._master.progress()

    def _await_workers(self) -> None:
        wanted, begun = self._config.processes, time.monotonic()
        while len(self._runner.clients.ready) < wanted:
            if time.monotonic() - begun > CONNECT_SECONDS:
                raise InputError(
                    f"{len(self._runner.clients.ready)} of {wanted} workers connected to {self._host}:{self._port} in "
                    f"{CONNECT_SECONDS:.0f} s: start them with `locust -f loadgen/locustfile.py --worker --master-host "
                    f"{self._host} --master-port {self._port}`"
                )
            gevent.sleep(_LOOK_SECONDS)

    @contextmanager
    def _own_workers(self) -> Iterator[None]:
        """Processes of this machine, unless workers come from elsewhere."""
        count = 0 if self._config.locust_master else self._config.processes
        command = [sys.executable, "-P", "-m", "prefixwatch.loadgen.run", "--worker", host_port(self._host, self._port)]
        workers = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) for _ in range(count)]
        try:
            yield
        finally:
            self._runner.quit()
            for worker in workers:
                try:
                    worker.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    worker.wait()


def work_for(address: str) -> None:
    """Be a worker of the master at HOST:PORT, until it says that all is done."""
    runner = Environment(user_classes=[]).create_worker_runner(*host_and_port(address))
    Worker(runner, _prepare_share, lambda record, exchange: None)
    runner.greenlet.join()


def _prepare_share(config: RunConfig, position: int, count: int) -> LoadRun:
    return LoadRun.prepare(config, lambda plan: share_of(plan, position, count))
