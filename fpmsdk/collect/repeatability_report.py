"""What independent launches of one sweep say together: scatter of each point, and agreement with the published source.

Every valid launch counts, the slow ones too. Launches whose identity is not established are shown and not pooled.
Source: collector.md section 7.4.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

AGGREGATE_SCHEMA = "aisimulate_fpm_repeatability_aggregate"
_AGGREGATED = (
    "cell_id",
    "phase",
    "key",
    "coordinates",
    "median_seconds",
    "samples_seconds",
    "raw_samples_seconds",
    "sample_cv",
    "status",
    "comparability",
    "observations",
)
_WORKER_IDENTITY = (
    "dp_rank",
    "tp_rank",
    "pp_rank",
    "backend_version",
    "attention_groups",
    "graph_config",
    "resolved_config",
)

Document = Mapping[str, Any]


class Compare(Protocol):
    """Compares what two launches measured at one point; latencies are no part of it."""

    def __call__(
        self, reference: Document, candidate: Document, *, point_key: str, same_context: bool = True
    ) -> dict[str, Any]:
        """`{status: comparable | unestablished | mismatch, reasons, ...}`."""
        ...


def summarise(frozen: Document, samples: Document, compare: Compare) -> dict[str, Any]:
    """Every statement of a report that follows from its attempts.

    Parameters
    ----------
    frozen: the plan of the repetition.
    samples: by cell, a list of `{sample_index, attempts}`.
    compare: compares two measurements at one point.

    Returns
    -------
    `points`, `repeatability`, `new_population`, `source_qualification`, `execution` and `status` of the report.
    Times are in seconds.

    Source: collector.md section 7.4.
    """
    policy = frozen["policy"]
    cells = [_Cell(cell, samples[cell["cell_id"]], policy, compare) for cell in frozen["cells"]]
    points = [cell.point(point) for cell in cells for point in cell.document["points"]]
    counts = Counter(point["status"] for point in points)
    scatter = next(
        (status for status in ("unstable", "mismatch", "unestablished", "incomplete") if counts[status]), "passed"
    )
    execution_failed = any(cell.execution_failed for cell in cells)
    execution_complete = all(cell.execution_complete for cell in cells)
    population = _population(scatter, execution_failed or counts["mismatch"] > 0, execution_complete)
    is_full = policy["comparison_mode"] == "full_grid"
    source = _source(points, is_full and population == "qualified")
    return {
        "points": points,
        "repeatability": {
            "status": scatter,
            "cv_threshold": policy["cv_threshold"],
            "point_counts": dict(counts),
            "measurement_count": "one for each fresh launch; steps inside one launch are no repetitions",
            "time_unit": "seconds",
            "standard_deviation_denominator": "n - 1",
        },
        "new_population": {"status": population, "scope": "full_native_sweep" if is_full else "bounded_diagnostic"},
        "source_qualification": {
            "status": source,
            "source_agreement_threshold": policy["source_agreement_threshold"],
            "agreement_metric": "abs(fresh_median / source_wall_time - 1)",
            "scope": "original_source" if is_full else "bounded_subset_cannot_qualify_full_source",
        },
        "execution": {"status": "failed" if execution_failed else "qualified" if execution_complete else "incomplete"},
        "status": _overall(population, source),
    }


def aggregate(plan_sha256: str, summary: Document) -> dict[str, Any]:
    """The estimate of each point over all launches, as a document of its own; the published source stays.

    Source: collector.md section 7.4.
    """
    return {
        "schema_name": AGGREGATE_SCHEMA,
        "schema_version": 1,
        "plan_sha256": plan_sha256,
        "status": summary["new_population"]["status"],
        "scope": summary["new_population"]["scope"],
        "method": "median_of_independent_launch_max_rank_estimates",
        "formal_source_replaced": False,
        "points": [{name: point[name] for name in _AGGREGATED} for point in summary["points"]],
    }


def worker_identity(execution: Document) -> list[dict[str, Any]]:
    """What the workers of a launch were observed to run, by rank."""
    workers = [{name: worker[name] for name in _WORKER_IDENTITY} for worker in execution["observed_workers"]]
    return sorted(workers, key=lambda worker: (worker["dp_rank"], worker["tp_rank"], worker["pp_rank"]))


def observed_differences(first: Document, second: Document) -> bool:
    """Whether two qualified launches were observed to run differently; unqualified ones cannot tell."""
    qualified = first["status"] == second["status"] == "qualified"
    return qualified and worker_identity(first) != worker_identity(second)


class _Cell:
    """One cell of a repetition with the launches that measured it."""

    def __init__(self, document: Document, slots: Sequence[Document], policy: Document, compare: Compare) -> None:
        attempts = [attempt for slot in slots for attempt in slot["attempts"]]
        latest = [slot["attempts"][-1] for slot in slots if slot["attempts"]]
        self.document, self._policy, self._compare = document, policy, compare
        # A valid observation is never superseded, also when its collection failed afterwards.
        self._measured = [attempt for attempt in attempts if attempt.get("evidence")]
        self._evidence = [attempt["evidence"] for attempt in self._measured]
        executions = [evidence["execution"]["status"] for evidence in self._evidence]
        self.execution_failed = (
            document["execution"]["status"] == "failed"
            or "failed" in executions
            or any(attempt.get("failure_kind") == "validation_failed" for attempt in latest)
        )
        self.execution_complete = (
            len(self._measured) == policy["samples"]
            and all(attempt["status"] == "passed" for attempt in self._measured)
            and set(executions) == {"qualified"}
        )

    def point(self, point: Document) -> dict[str, Any]:
        """The entry of a point in the report."""
        key, source_s = point["key"], point["source_wall_time_seconds"]
        comparisons = self._comparisons(key)
        comparable = _combined([comparison["status"] for comparison in comparisons])
        source_comparison = self._source_comparison(key)
        raw = [evidence["points"][key]["wall_time_seconds"] for evidence in self._evidence]
        values = raw if comparable == "comparable" else []
        figures = _figures(values, source_s)
        is_complete = len(values) == self._policy["samples"]
        difference = None
        if values and source_comparison["status"] == "comparable":
            difference = abs(figures["median_seconds"] / source_s - 1)
        return {
            "cell_id": self.document["cell_id"],
            "phase": self.document["phase"],
            "key": key,
            "coordinates": point["coordinates"],
            "status": _point_status(comparable, is_complete, figures["sample_cv"], self._policy["cv_threshold"]),
            "comparability": {"status": comparable, "comparisons": comparisons},
            "observations": [
                {
                    "attempt_id": attempt["evidence"]["attempt_id"],
                    "runtime_run_id": attempt["evidence"]["runtime_run_id"],
                    "directory": attempt["directory"],
                    "status": attempt["status"],
                    **attempt["evidence"]["points"][key],
                }
                for attempt in self._measured
            ],
            "samples_seconds": values,
            "raw_samples_seconds": raw,
            "sample_count": len(values),
            "raw_sample_count": len(raw),
            **figures,
            "source_wall_time_seconds": source_s,
            "source_comparison": source_comparison,
            "source_relative_difference": difference,
            "source_agreement": _agreement(difference, is_complete, self._policy["source_agreement_threshold"]),
        }

    def _comparisons(self, key: str) -> list[dict[str, Any]]:
        # Each launch with the first one; the first with what it must have recorded of itself.
        if not self._evidence:
            return []
        first = self._evidence[0]
        compared = [_reference(first, key)]
        for evidence in self._evidence[1:]:
            comparison = self._compare(first["measurement"], evidence["measurement"], point_key=key)
            comparison = _qualified(comparison, evidence["execution"], "the launch")
            if observed_differences(first["execution"], evidence["execution"]):
                reasons = [*comparison["reasons"], "workers were observed to run another configuration"]
                comparison = {**comparison, "status": "mismatch", "reasons": reasons}
            compared.append(comparison)
        return compared

    def _source_comparison(self, key: str) -> dict[str, Any]:
        reference = self._evidence[0]["measurement"] if self._evidence else {}
        comparison = self._compare(
            self.document["source_measurement"],
            reference,
            point_key=key,
            same_context=self._policy["comparison_mode"] == "full_grid",
        )
        return _qualified(comparison, self.document["execution"], "the source")


def _reference(first: Document, key: str) -> dict[str, Any]:
    measurement, execution = first["measurement"], first["execution"]["status"]
    point = measurement.get("points", {}).get(key, {})
    reasons = [*measurement.get("reasons", []), *point.get("reasons", [])]
    is_recorded = not measurement.get("reasons") and point.get("status") == "recorded" and execution == "qualified"
    status = "mismatch" if execution == "failed" else "comparable" if is_recorded else "unestablished"
    return {"status": status, "reasons": reasons, "scope": "first launch; the others are compared with it"}


def _qualified(comparison: dict[str, Any], execution: Document, what: str) -> dict[str, Any]:
    # A comparison weakened by workers whose execution is not qualified.
    if execution["status"] == "qualified":
        return comparison
    status = "mismatch" if execution["status"] == "failed" else "unestablished"
    reasons = [*comparison["reasons"], f"worker execution of {what} is {execution['status']}"]
    return {**comparison, "status": status, "reasons": reasons}


def _combined(statuses: Sequence[str]) -> str:
    if "mismatch" in statuses:
        return "mismatch"
    return "comparable" if statuses and set(statuses) == {"comparable"} else "unestablished"


def _figures(values: Sequence[float], source_s: float) -> dict[str, Any]:
    mean = statistics.mean(values) if values else None
    deviation = statistics.stdev(values) if len(values) >= 2 else None
    inclusive = [source_s, *values]
    inclusive_deviation = statistics.stdev(inclusive) if values else None
    return {
        "mean_seconds": mean,
        "median_seconds": statistics.median(values) if values else None,
        "minimum_seconds": min(values, default=None),
        "maximum_seconds": max(values, default=None),
        "sample_stddev_seconds": deviation,
        "sample_cv": None if deviation is None or mean is None else deviation / mean,
        "source_inclusive_cv": None
        if inclusive_deviation is None
        else inclusive_deviation / statistics.mean(inclusive),
        "source_inclusive_stddev_seconds": inclusive_deviation,
        "source_inclusive_sample_count": len(inclusive),
        "source_inclusive_usage": "diagnostic_only; the source is no independent repetition",
    }


def _point_status(comparable: str, is_complete: bool, cv: float | None, threshold: float) -> str:
    if comparable != "comparable":
        return comparable
    if not is_complete:
        return "incomplete"
    return "passed" if cv is not None and cv <= threshold else "unstable"


def _agreement(difference: float | None, is_complete: bool, threshold: float) -> str:
    if difference is None or not is_complete:
        return "unestablished"
    return "passed" if difference <= threshold else "failed"


def _population(scatter: str, failed: bool, execution_complete: bool) -> str:
    if scatter == "unstable":
        return "unstable"
    if failed:
        return "failed"
    if scatter == "passed" and execution_complete:
        return "qualified"
    return "unestablished" if scatter == "unestablished" else "incomplete"


def _source(points: Sequence[Document], may_qualify: bool) -> str:
    comparisons = {point["source_comparison"]["status"] for point in points}
    agreements = {point["source_agreement"] for point in points}
    if "mismatch" in comparisons or "failed" in agreements:
        return "failed"
    return (
        "qualified" if may_qualify and comparisons == {"comparable"} and agreements == {"passed"} else "unestablished"
    )


def _overall(population: str, source: str) -> str:
    if population in ("failed", "unstable") or source == "failed":
        return "failed"
    return "passed" if population == source == "qualified" else "incomplete"
