"""The command line of the collector for a request, and the commands that a plan notes for later.

Source: onboarding.md section 5 (collector argv, bounds rules, commands.json).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.pilot import PILOT, is_single_role
from fpmsdk.onboard.request import SupportRequest

COLLECTOR = ("python3", "-m", "fpmsdk.collect")
PROGRAM = "fpmsdk"
CHECKPOINT_FOLDER = "fpm-checkpoint"
ARTIFACT_FOLDER = "fpm-artifacts"
DATA_FOLDER = "systems/data"
PROFILE_FILE = "fpm-model-profile.json"


def checkpoint_folder(folder: Path, chosen: str | Path | None) -> Path:
    """Where a campaign of a plan keeps its checkpoint: in the plan's own folder for them, or deeper in it.

    Raises
    ------
    OnboardError: `chosen` is elsewhere.
    """
    own = folder / CHECKPOINT_FOLDER
    place = own if chosen is None else Path(chosen).expanduser().resolve()
    if place != own and own not in place.parents:
        raise OnboardError(f"--checkpoint-dir: must be {own} or a folder inside it, found {place}", "--checkpoint-dir")
    return place


def collector_arguments(
    request: SupportRequest,
    folder: Path,
    *,
    deployment: CollectionDeployment | None = None,
    probe_arguments: Sequence[str] = (),
    checkpoint: Path | None = None,
    plan_only: bool = False,
    smoke: bool = False,
    limit: int | None = None,
    resume: bool = False,
) -> list[str]:
    """The collector's command for a request, as separate words.

    Parameters
    ----------
    folder: the plan folder, absolute.
    deployment: where it runs; None leaves it to the collector.
    probe_arguments: what `runtime_profile.runtime_collection_inputs` gives of an imported probe.
    checkpoint: folder of the campaign's checkpoint; None is the plan's own.
    plan_only, smoke, limit, resume: as the options of the collector.

    Raises
    ------
    OnboardError: `limit` without `smoke` or less than 1, or a token limit of less than 2.
    """
    if limit is not None and (not smoke or limit < 1):
        raise OnboardError(f"--limit: must be at least 1 and needs --smoke, found {limit}", "--limit")
    limits = request.scheduler_limits()
    tokens, sequences = str(limits["max_batched_tokens"]), str(limits["max_sequences"])
    if limits["max_batched_tokens"] < 2:
        raise OnboardError(
            "collection.max_num_tokens: a collection needs at least 2 tokens of one rank, found 1; raise it here or "
            "max_num_tokens of the profile",
            "collection.max_num_tokens",
        )
    words = [
        *COLLECTOR,
        *("--backend", request.identity.framework),
        *("--model-path", request.identity.model),
        *("--gpu", request.identity.gpu),
        *("--fpm-max-gpus", str(request.worker_gpus)),
        *("--fpm-gpu-counts", str(request.worker_gpus)),
        *("--fpm-parallel-presets", request.parallel_preset),
        *("--fpm-max-model-len", str(request.search.context_length)),
        *("--fpm-max-num-batched-tokens", tokens),
        *("--fpm-max-num-seqs", sequences),
        *("--fpm-max-prefill-isl", tokens),
        *("--fpm-max-prefill-batch-size", sequences),
        *("--checkpoint-dir", str(checkpoint or folder / CHECKPOINT_FOLDER)),
        *("--fpm-artifact-root", str(folder / ARTIFACT_FOLDER)),
        *("--fpm-database-root", str(folder / DATA_FOLDER)),
        *probe_arguments,
        *_settings(request),
        *_profile(request, folder),
        *(() if deployment is None else _deployment(deployment)),
    ]
    words += [flag for flag, wanted in (("--plan-only", plan_only), ("--smoke", smoke)) if wanted]
    words += [] if limit is None else ["--limit", str(limit)]
    return [*words, "--resume"] if resume else words


def _settings(request: SupportRequest) -> list[str]:
    identity, collection = request.identity, request.collection
    policy_is_stated = "prefill_cudagraph_policy" in collection.model_fields_set
    options: tuple[tuple[str, Any], ...] = (
        ("--fpm-backend-version", identity.framework_version),
        ("--fpm-runtime-backend-version", identity.runtime_framework_version),
        ("--fpm-worker-type", request.worker_type),
        ("--fpm-cudagraph-mode", collection.cudagraph_mode),
        ("--fpm-cudagraph-capture-sizes", collection.cudagraph_capture_sizes),
        ("--fpm-max-cudagraph-capture-size", collection.max_cudagraph_capture_size),
        ("--fpm-prefill-cudagraph-policy", collection.prefill_cudagraph_policy if policy_is_stated else None),
        ("--fpm-max-prefill-cudagraph-size", collection.max_prefill_cudagraph_size),
        ("--fpm-gpu-memory-utilization", collection.gpu_memory_utilization),
    )
    return [word for option, value in options if value is not None for word in _option(option, value)]


def _option(option: str, value: Any) -> list[str]:
    return [option, *map(str, value if isinstance(value, list) else [value])]


def _profile(request: SupportRequest, folder: Path) -> list[str]:
    deployment = request.profile_deployment()
    words: list[str] = []
    if deployment is not None and request.fpm_profile is not None:
        words = [
            *("--model-architecture", request.fpm_profile.architecture),
            *("--fpm-weight-quantizations", deployment.gemm_quant_mode),
            *("--fpm-kv-cache-dtypes", deployment.kv_cache_dtype),
            *("--fpm-attention-backend", deployment.attention_backend),
            *("--fpm-moe-backend", deployment.moe_backend),
            *("--fpm-model-profile", str(folder / PROFILE_FILE)),
        ]
    return words if request.identity.sm is None else [*words, "--sm", str(request.identity.sm)]


def _deployment(deployment: CollectionDeployment) -> list[str]:
    executor, values = deployment.executor, deployment.document()
    # The collector's own default; older commands do not name it.
    words = [] if executor == "kubernetes" else ["--fpm-executor", executor]
    for name, value in values.items():
        if name == "image" and executor == "slurm":
            words += ["--fpm-slurm-container-image", value]
        elif name == "image":
            words += ["--generator-set", f"K8sConfig.k8s_image={json.dumps(value)}"]
        elif name in ("cpus_per_task", "cpu_bind"):
            words += ["--fpm-slurm-" + name.replace("_", "-"), str(value)]
        elif name not in ("executor", "container_mount"):
            words += ["--" + name.replace("_", "-"), value]
    return [
        *words,
        *(word for mount in values["container_mount"] for word in ("--fpm-slurm-container-mount", mount)),
    ]


def onboard_command(action: str, folder: Path, *options: str) -> list[str]:
    """A stage's command on a plan folder, as separate words.

    >>> onboard_command("collect-fpm", Path("/c"), "--execute")[2:]
    ['collect-fpm', '--config', '/c/request.yaml', '--output-dir', '/c', '--execute']
    """
    return [
        *(PROGRAM, "onboard", action),
        *("--config", str(folder / "request.yaml")),
        *("--output-dir", str(folder), *options),
    ]


def shell_line(words: Sequence[str]) -> str:
    """Words as one line for a shell, each quoted where it needs it.

    >>> shell_line(["fpmsdk", "onboard", "plan", "--config", "my request.yaml"])
    "fpmsdk onboard plan --config 'my request.yaml'"
    """
    return shlex.join(words)


def noted_commands(
    request: SupportRequest,
    folder: Path,
    *,
    probe_arguments: Sequence[str] = (),
    probe_deployment: CollectionDeployment | None = None,
) -> dict[str, Any]:
    """The content of `commands.json`: the collector's preview, the collection, what uses it and, if needed, finalize.

    Parameters
    ----------
    probe_arguments, probe_deployment: of an imported probe, as `runtime_profile.runtime_collection_inputs` gives them.
    """
    run = onboard_command("collect-fpm", folder, "--execute")
    if probe_deployment is not None:
        for name, value in probe_deployment.document().items():
            for item in value if isinstance(value, list) else [value]:
                run += ["--" + name.replace("_", "-"), str(item)]
    commands: dict[str, Any] = {
        "fpm_plan_local": collector_arguments(
            request, folder, deployment=probe_deployment, probe_arguments=probe_arguments, plan_only=True
        ),
        "fpm_run_local": run,
        "predict": [] if is_single_role(request) else [_use("predict", folder)],
        "recommend": [] if is_single_role(request) else [_use("recommend", folder)],
    }
    deployment = request.profile_deployment()
    if deployment is not None and (deployment.resources.memory_source == "pending" or probe_deployment is not None):
        resolved = folder.with_name(folder.name + "-resolved")
        commands["finalize"] = onboard_command("finalize", folder, "--resolved-output-dir", str(resolved))
    return commands


def _use(command: str, folder: Path) -> list[str]:
    return [
        *(PROGRAM, command),
        *("--config", str(folder / command / f"{PILOT}.yaml")),
        *("--output-dir", str(folder / f"{command}-results" / PILOT)),
        *("--format", "json"),
    ]
