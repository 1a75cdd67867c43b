"""The Kubernetes objects that reserve the GPUs of a cell and wait to be told what to run.

Source: collector.md section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.collect.deployment_inputs import SECTION, merged
from fpmsdk.collect.executor import CellLaunch
from fpmsdk.collect.paths import RESULTS
from fpmsdk.errors import OnboardError

CONTAINER = "fpm-resource"
LABELS = "aiconfigurator.nvidia.com"
CELL_LABEL = f"{LABELS}/cell"
_SHARED_MEMORY = "64Gi"
_LONGEST_NAME = 50


def manifest_text(launch: CellLaunch, deployment: Mapping[str, Any]) -> str:
    """The YAML of one Pod, LeaderWorkerSet or PodCliqueSet.

    Raises
    ------
    OnboardError: a label that names another cell.
    """
    import yaml

    section = deployment.get(SECTION) or {}
    document = _workload(launch, section)
    return str(yaml.safe_dump(document, sort_keys=False))


def _workload(launch: CellLaunch, section: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{launch.cell.cell_id}-agg"[:_LONGEST_NAME]
    labels = _labels(launch, section, name)
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if section.get("k8s_namespace"):
        metadata["namespace"] = section["k8s_namespace"]
    pod = _pod_spec(launch, section)
    if launch.num_nodes == 1:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
    if (section.get("fpm_orchestrator") or "lws") == "grove":
        clique = {
            "name": "worker",
            "labels": labels,
            "spec": {"roleName": "worker", "replicas": launch.num_nodes, "podSpec": pod},
        }
        return {
            "apiVersion": "grove.io/v1alpha1",
            "kind": "PodCliqueSet",
            "metadata": metadata,
            "spec": {"replicas": 1, "template": {"cliques": [clique]}},
        }
    template = {
        "size": launch.num_nodes,
        "restartPolicy": "None",
        "workerTemplate": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": template,
        },
    }


def _labels(launch: CellLaunch, section: Mapping[str, Any], name: str) -> dict[str, str]:
    own = {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/component": CONTAINER,
        f"{LABELS}/owned-by": "fpm-forward-collector",
        f"{LABELS}/plan": launch.plan.sha256[:16],
        CELL_LABEL: launch.cell.cell_id,
    }
    labels = {**own, **(section.get("fpm_resource_labels") or {})}
    if labels[CELL_LABEL] != launch.cell.cell_id:
        # Pods are selected by this label: with another one a cell would take over, or lose, those of another cell.
        raise OnboardError(
            f"fpm_resource_labels: {CELL_LABEL} must be {launch.cell.cell_id}, found {labels[CELL_LABEL]!r}; remove it",
            "fpm_resource_labels",
        )
    return labels


def _pod_spec(launch: CellLaunch, section: Mapping[str, Any]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "results", "emptyDir": {}},
        {
            "name": "dshm",
            "emptyDir": {"medium": "Memory", "sizeLimit": section.get("fpm_shared_memory_size") or _SHARED_MEMORY},
        },
    ]
    mounts = [{"name": "results", "mountPath": RESULTS}, {"name": "dshm", "mountPath": "/dev/shm"}]
    # A volume is mounted when both its name and its place are known.
    if section.get("k8s_pvc_name") and section.get("k8s_pvc_mount_path"):
        volumes.append({"name": "model-cache", "persistentVolumeClaim": {"claimName": section["k8s_pvc_name"]}})
        mounts.append({"name": "model-cache", "mountPath": section["k8s_pvc_mount_path"]})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": section.get("k8s_image"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-lc"],
        "args": ["exec sleep infinity"],
        "resources": {"limits": {"nvidia.com/gpu": str(launch.gpus_per_node)}},
        "volumeMounts": mounts,
    }
    if section.get("k8s_hf_home"):
        container["env"] = [{"name": "HF_HOME", "value": section["k8s_hf_home"]}]
    if container["image"] is None:
        del container["image"]
    pod: dict[str, Any] = {"containers": [container], "volumes": volumes, "restartPolicy": "Always"}
    if section.get("k8s_image_pull_secret"):
        pod["imagePullSecrets"] = [{"name": section["k8s_image_pull_secret"]}]
    return merged(pod, section.get("worker_extra_pod_spec") or {})
