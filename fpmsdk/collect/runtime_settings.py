"""What an initialised engine says of its own settings, compared with what it was launched for.

Settings are those of vLLM 0.27 and 0.28 as their observers write them (`resolved_config`).
Source: collector.md sections 7.1, 7.2 (graph check), 8.2 (launch must match), 8.5 (import checks).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpmsdk.collect.topology import Topology
from fpmsdk.errors import EvidenceError

COMPILATION_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
GRAPH_FIELDS = ("mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
# The attention backend of a worker may take these back; capture sizes stay.
GRAPH_DOWNGRADES = {
    "FULL": ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
    "FULL_AND_PIECEWISE": ("PIECEWISE", "NONE"),
    "FULL_DECODE_ONLY": ("PIECEWISE", "NONE"),
}
_DTYPES = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "half",
    "float16": "half",
    "fp8_e4m3": "fp8",
    "fp8_e4m3fn": "fp8",
}
_QUANTISATION = "vllm.model_executor.layers.quantization."
_NO_OFFLOADER = "vllm.model_executor.offloader.base.NoopOffloader"
_COMMIT = re.compile("[0-9a-fA-F]{40}")


@dataclass(frozen=True, slots=True)
class LaunchedSettings:
    """What an engine was launched for. Limits are per rank, in tokens and sequences.

    `gemm_quant_mode`, `moe_quant_mode` (None for dense models) and `kv_cache_dtype` are modes of the cell;
    `moe_backend` is None or "auto" when the engine chooses.
    """

    topology: Topology
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization: float
    gemm_quant_mode: str
    moe_quant_mode: str | None
    kv_cache_dtype: str
    moe_backend: str | None = "auto"


def dtype_name(value: Any) -> Any:
    """The name of a dtype among modes; what is no alias stays.

    >>> dtype_name("torch.float16"), dtype_name("torch.uint8")
    ('half', 'torch.uint8')
    """
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def cache_dtype(config: Mapping[str, Any]) -> Any:
    """The precision of the cache that settings resolve to: `auto` is that of the model."""
    value = config["cache_config"].get("cache_dtype")
    return dtype_name(config["model_config"].get("dtype") if value == "auto" else value)


def checked_settings(record: Mapping[str, Any], launched: LaunchedSettings) -> dict[str, Any]:
    """The settings of a record, with its compilation mode by name.

    Parameters
    ----------
    record: an observation of a worker or a scheduler, with `resolved_config`.
    launched: what it must agree with.

    Raises
    ------
    EvidenceError: a setting is missing, unsupported or differs; names it with both values.
    """
    config = record.get("resolved_config")
    if not isinstance(config, dict):
        raise EvidenceError(f"resolved_config: expected the settings of the engine, found {config!r}")
    config = copy.deepcopy(config)
    topology = launched.topology
    expected: dict[str, dict[str, Any]] = {
        "model_config": {"max_model_len": launched.max_model_len},
        "cache_config": {"gpu_memory_utilization": launched.gpu_memory_utilization},
        "scheduler_config": {
            "max_num_batched_tokens": launched.max_num_batched_tokens,
            "max_num_seqs": launched.max_num_seqs,
            "async_scheduling": False,
        },
        "parallel_config": {
            "tensor_parallel_size": topology.tp,
            "pipeline_parallel_size": topology.pp,
            "data_parallel_size": topology.dp,
            "decode_context_parallel_size": topology.cp,
        },
    }
    for section, fields in expected.items():
        found = config.get(section)
        if not isinstance(found, dict):
            raise EvidenceError(f"resolved_config.{section}: is missing")
        for name, value in fields.items():
            _require(f"{section}.{name}", found.get(name), value)
    parallel = config["parallel_config"]
    _require("parallel_config.prefill_context_parallel_size", parallel.get("prefill_context_parallel_size", 1), 1)
    _require("parallel_config.enable_eplb", parallel.get("enable_eplb", False), False)
    _require("parallel_config.enable_expert_parallel", parallel.get("enable_expert_parallel"), topology.moe_ep > 1)
    if launched.moe_backend not in (None, "auto"):
        kernel = config.get("kernel_config") or {}
        _require("kernel_config.moe_backend", kernel.get("moe_backend"), launched.moe_backend)
    _require("cache_config.cache_dtype", cache_dtype(config), launched.kv_cache_dtype)
    check_precision(config, launched)
    _check_no_offload(record, config)
    config["compilation_config"] = graph_settings(
        config.get("compilation_config"),
        eager=config["model_config"].get("enforce_eager"),
        tokens=launched.max_num_batched_tokens,
        # A worker keeps the sizes it was configured with after its backend disabled graphs.
        allow_unused_captures=record.get("kind") == "worker" and "initial_compilation_config" in record,
    )
    return config


def graph_settings(config: Any, *, eager: Any, tokens: int, allow_unused_captures: bool = False) -> dict[str, Any]:
    """Compilation settings that are complete and consistent, with the mode by name.

    Parameters
    ----------
    config: `mode`, `cudagraph_mode`, `cudagraph_capture_sizes`, `max_cudagraph_capture_size` and possibly more.
    eager: whether the engine runs without graphs.
    tokens: the largest size that can be captured.
    allow_unused_captures: whether sizes may remain while graphs are off.

    Raises
    ------
    EvidenceError: a field is missing or contradicts the others.

    Example
    -------
    >>> graph_settings({"mode": 0, "cudagraph_mode": "NONE", "cudagraph_capture_sizes": [],
    ...                 "max_cudagraph_capture_size": 0}, eager=True, tokens=64)["mode"]
    'NONE'
    """
    if not isinstance(config, dict) or not set(GRAPH_FIELDS) <= config.keys() or type(eager) is not bool:
        raise EvidenceError(
            f"compilation_config: expected {', '.join(GRAPH_FIELDS)} and a truth value of enforce_eager, found "
            f"{config!r} and {eager!r}"
        )
    settings = copy.deepcopy(config)
    mode, graphs = settings["mode"], settings["cudagraph_mode"]
    sizes, largest = settings["cudagraph_capture_sizes"], settings["max_cudagraph_capture_size"]
    if type(mode) is int or (isinstance(mode, str) and mode.isdigit()):
        number = int(mode)
        mode = COMPILATION_MODES[number] if 0 <= number < len(COMPILATION_MODES) else mode
    if mode not in COMPILATION_MODES:
        raise EvidenceError(f"compilation_config.mode: expected one of {', '.join(COMPILATION_MODES)}, found {mode!r}")
    settings["mode"] = mode
    if graphs not in GRAPH_MODES:
        raise EvidenceError(
            f"compilation_config.cudagraph_mode: expected one of {', '.join(GRAPH_MODES)}, found {graphs!r}"
        )
    if (
        not isinstance(sizes, list)
        or any(type(size) is not int or not 0 < size <= tokens for size in sizes)
        or sizes != sorted(set(sizes))
    ):
        raise EvidenceError(
            f"compilation_config.cudagraph_capture_sizes: expected increasing sizes from 1 to {tokens}, found {sizes!r}"
        )
    if type(largest) is not int or largest != max(sizes, default=0):
        raise EvidenceError(
            f"compilation_config.max_cudagraph_capture_size: expected {max(sizes, default=0)}, found {largest!r}"
        )
    if (graphs != "NONE" and not sizes) or (graphs == "NONE" and sizes and not allow_unused_captures):
        raise EvidenceError(f"compilation_config: cudagraph_mode {graphs} contradicts capture sizes {sizes!r}")
    if eager and (mode, graphs, sizes) != ("NONE", "NONE", []):
        raise EvidenceError(f"compilation_config: enforce_eager contradicts {mode}, {graphs} and sizes {sizes!r}")
    return settings


def launched_graphs(record: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The compilation settings an engine was started with, before the backend of a worker took some back."""
    settings = config["compilation_config"]
    if record.get("kind") == "worker":
        settings = record.get("initial_compilation_config", settings)
    return graph_settings(
        settings,
        eager=config["model_config"]["enforce_eager"],
        tokens=config["scheduler_config"]["max_num_batched_tokens"],
    )


def check_requested_graphs(record: Mapping[str, Any], config: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Compare the graph settings that were asked for with those the engine was started with.

    Raises
    ------
    EvidenceError: one differs; names it with both values.
    """
    if not requested:
        return
    initial = launched_graphs(record, config)
    for name, value in requested.items():
        _require(f"compilation_config.{name}", initial.get(name), value)


def check_one_engine(worker: Mapping[str, Any], scheduler: Mapping[str, Any]) -> None:
    """A worker and its scheduler have the same settings, but for graphs that the worker's backend took back.

    Raises
    ------
    EvidenceError: any other difference.
    """
    settings = []
    for record in (worker, scheduler):
        config = copy.deepcopy(record["resolved_config"])
        config["compilation_config"] = graph_settings(
            config["compilation_config"],
            eager=config["model_config"]["enforce_eager"],
            tokens=config["scheduler_config"]["max_num_batched_tokens"],
            allow_unused_captures=record is worker and "initial_compilation_config" in worker,
        )
        settings.append(config)
    mine, scheduled = settings
    if mine == scheduled:
        return
    if "initial_compilation_config" in worker:
        initial = launched_graphs(worker, mine)
        now = mine["compilation_config"]
        taken_back = now["cudagraph_mode"] in GRAPH_DOWNGRADES.get(initial["cudagraph_mode"], ())
        only_the_mode = {**now, "cudagraph_mode": initial["cudagraph_mode"]} == initial
        if taken_back and only_the_mode and {**mine, "compilation_config": initial} == scheduled:
            return
    differing = sorted(name for name in mine.keys() | scheduled.keys() if mine.get(name) != scheduled.get(name))
    raise EvidenceError(
        f"resolved_config: worker and scheduler of one rank differ in {', '.join(differing)}; both must come from one "
        "launch"
    )


def check_revision(config: Mapping[str, Any], revision: str) -> None:
    """No full commit that the engine reports contradicts the pinned one; a branch or nothing contradicts nothing.

    Raises
    ------
    EvidenceError: another commit; names the field.
    """
    if not _COMMIT.fullmatch(revision):
        return
    for name in ("revision", "loaded_config_commit_hash"):
        found = config["model_config"].get(name)
        if isinstance(found, str) and _COMMIT.fullmatch(found) and found.lower() != revision.lower():
            raise EvidenceError(f"model_config.{name}: the engine loaded {found}, pinned is {revision}")


def _require(name: str, found: Any, expected: Any) -> None:
    if type(found) is not type(expected) or found != expected:
        raise EvidenceError(f"resolved_config.{name}: expected {expected!r} as launched, found {found!r}")


def check_precision(config: Mapping[str, Any], launched: LaunchedSettings) -> None:
    """The precision of the weights is of the family that was launched for.

    Raises
    ------
    EvidenceError: it is not fully reported, not supported, or another.
    """
    model = config["model_config"]
    base = dtype_name(model.get("dtype"))
    if "quantization" not in model or "quantization_config" not in config or base not in ("bfloat16", "half"):
        raise EvidenceError("resolved_config: precision of the weights is not fully reported, or no 16-bit base dtype")
    family = _precision_family(model["quantization"], config["quantization_config"], base)
    if family is None:
        raise EvidenceError(
            f"model_config.quantization: {model['quantization']!r} with {config['quantization_config']!r} is no "
            "supported precision"
        )
    gemm, moe = family
    # A checkpoint may leave layers in its base dtype: the method tells a family, not the mode of every layer.
    if launched.gemm_quant_mode not in (base, gemm) or launched.moe_quant_mode not in (None, base, moe):
        raise EvidenceError(
            f"resolved_config: the weights run as gemm {gemm} and moe {moe} over {base}; launched for gemm "
            f"{launched.gemm_quant_mode} and moe {launched.moe_quant_mode}"
        )


def _precision_family(method: Any, quant: Any, base: str) -> tuple[str, str] | None:
    if method is None and quant is None:
        return base, base
    if not isinstance(quant, dict):
        return None
    if (method, quant.get("type")) == ("fp8", f"{_QUANTISATION}fp8.Fp8Config"):
        return _fp8_family(quant.get("activation_scheme"), quant.get("weight_block_size"))
    kind = (method, quant.get("type"), quant.get("quant_method"))
    if kind == ("modelopt_fp4", f"{_QUANTISATION}modelopt.ModelOptNvFp4Config", "NVFP4"):
        return "nvfp4", "nvfp4"
    if kind == ("modelopt", f"{_QUANTISATION}modelopt.ModelOptFp8Config", "FP8"):
        return "fp8_static", "fp8"
    return None


def _fp8_family(scheme: Any, block: Any) -> tuple[str, str] | None:
    if block == [128, 128] and scheme == "dynamic":
        return "fp8_block", "fp8_block"
    if block is None and scheme in ("static", "dynamic"):
        return ("fp8_static" if scheme == "static" else "fp8"), "fp8"
    return None


def _check_no_offload(record: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    offload = config.get("offload_config")
    parts = offload if isinstance(offload, dict) else {}
    uva, prefetch = parts.get("uva"), parts.get("prefetch")
    if not isinstance(uva, dict) or not isinstance(prefetch, dict):
        raise EvidenceError(f"resolved_config.offload_config: expected uva and prefetch, found {offload!r}")
    _require("offload_config.offload_backend", parts.get("offload_backend"), "auto")
    amount = uva.get("cpu_offload_gb")
    if type(amount) not in (int, float) or amount != 0:
        raise EvidenceError(f"resolved_config.offload_config.uva.cpu_offload_gb: expected 0, found {amount!r}")
    _require("offload_config.prefetch.offload_group_size", prefetch.get("offload_group_size"), 0)
    for name, minimum in (("offload_num_in_group", 1), ("offload_prefetch_step", 0)):
        value = prefetch.get(name)
        if type(value) is not int or value < minimum:
            raise EvidenceError(
                f"resolved_config.offload_config.prefetch.{name}: expected an integer of at least {minimum}, found "
                f"{value!r}"
            )
    for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if config["cache_config"].get(name) is not None:
            raise EvidenceError(
                f"resolved_config.cache_config.{name}: the cache must be sized by the engine, found "
                f"{config['cache_config'][name]!r}"
            )
    if record.get("kind") == "worker" and record.get("effective_offloader") != _NO_OFFLOADER:
        raise EvidenceError(
            f"effective_offloader: expected {_NO_OFFLOADER}, found {record.get('effective_offloader')!r}"
        )
