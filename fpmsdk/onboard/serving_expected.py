"""What a collection ran with, in the terms in which a serving run is compared with it.

Source: onboarding.md section 8.5 (expected_execution).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fpmsdk.documents.canonical import canonical_bytes, read_document
from fpmsdk.onboard.collection_source import CollectionSource
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.serving_evidence import normalized_runtime

_DIGEST = re.compile(r"(?:^|@)(sha256:[0-9a-f]{64})$")
_OVERRIDES = "generator-overrides.json"


def expected_execution(request: SupportRequest, source: CollectionSource, frozen: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an execution; what not every phase and rank observed alike is None, never guessed.

    Parameters
    ----------
    frozen: what repeating the collection means, with the observed workers of every cell.
    """
    deployment = request.profile_deployment()
    assert deployment is not None
    workers = [worker for cell in frozen["cells"] for worker in cell["execution"]["observed_workers"]]
    image = source.plan.options.get("slurm_container_image")
    if not image:
        image = read_document(source.campaign / _OVERRIDES).get("K8sConfig", {}).get("k8s_image", "")
    digest = _DIGEST.search(image)
    return {
        "model": request.identity.model,
        "model_revision": request.identity.model_revision,
        "backend": request.identity.framework,
        "backend_version": request.identity.framework_version,
        "image_digest": None if digest is None else digest[1],
        "hardware": request.identity.gpu,
        "parallelism": request.parallelism(),
        "precision": {
            "weights": deployment.gemm_quant_mode,
            "fmha": deployment.fmha_quant_mode,
            "kv": deployment.kv_cache_dtype,
        },
        "attention_groups": _uniform([worker.get("attention_groups") for worker in workers]),
        "graph_config": _uniform([worker.get("graph_config") for worker in workers]),
        "scheduler": request.scheduler_limits(),
        "context_length": request.search.context_length,
        "gpu_memory_utilization": request.collection.memory_fraction,
        "runtime_config": _uniform([normalized_runtime(worker.get("resolved_config") or {}) for worker in workers]),
    }


def _uniform(values: list[Any]) -> Any:
    return values[0] if len({canonical_bytes(value) for value in values}) == 1 else None
