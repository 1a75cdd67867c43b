"""The launch facts of a runtime probe: what is launched, in which precision, under which limits, from which image.

They are frozen before the geometry of the cache is known, and every observation repeats them.
Source: collector.md section 8.4, onboarding.md sections 3.5 and 6.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from fpmsdk.collect.runtime_settings import LaunchedSettings
from fpmsdk.collect.topology import Topology
from fpmsdk.documents.canonical import canonical_bytes, parse_document
from fpmsdk.errors import OnboardError

WARMUP_ITERATIONS = 5
DEFAULT_EXPLICIT_CAPTURE = 2048
EXECUTORS = ("kubernetes", "slurm", "local", "fake")
GRAPH_REQUEST_FIELDS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
MODEL_SOURCE_FILES = frozenset({"hf_quant_config.json"})
_IDENTITY = ("model", "model_revision", "model_kind", "framework", "framework_version", "gpu", "interconnect")
_MODES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kvcache_quant_mode", "comm_quant_mode")
_MOVING = ("main", "master", "latest", "head")
_SHA256 = re.compile("[0-9a-f]{64}")
_COMMIT = re.compile("[0-9a-fA-F]{40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


def phases_of(worker_type: Any) -> tuple[str, ...]:
    """The phases that a serving role runs: its own, or both.

    Raises
    ------
    OnboardError: no serving role.

    Example
    -------
    >>> phases_of("decode"), phases_of(None)
    (('decode',), ('prefill', 'decode'))
    """
    if worker_type not in (None, "aggregated", "prefill", "decode"):
        raise OnboardError(f"worker_type: expected aggregated, prefill or decode, found {worker_type!r}", "worker_type")
    return (worker_type,) if worker_type in ("prefill", "decode") else ("prefill", "decode")


def normalized_launch(facts: Mapping[str, Any], *, allow_pending_version: bool = False) -> dict[str, Any]:
    """Launch facts with every default written out; the input is not changed.

    Parameters
    ----------
    facts: `identity`, `topology`, `precision`, `collection`, `model_config`, `deployment` and possibly `worker_type`.
    allow_pending_version: whether the engine version may still be unknown.

    Raises
    ------
    OnboardError: a fact is missing or not supported; names it.
    """
    launch: dict[str, Any] = parse_document(canonical_bytes(dict(facts)), "launch")
    phases_of(launch.get("worker_type"))
    _check_identity(_section(launch, "identity"), allow_pending_version)
    topology = Topology.from_document(_section(launch, "topology"))
    if (topology.pp, topology.cp) != (1, 1):
        raise _refused("topology", "a probe supports pp 1 and cp 1", topology.document())
    _complete_precision(_section(launch, "precision"))
    _complete_collection(_section(launch, "collection"))
    config = _section(launch, "model_config")
    if not isinstance(config.get("path"), str) or not config["path"]:
        raise _refused("model_config.path", "the path of config.json", config.get("path"))
    _check_digests(config)
    _complete_deployment(_section(launch, "deployment"))
    return launch


def launched_settings(launch: Mapping[str, Any]) -> LaunchedSettings:
    """What engines of normalised launch facts must report of themselves.

    Raises
    ------
    OnboardError: the topology contradicts the kind of the model, or a setting has no supported observation.
    """
    identity, collection, precision = (launch[name] for name in ("identity", "collection", "precision"))
    topology = Topology.from_document(launch["topology"])
    if identity["model_kind"] == "moe":
        if topology.moe_tp * topology.moe_ep != topology.tp * topology.dp:
            raise _refused("topology", "moe_tp · moe_ep equal to tp · dp", topology.document())
    elif (topology.dp, topology.moe_tp, topology.moe_ep) != (1, 1, 1):
        raise _refused("topology", "dp, moe_tp and moe_ep of 1 for a dense model", topology.document())
    for name in ("enable_eplb", "enable_wideep"):
        if precision.get(name, False) is not False:
            raise _refused(f"precision.{name}", "false", precision[name])
    return LaunchedSettings(
        topology=topology,
        max_model_len=collection["max_model_len"],
        max_num_batched_tokens=collection["max_num_batched_tokens"],
        max_num_seqs=collection["max_num_seqs"],
        gpu_memory_utilization=float(collection["gpu_memory_utilization"]),
        gemm_quant_mode=precision["gemm_quant_mode"],
        moe_quant_mode=precision["moe_quant_mode"],
        kv_cache_dtype=precision["kvcache_quant_mode"],
        moe_backend=precision.get("moe_backend", "auto"),
    )


def expected_ranks(topology: Topology) -> dict[str, list[dict[str, int]]]:
    """Workers and schedulers that have to report, by rank.

    >>> expected_ranks(Topology(tp=2))["schedulers"]
    [{'dp_rank': 0}]
    """
    return {
        "workers": [
            {"dp_rank": dp, "tp_rank": tp, "pp_rank": pp}
            for dp in range(topology.dp)
            for tp in range(topology.tp)
            for pp in range(topology.pp)
        ],
        "schedulers": [{"dp_rank": dp} for dp in range(topology.dp)],
    }


def deployed_model(launch: Mapping[str, Any]) -> str:
    """The `--model` of a launch: the public name, or the path inside a model cache that names one.

    >>> deployed_model({"identity": {"model": "org/m"}, "deployment": {"model_cache": "claim:/models:org/m"}})
    '/models/org/m'

    Raises
    ------
    OnboardError: a mount without a subpath or the other way round, or a subpath that leads elsewhere.
    """
    model, cache = launch["identity"]["model"], launch["deployment"].get("model_cache")
    parts = cache.split(":") if cache else [""]
    mount, subpath = (*parts[1:], "", "")[:2]
    if not mount and not subpath:
        return str(model)
    relative = PurePosixPath(subpath)
    if len(parts) > 3 or not mount or not subpath or relative.is_absolute() or ".." in relative.parts:
        raise _refused("deployment.model_cache", "NAME, or NAME:MOUNT:SUBPATH with a relative subpath", cache)
    return str(PurePosixPath(mount) / relative)


def is_selected_model(observed: Any, launch: Mapping[str, Any]) -> bool:
    """Whether a model path that an engine reports is the launched model.

    An engine that runs offline reports the folder of a hub snapshot; it counts when repository and full revision are
    the selected ones.

    >>> launch = {"identity": {"model": "org/m", "model_revision": "a" * 40}, "deployment": {}}
    >>> is_selected_model(f"/hub/models--org--m/snapshots/{'a' * 40}", launch)
    True
    >>> is_selected_model("/hub/models--org--m/snapshots/main", launch)
    False
    """
    expected, revision = deployed_model(launch), launch["identity"]["model_revision"]
    if observed == expected:
        return True
    by_name = expected == launch["identity"]["model"] and _HUB_NAME.fullmatch(expected)
    if not by_name or "--" in expected or ".." in expected or not _COMMIT.fullmatch(revision):
        return False
    if not isinstance(observed, str):
        return False
    path = PurePosixPath(observed)
    tail = (f"models--{expected.replace('/', '--')}", "snapshots", revision)
    # A path that is written differently from what it means, such as with a trailing slash, is not taken for it.
    return path.is_absolute() and str(path) == observed and ".." not in path.parts and path.parts[-3:] == tail


def _refused(field: str, accepted: str, found: Any) -> OnboardError:
    return OnboardError(f"launch.{field}: expected {accepted}, found {found!r}", f"launch.{field}")


def _section(launch: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = launch.get(name)
    if not isinstance(value, dict):
        raise _refused(name, "an object", value)
    return value


def _check_identity(identity: Mapping[str, Any], allow_pending_version: bool) -> None:
    for name in _IDENTITY:
        value = identity.get(name)
        if value is None and name == "framework_version" and allow_pending_version:
            continue
        if not isinstance(value, str) or not value or value != value.strip() or not value.isprintable():
            raise _refused(f"identity.{name}", "text", value)
    if identity["framework"] != "vllm":
        raise _refused("identity.framework", "vllm", identity["framework"])
    if identity["model_kind"] not in ("dense", "moe"):
        raise _refused("identity.model_kind", "dense or moe", identity["model_kind"])
    if identity["model_revision"].lower() in _MOVING:
        raise _refused("identity.model_revision", "a pinned revision", identity["model_revision"])
    observed = identity.get("runtime_framework_version")
    if observed is not None and (not isinstance(observed, str) or not observed or observed != observed.strip()):
        raise _refused("identity.runtime_framework_version", "a version, or nothing", observed)


def _complete_precision(precision: dict[str, Any]) -> None:
    for name in _MODES:
        value = precision.get(name)
        if not isinstance(value, str) or not value or value == "auto":
            raise _refused(f"precision.{name}", "a mode in so many words", value)
    if precision["comm_quant_mode"] != "half":
        raise _refused("precision.comm_quant_mode", "half, which is what is collected", precision["comm_quant_mode"])
    for name in ("moe_backend", "attention_backend"):
        if not isinstance(precision.setdefault(name, "auto"), str) or not precision[name]:
            raise _refused(f"precision.{name}", "auto or a name", precision[name])
    for name in ("enable_wideep", "enable_eplb"):
        if type(precision.setdefault(name, False)) is not bool:
            raise _refused(f"precision.{name}", "true or false", precision[name])


def _complete_collection(collection: dict[str, Any]) -> None:
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
        if type(collection.get(name)) is not int or collection[name] < 1:
            raise _refused(f"collection.{name}", "a positive integer", collection.get(name))
    fraction: Any = collection.get("gpu_memory_utilization")
    if type(fraction) not in (int, float) or not math.isfinite(fraction) or not 0 < fraction <= 1:
        raise _refused("collection.gpu_memory_utilization", "a fraction above 0, at most 1", fraction)
    policy, size = collection.get("prefill_cudagraph_policy"), collection.get("max_prefill_cudagraph_size")
    if policy not in ("runtime", "explicit"):
        raise _refused("collection.prefill_cudagraph_policy", "runtime or explicit", policy)
    if policy == "runtime" and size is not None:
        raise _refused("collection.max_prefill_cudagraph_size", "nothing under policy runtime", size)
    if size is not None and (type(size) is not int or size < 1):
        raise _refused("collection.max_prefill_cudagraph_size", "a positive integer", size)
    collection["max_prefill_cudagraph_size"] = (size or DEFAULT_EXPLICIT_CAPTURE) if policy == "explicit" else None
    if collection.setdefault("async_scheduling", False) is not False:
        raise _refused("collection.async_scheduling", "false", collection["async_scheduling"])
    if type(collection.setdefault("enforce_eager", False)) is not bool:
        raise _refused("collection.enforce_eager", "true or false", collection["enforce_eager"])
    iterations = collection.setdefault("warmup_iterations", WARMUP_ITERATIONS)
    if type(iterations) is not int or iterations < 0:
        raise _refused("collection.warmup_iterations", "an integer of at least 0", iterations)


def _check_digests(config: Mapping[str, Any]) -> None:
    sources = config.get("source_files", {})
    if not isinstance(sources, dict) or sources.keys() - MODEL_SOURCE_FILES:
        raise _refused("model_config.source_files", "the digest of hf_quant_config.json, or nothing", sources)
    for name, known in {"sha256": config.get("sha256"), **sources}.items():
        if not isinstance(known, str) or not _SHA256.fullmatch(known):
            raise _refused(f"model_config.{name}", "a lower-case SHA-256", known)


def _complete_deployment(deployment: dict[str, Any]) -> None:
    # A label of the runner's own; it decides nothing about what is observed.
    deployment.pop("dynamo_version", None)
    executor, mounts = deployment.setdefault("executor", "kubernetes"), deployment.setdefault("container_mount", [])
    if executor not in EXECUTORS:
        raise _refused("deployment.executor", ", ".join(EXECUTORS), executor)
    image = deployment.get("image")
    if not isinstance(image, str) or not image or not image.isprintable() or " " in image:
        raise _refused("deployment.image", "the image of the pinned runtime (--image)", image)
    if not isinstance(mounts, list) or any(
        not isinstance(mount, str) or not mount or "," in mount or not mount.isprintable() for mount in mounts
    ):
        raise _refused("deployment.container_mount", "mounts without commas and control characters", mounts)
    policy = (deployment.get("cpus_per_task"), deployment.get("cpu_bind"))
    if executor != "slurm":
        if mounts or policy != (None, None):
            raise _refused("deployment", f"no mounts and no CPU policy with executor {executor}", deployment)
    else:
        foreign = [
            name for name in ("namespace", "model_cache", "image_pull_secret") if deployment.get(name) is not None
        ]
        if foreign:
            raise _refused("deployment", f"no {', '.join(foreign)} with executor slurm", deployment)
        if policy != (None, None) and (
            type(policy[0]) is not int or policy[0] < 1 or policy[1] not in ("cores", "none")
        ):
            raise _refused("deployment", "both cpus_per_task and cpu_bind (cores or none), or neither", policy)
