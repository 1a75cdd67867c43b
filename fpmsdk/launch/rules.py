"""Rules of an engine launch beyond types: ranges, combinations, and what a backend supports.

The first rule that does not hold is raised, engine rules before launch inputs.
Source: engine-and-replay.md sections 1.1 and 1.3.
"""

import math
import re
from decimal import Decimal
from typing import Any

from fpmsdk.config.schema import U32_MAX
from fpmsdk.errors import LaunchConfigError

MAX_EXACT_BYTES = 2**53
MAX_DRAFT_TOKENS = 5
DEFAULT_ACCEPT_RATES = "0.85,0.3,0,0,0"
DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE | re.ASCII)


def validate_launch(launch: dict[str, Any]) -> None:
    """Check every rule of a parsed launch, defaults resolved; accept rates become canonical in place.

    Raises: `LaunchConfigError` for the first rule that does not hold.
    """
    engine = launch["engine"]
    _capacity_and_intervals(engine)
    _speculation(engine)
    _sglang(engine)
    _kv_bytes(engine)
    _kv_groups(engine)
    _kv_transfer(engine)
    _timing(engine["timing_model"])
    _launch_inputs(launch)


def _require(holds: bool, reason: str, path: str) -> None:
    if not holds:
        raise LaunchConfigError(reason, path)


def _is_nonnegative(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value >= 0)


def _launch_inputs(launch: dict[str, Any]) -> None:
    tensor_parallel = launch["tensor_parallel_size"]
    _require(launch["dp_size"] > 0, "dp_size must be positive", "dp_size")
    _require(tensor_parallel > 0, "tensor_parallel_size must be positive", "tensor_parallel_size")
    _require(
        tensor_parallel <= U32_MAX,
        "tensor_parallel_size exceeds the engine contract",
        "tensor_parallel_size",
    )
    _require(
        _is_nonnegative(launch["startup_time"]),
        "startup_time must be finite and non-negative",
        "startup_time",
    )
    for name in ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"):
        share = launch[name]
        _require(share is None or 0 <= share <= 1, f"{name} must be finite and in [0, 1]", name)


def _capacity_and_intervals(engine: dict[str, Any]) -> None:
    backend = engine["backend"]

    def positive(name: str) -> None:
        _require(engine[name] != 0, f"{name} must be positive", f"engine.{name}")

    positive("num_gpu_blocks")
    positive("block_size")
    _require(
        backend == "sglang" or engine["block_size"] >= 2,
        "vLLM/TRT-LLM block_size must be at least two",
        "engine.block_size",
    )
    positive("max_num_seqs")
    positive("max_num_batched_tokens")
    positive("prefill_schedule_interval")
    _require(
        backend == "vllm" or engine["prefill_schedule_interval"] == 1,
        "prefill_schedule_interval needs backend vllm; for backend sglang use prefill_decode_interval",
        "engine.prefill_schedule_interval",
    )
    _require(
        backend == "sglang" or engine["prefill_decode_interval"] == 0,
        "prefill_decode_interval needs backend sglang",
        "engine.prefill_decode_interval",
    )
    _require(
        backend == "sglang" or not engine["sglang"]["host_loop"],
        "sglang.host_loop needs backend sglang",
        "engine.sglang.host_loop",
    )
    positive("max_model_len")
    for name in ("speedup_ratio", "decode_speedup_ratio"):
        _require(_is_nonnegative(engine[name]), f"{name} must be finite and non-negative", f"engine.{name}")


def _speculation(engine: dict[str, Any]) -> None:
    nextn, rates = engine["aic_nextn"], engine["aic_nextn_accept_rates"]
    if nextn is None:
        _require(rates is None, "aic_nextn_accept_rates needs aic_nextn", "engine.aic_nextn_accept_rates")
        return
    _require(
        1 <= nextn <= MAX_DRAFT_TOKENS,
        f"aic_nextn must be in 1..={MAX_DRAFT_TOKENS}, got {nextn}",
        "engine.aic_nextn",
    )
    engine["aic_nextn_accept_rates"] = canonical_accept_rates(rates, nextn)
    _require(
        engine["decode_speedup_ratio"] == 1,
        "aic_nextn needs decode_speedup_ratio 1: accepted drafts are simulated by burst sampling",
        "engine.aic_nextn",
    )


def canonical_accept_rates(rates: str | None, nextn: int) -> str:
    """Return exactly `nextn` conditional acceptance rates as a comma list in shortest decimals.

    Parameters: `rates`, a comma list of rates in [0, 1], None or blank for the default; missing entries are
    0.
    Raises: `LaunchConfigError` that names the entry.

    >>> canonical_accept_rates("0.50, 1e-3", 3)
    '0.5,0.001,0'
    >>> canonical_accept_rates(None, 2)
    '0.85,0.3'
    """
    path = "engine.aic_nextn_accept_rates"
    text = rates if rates is not None and rates.strip() else DEFAULT_ACCEPT_RATES
    values = []
    for index, entry in enumerate(text.split(",")):
        literal = entry.strip()
        _require(
            DECIMAL.fullmatch(literal) is not None,
            f"aic_nextn_accept_rates[{index}] must be a number, got {literal!r}",
            path,
        )
        value = float(literal)
        _require(
            0 <= value <= 1,
            f"aic_nextn_accept_rates[{index}] must be finite and in [0, 1], got {value:g}",
            path,
        )
        values.append(value)
    padded = (values + [0.0] * nextn)[:nextn]
    return ",".join(_shortest_decimal(value) for value in padded)


def _shortest_decimal(value: float) -> str:
    text = f"{Decimal(repr(value)):f}"
    return text.removesuffix(".0")


def _sglang(engine: dict[str, Any]) -> None:
    if engine["backend"] != "sglang":
        return
    _require(
        engine["enable_chunked_prefill"],
        "backend sglang does not support enable_chunked_prefill false",
        "engine.enable_chunked_prefill",
    )
    sglang = engine["sglang"]
    for name in ("max_prefill_tokens", "chunked_prefill_size"):
        _require(sglang[name] > 0, f"sglang.{name} must be positive", f"engine.sglang.{name}")
    _require(
        _is_nonnegative(sglang["schedule_conservativeness"]),
        "sglang.schedule_conservativeness must be finite and non-negative",
        "engine.sglang.schedule_conservativeness",
    )
    _require(
        sglang["chunked_prefill_size"] % engine["block_size"] == 0,
        "sglang.chunked_prefill_size must be a multiple of block_size",
        "engine.sglang.chunked_prefill_size",
    )


def _kv_bytes(engine: dict[str, Any]) -> None:
    _require(
        engine["emit_kv_events"] or not engine["emit_kv_token_ids"],
        "emit_kv_token_ids needs emit_kv_events",
        "engine.emit_kv_token_ids",
    )
    for name in ("kv_transfer_bytes_per_token", "kv_cache_bytes_per_token"):
        _require(engine[name] != 0, f"{name} must be positive", f"engine.{name}")


def _kv_transfer(engine: dict[str, Any]) -> None:
    bandwidth, path = engine["kv_transfer_bandwidth"], "engine.kv_transfer_bandwidth"
    _require(_is_nonnegative(bandwidth), "kv_transfer_bandwidth must be finite and non-negative", path)
    _require(
        not bandwidth or engine["worker_type"] != "prefill" or engine["kv_transfer_bytes_per_token"] is not None,
        "kv_transfer_bandwidth of worker_type prefill needs kv_transfer_bytes_per_token",
        path,
    )


def _kv_groups(engine: dict[str, Any]) -> None:
    capacity, path = engine["kv_cache_capacity_bytes"], "engine.kv_cache_groups"
    if not engine["kv_cache_groups"]:
        _require(
            capacity is None,
            "kv_cache_capacity_bytes requires kv_cache_groups",
            "engine.kv_cache_capacity_bytes",
        )
        return
    linear_fields = ("kv_cache_bytes_per_token", "kv_transfer_bytes_per_token", "kv_transfer_bandwidth")
    _require(
        engine["backend"] == "vllm" and engine["worker_type"] == "aggregated",
        "kv_cache_groups need backend vllm and worker_type aggregated",
        path,
    )
    _require(not engine["enable_prefix_caching"], "kv_cache_groups need enable_prefix_caching false", path)
    _require(engine["aic_nextn"] is None, "kv_cache_groups do not support aic_nextn", path)
    _require(
        not engine["emit_kv_events"],
        "kv_cache_groups do not support emit_kv_events or emit_kv_token_ids",
        path,
    )
    _require(
        all(engine[name] is None for name in linear_fields),
        f"kv_cache_groups cannot be combined with {', '.join(linear_fields)}",
        path,
    )
    _require(
        capacity is not None and 0 < capacity <= MAX_EXACT_BYTES,
        "kv_cache_groups need kv_cache_capacity_bytes in 1..=2^53",
        "engine.kv_cache_capacity_bytes",
    )
    names: set[str] = set()
    for index, group in enumerate(engine["kv_cache_groups"]):
        _kv_group(group, f"{path}[{index}]")
        _require(group["name"] not in names, f"kv_cache_groups name {group['name']!r} is not unique", path)
        names.add(group["name"])


def _kv_group(group: dict[str, Any], path: str) -> None:
    _require(group["name"].strip() != "", "kv_cache_groups name must not be blank", path)
    for name in ("num_layers", "block_size_tokens", "page_size_bytes", "sliding_window"):
        _require(group[name] != 0, f"kv_cache_groups {name} must be positive", path)
    _require(
        group["page_size_bytes"] <= MAX_EXACT_BYTES,
        "kv_cache_groups page_size_bytes must be at most 2^53",
        path,
    )
    _require(
        group["kind"] != "convolution" or group["sliding_window"] is not None,
        "kv_cache_groups of kind convolution need a sliding_window",
        path,
    )


def _timing(timing: dict[str, Any]) -> None:
    path = "engine.timing_model"
    if timing["type"] == "external":
        _require(timing["provider"] != "", "timing_model provider must not be empty", path)
    if timing["type"] == "fixed":
        for phase in ("prefill", "decode"):
            _require(
                _is_nonnegative(timing[f"{phase}_ms"]),
                f"fixed {phase} latency must be finite and non-negative",
                path,
            )
