"""The estimates behind the passes of a replay, equal ones counted once: why the passes cost what they cost.

Asks the model again what the passes were priced with; prices nothing itself.
Source: fpm-interpolation.md section 4.4; engine-and-replay.md section 4.2.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpmsdk.errors import ConfigError

if TYPE_CHECKING:
    from fpmsdk.replay.report import ReplayReport

PREFILL, DECODE, MIXED = "fpm_prefill", "fpm_decode", "fpm_mixed"


class _Shape(NamedTuple):
    # What one pass was priced by; tokens of prompts after and before it, known tokens of decoding requests.
    num_prefill: int
    prefill_end_tokens: int
    prefill_past_tokens: int
    num_decode: int
    decode_tokens: int
    composed: int


def pass_estimates(report: "ReplayReport", model: Any, *, pool: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Every distinct estimate that the passes of a replay were priced with, none left out.

    Parameters
    ----------
    report: a replay that kept its passes.
    model: the `ForwardPassPerfModel` that priced them; what it has learned since shows in its factors.
    pool: `agg`, `prefill` or `decode`; None where there is only one.

    Returns
    -------
    By operation, `fpm_prefill`, `fpm_decode` and `fpm_mixed` (both in one forward): rows of `estimate` (as
    `estimate_forward_pass_detailed`), `count` of passes and `latency_scale`, by which the engine's speedups multiply
    its `latency_ms`.

    Raises
    ------
    ConfigError: the replay kept no passes, or another pool is named.

    >>> from fpmsdk import ForwardPassPerfModel, Trace, replay_trace
    >>> model = ForwardPassPerfModel.best_available(
    ...     {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated",
    ...      "estimation_mode": "fpm_regression", "estimator_config": {"fpm_regression": {"min_observations": 2}}})
    >>> for tokens in (8, 16):
    ...     model.tune_with_fpms({"wall_time": 1e-3 * tokens, "scheduled_requests": {
    ...         "num_prefill_requests": 1, "sum_prefill_tokens": tokens}})
    ...     model.tune_with_fpms({"wall_time": 1e-4 * tokens, "scheduled_requests": {
    ...         "num_decode_requests": 1, "sum_decode_kv_tokens": tokens}})
    >>> report = replay_trace(Trace.from_arrays([0.0, 500.0], [8, 8], [2, 2]), timing=model)
    >>> estimates = pass_estimates(report, model)
    >>> [(row["count"], round(row["estimate"]["latency_ms"], 6)) for row in estimates["fpm_prefill"]]
    [(2, 8.0)]
    """
    passes = report.pass_columns
    if not len(passes["worker"]):
        raise ConfigError("the replay has kept no passes; leave record_passes at True", "record_passes")
    pools = sorted(set(passes["pool"]))
    if pool not in pools and (pool is not None or len(pools) > 1):
        raise ConfigError(f"pool is {pool!r}; the passes are of {' and '.join(pools)}", "pool")
    launch = report.options["prefill_launch" if pool == "prefill" else "launch"]
    # Operators are asked by known tokens, the newest one of each request included.
    counts_known_tokens = model.diagnostics()["provenance"]["selected_estimation_mode"] == "op_level"
    counted: dict[tuple[str, tuple[int, ...]], int] = {}
    for shape, count in _shapes(passes, pool):
        for query in _queries(shape, _kv_capacity_tokens(launch["engine"]), counts_known_tokens):
            counted[query] = counted.get(query, 0) + count
    scales = _scales(launch["engine"])
    estimates: dict[str, list[dict[str, Any]]] = {PREFILL: [], DECODE: [], MIXED: []}
    for (operation, totals), count in counted.items():
        estimate = model.estimate_forward_pass_detailed({"scheduled_requests": dict(zip(_FIELDS, totals, strict=True))})
        estimates[operation].append({"estimate": estimate, "count": count, "latency_scale": scales[operation]})
    return estimates


_FIELDS = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)


def _shapes(passes: Mapping[str, Any], pool: str | None) -> list[tuple[_Shape, int]]:
    # Distinct shapes with how many passes had them, in order of their first.
    names = (
        "priced_num_prefill",
        "priced_sum_prefill_end_tokens",
        "priced_sum_prefill_past_tokens",
        "priced_num_decode",
        "priced_sum_decode_tokens",
        "composed",
    )
    rows = np.stack([passes[name].astype(np.int64) for name in names], axis=1)
    if pool is not None:
        rows = rows[passes["pool"] == pool]
    shapes, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
    return [(_Shape._make(shapes[i].tolist()), int(counts[i])) for i in np.argsort(first)]


def _queries(
    shape: _Shape, capacity_tokens: int | None, counts_known_tokens: bool
) -> list[tuple[str, tuple[int, ...]]]:
    # What the model was asked of one pass; parts on their own, of operators by whole mean lengths.
    kv_tokens = shape.decode_tokens
    if not counts_known_tokens:
        kv_tokens -= shape.num_decode
        kv_tokens = kv_tokens if capacity_tokens is None else min(kv_tokens, capacity_tokens)
    prefill, past = shape.num_prefill, shape.prefill_past_tokens
    if shape.composed:
        return [(MIXED, (prefill, shape.prefill_end_tokens - past, past, shape.num_decode, kv_tokens))]
    queries: list[tuple[str, tuple[int, ...]]] = []
    if prefill:
        end = shape.prefill_end_tokens
        if counts_known_tokens:
            end, past = end // prefill * prefill, past // prefill * prefill
        queries.append((PREFILL, (prefill, end - past, past, 0, 0)))
    if shape.num_decode:
        queries.append((DECODE, (0, 0, 0, shape.num_decode, kv_tokens)))
    return queries


def _kv_capacity_tokens(engine: Mapping[str, Any]) -> int | None:
    # A budget of bytes holds no fixed number of tokens.
    if engine.get("kv_cache_groups"):
        return None
    capacity: int = engine["num_gpu_blocks"] * engine["block_size"]
    return capacity


def _scales(engine: Mapping[str, Any]) -> dict[str, float]:
    # A speedup of 0 means unscaled.
    whole = engine["speedup_ratio"]
    decode = whole * engine["decode_speedup_ratio"]
    scales = {PREFILL: whole, DECODE: decode, MIXED: whole}
    return {operation: 1.0 / speedup if speedup else 1.0 for operation, speedup in scales.items()}
