"""Targets from a Kubernetes cluster, listed once and then watched with the official client.

The client blocks, so it works in threads of its own; what it brings is applied on the event loop. This module is
imported only when it is asked for: the client is optional and slow to load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import kubernetes.client
import kubernetes.config
from kubernetes.client import ApiException
from kubernetes.watch import Watch
from urllib3.exceptions import HTTPError

from prefixwatch.exporters.discovery.config import KubernetesSdConfig
from prefixwatch.exporters.discovery.kubernetes_objects import Object, pod_targets, service_targets
from prefixwatch.exporters.discovery.provider import DiscoveryError, Found
from prefixwatch.exporters.errors import ExporterError

_ANY_NAMESPACE = ""
_WATCH_SECONDS = 60
"""After this the server ends a watch, and it is begun again."""
_READ_TIMEOUT_SECONDS = _WATCH_SECONDS + 15
_LIST_TIMEOUT_SECONDS = 15
_RETRY_SECONDS = 5.0
_BATCH_SECONDS = 0.1
"""A rollout brings many events at once; they make one change."""

Result = TypeVar("Result")


class KubernetesDiscovery:
    """Keeps what a list returned and what the watches changed since; lists again after any trouble."""

    name = "kubernetes_sd"

    def __init__(self, config: KubernetesSdConfig, retry_seconds: float = _RETRY_SECONDS) -> None:
        """Raises ExporterError when the client isn't installed or finds no cluster."""
        self._config = config
        self._retry_seconds = retry_seconds
        self._api = _core_api(config)
        self._targets_of = pod_targets if config.role == "pod" else service_targets
        self._scopes = config.namespaces.names or (_ANY_NAMESPACE,)
        self._objects: dict[str, dict[str, Object]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._listed: dict[str, str] = {}
        """Scopes that are up to date, with the resource version that they were listed at."""
        self._news = asyncio.Event()

    async def fetch(self) -> Found:
        for scope in self._scopes:
            if scope not in self._listed:
                self._objects[scope], self._listed[scope] = await _in_thread(partial(self._list, scope))
        for scope in self._scopes:
            if scope not in self._watches or self._watches[scope].done():
                self._watches[scope] = asyncio.create_task(self._follow(scope), name=f"watch {self.name} {scope}")
        objects = [thing for scope in self._scopes for thing in self._objects[scope].values()]
        return Found([labels for thing in objects for labels in self._targets_of(thing)])

    async def changed(self) -> None:
        if any(scope not in self._listed for scope in self._scopes):
            await asyncio.sleep(self._retry_seconds)
            return
        try:
            await asyncio.wait_for(self._news.wait(), self._config.refresh_interval)
            await asyncio.sleep(_BATCH_SECONDS)
        except TimeoutError:
            self._listed.clear()
        self._news.clear()

    async def close(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _follow(self, scope: str) -> None:
        """Watch until something goes wrong; then the scope isn't up to date any more and is listed again."""
        loop = asyncio.get_running_loop()

        def deliver(event: dict[str, Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._apply, scope, event)

        with contextlib.suppress(DiscoveryError):  # the list that follows says what is wrong
            while scope in self._listed:
                await _in_thread(partial(self._watch, scope, self._listed[scope], deliver))
        self._listed.pop(scope, None)
        self._news.set()

    def _apply(self, scope: str, event: dict[str, Any]) -> None:
        thing = event["raw_object"]
        metadata = thing.get("metadata") or {}
        if scope in self._listed and metadata.get("resourceVersion"):
            self._listed[scope] = metadata["resourceVersion"]
        if event["type"] == "BOOKMARK":
            return
        if event["type"] == "DELETED":
            self._objects[scope].pop(_key(thing), None)
        else:
            self._objects[scope][_key(thing)] = thing
        self._news.set()

    def _list(self, scope: str) -> tuple[dict[str, Object], str]:
        """Everything in the scope, and the version it is of. Runs in a thread; raises DiscoveryError."""
        with _named_faults(self._config.role):
            timeout = _LIST_TIMEOUT_SECONDS
            response = self._call(scope)(**self._selectors(), _preload_content=False, _request_timeout=timeout)
            document = json.loads(response.data)
        items = document.get("items") or ()
        return {_key(item): item for item in items}, (document.get("metadata") or {}).get("resourceVersion", "")

    def _watch(self, scope: str, version: str, deliver: Callable[[dict[str, Any]], None]) -> None:
        """Deliver events until the server ends the watch. Runs in a thread; raises DiscoveryError."""
        with _named_faults(self._config.role):
            stream = Watch().stream(
                self._call(scope),
                **self._selectors(),
                resource_version=version,
                timeout_seconds=_WATCH_SECONDS,
                _request_timeout=(_LIST_TIMEOUT_SECONDS, _READ_TIMEOUT_SECONDS),
            )
            for event in stream:
                deliver(event)

    def _call(self, scope: str) -> Any:
        """The client's own method: the watch reads from its documentation what it returns."""
        role = self._config.role
        if scope == _ANY_NAMESPACE:
            return getattr(self._api, f"list_{role}_for_all_namespaces")
        method = getattr(self._api, f"list_namespaced_{role}")

        def listing(**options: Any) -> Any:
            return method(scope, **options)

        listing.__doc__ = method.__doc__
        return listing

    def _selectors(self) -> dict[str, str]:
        selector = next(iter(self._config.selectors), None)
        given = {"label_selector": selector.label, "field_selector": selector.field} if selector else {}
        return {name: value for name, value in given.items() if value}


def _key(thing: Object) -> str:
    metadata = thing.get("metadata") or {}
    return f"{metadata.get('namespace')}/{metadata.get('name')}"


def _core_api(config: KubernetesSdConfig) -> Any:
    settings = kubernetes.client.Configuration()
    settings.retries = False  # retries are ours, so that every failure is counted
    try:
        if config.kubeconfig_file:
            kubernetes.config.load_kube_config(str(config.kubeconfig_file), client_configuration=settings)
        else:
            kubernetes.config.load_config(client_configuration=settings)
    except (kubernetes.config.ConfigException, OSError) as error:
        raise ExporterError(
            f"kubernetes_sd_configs: no cluster to ask: {error}; run inside a pod or give kubeconfig_file"
        ) from error
    return kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(settings))


@contextlib.contextmanager
def _named_faults(role: str) -> Iterator[None]:
    """Errors of the client, of its HTTP library and of what a server answers, as DiscoveryError."""
    try:
        yield
    except ApiException as error:
        raise DiscoveryError(f"kubernetes_sd: {_explain(error.status, error.reason, role)}") from error
    except (HTTPError, OSError, ValueError) as error:
        raise DiscoveryError(f"kubernetes_sd: the API server doesn't answer: {str(error)[:200]}") from error


def _explain(status: int, reason: str, role: str) -> str:
    if status == 401:
        return "401: the API server doesn't know these credentials: renew the token or kubeconfig"
    if status == 403:
        return f"403: not allowed to read {role}s: grant get, list and watch on {role}s"
    return f"the API server answers {status} {reason}"


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Like asyncio.to_thread, in a daemon: a watch that waits for its server must not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(result)  # type: ignore[arg-type]  # one is set

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # whatever it is, it is raised again where it is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="kubernetes", daemon=True).start()
    return await done
