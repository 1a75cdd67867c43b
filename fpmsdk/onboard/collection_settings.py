"""The resolved settings of a collection, as plans and reviews show them: each value, and where it comes from.

Source: onboarding.md section 2 (derived).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpmsdk.onboard.request_sections import DEFAULT_PREFILL_CAPTURE, REFERENCE_CONTEXT_TOKENS, ROLE_GRAPH_FIELDS

if TYPE_CHECKING:
    from fpmsdk.onboard.request import SupportRequest

_SET = "set for this collection"


def collection_settings(request: SupportRequest) -> dict[str, Any]:
    """As `SupportRequest.collection_settings`."""
    collection = request.collection
    settings: dict[str, Any] = {"context_length": request.search.context_length, **request.scheduler_limits()}
    settings["max_prefill_cudagraph_size"] = collection.max_prefill_cudagraph_size or DEFAULT_PREFILL_CAPTURE
    for name in ROLE_GRAPH_FIELDS:
        if (value := getattr(collection, name)) is not None:
            settings[name] = value
    if "prefill_cudagraph_policy" in collection.model_fields_set:
        settings["prefill_cudagraph_policy"] = collection.prefill_cudagraph_policy
        if collection.prefill_cudagraph_policy == "runtime":
            settings["max_prefill_cudagraph_size"] = None
    if collection.gpu_memory_utilization is not None:
        settings["gpu_memory_utilization"] = collection.gpu_memory_utilization
    sources = _sources(request)
    return settings | {"sources": {name: sources[name] for name in settings}}


def _sources(request: SupportRequest) -> dict[str, str]:
    collection, deployment = request.collection, request.profile_deployment()
    memory = None if deployment is None else deployment.resources.runtime_memory
    limit = "bound of the reviewed profile" if deployment is not None else "initial policy, to be reviewed"
    capture = "default of the collector, to be reviewed" if collection.max_prefill_cudagraph_size is None else _SET
    sources = dict.fromkeys(ROLE_GRAPH_FIELDS, "reviewed for this role") | {
        "context_length": f"reviewed limit of one request; proposed at most {REFERENCE_CONTEXT_TOKENS} tokens",
        "max_batched_tokens": limit if collection.max_num_tokens is None else _SET,
        "max_sequences": limit if collection.max_batch_size is None else _SET,
        "max_prefill_cudagraph_size": capture,
        "prefill_cudagraph_policy": "reviewed graph policy",
        "gpu_memory_utilization": "reviewed fraction of a GPU's memory; whether it fits is not known yet",
    }
    if collection.prefill_cudagraph_policy == "runtime":
        sources["max_prefill_cudagraph_size"] = "left to the runtime"
    if memory is not None:
        sources["context_length"] = f"reviewed, within the observed limit of {memory.max_model_len} tokens"
        sources["gpu_memory_utilization"] = f"fraction {memory.gpu_memory_utilization} under which memory was observed"
    return sources
