"""Replay what was served and compare: once with the collected table alone, once tuned on the first half of the run.

Limits are those of the truth table for prices from tables, and narrower ones after tuning.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from launches import medians

from fpmsdk import EngineLaunchConfig, FpmBatch, replay_trace, sample
from fpmsdk.errors import TimingError
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


def compare_run(work: Path) -> dict[str, Any]:
    """Every figure of the comparison of a journey, from the served run and the collected points.

    A point costs the median of its launches. Where one law does not fit the points, that is the result.
    """
    folder = work / "serving"
    run = read_run(folder / REQUESTS)
    frames = read_frames(folder / FRAMES)
    launch = EngineLaunchConfig.from_mapping(sample.launch(run))
    table = folder / TABLE
    cell = open_forward_table(str(table), *read_origin(str(table))).cells[0]
    law, refusal = None, None
    try:
        law = fit_table_timing(medians(cell, work))
    except TimingError as fault:
        refusal = str(fault).replace(cell.model_path, "the model")
    tuned = fit_pass_timing(FpmBatch.from_frames(frames[: len(frames) // 2]))
    late = np.asarray(run.trace.arrival_ms) >= run.trace.arrival_ms[-1] / 2
    measured = run.latencies()

    def errors(timing: Any, chosen: Any) -> dict[str, Any]:
        replayed = replay_trace(run.trace, launch=launch, timing=timing).latencies
        return compare_latencies(_of(measured, chosen), _of(replayed, chosen))

    found: dict[str, Any] = {
        "requests": len(late),
        "frames": len(frames),
        "engine": run.engine,
        "points": {"prefill": len(cell.prefill), "decode": len(cell.decode)},
        "tuned_coefficients_ms": list(tuned.coefficients_ms),
        "tuned_second_half": errors(tuned, late),
    }
    found["missed"] = missed(found["tuned_second_half"], TUNED, "tuned")
    if law is None:
        return found | {"refusal": refusal, "missed": [f"table: {refusal}", *found["missed"]]}
    found |= {
        "table_coefficients_ms": list(law.coefficients_ms),
        "by_table": errors(law, np.full(len(late), True)),
        "by_table_second_half": errors(law, late),
    }
    found["missed"] += missed(found["by_table"], BY_TABLE, "table")
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
