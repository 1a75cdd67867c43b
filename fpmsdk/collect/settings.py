"""What is asked of a campaign, as far as it decides what is measured: the `options` of a plan.

Source: collector.md sections 1.1 and 1.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fpmsdk.collect.cells import POINT_SOURCE
from fpmsdk.collect.sampling import DEFAULT_MAX_PREFILL_TOKENS, PrefillSampling, prefill_sampling
from fpmsdk.collect.topology import AXES
from fpmsdk.errors import OnboardError

EXECUTORS = ("kubernetes", "slurm", "local", "fake")
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
ROLES = ("prefill", "decode", "aggregated")
AUTO_MODEL_LEN = -1
DEFAULT_WARMUP_ITERATIONS = 5

Sizes = tuple[int, ...] | None


def collection_phases(worker_type: str | None) -> tuple[str, ...]:
    """Phases that a serving role runs; without a role, both.

    >>> collection_phases("decode"), collection_phases(None)
    (('decode',), ('prefill', 'decode'))
    """
    return (worker_type,) if worker_type in ("prefill", "decode") else ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class CollectionSettings:
    """Everything that is asked for and hashed into a plan. Sizes are per engine, token limits per pass.

    Raises `OnboardError` when values are out of range or contradict one another; names the option.
    """

    max_gpus: int
    gpu_counts: tuple[int, ...]
    parallel_presets: tuple[str, ...] = ("auto",)
    parallel_axes: tuple[str, ...] = ()
    tp_sizes: Sizes = None
    pp_sizes: Sizes = None
    dp_sizes: Sizes = None
    moe_tp_sizes: Sizes = None
    moe_ep_sizes: Sizes = None
    cp_sizes: Sizes = None
    moe_backend: str = "auto"
    attention_backend: str = "auto"
    enable_wideep: str = "false"
    enable_eplb: str = "false"
    weight_quantizations: tuple[str, ...] = ()
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    warmup_iterations: int = DEFAULT_WARMUP_ITERATIONS
    max_model_len: int = AUTO_MODEL_LEN
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_prefill_isl: int | None = None
    max_prefill_batch_size: int | None = None
    max_decode_batch_size: int | None = None
    prefill_cudagraph_policy: str = "explicit"
    max_prefill_cudagraph_size: int | None = None
    worker_type: str | None = None
    cudagraph_mode: str | None = None
    cudagraph_capture_sizes: Sizes = None
    max_cudagraph_capture_size: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    decoder_replay: bool = False
    benchmark_points: dict[str, Any] | None = None
    executor: str = "kubernetes"
    slurm_container_image: str = ""
    slurm_container_mounts: tuple[str, ...] = ()
    slurm_cpus_per_task: int | None = None
    slurm_cpu_bind: str | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_parallel(self)
        _check_graphs(self)
        _check_executor(self)
        self.check_limits()

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that are measured."""
        return collection_phases(self.worker_type)

    @property
    def sampling(self) -> PrefillSampling:
        """Sampling of prefill; a limit that is not given is the shared one, else 8192 tokens."""
        return prefill_sampling(
            self.max_prefill_isl or self.max_num_batched_tokens or DEFAULT_MAX_PREFILL_TOKENS,
            max_batch_size=self.max_prefill_batch_size or self.max_num_seqs,
            policy=self.prefill_cudagraph_policy,
            max_capture=self.max_prefill_cudagraph_size,
        )

    @property
    def sizes(self) -> dict[str, Sizes]:
        """Allowed sizes by axis."""
        return {axis: getattr(self, f"{axis}_sizes") for axis in AXES}

    def check_limits(self, *, profile_tokens: int | None = None, profile_seqs: int | None = None) -> None:
        """Refuse a pass that may hold fewer tokens than sequences, in either phase.

        Parameters
        ----------
        profile_tokens, profile_seqs: limits of a profile, where none is asked for.

        Raises
        ------
        OnboardError: names the phase and both limits.
        """
        tokens = self.max_num_batched_tokens or profile_tokens
        seqs = self.max_num_seqs or profile_seqs
        if self.worker_type == "aggregated":
            narrower = tokens is not None and self.max_prefill_isl not in (None, tokens)
            for batch in (self.max_prefill_batch_size, self.max_decode_batch_size):
                narrower |= seqs is not None and batch not in (None, seqs)
            if narrower:
                raise OnboardError(
                    "worker_type aggregated: one engine runs both phases, so that they share one limit of tokens and "
                    "one of sequences; set --fpm-max-num-batched-tokens and --fpm-max-num-seqs alone",
                    "worker_type",
                )
        for phase, phase_tokens, phase_seqs in (
            ("decode", tokens, self.max_decode_batch_size or seqs),
            (
                "prefill",
                self.max_prefill_isl or tokens or DEFAULT_MAX_PREFILL_TOKENS,
                self.max_prefill_batch_size or seqs,
            ),
        ):
            if phase_tokens is not None and phase_seqs is not None and phase_tokens < phase_seqs:
                raise OnboardError(
                    f"{phase}: max_num_batched_tokens {phase_tokens} must be at least max_num_seqs {phase_seqs}; every "
                    "scheduled sequence needs a token",
                    "max_num_batched_tokens",
                )

    def compilation_config(self) -> dict[str, Any]:
        """Graph settings of the serving role, as the engine's `--compilation-config`."""
        config: dict[str, Any] = {}
        if self.cudagraph_mode is not None:
            config["cudagraph_mode"] = self.cudagraph_mode
        largest = self.max_cudagraph_capture_size
        if self.cudagraph_capture_sizes is not None:
            config["cudagraph_capture_sizes"] = list(self.cudagraph_capture_sizes)
            largest = max(self.cudagraph_capture_sizes)
        if largest is not None:
            config["max_cudagraph_capture_size"] = largest
        return config

    def resolved(self, **changes: Any) -> CollectionSettings:
        """The same with other values. Raises as the class."""
        return replace(self, **changes)

    def document(self) -> dict[str, Any]:
        """`options` of a plan."""
        document: dict[str, Any] = {
            "max_gpus": self.max_gpus,
            "gpu_counts": list(self.gpu_counts),
            "parallel_presets": list(self.parallel_presets),
            "parallel_axes": list(self.parallel_axes),
            "moe_backend": self.moe_backend,
            "attention_backend": self.attention_backend,
            "enable_wideep": self.enable_wideep,
            "enable_eplb": self.enable_eplb,
            "weight_quantizations": list(self.weight_quantizations),
            "kv_cache_dtypes": list(self.kv_cache_dtypes),
            **{f"{axis}_sizes": None if sizes is None else list(sizes) for axis, sizes in self.sizes.items()},
            "global_warmup_iterations": self.warmup_iterations,
            "vllm_max_model_len": self.max_model_len,
            "warmup_repeats": 0,
            "measurement_repeats": 1,
            "point_source": POINT_SOURCE,
            "prefill_sampling": self.sampling.document(),
            "decoder_replay": self.decoder_replay,
            "executor": self.executor,
            "slurm_container_image": self.slurm_container_image,
            "slurm_container_mounts": list(self.slurm_container_mounts),
            "max_decode_batch_size": self.max_decode_batch_size,
        }
        captures = self.cudagraph_capture_sizes
        optional = {
            "worker_type": self.worker_type,
            "cudagraph_mode": self.cudagraph_mode,
            "cudagraph_capture_sizes": None if captures is None else list(captures),
            "max_cudagraph_capture_size": self.max_cudagraph_capture_size,
            "slurm_cpus_per_task": self.slurm_cpus_per_task,
            "slurm_cpu_bind": self.slurm_cpu_bind,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enforce_eager": self.enforce_eager or None,
            "benchmark_points": self.benchmark_points,
        }
        # Only what is set, so that older plans keep their digests.
        return document | {name: value for name, value in optional.items() if value is not None}


def _refuse(option: str, reason: str) -> None:
    raise OnboardError(f"--fpm-{option.replace('_', '-')}: {reason}", option)


def _check_numbers(settings: CollectionSettings) -> None:
    least = {
        "max_gpus": 1,
        "max_num_batched_tokens": 1,
        "max_num_seqs": 1,
        "max_decode_batch_size": 1,
        "max_prefill_batch_size": 1,
        "max_prefill_cudagraph_size": 1,
        "max_cudagraph_capture_size": 1,
        "max_prefill_isl": 2,
        "warmup_iterations": 0,
    }
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and (type(value) is not int or value < lowest):
            _refuse(name, f"expected an integer of at least {lowest}, found {value!r}")
    length = settings.max_model_len
    if type(length) is not int or (length < 1 and length != AUTO_MODEL_LEN):
        _refuse("max_model_len", f"expected a positive integer, or -1 for what fits, found {length!r}")
    share = settings.gpu_memory_utilization
    if share is not None and (type(share) not in (int, float) or not math.isfinite(share) or not 0 < share <= 1):
        _refuse("gpu_memory_utilization", f"expected a fraction above 0 and up to 1, found {share!r}")
    for narrow, wide in (
        ("max_prefill_isl", "max_num_batched_tokens"),
        ("max_prefill_batch_size", "max_num_seqs"),
        ("max_decode_batch_size", "max_num_seqs"),
    ):
        inner, outer = getattr(settings, narrow), getattr(settings, wide)
        if inner is not None and outer is not None and inner > outer:
            _refuse(narrow, f"{inner} exceeds {wide} {outer}")
    too_many = [count for count in settings.gpu_counts if count > settings.max_gpus]
    if too_many:
        _refuse("gpu_counts", f"{too_many} exceed max_gpus {settings.max_gpus}")


def _check_parallel(settings: CollectionSettings) -> None:
    if settings.parallel_axes and settings.parallel_presets:
        _refuse("parallel_axes", "cannot be combined with --fpm-parallel-presets")
    if "auto" in settings.parallel_presets and len(settings.parallel_presets) > 1:
        _refuse("parallel_presets", "auto stands alone")
    for axis in ("pp", "cp"):
        if settings.sizes[axis] not in (None, (1,)):
            _refuse(f"{axis}_sizes", f"only 1 is collected, found {list(settings.sizes[axis] or ())}")
        if axis in settings.parallel_axes:
            _refuse("parallel_axes", f"{axis} is always 1")


def _check_graphs(settings: CollectionSettings) -> None:
    runtime = settings.prefill_cudagraph_policy == "runtime"
    sizes, largest = settings.cudagraph_capture_sizes, settings.max_cudagraph_capture_size
    explicit = settings.max_prefill_cudagraph_size
    if settings.worker_type is None and (settings.cudagraph_mode, sizes, largest) != (None, None, None):
        _refuse("cudagraph_mode", "graph settings belong to a serving role; add --fpm-worker-type")
    if sizes is not None and (not sizes or min(sizes) < 1 or tuple(sorted(set(sizes))) != sizes):
        _refuse("cudagraph_capture_sizes", f"expected rising positive integers, found {list(sizes)}")
    if sizes is not None and largest not in (None, max(sizes)):
        _refuse("max_cudagraph_capture_size", f"must be the largest capture size {max(sizes)}, found {largest}")
    if (sizes, largest) != (None, None) and (not runtime or explicit is not None):
        _refuse("cudagraph_capture_sizes", "needs --fpm-prefill-cudagraph-policy runtime and no prefill capture size")
    if settings.cudagraph_mode == "NONE" and ((sizes, largest) != (None, None) or not runtime):
        _refuse("cudagraph_mode", "NONE captures nothing: omit capture sizes and use policy runtime")
    biggest, tokens = largest or max(sizes or (0,)), settings.max_num_batched_tokens
    if tokens is not None and biggest > tokens:
        _refuse("cudagraph_capture_sizes", f"{biggest} exceeds max_num_batched_tokens {tokens}")
    if runtime and explicit is not None:
        _refuse("max_prefill_cudagraph_size", "policy runtime leaves captured sizes to the engine")


def _check_executor(settings: CollectionSettings) -> None:
    cpus, bind = settings.slurm_cpus_per_task, settings.slurm_cpu_bind
    slurm_only = {
        "slurm_container_image": settings.slurm_container_image,
        "slurm_container_mount": settings.slurm_container_mounts,
        "slurm_cpus_per_task": cpus,
        "slurm_cpu_bind": bind,
    }
    if settings.executor == "slurm":
        if not settings.slurm_container_image:
            _refuse("slurm_container_image", "executor slurm runs in a container; name its image")
    else:
        for name, value in slurm_only.items():
            if value:
                _refuse(name, f"belongs to executor slurm, found executor {settings.executor}")
    if (cpus is None) != (bind is None):
        _refuse("slurm_cpus_per_task", "a CPU policy has both --fpm-slurm-cpus-per-task and --fpm-slurm-cpu-bind")
    if cpus is not None and (type(cpus) is not int or cpus < 1 or bind not in ("cores", "none")):
        _refuse("slurm_cpus_per_task", f"expected a positive integer and cores or none, found {cpus!r} and {bind!r}")
