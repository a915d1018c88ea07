"""Independent runs on all cores of this machine or of a Ray cluster, with results in the order of the tasks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from prefixwatch.stack.errors import UsageError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def run_all(
    run: Callable[[_Task], _Result], tasks: Sequence[_Task], *, processes: int, ray_address: str | None = None
) -> list[_Result]:
    """`run` of each task. `ray_address` is a cluster's (`ray://HOST:10001`, `HOST:6379`, `auto`, `local`), whose nodes
    must have the same version of this package and find the same files. Raises UsageError where it can't be reached.
    """
    if ray_address is not None:
        return _on_ray(run, tasks, ray_address)
    if processes == 1 or len(tasks) == 1:
        return [run(task) for task in tasks]
    # Not forked: threads of this process may hold locks.
    with ProcessPoolExecutor(min(processes, len(tasks)), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(run, tasks))


def _on_ray(run: Callable[[_Task], _Result], tasks: Sequence[_Task], address: str) -> list[_Result]:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address == "local" else None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"--ray {address}: {reason}: give the address of a running cluster, such as ray://HOST:10001"
        ) from error
    try:
        remote = ray.remote(run)
        results: list[_Result] = ray.get([remote.remote(task) for task in tasks])
        return results
    finally:
        ray.shutdown()
