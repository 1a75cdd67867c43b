"""Time and memory of validating the native artifact of a large sweep: 1,000 points on 8 ranks.

    python -m benchmarks.artifacts [--write-evidence]

`make bench-artifacts` runs it. Every rank file repeats the samples of all ranks. Exits 1 when it takes 5 s or more, or
when all files need more memory than 1.2 times what the first of them alone needs.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import peak_rss_kib

POINTS, RANKS = 1_000, 8
SECONDS, MEMORY = 5.0, 1.2
EVIDENCE = Path(__file__).parent / "evidence" / "artifacts.json"


def write_attempt(folder: Path) -> None:
    """Rank files of a made-up decode sweep on real KV, with their provenance."""
    from fpmsdk.collect.provenance import provenance_document

    points = [
        {
            "point_type": "decode",
            "benchmark_id": number,
            "total_prefill_tokens": 0,
            "total_kv_read_tokens": 64 * number,
            "batch_size": 1 + number % 64,
            "expected_cudagraph_mode": "FULL",
            "expected_capture_size": 64,
            "padding_tokens": 63 - number % 64,
            "sample_reasons": ["capture", "kvwarm_real_kv"],
            "partition": None,
            "rows": None,
        }
        for number in range(1, POINTS + 1)
    ]
    samples = [[_sample(point, rank) for rank in range(RANKS)] for point in points]
    groups = [
        {
            "benchmark_id": point["benchmark_id"],
            "point": point,
            "expected_dp_ranks": list(range(RANKS)),
            "complete": True,
            "wall_time": max(sample["wall_time"] for sample in of_ranks),
            "rank_results": [{"dp_rank": rank, "fpms": [sample]} for rank, sample in enumerate(of_ranks)],
        }
        for point, of_ranks in zip(points, samples, strict=True)
    ]
    measured_s = sum(float(group["wall_time"]) for group in groups)
    unit = folder / "node0000"
    unit.mkdir()
    provenance = provenance_document(
        cell_id=_cell().cell_id, plan_sha256="0" * 64, attempt_id="0" * 32, backend_version="0.27.0"
    )
    (unit / "collector-provenance.json").write_text(json.dumps(provenance))
    for rank in range(RANKS):
        document = {
            **{"schema_version": 2, "artifact_type": "rank", "status": "complete", "stop_reason": None, "error": None},
            **dict.fromkeys(("valid", "usable", "timing_valid"), True),
            **{"run_id": "run", "grid_digest": "grid", "skipped_points": [], "missing_phases": []},
            "timing": {"benchmark_elapsed_seconds": measured_s + 1, "measured_iteration_seconds": measured_s},
            "dp": {"rank": rank, "size": RANKS},
            "coverage": {"expected_points": POINTS, "completed_points": POINTS, "skipped_points": 0},
            "config": {"mode": "decode"},
            "kvwarm": {"enabled": True, "warm_eligible": True, "skip_reason": None},
            "results": [
                {"point": point, "kv_seed_regime": "real_kv", "fpms": [of_ranks[rank]]}
                for point, of_ranks in zip(points, samples, strict=True)
            ],
            "iteration_groups": groups,
        }
        (unit / ("benchmark.json" if rank == 0 else f"benchmark_dp{rank}.json")).write_text(json.dumps(document))


def _sample(point: dict[str, Any], rank: int) -> dict[str, Any]:
    nothing = dict.fromkeys(("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens"), 0)
    batch, kv = point["batch_size"], point["total_kv_read_tokens"]
    return {
        "version": 1,
        "worker_id": f"worker {rank}",
        "dp_rank": rank,
        "counter_id": point["benchmark_id"],
        "wall_time": 0.004 + 1e-6 * point["benchmark_id"] + 1e-7 * rank,
        "scheduled_requests": nothing | {"num_decode_requests": batch, "sum_decode_kv_tokens": kv},
        "queued_requests": nothing | {"num_decode_requests": 0, "sum_decode_kv_tokens": 0},
    }


def _cell() -> Any:
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.topology import Topology

    dtypes = dict.fromkeys(("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kvcache_quant_mode"), "bfloat16")
    return Cell(
        cell_id="fpm-benchmark",
        workload_kind="decode",
        topology=Topology(dp=RANKS, moe_ep=RANKS),
        parallel_strategy="dep",
        weight_quantization="bfloat16",
        kv_cache_dtype="bfloat16",
        resolved_dtypes=dtypes | {"comm_quant_mode": "half", "fmha_resolution": None},
        backend_policy={"policy_id": "baseline_auto", "expected_markers": {}, "aic_fields": {}},
    )


def measure(mode: str, folder: str) -> dict[str, Any]:
    """Validate all files of an attempt in this process, or read the first of them alone; what it needed."""
    from fpmsdk.collect.artifact import validate_native
    from fpmsdk.collect.rank_file import rank_files, read_rank_file

    cell = _cell()
    before = peak_rss_kib()
    started = time.perf_counter()
    if mode == "all":
        points = validate_native(None, cell, folder).num_points
    else:
        first = read_rank_file(rank_files(Path(folder))[0], cell)
        points = len(json.loads(bytes(first.groups)))
    seconds = time.perf_counter() - started
    return {"points": points, "seconds": round(seconds, 3), "grown_rss_kib": peak_rss_kib() - before}


def main() -> int:
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], sys.argv[2])))
        return 0
    figures: dict[str, Any] = {"points": POINTS, "ranks": RANKS}
    with tempfile.TemporaryDirectory() as folder:
        write_attempt(Path(folder))
        files = sorted(Path(folder).rglob("benchmark*.json"))
        figures["file_bytes"] = max(file.stat().st_size for file in files)
        for mode in ("first", "all"):
            command = [sys.executable, "-m", "benchmarks.artifacts", mode, folder]
            figures[mode] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    every, first = figures["all"], figures["first"]
    figures["memory_ratio"] = round(every["grown_rss_kib"] / first["grown_rss_kib"], 2)
    print(json.dumps(figures, indent=1))
    failures = []
    if every["points"] != POINTS or every["seconds"] >= SECONDS:
        failures.append(f"{every['points']} points in {every['seconds']} s, {SECONDS} s allowed for {POINTS}")
    if figures["memory_ratio"] > MEMORY:
        failures.append(f"all files need {figures['memory_ratio']} times the memory of one, {MEMORY} allowed")
    if "--write-evidence" in sys.argv:
        EVIDENCE.write_text(json.dumps(figures, indent=1) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
