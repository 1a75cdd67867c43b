"""Whether two artifacts measured a point under the same conditions. Latency is never looked at.

Source: collector.md section 7.3 (compare).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fpmsdk.collect.measurement import DISPATCH, UNOBSERVED
from fpmsdk.collect.measurement_records import content_key

Evidence = Mapping[str, Any]

# Differ between engines of one protocol without changing what is measured.
_DESCRIPTIVE = ("execution_evidence", "unobserved")


class _Findings:
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.mismatches: list[str] = []

    def differs(self, what: str, left: Any, right: Any) -> None:
        if left != right:
            self.mismatches.append(f"{what} differs")


def compare_measurements(
    reference: Evidence, candidate: Evidence, *, point_key: str, same_context: bool = True
) -> dict[str, Any]:
    """Compare the recorded conditions of one point in two artifacts.

    Parameters
    ----------
    reference, candidate: what `extract_measurements` returned.
    point_key: digest of the coordinates of the point.
    same_context: both swept the same grid in the same order; False compares across grids, where the history of
        execution stays unproven.

    Returns
    -------
    `{status, identity_status, reasons, unobserved, scope, context}`. Status is `mismatch` when anything differs, else
    `unestablished` when anything is not known, else `comparable`; across contexts `comparable` becomes `unestablished`.

    Source: collector.md section 7.3.
    """
    found = _Findings()
    is_extended = reference.get("schema_version") == candidate.get("schema_version") == 2
    _compare_artifacts(reference, candidate, is_extended, found)
    left, right = (evidence.get("points", {}).get(point_key) for evidence in (reference, candidate))
    if left is None or right is None:
        found.missing.append("point is missing from reference or candidate")
    else:
        _compare_points(left, right, is_extended, same_context, found)
    if same_context:
        for name in ("runtime_grid_digest", "benchmark_config"):
            if reference.get(name) is not None and candidate.get(name) is not None:
                found.differs(name, reference[name], candidate[name])
    identity = "mismatch" if found.mismatches else "unestablished" if found.missing else "comparable"
    reasons = sorted({*found.mismatches, *found.missing})
    if not same_context:
        reasons.append("cross-context execution history equivalence has not been established")
    always = set(UNOBSERVED) - {DISPATCH} if is_extended else set(UNOBSERVED)
    return {
        "status": "unestablished" if identity == "comparable" and not same_context else identity,
        "identity_status": identity,
        "reasons": reasons,
        "unobserved": sorted({*always, *reference.get("unobserved", ()), *candidate.get("unobserved", ())}),
        "scope": "recorded measurement protocol and injected prompts; worker runtime validation remains required",
        "context": "matched_native_sweep" if same_context else "cross_context_unproven",
    }


def _compare_artifacts(reference: Evidence, candidate: Evidence, is_extended: bool, found: _Findings) -> None:
    for label, evidence in (("reference", reference), ("candidate", candidate)):
        found.missing += [f"{label}: {reason}" for reason in evidence.get("reasons", ())]
        if evidence.get("schema_version") not in (1, 2) or evidence.get("measurement_protocol") is None:
            found.missing.append(f"{label}: missing supported measurement evidence")
        if not evidence.get("runtime_run_id"):
            found.missing.append(f"{label}: missing independent runtime run identity")
    for name in ("backend_version", "measurement_protocol", "runtime_identity"):
        left, right = reference.get(name), candidate.get(name)
        if left is None or right is None:
            continue
        if is_extended and name == "measurement_protocol":
            left, right = _without(left, _DESCRIPTIVE), _without(right, _DESCRIPTIVE)
        found.differs(name, left, right)
    if 2 in (reference.get("schema_version"), candidate.get("schema_version")):
        _compare_scheduling(reference.get("scheduling", {}), candidate.get("scheduling", {}), found)
    run = reference.get("runtime_run_id")
    if run and run == candidate.get("runtime_run_id"):
        found.mismatches.append("runtime_run_id is not an independent launch")


def _compare_scheduling(left: Evidence, right: Evidence, found: _Findings) -> None:
    for rank in sorted({*left, *right}):
        modes = [scheduling.get(rank, {}).get("async_scheduling") for scheduling in (left, right)]
        if any(type(mode) is not bool for mode in modes):
            found.missing.append(f"rank {rank}: effective async_scheduling comparison is unestablished")
        else:
            found.differs(f"rank {rank}: effective async_scheduling", *modes)


def _compare_points(left: Evidence, right: Evidence, is_extended: bool, same_context: bool, found: _Findings) -> None:
    for label, point in (("reference", left), ("candidate", right)):
        found.missing += [f"{label}: {reason}" for reason in point.get("reasons", ())]
    found.differs("point shape/partition", content_key(left["point"]), content_key(right["point"]))
    for name in ("kv_seed_regime", "regime"):
        found.differs(name, left.get(name), right.get(name))
    found.differs("DP rank set", set(left["ranks"]), set(right["ranks"]))
    for rank in sorted(set(left["ranks"]) & set(right["ranks"])):
        one, other = left["ranks"][rank], right["ranks"][rank]
        if one is None or other is None:
            found.missing.append(f"rank {rank}: missing measurement evidence")
            continue
        for name in ("point_key", "prompts", "expected_internal_samples", "estimate"):
            found.differs(f"rank {rank}: {name}", one[name], other[name])
        _compare_executions(rank, one, other, is_extended, same_context, found)
        if same_context:
            ignored = ("warmup_records_before",) if is_extended else ()
            preparations = (_without(side["preparation"], ignored) for side in (one, other))
            found.differs(f"rank {rank}: preparation", *preparations)
            prefixes = (side["execution_prefix_sha256"] for side in (one, other))
            found.differs(f"rank {rank}: execution_prefix_sha256", *prefixes)


def _compare_executions(
    rank: str, left: Evidence, right: Evidence, is_extended: bool, same_context: bool, found: _Findings
) -> None:
    one, other = left.get("observed_execution"), right.get("observed_execution")
    if one is None or other is None:
        if is_extended or (one is None) != (other is None):
            found.missing.append(f"rank {rank}: per-sample execution comparison is unestablished")
        return
    # The order of forwards belongs to the preparation of a matched sweep; clocks of processes are never compared.
    names = ("sample_index", "timing_basis", *(("forward_index",) if same_context else ()))
    found.differs(f"rank {rank}: observed sample count", len(one["samples"]), len(other["samples"]))
    for sample, twin in zip(one["samples"], other["samples"], strict=False):
        order = ([side[name] for name in names] for side in (sample, twin))
        found.differs(f"rank {rank}: observed sample order or timing basis", *order)
        if {sample["cudagraph"]["status"], twin["cudagraph"]["status"]} == {"observed"}:
            found.differs(f"rank {rank}: observed graph dispatch", sample["cudagraph"], twin["cudagraph"])
        else:
            found.missing.append(f"rank {rank}: observed graph dispatch comparison is unestablished")
    if same_context:
        prefixes = [side["warmup_prefix_sha256"] for side in (one, other)]
        if None in prefixes:
            found.missing.append(f"rank {rank}: observed warmup comparison is unestablished")
        else:
            found.differs(f"rank {rank}: observed warmup preparation", *prefixes)


def _without(value: Any, names: Iterable[str]) -> Any:
    return {name: one for name, one in value.items() if name not in names} if isinstance(value, Mapping) else value
