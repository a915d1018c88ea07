"""From pods and services, as the Kubernetes API gives them, to label sets with Prometheus' `__meta_kubernetes_…`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prefixwatch.exporters.discovery.relabel import Labels

Object = Mapping[str, Any]

_NOT_IN_A_LABEL_NAME = re.compile(r"[^a-zA-Z0-9_]")
_PREFIX = "__meta_kubernetes_"
_ENDED = ("Succeeded", "Failed")


def pod_targets(pod: Object) -> list[Labels]:
    """One target a port of each container that runs beside the others; none for a pod without address or that ended."""
    status = pod.get("status") or {}
    address = status.get("podIP")
    if not address or status.get("phase") in _ENDED:
        return []
    common = _pod_labels(pod, status)
    host = f"[{address}]" if ":" in address else address
    targets: list[Labels] = []
    for container, init in _containers(pod.get("spec") or {}):
        own = {
            f"{_PREFIX}pod_container_name": container.get("name", ""),
            f"{_PREFIX}pod_container_image": container.get("image", ""),
            f"{_PREFIX}pod_container_init": _text(init),
        }
        targets.extend(common | own | _port(port, host) for port in container.get("ports") or ())
        if not container.get("ports"):
            targets.append(common | own | {"__address__": host})
    return targets


def _port(port: Object, host: str) -> Labels:
    number = port["containerPort"]
    return {
        f"{_PREFIX}pod_container_port_name": port.get("name", ""),
        f"{_PREFIX}pod_container_port_number": str(number),
        f"{_PREFIX}pod_container_port_protocol": port.get("protocol", "TCP"),
        "__address__": f"{host}:{number}",
    }


def service_targets(service: Object) -> list[Labels]:
    """One target a port, by the service's name in the cluster's DNS."""
    metadata, spec = service.get("metadata") or {}, service.get("spec") or {}
    common = {
        f"{_PREFIX}namespace": metadata.get("namespace", ""),
        f"{_PREFIX}service_name": metadata.get("name", ""),
        f"{_PREFIX}service_type": spec.get("type", ""),
        f"{_PREFIX}service_cluster_ip": spec.get("clusterIP", ""),
        **_described(metadata, "service"),
    }
    host = f"{metadata.get('name')}.{metadata.get('namespace')}.svc"
    return [
        common
        | {
            f"{_PREFIX}service_port_name": port.get("name", ""),
            f"{_PREFIX}service_port_number": str(port["port"]),
            f"{_PREFIX}service_port_protocol": port.get("protocol", "TCP"),
            "__address__": f"{host}:{port['port']}",
        }
        for port in spec.get("ports") or ()
    ]


def _pod_labels(pod: Object, status: Object) -> Labels:
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    ready = [entry.get("status", "") for entry in status.get("conditions") or () if entry.get("type") == "Ready"]
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    return {
        f"{_PREFIX}namespace": metadata.get("namespace", ""),
        f"{_PREFIX}pod_name": metadata.get("name", ""),
        f"{_PREFIX}pod_uid": metadata.get("uid", ""),
        f"{_PREFIX}pod_ip": status.get("podIP", ""),
        f"{_PREFIX}pod_host_ip": status.get("hostIP", ""),
        f"{_PREFIX}pod_phase": status.get("phase", ""),
        f"{_PREFIX}pod_ready": ready[0].lower() if ready else "unknown",
        f"{_PREFIX}pod_node_name": spec.get("nodeName", ""),
        f"{_PREFIX}pod_controller_kind": owners[0].get("kind", "") if owners else "",
        f"{_PREFIX}pod_controller_name": owners[0].get("name", "") if owners else "",
        **_described(metadata, "pod"),
    }


def _containers(spec: Object) -> Iterator[tuple[Object, bool]]:
    """The containers that serve, and whether each is a sidecar: an init container that is kept running."""
    for container in spec.get("containers") or ():
        yield container, False
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            yield container, True


def _described(metadata: Object, role: str) -> Labels:
    """Labels and annotations, and that they are there: an empty value counts as no label."""
    found = {}
    for kind in ("label", "annotation"):
        for name, value in (metadata.get(f"{kind}s") or {}).items():
            safe = _NOT_IN_A_LABEL_NAME.sub("_", name)
            found[f"{_PREFIX}{role}_{kind}_{safe}"] = value
            found[f"{_PREFIX}{role}_{kind}present_{safe}"] = "true"
    return found


def _text(flag: bool) -> str:
    return "true" if flag else "false"
