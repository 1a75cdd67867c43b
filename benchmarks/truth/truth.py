"""The simulator against three measured runs of a real engine; exits with 1 when a bound is missed.

    python benchmarks/truth/truth.py [--data FOLDER] [--write-evidence]

The runs are those of `fpmsdk.sample`, or files of the same names (`fpm_train.bin.gz`, `requests_train.json`, and so
on for eval and burst) in FOLDER. What prices passes is fitted to the training run only, or, in the table-priced rows,
to the whole-forward pair that the engine's self-benchmark measured: no telemetry at all.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk import EngineLaunchConfig, ForwardPassPerfModel, FpmBatch, replay_trace, sample
from fpmsdk._ext.fitted import FEATURES
from fpmsdk.metrics import read_frames
from fpmsdk.perfdb.forward_cells import ForwardCell, open_forward_table
from fpmsdk.perfdb.forward_writer import read_origin
from fpmsdk.replay import RecordedPasses, fit_pass_timing, fit_table_timing
from fpmsdk.replay.compare import compare_latencies, compare_with_measured
from fpmsdk.replay.formats.recorded import RecordedRun, read_run
from fpmsdk.replay.measured import MeasuredSchedule, latencies_of_prices, measured_schedule

EVIDENCE = Path(__file__).parent.parent / "evidence" / "truth.json"
METRICS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "e2e"}


@dataclass(frozen=True)
class Bounds:
    """Per cent by which a replay may miss the measured run."""

    p50: float
    mean: float
    p90: float
    request: dict[str, float] | None = None  # median error of a request
    makespan: float | None = None


BOUNDS = {
    "eval": Bounds(8, 8, 12, {"ttft_ms": 8.5, "itl_ms": 6.5, "e2e_ms": 7}, 0.3),
    "burst": Bounds(5, 5, 8, {"ttft_ms": 4, "itl_ms": 3.5, "e2e_ms": 3.5}, 2),
}
TABLE_BOUNDS = {"eval": Bounds(11, 11, 13), "burst": Bounds(11, 11, 13)}


@dataclass(frozen=True)
class Measured:
    """One run: its requests, its telemetry, and the engine that served it."""

    run: RecordedRun
    batch: FpmBatch
    launch: EngineLaunchConfig

    @classmethod
    def of_sample(cls, name: str) -> "Measured":
        return cls.of(getattr(sample, f"{name}_run")(), getattr(sample, f"{name}_frames")())

    @classmethod
    def of_folder(cls, folder: Path, name: str) -> "Measured":
        return cls.of(read_run(folder / f"requests_{name}.json"), read_frames(folder / f"fpm_{name}.bin.gz"))

    @classmethod
    def of(cls, run: RecordedRun, frames: list[bytes]) -> "Measured":
        return cls(run, FpmBatch.from_frames(frames), EngineLaunchConfig.from_mapping(sample.launch(run)))


def errors_of(comparison: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per cent: p50, mean and p90 of the run, and the median error of a request."""
    return {
        metric: {figure: comparison[metric][figure]["error_percent"] for figure in ("p50", "mean", "p90")}
        | {"request": comparison[metric]["request_error_percent"]["p50"]}
        for metric in METRICS
    }


def replayed(measured: Measured, timing: Any) -> dict[str, Any]:
    """Planned arrivals in, every pass priced by `timing`."""
    report = replay_trace(measured.run.trace, launch=measured.launch, timing=timing)
    comparison = compare_with_measured(report, measured.run)
    return {"errors": errors_of(comparison), "makespan": comparison["duration_ms"]["total"]["error_percent"]}


def priced(measured: Measured, schedule: MeasuredSchedule, timing: Any) -> dict[str, Any]:
    """The recorded passes, each priced by `timing`."""
    latencies, busy_ms = latencies_of_prices(measured.run, schedule, timing)
    measured_ms = float((schedule.end_ms - schedule.start_ms).sum())
    return {
        "errors": errors_of(compare_latencies(measured.run.latencies(), latencies)),
        "busy_time": (busy_ms / measured_ms - 1) * 100,
    }


def missed(name: str, result: dict[str, Any], bounds: Bounds) -> list[str]:
    """What lies beyond the bounds of a run."""
    found = []
    for metric, label in METRICS.items():
        errors = result["errors"][metric]
        limits = {"p50": bounds.p50, "mean": bounds.mean, "p90": bounds.p90}
        if bounds.request is not None:
            limits["request"] = bounds.request[metric]
        found += [
            f"{name}: {label} {figure} is {errors[figure]:+.2f} % off, {limit} allowed"
            for figure, limit in limits.items()
            if abs(errors[figure]) > limit
        ]
    if bounds.makespan is not None and abs(result["makespan"]) > bounds.makespan:
        found.append(f"{name}: makespan is {result['makespan']:+.2f} % off, {bounds.makespan} allowed")
    return found


def print_bounds(bounds: Bounds) -> None:
    cells = []
    for metric in METRICS:
        request = "" if bounds.request is None else f"{bounds.request[metric]:.2f}"
        cells.append(f"{bounds.p50:6.2f}/{bounds.mean:6.2f}/{bounds.p90:6.2f}/{request:>6}")
    makespan = "" if bounds.makespan is None else f"{bounds.makespan:9.3f}"
    print(f"  {'allowed':40}" + "  ".join(cells) + makespan)


def measured_cell() -> ForwardCell:
    """The engine in its self-benchmark: every point the median of three launches."""
    path = str(sample.forward_pair())
    return open_forward_table(path, *read_origin(path)).cells[0]


def print_row(label: str, result: dict[str, Any]) -> None:
    cells = [
        "/".join(f"{result['errors'][metric][figure]:6.2f}" for figure in ("p50", "mean", "p90", "request"))
        for metric in METRICS
    ]
    rest = f"{result['makespan']:9.3f}" if "makespan" in result else f"  (busy time {result['busy_time']:+.2f})"
    print(f"  {label:40}" + "  ".join(cells) + rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the runs; those of the package without it")
    parser.add_argument("--write-evidence", action="store_true", help="keep the tables in benchmarks/evidence/")
    options = parser.parse_args()
    runs = {
        name: Measured.of_sample(name) if options.data is None else Measured.of_folder(options.data, name)
        for name in ("train", "eval", "burst")
    }
    failures: list[str] = []
    document: dict[str, Any] = {"schedule": {}, "replay_error_percent": {}}

    print("schedule: fed with the recorded step ends and the moments at which the engine got the requests")
    schedules = {}
    for name, measured in runs.items():
        schedules[name] = schedule = measured_schedule(measured.run, measured.batch, measured.launch)
        row = {
            "passes": len(schedule.passes),
            "tokens": len(measured.run.token_ms),
            "tokens_at_their_time": schedule.tokens,
            "preemptions": sum(len(one["preempted"]) for one in schedule.passes),
            "differences": len(schedule.differences),
        }
        document["schedule"][name] = row
        print(f"  {name:8}" + ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in row.items()))
        failures += [f"{name}: {difference}" for difference in schedule.differences[:5]]

    timing = fit_pass_timing(runs["train"].batch)
    regression = ForwardPassPerfModel.best_available(sample.MODEL)
    regression.tune_with_fpms(runs["train"].batch)
    table = fit_table_timing(measured_cell())
    document["coefficients_ms"] = dict(zip(FEATURES, timing.coefficients_ms, strict=True))
    document["table_coefficients_ms"] = dict(zip(FEATURES, table.coefficients_ms, strict=True))
    print("\nreplay of the planned arrivals, error in % of p50/mean/p90 of the run and median over the requests")
    print(" " * 42 + "  ".join(f"{label:^27}" for label in METRICS.values()) + " makespan")
    for name, bounds in BOUNDS.items():
        measured = runs[name]
        durations = RecordedPasses.from_durations([(schedules[name].end_ms - schedules[name].start_ms).tolist()])
        results = {
            "replay": replayed(measured, timing),
            "pricing_alone": priced(measured, schedules[name], timing),
            "scheduler_alone": replayed(measured, durations),
            "replay_default_regression": replayed(measured, regression),
            "replay_table": replayed(measured, table),
            "pricing_alone_table": priced(measured, schedules[name], table),
        }
        document["replay_error_percent"][name] = results
        print(name)
        print_row("replay, least squares on train", results["replay"])
        print_bounds(bounds)
        print_row("pricing alone: recorded passes", results["pricing_alone"])
        print_row("scheduler alone: measured wall times", results["scheduler_alone"])
        print_row("for comparison: default regression", results["replay_default_regression"])
        print_row("replay, law over the measured table", results["replay_table"])
        print_bounds(TABLE_BOUNDS[name])
        print_row("pricing alone by the table", results["pricing_alone_table"])
        failures += missed(name, results["replay"], bounds)
        failures += missed(f"{name}, priced by the table", results["replay_table"], TABLE_BOUNDS[name])
    document["failures"] = failures
    if options.write_evidence:
        EVIDENCE.write_text(json.dumps(document, indent=1) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
