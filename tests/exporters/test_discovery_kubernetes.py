"""Targets from a Kubernetes cluster: the official client against a small API server, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from prefixwatch.exporters.discovery.config import KubernetesSdConfig
from prefixwatch.exporters.discovery.job import provider_for
from prefixwatch.exporters.discovery.kubernetes import KubernetesDiscovery
from prefixwatch.exporters.discovery.kubernetes_objects import pod_targets, service_targets
from prefixwatch.exporters.discovery.provider import DiscoveryError
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.scraping.scrape import Scraper

TOKEN = "t0ken-of-the-exporter"


def pod(name: str, ip: str = "10.0.0.1", phase: str = "Running", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "llm", "uid": f"uid-{name}", "labels": labels or {"app": "vllm"}},
        "spec": {
            "nodeName": "node-1",
            "containers": [{"name": "vllm", "image": "vllm:1", "ports": [{"name": "http", "containerPort": 8000}]}],
        },
        "status": {"podIP": ip, "phase": phase, "conditions": [{"type": "Ready", "status": "True"}]},
    }


class ApiServer:
    """Lists and watches pods; versions count up with each change."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.status = 200
        self.lists = 0
        self.queries: list[dict[str, str]] = []
        self.watches: set[web.StreamResponse] = set()
        self.watched = asyncio.Event()
        self._requests: set[asyncio.Task[Any]] = set()

    async def pods_handler(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"reason": "Unauthorized"}, status=401)
        if self.status != 200:
            return web.json_response({"reason": "x"}, status=self.status)
        self.queries.append(dict(request.query))
        if request.query.get("watch") in ("true", "True"):
            return await self._watch(request)
        self.lists += 1
        items = list(self.pods.values())
        return web.json_response(
            {"kind": "PodList", "metadata": {"resourceVersion": str(self.version)}, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.watches.add(response)
        self.watched.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.watches.discard(response)
        return response

    async def send(self, kind: str, thing: dict[str, Any]) -> None:
        self.version += 1
        name = thing.get("metadata", {}).get("name", "")
        if kind == "DELETED":
            self.pods.pop(name)
        elif kind in ("ADDED", "MODIFIED"):
            self.pods[name] = thing
        if "metadata" in thing:
            thing = {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(self.version)}}
        for watch in self.watches:
            await watch.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")

    async def drop_watches(self) -> None:
        """As a load balancer that is restarted does."""
        self.watched.clear()
        for watch in list(self.watches):
            transport = watch._req.transport  # type: ignore[union-attr]  # there is no public way to cut it
            assert transport is not None
            transport.abort()


@pytest.fixture
async def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def discovery(api: ApiServer, tmp_path: Path) -> AsyncIterator[KubernetesDiscovery]:
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/llm/pods", api.pods_handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = kubeconfig(tmp_path, f"http://127.0.0.1:{runner.addresses[0][1]}")
    one = KubernetesDiscovery(config, retry_seconds=0.01)
    yield one
    await one.close()
    await runner.cleanup()


def kubeconfig(folder: Path, server: str) -> KubernetesSdConfig:
    file = folder / "kubeconfig"
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
    }
    file.write_text(yaml.safe_dump(document))
    return KubernetesSdConfig.model_validate(
        {
            "role": "pod",
            "namespaces": {"names": ["llm"]},
            "selectors": [{"role": "pod", "label": "app=vllm"}],
            "kubeconfig_file": str(file),
        }
    )


async def names(discovery: KubernetesDiscovery) -> list[str]:
    return sorted(labels["__meta_kubernetes_pod_name"] for labels in (await discovery.fetch()).targets)


async def changed(discovery: KubernetesDiscovery) -> None:
    await asyncio.wait_for(discovery.changed(), 20)


async def test_pods_are_listed_by_label_then_watched(api: ApiServer, discovery: KubernetesDiscovery) -> None:
    api.pods["a"] = pod("a")
    assert await names(discovery) == ["a"]
    await asyncio.wait_for(api.watched.wait(), 20)
    await api.send("ADDED", pod("b", "10.0.0.2"))
    await changed(discovery)
    assert await names(discovery) == ["a", "b"]
    await api.send("DELETED", pod("a"))
    await changed(discovery)
    assert await names(discovery) == ["b"]
    assert api.lists == 1
    assert all(query["labelSelector"] == "app=vllm" for query in api.queries)
    assert api.queries[1]["resourceVersion"] == "100"


async def test_a_version_that_is_too_old_is_listed_anew(api: ApiServer, discovery: KubernetesDiscovery) -> None:
    api.pods["a"] = pod("a")
    await discovery.fetch()
    await asyncio.wait_for(api.watched.wait(), 20)
    api.pods["b"] = pod("b")
    await api.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
    await changed(discovery)
    assert await names(discovery) == ["a", "b"]
    assert api.lists == 2


async def test_a_lost_connection_is_listed_anew(api: ApiServer, discovery: KubernetesDiscovery) -> None:
    api.pods["a"] = pod("a")
    await discovery.fetch()
    await asyncio.wait_for(api.watched.wait(), 20)
    api.pods["b"] = pod("b")
    await api.drop_watches()
    await changed(discovery)
    assert await names(discovery) == ["a", "b"]


@pytest.mark.parametrize(("status", "remedy"), [(401, "renew the token"), (403, "grant get, list and watch on pods")])
async def test_refused_credentials_name_the_remedy(
    api: ApiServer, discovery: KubernetesDiscovery, status: int, remedy: str
) -> None:
    api.status = status
    with pytest.raises(DiscoveryError, match=f"{status}.*{remedy}"):
        await discovery.fetch()
    api.status = 200
    await changed(discovery)
    assert await names(discovery) == []


async def test_no_server_is_an_error_that_says_so(tmp_path: Path) -> None:
    discovery = KubernetesDiscovery(kubeconfig(tmp_path, "http://127.0.0.1:1"))
    with pytest.raises(DiscoveryError, match="API server doesn't answer"):
        await discovery.fetch()


def test_a_pod_s_port_is_a_target_with_prometheus_labels() -> None:
    (labels,) = pod_targets(pod("a", **{"app.kubernetes.io/name": "vllm"}))
    assert labels["__address__"] == "10.0.0.1:8000"
    assert {
        "__meta_kubernetes_namespace": "llm",
        "__meta_kubernetes_pod_name": "a",
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": "vllm",
        "__meta_kubernetes_pod_labelpresent_app_kubernetes_io_name": "true",
        "__meta_kubernetes_pod_container_port_name": "http",
        "__meta_kubernetes_pod_node_name": "node-1",
        "__meta_kubernetes_pod_ready": "true",
    }.items() <= labels.items()


@pytest.mark.parametrize("gone", [pod("a", ip=""), pod("a", phase="Failed"), pod("a", phase="Succeeded")])
def test_a_pod_without_address_or_that_ended_is_no_target(gone: dict[str, Any]) -> None:
    assert pod_targets(gone) == []


def test_a_sidecar_that_keeps_running_is_a_target_and_an_init_container_is_not() -> None:
    one = pod("a")
    port = {"ports": [{"containerPort": 8200}]}
    one["spec"]["initContainers"] = [
        {"name": "routing-proxy", "restartPolicy": "Always", **port},
        {"name": "download", **port},
    ]
    assert [labels["__meta_kubernetes_pod_container_name"] for labels in pod_targets(one)] == ["vllm", "routing-proxy"]


def test_a_service_s_port_is_a_target_by_its_dns_name() -> None:
    service = {"metadata": {"name": "epp", "namespace": "llm"}, "spec": {"ports": [{"name": "metrics", "port": 9090}]}}
    (labels,) = service_targets(service)
    assert labels["__address__"] == "epp.llm.svc:9090"
    assert labels["__meta_kubernetes_service_port_name"] == "metrics"


async def test_without_the_client_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "prefixwatch.exporters.discovery.kubernetes")
    scraper = Scraper(1.0, 1)
    with pytest.raises(ExporterError, match=r"pip install 'prefixwatch\[kubernetes\]'"):
        provider_for(KubernetesSdConfig(role="pod"), scraper)
    await scraper.close()
