"""The command that starts the engine's benchmark for one cell.

Source: collector.md section 3.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.deployment_inputs import SECTION, model_in_volume
from fpmsdk.collect.paths import BENCHMARK, RESULTS, WORK
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.points import FILE_NAME as POINTS_FILE
from fpmsdk.collect.sampling import DEFAULT_MAX_PREFILL_TOKENS
from fpmsdk.errors import OnboardError

BENCHMARK_TIMEOUT_S = 10800
NODE_RANK_WORD = "__FPM_NODE_RANK__"
# Engine versions whose worker and scheduler the collector's execution observers were made for.
EXECUTION_OBSERVER_VERSIONS = ("0.27.0", "0.28.0")
_SMOKE_SAMPLES = {
    "prefill": {
        "--prefill-max-new-token-samples": "2",
        "--prefill-max-kv-read-token-samples": "2",
        "--prefix-max-batch-size-samples": "1",
    },
    "decode": {"--decode-max-kv-read-token-samples": "2", "--decode-max-batch-size-samples": "2"},
}
_NO_POLICY_FLAGS = {
    "--enforce-eager": "eager execution is an option of the campaign",
    "--no-enforce-eager": "eager execution is an option of the campaign",
    "--benchmark-points-file": "points are an option of the campaign",
}


def observes_memory(plan: CollectionPlan) -> bool:
    """Whether the engine's memory is observed while the cell runs."""
    policy = plan.runtime_memory_policy
    return policy is not None and policy["observation"] == "enabled"


def observes_execution(plan: CollectionPlan, cell: Cell) -> bool:
    """Whether the engine's execution is observed, where its memory is not."""
    known = plan.runtime_backend_version in EXECUTION_OBSERVER_VERSIONS
    return known and not observes_memory(plan) and not cell.is_config_bound


def engine_command(
    plan: CollectionPlan, cell: Cell, deployment: Mapping[str, Any], *, smoke: bool, num_nodes: int = 1
) -> list[str]:
    """The words of the engine's command; `__FPM_NODE_RANK__` stands for the rank of the node.

    Raises
    ------
    OnboardError: the backend policy asks for what the campaign decides, or no explicit point is of this phase.
    """
    policy = [str(word) for word in _policy_arguments(cell)]
    _check_policy(plan, cell, policy)
    topology = cell.topology
    path = model_in_volume(deployment.get(SECTION) or {}) or plan.model_path
    words = ["python3", "-m", "dynamo.vllm", "--model", path, "--served-model-name", plan.model_path]
    for axis, size in (("tensor", topology.tp), ("pipeline", topology.pp), ("data", topology.dp)):
        words += [f"--{axis}-parallel-size", str(size)]
    if topology.moe_ep > 1:
        words.append("--enable-expert-parallel")
    share = plan.options.get("gpu_memory_utilization")
    if share is not None:
        words += ["--gpu-memory-utilization", str(share)]
    words += ["--kv-cache-dtype", cell.kv_cache_dtype]
    words += ["--distributed-executor-backend", "mp", "--distributed-timeout-seconds", "1800"]
    words.append("--no-enable-log-requests")
    words += _phase_arguments(cell)
    words += _model_arguments(plan, cell)
    words += policy
    if not any(word.split("=")[0] == "--benchmark-timeout" for word in words):
        words += ["--benchmark-timeout", str(BENCHMARK_TIMEOUT_S)]
    words += scheduler_arguments(plan, cell, smoke=smoke)
    if topology.dp > 1:
        words += ["--data-parallel-backend", "mp"]
    rank = NODE_RANK_WORD if num_nodes > 1 else "0"
    words += ["--dump-config-to", f"{RESULTS}/resolved-config-node{rank}.json"]
    return [*words, "--benchmark-output-path", f"{RESULTS}/{BENCHMARK}"]


def scheduler_arguments(plan: CollectionPlan, cell: Cell, *, smoke: bool) -> list[str]:
    """What the engine measures in this phase, and within which limits."""
    options = plan.document["options"]
    phase, sampling = cell.workload_kind, options["prefill_sampling"]
    words = ["--benchmark-mode", phase]
    words += ["--benchmark-warmup-iterations", str(options["global_warmup_iterations"])]
    words += ["--max-model-len", str(options["vllm_max_model_len"])]
    if options.get("enforce_eager"):
        words.append("--enforce-eager")
    points = plan.benchmark_points
    if points is not None:
        if smoke:
            raise OnboardError("benchmark_points: a smoke run measures its own few points", "benchmark_points")
        if not points["payload"][phase]:
            raise OnboardError(f"benchmark_points: no point of {phase} for {cell.cell_id}", "benchmark_points")
        words += ["--benchmark-points-file", f"{WORK}/{POINTS_FILE}"]
    compilation = _compilation(plan, cell)
    if compilation and not options.get("enforce_eager"):
        words += ["--compilation-config", json.dumps(compilation, sort_keys=True, separators=(",", ":"))]
    probe = plan.document.get("probe_sampling")
    words += _words(probe[phase]) if probe else _sampling_arguments(phase, sampling, smoke=smoke)
    tokens, seqs = _limits(plan, cell, smoke=smoke)
    words += [] if tokens is None else ["--max-num-batched-tokens", str(tokens)]
    return words if seqs is None else [*words, "--max-num-seqs", str(seqs)]


def _words(flags: Mapping[str, str]) -> list[str]:
    return [word for flag in flags.items() for word in flag]


def _sampling_arguments(phase: str, sampling: Mapping[str, Any], *, smoke: bool) -> list[str]:
    if smoke:
        return _words(_SMOKE_SAMPLES[phase])
    if phase == "decode":
        return []
    words = []
    if sampling["cudagraph_capture_sizes"] is not None:
        words += ["--prefill-max-new-token-samples", str(sampling["prefill_max_new_token_samples"])]
    return [*words, "--prefill-max-kv-read-token-samples", str(sampling["prefill_max_kv_read_token_samples"])]


def _compilation(plan: CollectionPlan, cell: Cell) -> dict[str, Any]:
    options = plan.document["options"]
    config: dict[str, Any] = {}
    if options.get("cudagraph_mode") is not None:
        config["cudagraph_mode"] = options["cudagraph_mode"]
    sizes, largest = options.get("cudagraph_capture_sizes"), options.get("max_cudagraph_capture_size")
    if sizes is not None:
        config["cudagraph_capture_sizes"], largest = sizes, max(sizes)
    if largest is not None:
        config["max_cudagraph_capture_size"] = largest
    captures = options["prefill_sampling"]["cudagraph_capture_sizes"]
    # A role is one engine with one configuration; campaigns without a role captured for prefill alone.
    if captures is not None and (cell.workload_kind == "prefill" or plan.worker_type is not None):
        config["cudagraph_capture_sizes"], config["max_cudagraph_capture_size"] = captures, captures[-1]
    return config


def _limits(plan: CollectionPlan, cell: Cell, *, smoke: bool) -> tuple[int | None, int | None]:
    options, sampling = plan.document["options"], plan.document["options"]["prefill_sampling"]
    tokens, seqs = options.get("max_num_batched_tokens"), options.get("max_num_seqs")
    record = plan.deployment(cell.topology)
    if record is not None:
        tokens = record.resources.max_num_tokens if tokens is None else tokens
        seqs = record.resources.max_batch_size if seqs is None else seqs
    if cell.workload_kind == "decode":
        return tokens, options.get("max_decode_batch_size") or seqs
    asked = sampling["max_total_prefill_tokens"] != DEFAULT_MAX_PREFILL_TOKENS
    if not smoke or record is not None or tokens is not None or asked:
        tokens = sampling["max_total_prefill_tokens"]
    return tokens, sampling["max_batch_size"] or seqs


def _phase_arguments(cell: Cell) -> list[str]:
    if cell.workload_kind == "prefill":
        return ["--no-async-scheduling"]
    # Real cache contents are reused between points, so that prefix caching has to stay on.
    return [] if cell.needs_warm_kv else ["--no-enable-prefix-caching"]


def _model_arguments(plan: CollectionPlan, cell: Cell) -> list[str]:
    words: list[str] = []
    observation = plan.runtime_observation
    if observation is not None:
        words += ["--revision", observation["launch"]["identity"]["model_revision"]]
    classes = None
    if observes_memory(plan):
        words += ["--no-async-scheduling"] if cell.workload_kind == "decode" else []
        classes = ("fpm_memory_worker.FpmResourceWorker", "fpm_memory_scheduler.FpmResourceInstrumentedScheduler")
        if observation is not None:
            module = "fpm_runtime_instrumentation"
            classes = (f"{module}.ObservedWorker", f"{module}.ObservedInstrumentedScheduler")
    elif observes_execution(plan, cell):
        classes = ("fpm_memory_worker.FpmExecutionWorker", "fpm_memory_scheduler.FpmExecutionInstrumentedScheduler")
    if classes is not None:
        words += ["--worker-cls", classes[0], "--scheduler-cls", classes[1]]
    if plan.capability["architecture"] == "GlmMoeDsaForCausalLM":
        words += ["--trust-remote-code", "--reasoning-parser=glm45"]
    return words


def _policy_arguments(cell: Cell) -> Sequence[Any]:
    overrides = cell.backend_policy["generator_overrides"]
    words: Sequence[Any] = ((overrides.get("params") or {}).get("agg") or {}).get("extra_cli_args") or ()
    return words


def _check_policy(plan: CollectionPlan, cell: Cell, policy: Sequence[str]) -> None:
    flags = {word.split("=")[0].split(" ")[0] for word in policy}
    taken = dict(_NO_POLICY_FLAGS)
    if plan.runtime_observation is not None:
        taken["--revision"] = "the observed revision of the model is measured"
    if observes_memory(plan) or observes_execution(plan, cell):
        taken |= dict.fromkeys(("--worker-cls", "--scheduler-cls"), "the observers of the engine are needed")
    if observes_memory(plan):
        sizing = ("--kv-cache-memory-bytes", "--num-gpu-blocks-override")
        taken |= dict.fromkeys(sizing, "the engine sizes its own cache while it is observed")
        taken["--async-scheduling"] = "memory is observed under synchronous scheduling"
    if plan.options.get("gpu_memory_utilization") is not None:
        taken["--gpu-memory-utilization"] = "the share of memory is an option of the campaign"
    sampling = plan.document["options"]["prefill_sampling"]
    if cell.workload_kind == "prefill" and sampling["cudagraph_capture_sizes"] is None:
        captures = ("--compilation-config", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size")
        taken |= dict.fromkeys(captures, "policy runtime leaves captured graphs to the engine")
    if cell.workload_kind == "decode":
        flag = "--no-enable-prefix-caching" if cell.needs_warm_kv else "--enable-prefix-caching"
        taken[flag] = f"decode of {cell.parallel_strategy} decides about prefix caching"
    for flag in sorted(flags & taken.keys()):
        raise OnboardError(
            f"backend_policy {cell.backend_policy['policy_id']}: {flag}: {taken[flag]}", "backend_policy"
        )
