"""How one simulated engine is launched: scheduler options, parallel sizes, memory inputs, timing model.

Frozen dataclasses with a canonical mapping form; what a launch must agree on with its timing model is here
too.
Source: engine-and-replay.md section 1.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any, Self

from fpmsdk.config import ForwardPassPerfModelConfig, check_config, request_document
from fpmsdk.config.jsontext import JsonFault, read_json
from fpmsdk.config.schema import SchemaFault, describe
from fpmsdk.errors import ConfigError, LaunchConfigError, MissingCapabilityError
from fpmsdk.launch.fields import BLOCK_SIZES, LAUNCH
from fpmsdk.launch.flat import canonical_form, derived_from_timing, native_timing_config
from fpmsdk.launch.rules import validate_launch

UNLIMITED = 2**64 - 1


@dataclass(frozen=True)
class KvCacheGroup:
    """One group of layers that share a page size; `page_size_bytes` covers all its layers on one rank."""

    name: str
    kind: str
    num_layers: int
    block_size_tokens: int
    page_size_bytes: int
    sliding_window: int | None = None


@dataclass(frozen=True)
class SglangConfig:
    """Scheduler options that only backend sglang reads; budgets in tokens, `vlm_cache_bytes` in bytes.

    Source: engine-and-replay.md section 1.1.

    >>> from fpmsdk import EngineLaunchConfig
    >>> engine = {"backend": "sglang", "sglang": {"max_prefill_tokens": 4096}}
    >>> launch = EngineLaunchConfig.from_mapping({"engine": engine})
    >>> launch.engine.sglang.max_prefill_tokens, launch.engine.sglang.chunked_prefill_size
    (4096, 8192)
    """

    schedule_policy: str = "fifo"
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    clip_max_new_tokens: int = 4096
    schedule_conservativeness: float = 1.0
    vlm_cache_bytes: int = 104_857_600
    host_loop: bool = False


@dataclass(frozen=True)
class TrtllmConfig:
    """Scheduler options that only backend trtllm reads."""

    capacity_scheduler_policy: str = "guaranteed_no_evict"


@dataclass(frozen=True)
class EngineConfig:
    """One scheduler rank: lengths in tokens, sizes in bytes, bandwidth in decimal GB/s, None for no limit.

    Not validated by itself; `EngineLaunchConfig.from_mapping` reads and checks one.
    Source: engine-and-replay.md section 1.1.

    >>> engine = EngineConfig(num_gpu_blocks=400, max_num_seqs=16)
    >>> engine.num_gpu_blocks * engine.block_size, engine.timing_model
    (25600, {'type': 'polynomial'})
    """

    backend: str = "vllm"
    num_gpu_blocks: int = 16384
    block_size: int = 64
    max_model_len: int | None = None
    max_num_seqs: int | None = 256
    max_num_batched_tokens: int | None = 8192
    prefill_schedule_interval: int = 1
    prefill_decode_interval: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    aic_nextn: int | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: int = 42
    worker_type: str = "aggregated"
    preemption_mode: str = "lifo"
    emit_kv_events: bool = False
    emit_kv_token_ids: bool = False
    kv_transfer_bytes_per_token: int | None = None
    kv_cache_bytes_per_token: int | None = None
    kv_cache_groups: tuple[KvCacheGroup, ...] = ()
    kv_cache_capacity_bytes: int | None = None
    kv_transfer_bandwidth: float | None = None
    kv_transfer_timing_mode: str = "full_prompt"
    timing_model: dict[str, Any] = field(default_factory=lambda: {"type": "polynomial"})
    sglang: SglangConfig = field(default_factory=SglangConfig)
    trtllm: TrtllmConfig = field(default_factory=TrtllmConfig)


@dataclass(frozen=True)
class EngineLaunchConfig:
    """A scheduler rank and the inputs of its launch. `from_mapping` validates; direct construction does not.

    `startup_time` is in seconds, `cuda_graph_reserved_bytes` is local to a rank.

    Source: engine-and-replay.md section 1.1.

    >>> launch = EngineLaunchConfig.from_mapping({"engine": {"max_num_seqs": 8}, "dp_size": 2})
    >>> launch.engine.max_num_seqs, launch.engine.block_size, launch.dp_size
    (8, 64, 2)
    >>> EngineLaunchConfig.from_mapping(launch.to_dict()) == launch
    True
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    dp_size: int = 1
    tensor_parallel_size: int = 1
    startup_time: float | None = None
    num_gpu_blocks_is_explicit: bool = False
    gpu_memory_utilization: float | None = None
    mem_fraction_static: float | None = None
    free_gpu_memory_fraction: float | None = None
    cuda_graph_reserved_bytes: int | None = None

    @classmethod
    def from_mapping(cls, launch: Mapping[str, Any] | str) -> Self:
        """Read and validate a launch.

        Parameters: `launch`, a mapping or JSON text. With the key `engine` it is canonical; without, it is
        the flat legacy form, whose omitted parallel sizes follow a native timing model.
        Raises: `LaunchConfigError` for a field that is unknown, repeated, missing or ill-typed (`path`
        names it) and for the first rule that does not hold; `ConfigError` for the configuration of a native
        timing model.
        Source: engine-and-replay.md sections 1.1 to 1.5.

        >>> EngineLaunchConfig.from_mapping({"engine": {}, "dp_size": 0})
        Traceback (most recent call last):
            ...
        fpmsdk.errors.LaunchConfigError: dp_size must be positive
        """
        document = _document(launch)
        if "engine" in document:
            parsed = _parse(document)
        else:
            canonical = canonical_form(document)
            config = native_timing_config(canonical)
            if config is not None:
                canonical = derived_from_timing(canonical, check_config(config))
            parsed = _parse(canonical, written_at="engine.")
        validate_launch(parsed)
        config = native_timing_config(parsed)
        if config is not None and (conflicts := _identity_conflicts(parsed, check_config(config))):
            raise LaunchConfigError(conflicts[0])
        return cls._of(parsed)

    @classmethod
    def timing_config_mismatches(
        cls, launch_args: "Mapping[str, Any] | str | EngineLaunchConfig", config: Mapping[str, Any]
    ) -> list[str]:
        """Return every identity conflict of launch arguments that take `config` as their timing model.

        Parameters: `launch_args`, as for `from_mapping`; what they omit follows `config`, a strict
        configuration.
        Returns: texts in rule order; empty means that the launch accepts the configuration.
        Raises: what `from_mapping` raises for the arguments themselves, and `ConfigError`.
        Source: engine-and-replay.md section 1.5.

        >>> config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated", "tp": 2}
        >>> EngineLaunchConfig.timing_config_mismatches({"engine": {}, "tensor_parallel_size": 4}, config)
        ['tensor_parallel_size conflicts with canonical tp']
        """
        checked = check_config(config)
        document = launch_args.to_dict() if isinstance(launch_args, EngineLaunchConfig) else _document(launch_args)
        flat = "engine" not in document
        canonical = canonical_form(document) if flat else document
        if isinstance(engine := canonical["engine"], Mapping):
            timing = {"type": "external", "provider": "ais", "config": dict(config)}
            canonical = {**canonical, "engine": {**engine, "timing_model": timing}}
        parsed = _parse(derived_from_timing(canonical, checked), written_at="engine." if flat else "")
        validate_launch(parsed)
        return _identity_conflicts(parsed, checked)

    def to_dict(self) -> dict[str, Any]:
        """Return the canonical mapping, every field in serialisation order; `from_mapping` reads it back.

        Source: engine-and-replay.md section 1.1.

        >>> EngineLaunchConfig(dp_size=2).to_dict()["dp_size"]
        2
        """
        return LAUNCH.write(asdict(self))

    @classmethod
    def _of(cls, parsed: dict[str, Any]) -> Self:
        engine = dict(parsed["engine"])
        groups = tuple(KvCacheGroup(**group) for group in engine.pop("kv_cache_groups"))
        sglang, trtllm = SglangConfig(**engine.pop("sglang")), TrtllmConfig(**engine.pop("trtllm"))
        rank = EngineConfig(**engine, kv_cache_groups=groups, sglang=sglang, trtllm=trtllm)
        return cls(**{**parsed, "engine": rank})


def config_engine_launch_mismatches(
    launch_args: Mapping[str, Any] | str | EngineLaunchConfig,
    config: Mapping[str, Any] | ForwardPassPerfModelConfig | str | None = None,
    *,
    state_snapshot: str | PathLike[str] | None = None,
) -> list[str]:
    """Return every identity conflict between engine launch arguments and a forward-pass configuration.

    No model is built. Parameters: `launch_args`, as for `EngineLaunchConfig.from_mapping`; exactly one of
    `config` and `state_snapshot`, the directory of a saved model.
    Returns: texts in rule order; empty means that the launch accepts the model.
    Raises: the launch's own error for invalid launch arguments, `ConfigError` for an invalid configuration.
    Source: engine-and-replay.md section 1.5, snapshot.md section 1.

    >>> config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"}
    >>> config_engine_launch_mismatches({"engine": {}}, config | {"estimation_mode": "fpm_regression"})
    ['AIS worker_type must match engine role']
    """
    if (config is None) == (state_snapshot is None):
        raise ConfigError("give exactly one of config and state_snapshot")
    if config is None:
        raise MissingCapabilityError("this release cannot read state snapshots (state_snapshot)")
    return EngineLaunchConfig.timing_config_mismatches(launch_args, request_document(config))


def _document(launch: Mapping[str, Any] | str) -> Mapping[str, Any]:
    try:
        document = read_json(launch) if isinstance(launch, str) else launch
    except JsonFault as fault:
        raise _launch_error(fault.path, str(fault)) from None
    if not isinstance(document, Mapping):
        raise _launch_error("", f"expected an object, found {describe(document)}")
    return document


def _launch_error(path: str, reason: str) -> LaunchConfigError:
    at = f"{path}: " if path else ""
    return LaunchConfigError(f"invalid engine launch config: {at}{reason}", path)


def _parse(document: Mapping[str, Any], written_at: str = "") -> dict[str, Any]:
    """Read a canonical mapping; `written_at` is the part of the paths that the caller did not write."""
    try:
        parsed = LAUNCH.read(document)
    except SchemaFault as fault:
        raise _launch_error(fault.path.removeprefix(written_at), fault.reason) from None
    engine = parsed["engine"]
    if engine["block_size"] is None:
        engine["block_size"] = BLOCK_SIZES[engine["backend"]]
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        engine[limit] = None if engine[limit] == UNLIMITED else engine[limit]
    if parsed["num_gpu_blocks_is_explicit"] is None:
        parsed["num_gpu_blocks_is_explicit"] = "num_gpu_blocks" in document.get("engine", {})
    return parsed


def _identity_conflicts(launch: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the conflicts of a parsed launch with a checked timing configuration, in rule order."""
    engine = launch["engine"]
    speculation = config["speculation"]
    rules = [
        (config["pp"] == 1, f"engine launch supports only pp=1; got pp={config['pp']}"),
        (
            config["tp"] == launch["tensor_parallel_size"],
            "tensor_parallel_size conflicts with canonical tp",
        ),
        (config["attention_dp"] == launch["dp_size"], "dp_size conflicts with canonical attention_dp"),
        (config["worker_type"] == engine["worker_type"], "AIS worker_type must match engine role"),
        (
            speculation is None or speculation["kind"] != "ngram",
            "engine launch does not implement ngram draft scheduling",
        ),
        (
            config["nextn"] == (engine["aic_nextn"] or 0),
            "canonical nextn conflicts with scheduler aic_nextn",
        ),
    ]
    return [text for holds, text in rules if not holds]
