"""Counts and sums over requests, and the summary figures that are made of them; requests may come in any portions.

Not distributions, which are in `fpmsdk.replay.latency`. Source: engine-and-replay.md sections 5.6 and 5.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fpmsdk.replay.latency import RequestLatencies, Sla

Columns = Mapping[str, NDArray[Any]]


class Totals(Struct):
    """Of all requests that arrived, and of those that completed."""

    num_requests: int = 0
    completed: int = 0
    rejected: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reused_tokens: int = 0
    first_reused_tokens: int = 0
    duration_ms: float = 0.0
    good: int = 0
    good_output_tokens: int = 0

    def add(self, columns: Columns, latencies: RequestLatencies, sla: Sla | None) -> None:
        """Count request columns, as a report has them."""
        done = columns["status"] == "completed"
        self.num_requests += len(done)
        self.rejected += int(_is_refused(columns).sum())
        if not done.any():
            return
        self.completed += int(done.sum())
        self.input_tokens += int(columns["prompt_tokens"][done].sum())
        self.output_tokens += int(columns["output_tokens"][done].sum())
        self.reused_tokens += int(_best_reuse(columns)[done].sum())
        self.first_reused_tokens += int(columns["first_reused_tokens"][done].sum())
        self.duration_ms = max(self.duration_ms, float(columns["end_ms"][done].max()))
        if sla is not None:
            good = done & sla.met_by(latencies, columns["arrival_ms"], columns["end_ms"])
            self.good += int(good.sum())
            self.good_output_tokens += int(columns["output_tokens"][good].sum())

    def volume(self, wall_time_ms: float) -> dict[str, Any]:
        """Counts, throughputs and shares of a summary."""
        seconds = self._seconds
        wall_seconds = max(wall_time_ms, 1e-6) / 1e3
        tokens = self.input_tokens + self.output_tokens
        return {
            "num_requests": self.num_requests,
            "completed_requests": self.completed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "duration_ms": self.duration_ms,
            "wall_time_ms": wall_time_ms,
            "request_throughput_rps": self.completed / seconds,
            "input_throughput_tok_s": self.input_tokens / seconds,
            "output_throughput_tok_s": self.output_tokens / seconds,
            "total_throughput_tok_s": tokens / seconds,
            "power_w": None,  # no timing model so far knows its energy
            "power_coverage": None,
            "processed_tokens": tokens,
            "processed_tokens_per_s": tokens / wall_seconds,
            "processed_output_tokens_per_s": self.output_tokens / wall_seconds,
            "prefix_cache_reused_ratio": self.reused_tokens / max(self.input_tokens, 1),
            "first_admission_prefix_cache_reused_ratio": self.first_reused_tokens / max(self.input_tokens, 1),
        }

    def goodput(self) -> dict[str, Any]:
        """What held every bound of the SLA."""
        return {
            "goodput_completed_requests": self.good,
            "goodput_request_throughput_rps": self.good / self._seconds,
            "goodput_output_throughput_tok_s": self.good_output_tokens / self._seconds,
        }

    @property
    def _seconds(self) -> float:
        return max(self.duration_ms, 1e-6) / 1e3

    def why_empty(self, first_rejected: tuple[str, str] | None) -> str:
        """In words, what became of requests of which none completed; of the first rejected one its name and why."""
        fault = f"no request completed: {self.rejected} of {self.num_requests} were rejected"
        if first_rejected is not None:
            fault += f", the first, {first_rejected[0]}, because {first_rejected[1]}"
        return f"{fault}; {self.num_requests - self.rejected} were unfinished"


def first_rejected(columns: Columns) -> tuple[str, str] | None:
    """Name and reason of the first rejected request of some columns."""
    rows = np.flatnonzero(_is_refused(columns))
    if not rows.size:
        return None
    return str(columns["request_id"][rows[0]]), str(columns["rejection_reason"][rows[0]])


def _is_refused(columns: Columns) -> NDArray[np.bool_]:
    # Whom no decode worker can take has failed for the same reason, only later.
    refused: NDArray[np.bool_] = (columns["status"] == "rejected") | (columns["status"] == "failed")
    return refused


def _best_reuse(requests: Columns) -> NDArray[np.int64]:
    """Tokens reused in the best admission of each request, whichever pool it was in."""
    decode = requests.get("decode_reused_tokens", requests["reused_tokens"])
    best: NDArray[np.int64] = np.maximum(requests["reused_tokens"], decode)
    return best


def provision(
    clock_ms: float, num_workers: int, gpus_per_worker: int, num_prefill_workers: int, prefill_gpus_per_worker: int
) -> dict[str, Any]:
    """Worker seconds and GPU hours; an aggregated worker counts as a decode worker."""
    prefill_seconds, decode_seconds = num_prefill_workers * clock_ms / 1e3, num_workers * clock_ms / 1e3
    gpu_seconds = prefill_seconds * prefill_gpus_per_worker + decode_seconds * gpus_per_worker
    return {
        "prefill_worker_seconds": prefill_seconds,
        "decode_worker_seconds": decode_seconds,
        "prefill_gpus_per_worker": prefill_gpus_per_worker,
        "decode_gpus_per_worker": gpus_per_worker,
        "gpu_hours": gpu_seconds / 3600,
    }
