"""Native artifacts for tests: those recorded from a real engine, and small made-up ones of several ranks."""

import gzip
import hashlib
import json
from pathlib import Path

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.provenance import provenance_document
from fpmsdk.collect.topology import Topology

RECORDED = Path(__file__).parent / "recorded"
PLAN = CollectionPlan.read(RECORDED / "plan.json")
PREFILL, DECODE = PLAN.cells
ATTEMPT = "a" * 32


def recorded_attempt(phase, run):
    """The attempt under which the peer published a recorded launch."""
    return f"{phase[0]}{run}".encode().hex().ljust(32, "0")


def recorded(folder, cell, run, change=None, attempt_id=None):
    """`cells/<cell_id>` of a recorded launch; `change` is done to the artifact on the way."""
    document = json.loads(gzip.decompress((RECORDED / f"{cell.workload_kind}_run{run}.json.gz").read_bytes()))
    if change is not None:
        change(document)
    cell_dir = Path(folder) / "cells" / cell.cell_id
    unit(cell_dir / "raw" / "node0000", cell, attempt_id or recorded_attempt(cell.workload_kind, run), "0.31.0")
    (cell_dir / "raw" / "node0000" / "benchmark.json").write_text(json.dumps(document))
    return cell_dir


def unit(folder, cell, attempt_id=ATTEMPT, version="0.27.0", **changes):
    """The folder of a unit with its provenance."""
    folder.mkdir(parents=True, exist_ok=True)
    document = provenance_document(
        cell_id=cell.cell_id, plan_sha256=PLAN.sha256, attempt_id=attempt_id, backend_version=version
    )
    (folder / "collector-provenance.json").write_text(json.dumps(document | changes))
    return folder


def cell_of(phase="decode", strategy="dep", **sizes):
    """A cell like the recorded one, in another layout."""
    source = PREFILL if phase == "prefill" else DECODE
    return Cell.from_document(
        source.document()
        | {
            "cell_id": f"fpm-{strategy}-{phase}",
            "parallel_strategy": strategy,
            "topology": Topology(**sizes).document(),
        }
    )


def point(number, phase, batch, tokens, kv, reasons=(), **fields):
    return {
        "point_type": phase,
        "benchmark_id": number,
        "total_prefill_tokens": tokens,
        "total_kv_read_tokens": kv,
        "batch_size": batch,
        "expected_cudagraph_mode": "NONE",
        "expected_capture_size": None,
        "padding_tokens": None,
        "sample_reasons": list(reasons),
        "partition": None,
        "rows": None,
        **fields,
    }


def artifact(points, regimes, dp=1, kvwarm=None, wall_s=lambda number, rank: 0.01 * number + 0.001 * rank):
    """Rank files, by rank, of a sweep over points in this order; `wall_s` gives what a rank took for a benchmark id."""
    groups = []
    for one in points:
        number, is_prefill = one["benchmark_id"], one["point_type"] == "prefill"
        samples = []
        for rank in range(dp):
            totals = (one["batch_size"], one["total_prefill_tokens"], one["total_kv_read_tokens"])
            scheduled = dict.fromkeys(("var_prefill_length", "var_decode_kv_tokens"), 0.0)
            names = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")
            scheduled |= dict(zip(names, totals if is_prefill else (0, 0, 0), strict=True))
            scheduled |= {
                "num_decode_requests": 0 if is_prefill else totals[0],
                "sum_decode_kv_tokens": 0 if is_prefill else totals[2],
            }
            samples.append(
                {
                    "version": 1,
                    "worker_id": f"w{rank}",
                    "dp_rank": rank,
                    "counter_id": number,
                    "wall_time": wall_s(number, rank),
                    "scheduled_requests": scheduled,
                }
            )
        groups.append(
            {
                "benchmark_id": number,
                "point": one,
                "expected_dp_ranks": list(range(dp)),
                "complete": True,
                "wall_time": max(sample["wall_time"] for sample in samples),
                "rank_results": [{"dp_rank": rank, "fpms": [sample]} for rank, sample in enumerate(samples)],
            }
        )
    measured_s = sum(group["wall_time"] for group in sorted(groups, key=lambda group: group["benchmark_id"]))
    files = []
    for rank in range(dp):
        results = [
            {"point": one, "kv_seed_regime": regime, "fpms": [group["rank_results"][rank]["fpms"][0]]}
            for one, regime, group in zip(points, regimes, groups, strict=True)
        ]
        document = {
            "schema_version": 2,
            "artifact_type": "rank",
            "status": "complete",
            "valid": True,
            "usable": True,
            "timing_valid": True,
            "stop_reason": None,
            "error": None,
            "run_id": "run",
            "grid_digest": "grid",
            "timing": {"benchmark_elapsed_seconds": measured_s + 1, "measured_iteration_seconds": measured_s},
            "dp": {"rank": rank, "size": dp},
            "coverage": {"expected_points": len(points), "completed_points": len(points), "skipped_points": 0},
            "config": {"mode": points[0]["point_type"]},
            "results": results,
            "iteration_groups": groups,
            "skipped_points": [],
            "missing_phases": [],
        }
        files.append(json.loads(json.dumps(document | ({} if kvwarm is None else {"kvwarm": kvwarm}))))
    return files


REAL_KV = {"enabled": True, "warm_eligible": True, "skip_reason": None}


def decode_sweep(dp=2, count=3):
    """A decode sweep on real KV, executed deepest first."""
    points = [point(number, "decode", number, 0, 16 * number, ["kvwarm_real_kv"]) for number in range(count, 0, -1)]
    return artifact(points, ["real_kv"] * count, dp, REAL_KV)


def write(raw_root, cell, files, per_unit=1):
    """Rank files in units of `per_unit` ranks, each with its provenance."""
    for rank, document in enumerate(files):
        folder = unit(raw_root / f"node{rank // per_unit:04d}", cell)
        (folder / ("benchmark.json" if rank == 0 else f"benchmark_dp{rank}.json")).write_text(json.dumps(document))
    return raw_root


PROTOCOL = {
    "schema_version": 1,
    "content_identity": "coordinate_rank_slot_v1",
    "content_seed": "seed",
    "synthetic_content": "random",
    "synthetic_pool_tag": "pool",
    "prompt_hash_encoding": "uint32_le",
    "independent_repetitions": 1,
    "timing_metric": "scheduler_wall_time",
    "input_evidence_scope": "injected_prompt_token_ids",
    "unobserved": ["gpu_clocks"],
    "preparation": {
        "warmup_iterations": 5,
        "prefill_real_seed": True,
        "decode_real_kv_warmup": True,
        "giant_kv_threshold": 1000000,
        "giant_kv_repeats": 3,
    },
}
CONTRACT = {
    "schema_version": 1,
    "sample_field": "benchmark_sample",
    "warmup_field": "warmup_evidence",
    "forward_index_scope": "rank_process",
    "timing_clock": "process_local_monotonic",
    "cudagraph_source": "ModelRunnerOutput.cudagraph_stats",
    "warmup_scope": "request_completion_and_existing_shape_validation",
}


def sha(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_measurements(files, execution=True, internal=2):
    """The same rank files with a measurement protocol, `internal` steps a sample and, if asked, every forward."""
    for rank, document in enumerate(files):
        protocol = PROTOCOL | ({"execution_evidence": CONTRACT} if execution else {})
        document["measurement_protocol"] = json.loads(json.dumps(protocol))
        for name in ("limits", "cudagraph", "recurrent_state"):
            document[name] = {"value": name}
        document["engine"] = {"scheduler": {"async_scheduling": False}}
        if execution:
            warmup = {
                "kind": "global",
                "requested_shape": None,
                "status": "completed",
                "forward_index_start": 0,
                "forward_index_end": 5,
                "observed_forward_count": 5,
                "completed_points_before": 0,
                "first_scheduled_requests": None,
                "last_scheduled_requests": None,
                "validation": {"status": "not_performed"},
            }
            document["warmup_evidence"] = {"status": "recorded", "records": [warmup]}
        for position, row in enumerate(document["results"]):
            (sample,) = row["fpms"]
            sample["benchmark_measurement"] = _measurement(row, rank, position, execution, internal)
    for number in range(len(files[0]["results"])):
        for document in files:
            group = document["iteration_groups"][number]
            for rank, one in enumerate(group["rank_results"]):
                one["fpms"] = files[rank]["results"][number]["fpms"]
    return files


def _measurement(row, rank, position, execution, internal):
    point, (sample,) = row["point"], row["fpms"]
    identity = {name: point[name] for name in ("point_type", "batch_size", "total_prefill_tokens")}
    identity |= {name: point[name] for name in ("total_kv_read_tokens", "partition", "rows")}
    requests = [{"slot": slot, "num_tokens": 16, "sha256": sha(slot)} for slot in range(point["batch_size"])]
    raw = []
    for step in range(internal):
        forward = 5 + position * internal + step
        record = {
            "sample_index": step,
            "forward_index": forward,
            "timing": {
                "basis": "inter_output",
                "start_monotonic": float(forward),
                "end_monotonic": forward + sample["wall_time"],
            },
            "cudagraph": {
                "status": "observed",
                "runtime_mode": "FULL",
                "num_unpadded_tokens": 3,
                "num_padded_tokens": 4,
                "num_paddings": 1,
            },
        }
        one = {"dp_rank": rank, "counter_id": point["benchmark_id"], "wall_time": sample["wall_time"]}
        raw.append(one | ({"benchmark_sample": record} if execution else {}))
    preparation = {"grid_digest": "grid", "completed_points_before": position, "kv_seed_regime": row["kv_seed_regime"]}
    return {
        "schema_version": 1,
        "point_key": sha(identity),
        "dp_rank": rank,
        "prompts": {"status": "recorded", "requests": requests, "sha256": sha(requests)},
        "preparation": preparation | ({"warmup_records_before": 1} if execution else {}),
        "expected_internal_samples": internal,
        "raw_fpms": raw,
        "estimate": {"method": "last_step", "raw_sample_indices": [internal - 1]},
    }
