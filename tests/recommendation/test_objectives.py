"""The value of a report under every target, and what rules a candidate out. Source: predict-recommend.md section 7."""

import pytest

from fpmsdk.recommendation.candidate import Outcome
from fpmsdk.recommendation.objectives import TARGETS, MetricsFault, Objective
from tests.recommendation.made import REPORT


@pytest.mark.parametrize(
    ("target", "values", "score"),
    [
        ("throughput", {"throughput": 600.0}, 600.0),
        ("throughput_per_gpu", {"throughput_per_gpu": 300.0}, 300.0),
        ("throughput_per_user", {"throughput_per_user": 200.0}, 200.0),
        ("goodput", {"goodput": 300.0}, 300.0),
        ("goodput_per_gpu", {"goodput_per_gpu": 150.0}, 150.0),
        ("ttft", {"ttft": 20.0}, -20.0),
        ("e2e_latency", {"e2e_latency": 100.0}, -100.0),
        ("min_gpus", {"min_gpus": 2.0}, -2.0),
        ("pareto", {"throughput_per_gpu": 300.0, "throughput_per_user": 200.0}, 300.0),
    ],
)
def test_each_target_has_its_figure_and_minimised_ones_a_negative_score(target, values, score):
    objective = Objective(target)
    assert objective.values(REPORT, used_gpus=2) == pytest.approx(values, rel=1e-12)
    found, objectives = objective.scored(Outcome("feasible", metrics=REPORT, used_gpus=2))
    assert found == pytest.approx(score, rel=1e-12)
    assert objectives == (pytest.approx(values, rel=1e-12) if target == "pareto" else None)


def test_the_targets_are_those_of_the_specification():
    assert {*TARGETS} == {
        *("throughput", "throughput_per_gpu", "throughput_per_user", "goodput", "goodput_per_gpu"),
        *("ttft", "e2e_latency", "min_gpus", "pareto"),
    }
    with pytest.raises(ValueError, match="optimization.target: found 'speed', accepted are throughput, "):
        Objective("speed")


@pytest.mark.parametrize("missing", ["gpu_hours", "duration_ms"])
def test_a_rate_per_gpu_is_zero_without_hours_or_duration(missing):
    report = {**REPORT, missing: 0.0}
    assert Objective("goodput_per_gpu").values(report, 2) == {"goodput_per_gpu": 0.0}


def test_what_is_not_feasible_has_no_score():
    outcome = Outcome("infeasible", "sla_constraint", "slow", metrics=REPORT)
    assert Objective("throughput").scored(outcome) == (None, None)
    assert Objective("throughput").signed(outcome) is None


FEASIBLE = ("feasible", None, None)


@pytest.mark.parametrize(
    ("objective", "changes", "sla", "expected"),
    [
        # an SLA alone removes nothing
        (Objective("goodput"), {}, {"ttft_ms": 1.0}, FEASIBLE),
        # strict bounds are inclusive
        (Objective("throughput", strict_sla=True), {}, {"ttft_ms": 20.0, "itl_ms": 5.0}, FEASIBLE),
        (
            Objective("throughput", strict_sla=True),
            {},
            {"ttft_ms": 19.5, "itl_ms": 4.0},
            (
                "infeasible",
                "sla_constraint",
                "mean_ttft_ms 20 is over sla.ttft_ms 19.5; mean_tpot_ms 5 is over sla.itl_ms 4",
            ),
        ),
        (
            Objective("throughput", strict_sla=True),
            {},
            {"e2e_ms": 99.0},
            ("infeasible", "sla_constraint", "mean_e2e_latency_ms 100 is over sla.e2e_ms 99"),
        ),
        (
            Objective("throughput", strict_sla=True),
            {"num_tpot_samples": 0},
            {"itl_ms": 9.0},
            ("infeasible", "sla_constraint", "num_tpot_samples is 0, so that sla.itl_ms is not shown to hold"),
        ),
        # min_gpus is always strict, and asks for a goodput
        (
            Objective("min_gpus"),
            {},
            {"ttft_ms": 19.0},
            ("infeasible", "sla_constraint", "mean_ttft_ms 20 is over sla.ttft_ms 19"),
        ),
        (Objective("min_gpus", min_goodput_rps=8.0), {}, {"ttft_ms": 20.0}, FEASIBLE),
        (
            Objective("min_gpus", min_goodput_rps=8.5),
            {},
            {"ttft_ms": 20.0},
            ("infeasible", "load_constraint", "goodput_request_throughput_rps 8 is under min_goodput_rps 8.5"),
        ),
        # nothing to take a mean of
        (
            Objective("ttft"),
            {"num_ttft_samples": 0, "mean_ttft_ms": None},
            {},
            ("infeasible", "no_samples", "num_ttft_samples is 0, so that ttft has no value"),
        ),
        (Objective("throughput"), {"completed_requests": 0}, {}, ("infeasible", "no_samples", "no request completed")),
        # figures that are not there
        (
            Objective("goodput"),
            {"goodput_output_throughput_tok_s": None},
            {"ttft_ms": 50.0},
            (
                "failed",
                "invalid_metrics",
                "goodput_output_throughput_tok_s: the report has None, a finite number is needed",
            ),
        ),
        (
            Objective("throughput"),
            {"output_throughput_tok_s": float("inf")},
            {},
            ("failed", "invalid_metrics", "output_throughput_tok_s: the report has inf, a finite number is needed"),
        ),
        (
            Objective("min_gpus"),
            {"mean_e2e_latency_ms": None},
            {"ttft_ms": 50.0},
            ("failed", "invalid_metrics", "mean_e2e_latency_ms: the report has None, a finite number is needed"),
        ),
    ],
)
def test_what_rules_a_candidate_out(objective, changes, sla, expected):
    assert objective.verdict({**REPORT, **changes}, 2, sla) == expected


def test_a_figure_that_is_no_number_is_named():
    with pytest.raises(MetricsFault, match="mean_ttft_ms: the report has True"):
        Objective("ttft").values({"mean_ttft_ms": True}, 1)


def test_an_objective_goes_through_json():
    objective = Objective("min_gpus", True, 80.0)
    assert Objective.from_json(objective.to_json()) == objective
