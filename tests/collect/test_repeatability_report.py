"""What repeated launches say together: figures, statuses and their priorities.

Source: collector.md sections 7.4 and 12.
"""

import pytest

from fpmsdk.collect.repeatability_report import aggregate, summarise

POLICY = {
    "samples": 5,
    "max_points_per_cell": 12,
    "cv_threshold": 0.05,
    "comparison_mode": "full_grid",
    "max_attempts_per_sample": 2,
    "source_agreement_threshold": 0.05,
}
WORKER = {
    "dp_rank": 0,
    "tp_rank": 0,
    "pp_rank": 0,
    "backend_version": "0.28.0",
    "attention_groups": [],
    "graph_config": {},
    "resolved_config": {},
}
STEADY_MS = (9.9, 10.0, 10.1, 10.0, 10.0)


def execution(status="qualified", **worker):
    return {"status": status, "observed_workers": [WORKER | worker]}


def measurement(*reasons, status="recorded", identity="a"):
    return {"identity": identity, "reasons": list(reasons), "points": {"key": {"status": status, "reasons": []}}}


def compare(reference, candidate, *, point_key, same_context=True):
    """Measurements of one identity are comparable; those without one are not established."""
    if "identity" not in candidate:
        return {"status": "unestablished", "reasons": ["nothing measured"]}
    equal = reference["identity"] == candidate["identity"]
    return {"status": "comparable" if equal else "mismatch", "reasons": [], "same_context": same_context}


def launch(milliseconds, number=1, status="passed", measured=None, ran=None, **attempt):
    evidence = {
        "attempt_id": f"attempt-{number}",
        "runtime_run_id": f"run-{number}",
        "measurement": measured or measurement(),
        "execution": ran or execution(),
        "points": {"key": {"wall_time_seconds": milliseconds / 1000, "rank_wall_times": [[0, milliseconds / 1000]]}},
    }
    return {"directory": f"attempt-{number}", "status": status, "evidence": evidence, **attempt}


def plan(source_ms=10.0, ran=None, measured=None, **policy):
    point = {"key": "key", "coordinates": {"batch_size": 1}, "source_wall_time_seconds": source_ms / 1000}
    return {
        "policy": POLICY | policy,
        "cells": [
            {
                "cell_id": "cell",
                "phase": "decode",
                "execution": ran or execution(),
                "source_measurement": measured or measurement(),
                "points": [point],
            }
        ],
    }


def report(launches, frozen=None):
    frozen = frozen or plan()
    slots = [{"sample_index": n + 1, "attempts": []} for n in range(frozen["policy"]["samples"])]
    for slot, attempts in zip(slots, launches, strict=False):
        slot["attempts"] = attempts if isinstance(attempts, list) else [attempts]
    return summarise(frozen, {"cell": slots}, compare)


def steady(**changes):
    return [launch(milliseconds, number, **changes) for number, milliseconds in enumerate(STEADY_MS)]


def statuses(summary):
    return (
        summary["repeatability"]["status"],
        summary["new_population"]["status"],
        summary["source_qualification"]["status"],
        summary["execution"]["status"],
        summary["status"],
    )


def test_the_figures_are_those_of_the_recorded_vector():
    [point] = report(steady())["points"]
    assert point["sample_cv"] == pytest.approx(0.00707107, abs=1e-8)
    assert point["median_seconds"] == 0.010
    assert point["mean_seconds"] == pytest.approx(0.010)
    assert (point["minimum_seconds"], point["maximum_seconds"]) == (0.0099, 0.0101)
    assert point["sample_stddev_seconds"] == pytest.approx(7.07107e-5, abs=1e-10)
    assert (point["sample_count"], point["raw_sample_count"]) == (5, 5)


def test_the_difference_from_the_source_is_that_of_the_recorded_vector():
    summary = report(steady(), plan(source_ms=10.4))
    [point] = summary["points"]
    assert point["source_relative_difference"] == pytest.approx(0.0384615, abs=1e-7)
    assert point["source_agreement"] == "passed"
    assert statuses(summary) == ("passed", "qualified", "qualified", "qualified", "passed")


def test_a_source_that_lies_elsewhere_fails_although_the_launches_agree():
    summary = report(steady(), plan(source_ms=10.8))
    assert summary["points"][0]["source_agreement"] == "failed"
    assert statuses(summary) == ("passed", "qualified", "failed", "qualified", "failed")


def test_a_slow_launch_stays_and_makes_the_point_unstable():
    launches = [launch(ms, n) for n, ms in enumerate((10.0, 10.0, 13.0, 10.0, 10.0))]
    summary = report(launches)
    assert summary["points"][0]["samples_seconds"] == [0.010, 0.010, 0.013, 0.010, 0.010]
    assert statuses(summary) == ("unstable", "unstable", "unestablished", "qualified", "failed")


def test_figures_with_the_source_are_diagnostic_only():
    [point] = report(steady(), plan(source_ms=20.0))["points"]
    assert point["source_inclusive_sample_count"] == 6
    assert point["source_inclusive_cv"] > point["sample_cv"]
    assert point["status"] == "passed"


@pytest.mark.parametrize(
    ("launches", "frozen", "expected"),
    [
        ([], None, ("unestablished", "unestablished", "unestablished", "incomplete", "incomplete")),
        (steady()[:3], None, ("incomplete", "incomplete", "unestablished", "incomplete", "incomplete")),
        (
            steady(measured=measurement("no measurement protocol")),
            None,
            ("unestablished", "unestablished", "unestablished", "qualified", "incomplete"),
        ),
        (
            steady(measured=measurement(status="unestablished")),
            None,
            ("unestablished", "unestablished", "unestablished", "qualified", "incomplete"),
        ),
        (
            steady(ran=execution("incomplete")),
            None,
            ("unestablished", "unestablished", "unestablished", "incomplete", "incomplete"),
        ),
        (steady(ran=execution("failed")), None, ("mismatch", "failed", "unestablished", "failed", "failed")),
        (
            [*steady()[:4], launch(10, 9, measured=measurement(identity="b"))],
            None,
            ("mismatch", "failed", "unestablished", "qualified", "failed"),
        ),
        (
            [*steady()[:4], launch(10, 9, ran=execution(graph_config={"mode": "NONE"}))],
            None,
            ("mismatch", "failed", "unestablished", "qualified", "failed"),
        ),
        (
            steady(),
            plan(measured=measurement(identity="b")),
            ("passed", "qualified", "failed", "qualified", "failed"),
        ),
        (
            steady(),
            plan(ran=execution("incomplete")),
            ("passed", "qualified", "unestablished", "qualified", "incomplete"),
        ),
        (steady(), plan(ran=execution("failed")), ("passed", "failed", "failed", "failed", "failed")),
        (
            steady(),
            plan(comparison_mode="bounded"),
            ("passed", "qualified", "unestablished", "qualified", "incomplete"),
        ),
        (
            [*steady()[:4], launch(10, 9, "failed", failure_kind="cleanup_failed")],
            None,
            ("passed", "incomplete", "unestablished", "incomplete", "incomplete"),
        ),
        (
            [*steady()[:4], {"directory": "d", "status": "failed", "failure_kind": "validation_failed"}],
            None,
            ("incomplete", "failed", "unestablished", "failed", "failed"),
        ),
    ],
    ids=[
        "nothing launched",
        "too few launches",
        "no protocol",
        "a point not recorded",
        "workers incomplete",
        "workers failed",
        "another measurement",
        "other workers",
        "source of another measurement",
        "source workers incomplete",
        "source workers failed",
        "bounded is diagnostic",
        "teardown failed",
        "a launch contradicts the plan",
    ],
)
def test_statuses_keep_scatter_population_source_and_execution_apart(launches, frozen, expected):
    assert statuses(report(launches, frozen)) == expected


def test_latencies_of_launches_without_an_established_identity_are_shown_and_not_pooled():
    [point] = report(steady(measured=measurement("no measurement protocol")))["points"]
    assert point["raw_sample_count"] == 5
    assert point["samples_seconds"] == []
    assert point["median_seconds"] is point["sample_cv"] is point["source_relative_difference"] is None


def test_a_failed_attempt_before_a_valid_one_does_not_count():
    failed = {"directory": "d", "status": "failed", "failure_kind": "validation_failed"}
    launches = [[failed, attempt] if number == 0 else attempt for number, attempt in enumerate(steady())]
    assert report(launches)["status"] == "passed"


def test_a_bounded_subset_is_compared_with_its_source_in_another_context():
    assert report(steady(), plan(comparison_mode="bounded"))["points"][0]["source_comparison"]["same_context"] is False


def test_the_aggregate_holds_the_medians_and_replaces_nothing():
    summary = report(steady())
    document = aggregate("a" * 64, summary)
    assert document["schema_name"] == "aisimulate_fpm_repeatability_aggregate"
    assert document["formal_source_replaced"] is False
    assert document["status"] == "qualified"
    assert document["points"][0]["median_seconds"] == 0.010
    assert "source_wall_time_seconds" not in document["points"][0]
