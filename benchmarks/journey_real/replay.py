"""Replay what was served and compare: once with the collected table alone, once tuned on the first half of the run.

Limits are those of the truth table for prices from tables, and narrower ones after tuning.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from fpmsdk import EngineLaunchConfig, FpmBatch, replay_trace, sample
from fpmsdk.metrics import read_frames
from fpmsdk.perfdb.forward_cells import open_forward_table
from fpmsdk.perfdb.forward_writer import read_origin
from fpmsdk.replay import fit_pass_timing, fit_table_timing
from fpmsdk.replay.compare import compare_latencies
from fpmsdk.replay.formats.recorded import read_run
from fpmsdk.replay.latency import RequestLatencies

# Per cent by which a figure of the replay may miss that of the run.
BY_TABLE = {"p50": 11.0, "mean": 11.0, "p90": 13.0}
TUNED = {"p50": 8.0, "mean": 8.0, "p90": 12.0}
METRICS = ("ttft_ms", "itl_ms", "e2e_ms")
REQUESTS, FRAMES, TABLE = "requests_eval.json", "fpm_eval.bin.gz", "fpm_forward_perf.parquet"


def compare_run(folder: Path) -> dict[str, Any]:
    """Every figure of the comparison from the files of a run and the published table."""
    run = read_run(folder / REQUESTS)
    frames = read_frames(folder / FRAMES)
    launch = EngineLaunchConfig.from_mapping(sample.launch(run))
    table = folder / TABLE
    cell = open_forward_table(str(table), *read_origin(str(table))).cells[0]
    by_table = fit_table_timing(cell)
    tuned = fit_pass_timing(FpmBatch.from_frames(frames[: len(frames) // 2]))
    late = np.asarray(run.trace.arrival_ms) >= run.trace.arrival_ms[-1] / 2
    measured = run.latencies()

    def errors(timing: Any, chosen: Any) -> dict[str, Any]:
        replayed = replay_trace(run.trace, launch=launch, timing=timing).latencies
        return compare_latencies(_of(measured, chosen), _of(replayed, chosen))

    everyone = np.full(len(late), True)
    found = {
        "requests": len(late),
        "frames": len(frames),
        "engine": run.engine,
        "points": {"prefill": len(cell.prefill), "decode": len(cell.decode)},
        "table_coefficients_ms": list(by_table.coefficients_ms),
        "tuned_coefficients_ms": list(tuned.coefficients_ms),
        "by_table": errors(by_table, everyone),
        "tuned_second_half": errors(tuned, late),
        "by_table_second_half": errors(by_table, late),
    }
    found["missed"] = missed(found["by_table"], BY_TABLE, "table") + missed(found["tuned_second_half"], TUNED, "tuned")
    return found


def missed(comparison: dict[str, Any], limits: dict[str, float], name: str) -> list[str]:
    """Figures beyond their limits."""
    return [
        f"{name}: {metric} {figure} is {comparison[metric][figure]['error_percent']:+.1f} % off, {limit:g} allowed"
        for metric in METRICS
        for figure, limit in limits.items()
        if abs(comparison[metric][figure]["error_percent"]) > limit
    ]


def _of(latencies: RequestLatencies, chosen: Any) -> RequestLatencies:
    columns = {field.name: getattr(latencies, field.name)[chosen] for field in dataclasses.fields(RequestLatencies)}
    return RequestLatencies(**columns)
