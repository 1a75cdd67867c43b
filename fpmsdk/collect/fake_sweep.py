"""The result files of a fake engine: the points it measured, with times of every rank and the evidence of them.

Source: collector.md sections 5.1, 5.2, 7.3.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fpmsdk.collect.fake_documents import (
    GIANT_KV_REPEATS,
    GIANT_KV_TOKENS,
    benchmark_config,
    engine_block,
    graph_settings,
    measurement_protocol,
)
from fpmsdk.collect.fake_launch import FakeLaunch
from fpmsdk.collect.fake_law import FakeClock, FakeGpu
from fpmsdk.collect.fake_points import kv_regime, measured_points, skip_reason, warms_kv, warmup_records
from fpmsdk.collect.grid import Point, capture_of, with_replicas
from fpmsdk.collect.kvwarm import STAMPS
from fpmsdk.collect.measurement_records import content_key
from fpmsdk.collect.paths import rank_path
from fpmsdk.documents.canonical import digest

_encode = msgspec.json.encode


class _Row(NamedTuple):
    # One measured point: its document, what seeded its cache, and the encoded sample and seconds of every rank.
    point: dict[str, Any]
    regime: str | None
    samples: list[msgspec.Raw]
    walls_s: list[float]


class Sweep:
    """The measured grid of one launch.

    Parameters
    ----------
    launch: what was asked for.
    """

    def __init__(self, launch: FakeLaunch) -> None:
        self.launch = launch
        self.captures = launch.limits.decode_captures if launch.phase == "decode" else launch.limits.captures
        self.points = measured_points(launch)
        replicas = [point for point in with_replicas(self.points, self.captures) if point.is_replica]
        self.grid_digest = digest(
            [self._document(number, point, None) for number, point in enumerate([*self.points, *replicas], 1)]
        )
        self.run_id = f"{launch.seed:016x}" * 2
        warmups = int(launch.flags.get("--benchmark-warmup-iterations", 5))
        self._warmups = warmup_records(warmups, replicas)
        self._forward = warmups + len(replicas)
        self._clock = FakeClock(launch.seed, drift=launch.faults.drift, **_sigma(launch.faults.cv))
        self._monotonic_s = 1000.0
        self._rows = list(self._measure())

    @property
    def measured_s(self) -> float:
        """Seconds of all measured iterations."""
        return math.fsum(max(row.walls_s) for row in self._rows)

    def write(self) -> None:
        """Write the file of every rank, and the merged one. Raises `OSError`."""
        launch = self.launch
        groups = msgspec.Raw(_encode([self._group(row) for row in self._rows]))
        ranks = range(launch.topology.dp - (launch.faults.rank_missing and launch.topology.dp > 1))
        files = [rank_path(str(launch.output), rank) for rank in ranks]
        if launch.faults.rank_missing and launch.topology.dp == 1:
            files = []
        for rank, path in enumerate(files):
            Path(path).write_bytes(_encode(self._rank_document(rank, groups)))
        merged = launch.output.with_name(f"{launch.output.stem}_merged{launch.output.suffix}")
        document = {
            **self._envelope(),
            "artifact_type": "merged",
            "config": {"mode": launch.phase},
            "rank_files": [Path(path).name for path in files],
            "merged_output_path": str(merged),
            "dp": {"size": launch.topology.dp, "source_ranks": list(ranks)},
        }
        merged.write_bytes(_encode(document))

    def _measure(self) -> Iterator[_Row]:
        launch, gpu = self.launch, FakeGpu()
        mode = launch.mode_of(launch.phase)
        for number, point in enumerate(self.points, 1):
            capture = capture_of(point.tokens, self.captures)
            base_s = gpu.pass_s(point, launch.topology, mode="NONE" if capture is None else mode, capture=capture)
            regime = kv_regime(launch, point)
            count, method = self._samples_of(point, regime)
            biased = launch.is_moe and regime == "fake_fallback"
            document = self._document(number, point, regime)
            start_s, samples, walls = self._monotonic_s, [], []
            for rank in range(launch.topology.dp):
                raw = [self._clock.sample_s(base_s, rank, is_fake_moe_kv=biased) for _ in range(count)]
                counted = raw[1:] if method == "adjacent_upper_median" else raw[-1:]
                wall_s = sorted(counted)[len(counted) // 2]
                sample = self._sample(document, rank, wall_s, regime)
                if not launch.faults.legacy:
                    sample["benchmark_measurement"] = self._measurement(document, sample, rank, raw, method, regime)
                samples.append(msgspec.Raw(_encode(sample)))
                walls.append(wall_s)
                self._monotonic_s = max(self._monotonic_s, start_s + math.fsum(raw))
            self._forward += count
            yield _Row(document, regime, samples, walls)

    def _samples_of(self, point: Point, regime: str | None) -> tuple[int, str]:
        if point.point_type == "prefill":
            return 1, "single_step"
        if regime == "real_kv" or point.total_kv_read_tokens >= GIANT_KV_TOKENS:
            return 1 + GIANT_KV_REPEATS, "adjacent_upper_median"
        return 2, "last_step"

    def _document(self, number: int, point: Point, regime: str | None) -> dict[str, Any]:
        capture = capture_of(point.tokens, self.captures)
        stamp = STAMPS.get(regime or "")
        stamps = [stamp] if stamp and stamp not in point.reasons else []
        return {
            "point_type": point.point_type,
            "benchmark_id": number,
            "total_prefill_tokens": point.total_prefill_tokens,
            "total_kv_read_tokens": point.total_kv_read_tokens,
            "batch_size": point.batch_size,
            "expected_cudagraph_mode": "NONE" if capture is None else self.launch.mode_of(self.launch.phase),
            "expected_capture_size": capture,
            "padding_tokens": None if capture is None else capture - point.tokens,
            "sample_reasons": [*point.reasons, *stamps],
            "partition": point.partition,
            "rows": None if point.rows is None else [list(row) for row in point.rows],
        }

    def _sample(self, point: dict[str, Any], rank: int, wall_s: float, regime: str | None) -> dict[str, Any]:
        is_prefill, batch = point["point_type"] == "prefill", point["batch_size"]
        kv_tokens = point["total_kv_read_tokens"]
        sample: dict[str, Any] = {
            "version": 1,
            "worker_id": self.launch.environment.get("DYN_FPM_WORKER_ID", "fake"),
            "dp_rank": rank,
            "counter_id": point["benchmark_id"],
            "wall_time": wall_s,
            "scheduled_requests": {
                "num_prefill_requests": batch if is_prefill else 0,
                "sum_prefill_tokens": point["total_prefill_tokens"],
                "var_prefill_length": 0.0,
                "sum_prefill_kv_tokens": kv_tokens if is_prefill else 0,
                "num_decode_requests": 0 if is_prefill else batch,
                "sum_decode_kv_tokens": 0 if is_prefill else kv_tokens,
                "var_decode_kv_tokens": 0.0,
            },
            "queued_requests": {
                "num_prefill_requests": 0,
                "sum_prefill_tokens": 0,
                "var_prefill_length": 0.0,
                "num_decode_requests": 0,
                "sum_decode_kv_tokens": 0,
                "var_decode_kv_tokens": 0.0,
            },
        }
        if not is_prefill:
            sample["kvwarm_steady_sample"] = True
        if regime == "real_kv":
            sample["kvwarm_giant_median_of"] = GIANT_KV_REPEATS
        return sample

    def _measurement(
        self,
        point: dict[str, Any],
        sample: dict[str, Any],
        rank: int,
        raw: list[float],
        method: str,
        regime: str | None,
    ) -> dict[str, Any]:
        key = content_key(point)
        requests = [
            {
                "slot": slot,
                "num_tokens": max(1, point["total_prefill_tokens"] // point["batch_size"]),
                "sha256": hashlib.sha256(f"{key}/{rank}/{slot}".encode()).hexdigest(),
            }
            for slot in range(point["batch_size"])
        ]
        count = len(raw)
        indices = list(range(1, count)) if method == "adjacent_upper_median" else [count - 1]
        return {
            "schema_version": 1,
            "point_key": key,
            "dp_rank": rank,
            "prompts": {"status": "recorded", "requests": requests, "sha256": digest(requests)},
            "preparation": {
                "grid_digest": self.grid_digest,
                "completed_points_before": point["benchmark_id"] - 1,
                "kv_seed_regime": regime,
                "warmup_records_before": len(self._warmups),
            },
            "expected_internal_samples": count,
            "raw_fpms": [
                {**sample, "wall_time": wall_s, "benchmark_sample": self._execution(point, at, wall_s)}
                for at, wall_s in enumerate(raw)
            ],
            "estimate": {"method": method, "raw_sample_indices": indices},
        }

    def _execution(self, point: dict[str, Any], at: int, wall_s: float) -> dict[str, Any]:
        bare = point["total_prefill_tokens"] or point["batch_size"]
        padded = bare if point["expected_capture_size"] is None else point["expected_capture_size"]
        start_s = self._monotonic_s
        return {
            "sample_index": at,
            "forward_index": self._forward + at,
            "timing": {
                "basis": "schedule_to_output" if at == 0 else "inter_output",
                "start_monotonic": start_s,
                "end_monotonic": start_s + wall_s,
            },
            "cudagraph": {
                "status": "observed",
                "runtime_mode": point["expected_cudagraph_mode"],
                "num_unpadded_tokens": bare,
                "num_padded_tokens": padded,
                "num_paddings": padded - bare,
            },
        }

    def _group(self, row: _Row) -> dict[str, Any]:
        return {
            "benchmark_id": row.point["benchmark_id"],
            "point": row.point,
            "expected_dp_ranks": list(range(self.launch.topology.dp)),
            "complete": True,
            "wall_time": max(row.walls_s),
            "rank_results": [{"dp_rank": rank, "fpms": [sample]} for rank, sample in enumerate(row.samples)],
        }

    def _envelope(self) -> dict[str, Any]:
        partial = self.launch.faults.partial or self.launch.faults.fail_at == "mid"
        done = len(self._rows) - (self.launch.faults.fail_at == "validate")
        return {
            "schema_version": 2,
            "status": "partial" if partial else "complete",
            "valid": not partial,
            "usable": not partial,
            "timing_valid": True,
            "stop_reason": "timeout" if partial else None,
            "error": None,
            "run_id": self.run_id,
            "grid_digest": self.grid_digest,
            "coverage": {"expected_points": len(self._rows), "completed_points": done, "skipped_points": 0},
        }

    def _rank_document(self, rank: int, groups: msgspec.Raw) -> dict[str, Any]:
        launch, limits = self.launch, self.launch.limits
        stamp = datetime.now(UTC).isoformat()
        document = {
            **self._envelope(),
            "artifact_type": "rank",
            "timing": {
                "started_at": stamp,
                "completed_at": stamp,
                "benchmark_elapsed_seconds": self.measured_s * 1.05 + 0.5,
                "measured_iteration_seconds": self.measured_s,
            },
            "dp": {"rank": rank, "size": launch.topology.dp},
            "synchronization": {"enabled": launch.topology.dp > 1, "coordinator_rank": 0, "port": None},
            "config": benchmark_config(launch, rank),
            "limits": {
                "max_num_scheduled_tokens": limits.max_num_batched_tokens,
                "max_num_running_reqs": limits.max_num_seqs,
                "max_model_len": limits.max_model_len,
                "block_size": limits.block_size,
                "num_gpu_blocks": launch.num_blocks,
                "configured_max_batch_size": limits.max_num_seqs,
                "feasible_max_batch_size": max((p.batch_size for p in self.points), default=0)
                if launch.phase == "decode"
                else 0,
            },
            "recurrent_state": {"initialization": "unchanged", "policy": None, "uniform_bound": None},
            "measurement_policy": {"decode": "steady_state_second_step", "prefill": "single_step"},
            "synthetic_prompts": {"mode": "salted_random", "vocab_size": 32000},
            "capacity": {
                "common": {
                    "max_model_len": limits.max_model_len,
                    "max_num_scheduled_tokens": limits.max_num_batched_tokens,
                    "max_num_running_reqs": limits.max_num_seqs,
                    "usable_blocks_without_watermark": limits.usable_blocks,
                    "usable_blocks_with_watermark": limits.usable_blocks,
                    "grid_invariants_digest": self.grid_digest,
                    "kvwarm_eligible": warms_kv(launch),
                }
            },
            "cudagraph": graph_settings(launch),
            "engine": engine_block(launch, rank),
            "results": [
                {"point": row.point, "kv_seed_regime": row.regime, "fpms": [row.samples[rank]]} for row in self._rows
            ],
            "iteration_groups": groups,
            "skipped_points": [],
            "missing_phases": [],
        }
        if launch.phase == "decode":
            document["kvwarm"] = self._kvwarm()
        if not launch.faults.legacy:
            document["measurement_protocol"] = measurement_protocol(launch)
            document["warmup_evidence"] = {"status": "recorded", "records": self._warmups}
        return document

    def _kvwarm(self) -> dict[str, Any]:
        reason = skip_reason(self.launch)
        real = sum(row.regime == "real_kv" for row in self._rows)
        return {
            "enabled": reason != "flag_off",
            "warm_eligible": reason is None,
            "skip_reason": reason,
            "dataset": None,
            "stages": [],
            "points_real_kv": real,
            "points_fake_fallback": len(self._rows) - real,
            "giant_kv_threshold": GIANT_KV_TOKENS,
            "giant_kv_repeats": GIANT_KV_REPEATS,
        }


def _sigma(cv: float) -> dict[str, float]:
    return {"sigma": cv} if cv else {}
