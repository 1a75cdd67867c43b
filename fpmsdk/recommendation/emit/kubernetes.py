"""`deploy.yaml`: a Deployment and a Service for the workers of every role.

Source: predict-recommend.md section 10.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from fpmsdk.recommendation.emit.shell import require_one_node
from fpmsdk.recommendation.emit.workers import PORT, SIDE_CHANNEL_PORT, ServingWorker

_MANAGER = "fpmsdk"
# Weights of a large model take long to load: 60 probes of 30 s.
_STARTUP_PROBES, _PROBE_SECONDS = 60, 30


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    # Written out wherever it stands: people edit these files.
    def ignore_aliases(self, data: Any) -> bool:
        return True


def deploy_manifest(
    workers: Sequence[ServingWorker], about: Sequence[str], *, name: str, gpus_per_node: int, image: str
) -> str:
    """The text of `deploy.yaml`.

    Parameters
    ----------
    workers: by role.
    about: lines of its heading.
    name: of the deployment, a DNS label.
    gpus_per_node: of the system.
    image: container image with vLLM.

    Raises
    ------
    OnboardError: a worker takes more GPUs than a node has.
    """
    objects = []
    for worker in workers:
        require_one_node(worker, gpus_per_node)
        objects += [_deployment(worker, name, image), _service(worker, name)]
    lines = list(about)
    if any(worker.transfers_kv for worker in workers):
        lines.append(
            "Put a router for disaggregated prefill in front of the two services; it is not part of this file."
        )
    heading = "".join(f"# {line}\n" for line in lines)
    return heading + str(yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120))


def _labels(worker: ServingWorker, name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/component": worker.role,
        "app.kubernetes.io/managed-by": _MANAGER,
    }


def _deployment(worker: ServingWorker, name: str, image: str) -> dict[str, Any]:
    labels = _labels(worker, name)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{name}-{worker.role}", "labels": labels},
        "spec": {
            "replicas": worker.replicas,
            # GPUs of a worker are free again before its successor starts.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(worker, image)},
        },
    }


def _pod(worker: ServingWorker, image: str) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if worker.is_local:
        volumes.append({"name": "model", "hostPath": {"path": worker.model, "type": "Directory"}})
        mounts.append({"name": "model", "mountPath": worker.model, "readOnly": True})
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_SECONDS}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image,
        "command": ["vllm", "serve", worker.model],
        "args": ["--port", str(PORT), *worker.arguments],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": str(worker.gpus)}},
        "startupProbe": {**health, "failureThreshold": _STARTUP_PROBES},
        "readinessProbe": health,
        "volumeMounts": mounts,
    }
    if worker.transfers_kv:
        container["env"] = [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL_PORT)},
        ]
    return {"containers": [container], "volumes": volumes}


def _service(worker: ServingWorker, name: str) -> dict[str, Any]:
    labels = _labels(worker, name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-{worker.role}", "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
    }
