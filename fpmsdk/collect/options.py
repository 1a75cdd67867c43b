"""The command line of the collector: `python -m fpmsdk.collect`.

Source: collector.md section 1.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fpmsdk.collect.cpu_policy import resolve_cpu_policy
from fpmsdk.collect.deployment_inputs import read_inputs
from fpmsdk.collect.points import read_points
from fpmsdk.collect.settings import AUTO_MODEL_LEN, EXECUTORS, GRAPH_MODES, ROLES, CollectionSettings
from fpmsdk.collect.topology import AXES, PRESETS
from fpmsdk.errors import OnboardError


@dataclass(frozen=True, kw_only=True)
class RepeatabilityOptions:
    """Repeated launches of a finished campaign."""

    source_campaign: Path
    source_checkpoint: Path
    output_dir: Path
    samples: int = 5
    comparison_mode: str = "full_grid"
    max_points: int = 12
    max_attempts: int = 2
    cv_threshold: float = 0.05
    source_agreement_threshold: float = 0.05


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """Everything that the command line says.

    Parameters
    ----------
    settings: what is measured; None when a finished campaign is repeated.
    system: name of the GPU system.
    deployment: deployment inputs, checked.
    """

    settings: CollectionSettings | None = None
    backend: str = "vllm"
    model_path: str = ""
    model_architecture: str | None = None
    model_config: str | None = None
    model_profile: str | None = None
    system: str = ""
    backend_version: str | None = None
    runtime_backend_version: str | None = None
    runtime_instrumentation: str | None = None
    runtime_launch: str | None = None
    runtime_configuration: str | None = None
    deployment: dict[str, Any] = field(default_factory=dict)
    artifact_root: Path = Path("fpm_forward_artifacts")
    checkpoint_dir: Path = Path(".collector_checkpoint")
    database_root: Path | None = None
    publish_partial: bool = False
    plan_only: bool = False
    smoke: bool = False
    limit: int | None = None
    resume: bool = False
    retry_failed: bool = False
    repeatability: RepeatabilityOptions | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OnboardError(f"{self.prog}: {message}; see --help")


def parse_arguments(argv: Sequence[str]) -> CollectorOptions:
    """Read the arguments of the collector.

    Raises
    ------
    OnboardError: an argument is missing, unknown, out of range or contradicts another one.
    OSError: a file that is named cannot be read.

    Example
    -------
    >>> words = "--model-path org/model --gpu h200_sxm --fpm-max-gpus 6 --fpm-backend-version 0.27.0"
    >>> parse_arguments(words.split()).settings.gpu_counts
    (1, 2, 4, 6)
    """
    found = _parser().parse_args(list(argv))
    if found.resume_retry_failed and not found.resume:
        raise OnboardError("--resume-retry-failed: needs --resume", "resume_retry_failed")
    repeatability = _repeatability(found)
    if found.limit is not None and (not found.smoke or found.limit < 1):
        raise OnboardError("--limit: a positive number of cells, with --smoke alone", "limit")
    if repeatability is None and not found.model_path:
        raise OnboardError("--model-path: name the model", "model_path")
    if repeatability is None and not found.gpu:
        raise OnboardError("--gpu: name the GPU system", "gpu")
    instrumentation = (
        found.fpm_runtime_instrumentation,
        found.fpm_runtime_launch,
        found.fpm_runtime_configuration,
    )
    if any(instrumentation) and not all(instrumentation):
        raise OnboardError(
            "--fpm-runtime-instrumentation, --fpm-runtime-launch and --fpm-runtime-configuration come together",
            "runtime_instrumentation",
        )
    return CollectorOptions(
        settings=None if repeatability else _settings(found),
        backend=found.backend,
        model_path=found.model_path or "",
        model_architecture=found.model_architecture,
        model_config=found.fpm_model_config,
        model_profile=found.fpm_model_profile,
        system=found.gpu or "",
        backend_version=found.fpm_backend_version,
        runtime_backend_version=found.fpm_runtime_backend_version,
        runtime_instrumentation=found.fpm_runtime_instrumentation,
        runtime_launch=found.fpm_runtime_launch,
        runtime_configuration=found.fpm_runtime_configuration,
        deployment=read_inputs(
            found.generator_config,
            found.generator_set or (),
            namespace=found.namespace,
            model_cache=found.model_cache,
            transport=found.transport,
            orchestrator=found.fpm_orchestrator,
            image_pull_secret=found.image_pull_secret,
            dynamo_version=found.dynamo_version,
        ),
        artifact_root=Path(found.fpm_artifact_root),
        checkpoint_dir=Path(found.checkpoint_dir),
        database_root=Path(found.fpm_database_root) if found.fpm_database_root else None,
        publish_partial=found.fpm_publish_partial,
        plan_only=found.plan_only,
        smoke=found.smoke,
        limit=found.limit,
        resume=found.resume,
        retry_failed=found.resume_retry_failed,
        repeatability=repeatability,
    )


def _settings(found: argparse.Namespace) -> CollectionSettings:
    if found.fpm_max_gpus is None:
        raise OnboardError("--fpm-max-gpus: state the largest number of GPUs of one engine", "max_gpus")
    if found.fpm_benchmark_points_file and found.smoke:
        raise OnboardError("--fpm-benchmark-points-file: a smoke run measures its own few points", "benchmark_points")
    axes = tuple(dict.fromkeys(found.fpm_parallel_axes or ()))
    presets = tuple(dict.fromkeys(found.fpm_parallel_presets or (() if axes else ("auto",))))
    cpus, bind = found.fpm_slurm_cpus_per_task, found.fpm_slurm_cpu_bind
    if found.fpm_executor == "slurm":
        cpus, bind = resolve_cpu_policy(
            cpus,
            bind,
            resume=found.resume,
            checkpoint_dir=Path(found.checkpoint_dir),
            artifact_root=Path(found.fpm_artifact_root),
            smoke=found.smoke,
        )
    return CollectionSettings(
        max_gpus=found.fpm_max_gpus,
        gpu_counts=_gpu_counts(found.fpm_max_gpus, found.fpm_gpu_counts),
        parallel_presets=presets,
        parallel_axes=axes,
        **{f"{axis}_sizes": _sorted(getattr(found, f"fpm_{axis}_sizes")) for axis in AXES},
        moe_backend=found.fpm_moe_backend.strip(),
        attention_backend=found.fpm_attention_backend.strip(),
        enable_wideep=found.fpm_enable_wideep,
        enable_eplb=found.fpm_enable_eplb,
        weight_quantizations=tuple(dict.fromkeys(name.lower() for name in found.fpm_weight_quantizations or ())),
        kv_cache_dtypes=tuple(dict.fromkeys(found.fpm_kv_cache_dtypes or ("auto",))),
        warmup_iterations=found.fpm_warmup_iterations,
        max_model_len=found.fpm_max_model_len,
        max_num_batched_tokens=found.fpm_max_num_batched_tokens,
        max_num_seqs=found.fpm_max_num_seqs,
        max_prefill_isl=found.fpm_max_prefill_isl,
        max_prefill_batch_size=found.fpm_max_prefill_batch_size,
        max_decode_batch_size=found.fpm_max_decode_batch_size,
        prefill_cudagraph_policy=found.fpm_prefill_cudagraph_policy,
        max_prefill_cudagraph_size=found.fpm_max_prefill_cudagraph_size,
        worker_type=found.fpm_worker_type,
        cudagraph_mode=found.fpm_cudagraph_mode,
        cudagraph_capture_sizes=None
        if found.fpm_cudagraph_capture_sizes is None
        else tuple(found.fpm_cudagraph_capture_sizes),
        max_cudagraph_capture_size=found.fpm_max_cudagraph_capture_size,
        gpu_memory_utilization=found.fpm_gpu_memory_utilization,
        enforce_eager=found.fpm_enforce_eager,
        decoder_replay=found.fpm_decoder_replay,
        benchmark_points=read_points(found.fpm_benchmark_points_file) if found.fpm_benchmark_points_file else None,
        executor=found.fpm_executor,
        slurm_container_image=found.fpm_slurm_container_image,
        slurm_container_mounts=tuple(found.fpm_slurm_container_mount or ()),
        slurm_cpus_per_task=cpus,
        slurm_cpu_bind=bind,
    )


def _gpu_counts(max_gpus: int, asked: list[int] | None) -> tuple[int, ...]:
    if asked is not None:
        return tuple(sorted(set(asked)))
    return tuple(sorted({*(1 << power for power in range(max_gpus.bit_length())), max_gpus}))


def _sorted(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(sorted(set(values)))


def _repeatability(found: argparse.Namespace) -> RepeatabilityOptions | None:
    source, checkpoint = found.repeatability_source_campaign, found.repeatability_source_checkpoint
    paths = (source, checkpoint, found.repeatability_output_dir)
    if not any(paths):
        return None
    if not all(paths):
        raise OnboardError(
            "--repeatability-source-campaign, --repeatability-source-checkpoint and --repeatability-output-dir come "
            "together",
            "repeatability",
        )
    if found.smoke or found.limit is not None:
        raise OnboardError("--smoke, --limit: no part of a repeatability run", "repeatability")
    return RepeatabilityOptions(
        source_campaign=Path(source),
        source_checkpoint=Path(checkpoint),
        output_dir=Path(found.repeatability_output_dir),
        samples=found.repeatability_samples,
        comparison_mode=found.repeatability_comparison_mode,
        max_points=found.repeatability_max_points,
        max_attempts=found.repeatability_max_attempts,
        cv_threshold=found.repeatability_cv_threshold,
        source_agreement_threshold=found.repeatability_source_agreement_threshold,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text}")
    return value


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m fpmsdk.collect", description="Plan or run a campaign of measured forwards.", allow_abbrev=False
    )
    _add_campaign(parser)
    _add_measurement(parser)
    _add_deployment(parser)
    _add_repeatability(parser)
    return parser


def _add_campaign(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=("vllm",), default="vllm")
    add("--model-path", help="public name of the model")
    add("--model-architecture", help="architecture of a configuration that names none")
    add("--gpu", help="name of the GPU system")
    add("--sm", type=_positive, help="compute capability of the GPU; recorded nowhere")
    add("--plan-only", action="store_true", help="print the frozen plan")
    add("--smoke", action="store_true", help="few points, nothing is published")
    add("--limit", type=int, help="number of cells of a smoke run")
    add("--resume", action="store_true", help="continue the campaign of the same plan")
    add("--resume-retry-failed", action="store_true", help="run failed cells again")
    add("--checkpoint-dir", default=".collector_checkpoint")
    add("--fpm-artifact-root", default="fpm_forward_artifacts")
    add("--fpm-database-root", help="the `data` folder of a systems root to publish into")
    add("--fpm-publish-partial", action="store_true", help="publish the passed cells though others failed")


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("What is measured").add_argument
    add("--fpm-model-config", metavar="PATH", help="config.json, or a folder with one")
    add("--fpm-model-profile", metavar="PATH", help="profile of the model's deployments")
    add("--fpm-backend-version", help="version label of the measurements")
    add("--fpm-runtime-backend-version", help="version that the engine reports")
    add("--fpm-worker-type", choices=ROLES, help="serving role; one role measures its own phases")
    add("--fpm-max-gpus", type=_positive, help="GPUs of one engine")
    add("--fpm-gpu-counts", type=_positive, nargs="+", help="powers of two and the largest by default")
    add("--fpm-parallel-presets", choices=PRESETS, nargs="+")
    add("--fpm-parallel-axes", choices=AXES, nargs="+", help="older form of one preset")
    for axis in AXES:
        add(f"--fpm-{axis.replace('_', '-')}-sizes", type=_positive, nargs="+", help=f"allowed sizes of {axis}")
    add("--fpm-moe-backend", default="auto")
    add("--fpm-attention-backend", default="auto")
    add("--fpm-enable-wideep", choices=("true", "false"), default="false")
    add("--fpm-enable-eplb", choices=("true", "false"), default="false")
    add("--fpm-weight-quantizations", nargs="+", help="the checkpoint's own must be among them")
    add("--fpm-kv-cache-dtypes", nargs="+")
    add("--fpm-warmup-iterations", type=int, default=5, help="once before all points")
    add("--fpm-max-model-len", type=int, default=AUTO_MODEL_LEN, help="-1 for what fits")
    add("--fpm-max-num-batched-tokens", type=_positive)
    add("--fpm-max-num-seqs", type=_positive)
    add("--fpm-max-prefill-isl", type=int)
    add("--fpm-max-prefill-batch-size", type=_positive)
    add("--fpm-max-decode-batch-size", type=_positive)
    add("--fpm-prefill-cudagraph-policy", choices=("explicit", "runtime"), default="explicit")
    add("--fpm-max-prefill-cudagraph-size", type=_positive)
    add("--fpm-cudagraph-mode", choices=GRAPH_MODES)
    add("--fpm-cudagraph-capture-sizes", type=int, nargs="+")
    add("--fpm-max-cudagraph-capture-size", type=int)
    add("--fpm-gpu-memory-utilization", type=float)
    add("--fpm-enforce-eager", action="store_true")
    add("--fpm-decoder-replay", action="store_true")
    add("--fpm-benchmark-points-file", metavar="PATH")
    add("--fpm-runtime-instrumentation", metavar="PATH", help="manifest of the observers")
    add("--fpm-runtime-launch", metavar="PATH", help="launch facts of the accepted probe")
    add("--fpm-runtime-configuration", metavar="KEY", help="its configuration in the session")


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Where it runs").add_argument
    add("--fpm-executor", choices=EXECUTORS, default="kubernetes")
    add("--fpm-slurm-container-image", default="")
    add("--fpm-slurm-container-mount", action="append", metavar="SOURCE:TARGET")
    add("--fpm-slurm-cpus-per-task", type=_positive, help="of one node's task; 16 by default")
    add("--fpm-slurm-cpu-bind", choices=("cores", "none"), help="cores by default")
    add("--generator-config", metavar="PATH", help="YAML with the section K8sConfig")
    add("--generator-set", action="append", metavar="KEY=VALUE")
    add("--dynamo-version", help="release label of the runtime; selects nothing")
    add("--namespace")
    add("--model-cache", metavar="NAME[:MOUNT[:SUBPATH]]")
    add("--transport", choices=("nvlink", "ib", "efa"))
    add("--fpm-orchestrator", choices=("lws", "grove"))
    add("--image-pull-secret")


def _add_repeatability(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Repeatability of a finished campaign").add_argument
    add("--repeatability-source-campaign", metavar="DIR")
    add("--repeatability-source-checkpoint", metavar="PATH")
    add("--repeatability-output-dir", metavar="DIR")
    add("--repeatability-samples", type=int, default=5)
    add("--repeatability-comparison-mode", choices=("full_grid", "bounded"), default="full_grid")
    add("--repeatability-max-points", type=int, default=12)
    add("--repeatability-max-attempts", type=int, default=2)
    add("--repeatability-cv-threshold", type=float, default=0.05)
    add("--repeatability-source-agreement-threshold", type=float, default=0.05)
