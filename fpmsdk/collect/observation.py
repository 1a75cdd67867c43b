"""One observation of a running engine: whether it is of this attempt, of this launch and complete.

A record is never trusted for what it concludes of itself; every fact in it is compared anew.
Source: collector.md section 8.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fpmsdk.collect.cache_pool import is_in_host_memory, positive
from fpmsdk.collect.instrumentation import OBSERVATION_SCHEMA, InstrumentationBundle
from fpmsdk.collect.observation_imports import check_imports
from fpmsdk.collect.probe_launch import GRAPH_REQUEST_FIELDS, is_selected_model, launched_settings
from fpmsdk.collect.runtime_settings import (
    check_requested_graphs,
    check_revision,
    checked_settings,
    dtype_name,
    launched_graphs,
)
from fpmsdk.collect.sampling import prefill_sampling
from fpmsdk.documents.canonical import canonical_bytes
from fpmsdk.errors import EvidenceError

BINDING_FIELDS = ("attempt_id", "configuration", "phase", "bundle_sha256")
# Systems whose name begins with the name that their devices report; the one exception is told in full.
_FAMILY = re.compile("(a100|h100|h200|b200|b300|gh200|gb200|gb300|l40s|l4)(?:_sxm|_pcie)?")
_OTHER_FAMILIES = {"rtx_pro_6000_server": "rtx pro 6000"}


def checked_record(
    record: Any,
    *,
    launch: Mapping[str, Any],
    bundle: InstrumentationBundle,
    binding: Mapping[str, str],
    import_binding: Mapping[str, Any] | None,
    sm_version: int | None,
) -> dict[str, Any]:
    """The resolved settings of a sound record.

    Parameters
    ----------
    record: the JSON value of an observation.
    launch: the normalised facts the engine was launched with.
    bundle: the frozen observers.
    binding: `attempt_id`, `configuration`, `phase` and `bundle_sha256` of the launch.
    import_binding: what the launch froze of the importer; None for launches from before that.
    sm_version: the SM of the described system, None when the description states none.

    Raises
    ------
    EvidenceError: the record is of something else, incomplete or unsupported; names the field.
    OnboardError: the launch itself has no supported observation.
    """
    if not isinstance(record, dict) or record.get("schema_version") != OBSERVATION_SCHEMA:
        raise EvidenceError(f"schema_version: expected {OBSERVATION_SCHEMA}")
    for name in BINDING_FIELDS:
        same(record.get(name), binding[name], name)
    _check_origin(record, launch, bundle)
    if record.get("unresolved_fields") != [] or record.get("error"):
        raise EvidenceError(
            f"unresolved_fields: the observer could not tell {record.get('unresolved_fields')!r}: "
            f"{record.get('error')!r}"
        )
    _check_lifecycle(record)
    if record["kind"] == "worker":
        _check_hardware(record, launch["identity"], sm_version)
    config = checked_settings(record, launched_settings(launch))
    _check_engine(record, config, launch, binding["phase"])
    if import_binding is not None:
        check_imports(record, import_binding, bundle)
    elif "instrumentation_binding" in record:
        raise EvidenceError("instrumentation_binding: imports are reported, but the launch froze no importer")
    return config


def same(found: Any, expected: Any, name: str) -> None:
    """Raise `EvidenceError` unless both are one JSON value, types included; names the field and both values."""
    try:
        equal = canonical_bytes(found) == canonical_bytes(expected)
    except (TypeError, ValueError):
        equal = False
    if not equal:
        raise EvidenceError(f"{name}: expected {_short(expected)}, found {_short(found)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _check_origin(record: Mapping[str, Any], launch: Mapping[str, Any], bundle: InstrumentationBundle) -> None:
    config = launch["model_config"]
    same(record.get("identity"), launch["identity"], "identity")
    same(record.get("launch"), launch, "launch")
    same(record.get("model_config_sha256"), config["sha256"], "model_config_sha256")
    same(record.get("model_config_source_files", {}), config.get("source_files", {}), "model_config_source_files")
    same(record.get("runtime"), {**bundle.runtime, "image": launch["deployment"]["image"]}, "runtime")


def _check_lifecycle(record: Mapping[str, Any]) -> None:
    kind, lifecycle = record.get("kind"), record.get("lifecycle")
    steps: dict[Any, dict[str, Any]] = {
        "worker": {"measurement": "after_warmup", "warmup_completed": True, "capture_completed": True},
        "scheduler": {"measurement": "scheduler_initialized"},
    }
    if kind not in steps:
        raise EvidenceError(f"kind: expected worker or scheduler, found {kind!r}")
    for name, expected in {"cache_initialized": True, **steps[kind]}.items():
        found = lifecycle.get(name) if isinstance(lifecycle, dict) else None
        if type(found) is not type(expected) or found != expected:
            raise EvidenceError(f"lifecycle.{name}: expected {expected!r}, found {found!r}; the engine was not ready")


def _check_hardware(record: Mapping[str, Any], identity: Mapping[str, Any], sm_version: int | None) -> None:
    hardware = record.get("hardware")
    if not isinstance(hardware, dict):
        raise EvidenceError("hardware: is missing")
    device = hardware.get("device_type", "cuda")
    found = "cpu" if is_in_host_memory(record["cache"]) else "cuda"
    if device != found:
        raise EvidenceError(f"hardware.device_type: expected {found!r}, on which the cache is, found {device!r}")
    if device == "cpu":
        _check_cpu(hardware, identity, sm_version)
    else:
        _check_gpu(hardware, identity, sm_version)
    memory = positive(hardware.get("total_memory_bytes"), "hardware.total_memory_bytes")
    budget = positive(record["cache"]["available_cache_bytes"], "cache.available_cache_bytes")
    if budget > memory:
        raise EvidenceError(f"cache.available_cache_bytes: {budget} exceed the {memory} bytes of the device")


def _check_cpu(hardware: Mapping[str, Any], identity: Mapping[str, Any], sm_version: int | None) -> None:
    system = identity["gpu"]
    for name, stated in (("the description of the system", sm_version), ("identity.sm", identity.get("sm"))):
        if stated is not None:
            raise EvidenceError(
                f"hardware.device_type: the engine ran on a CPU, and {name} of {system!r} states SM {stated}; describe "
                "this machine under a name of its own, without an SM"
            )
    same(hardware.get("gpu"), system, "hardware.gpu")
    same(hardware.get("sm"), None, "hardware.sm")
    told = hardware.get("device_name")
    if not isinstance(told, str) or not told.strip():
        raise EvidenceError(f"hardware.device_name: expected the name of the CPU, found {told!r}")


def not_established(record: Mapping[str, Any]) -> list[str]:
    """What a sound observation of a worker leaves open: nothing on a GPU, and on a CPU what a CPU does not tell.

    >>> not_established({"hardware": {"sm": 90}})
    []
    """
    hardware = record["hardware"]
    if hardware.get("device_type") != "cpu":
        return []
    return [
        f"hardware.gpu: that {hardware['device_name']!r} is {hardware['gpu']!r} is only stated; a CPU tells no family",
        "hardware.sm: a CPU has no compute capability",
        "lifecycle.capture_completed: an engine on a CPU captures no graphs; nothing is known of theirs",
        "cache.semantics.storage: the cache is in the memory of the host, of which other processes have a part",
    ]


def _check_gpu(hardware: Mapping[str, Any], identity: Mapping[str, Any], sm_version: int | None) -> None:
    system = identity["gpu"]
    match = _FAMILY.fullmatch(system)
    family = match[1] if match else _OTHER_FAMILIES.get(system)
    if family is None or sm_version is None:
        raise EvidenceError(f"hardware: no device family and SM are known for {system!r}, so that nothing confirms it")
    same(hardware.get("gpu"), system, "hardware.gpu")
    same(hardware.get("sm"), sm_version, "hardware.sm")
    same(hardware["sm"], identity.get("sm", hardware["sm"]), "hardware.sm")
    name = hardware.get("device_name")
    if not isinstance(name, str) or not re.search(rf"(?<![a-z0-9]){re.escape(family)}(?![a-z0-9])", name.lower()):
        raise EvidenceError(f"hardware.device_name: expected a {family} device, found {name!r}")


def _check_engine(record: Mapping[str, Any], config: dict[str, Any], launch: Mapping[str, Any], phase: str) -> None:
    identity, collection = launch["identity"], launch["collection"]
    model, parallel = config["model_config"], config["parallel_config"]
    if identity["model_kind"] == "moe":
        # vLLM flattens attention TP and DP: with expert parallelism every expert is whole.
        width = parallel["tensor_parallel_size"] * parallel["data_parallel_size"]
        axes = (1, width) if parallel["enable_expert_parallel"] else (width, 1)
        topology = launch["topology"]
        if (topology["moe_tp"], topology["moe_ep"]) != axes:
            raise EvidenceError(
                f"resolved_config.parallel_config: experts run with (moe_tp, moe_ep) {axes}, launched for "
                f"{(topology['moe_tp'], topology['moe_ep'])}"
            )
    for name in ("speculative_config", "kv_transfer_config"):
        if config.get(name) is not None:
            raise EvidenceError(f"resolved_config.{name}: such caches are unsupported")
    if not is_selected_model(model.get("model"), launch):
        raise EvidenceError(f"resolved_config.model_config.model: {model.get('model')!r} is not the launched model")
    revision = identity["model_revision"]
    if revision not in (model.get("revision"), model.get("loaded_config_commit_hash")):
        raise EvidenceError(f"resolved_config.model_config.revision: {revision} is pinned and not reported")
    check_revision(config, revision)
    fmha = launch["precision"]["fmha_quant_mode"]
    if fmha not in ("half", "bfloat16") or dtype_name(model.get("dtype")) != fmha:
        raise EvidenceError(
            f"resolved_config.model_config.dtype: {model.get('dtype')!r} does not confirm attention in {fmha}"
        )
    same(
        model.get("enforce_eager"), collection.get("enforce_eager", False), "resolved_config.model_config.enforce_eager"
    )
    _check_graphs(record, config, launch, phase)
    asked = launch["precision"].get("attention_backend", "auto")
    if asked not in (None, "auto") and record.get("attention_backend") != asked:
        raise EvidenceError(f"attention_backend: expected {asked!r}, found {record.get('attention_backend')!r}")


def _check_graphs(record: Mapping[str, Any], config: dict[str, Any], launch: Mapping[str, Any], phase: str) -> None:
    collection, role = launch["collection"], launch.get("worker_type")
    explicit = collection["prefill_cudagraph_policy"] == "explicit" and not config["model_config"]["enforce_eager"]
    # Launches from before serving roles applied explicit captures to prefill alone.
    if explicit and (phase == "prefill" or role is not None):
        sampling = prefill_sampling(
            collection["max_num_batched_tokens"],
            max_batch_size=collection["max_num_seqs"],
            max_capture=collection["max_prefill_cudagraph_size"],
        )
        initial = launched_graphs(record, config)
        same(initial["cudagraph_capture_sizes"], list(sampling.captures or ()), "cudagraph_capture_sizes")
    requested = {name: collection[name] for name in GRAPH_REQUEST_FIELDS if collection.get(name) is not None}
    if requested and role is None:
        raise EvidenceError(f"launch.collection: {', '.join(requested)} need a serving role")
    if "cudagraph_capture_sizes" in requested:
        requested.setdefault("max_cudagraph_capture_size", max(requested["cudagraph_capture_sizes"]))
    check_requested_graphs(record, config, requested)
