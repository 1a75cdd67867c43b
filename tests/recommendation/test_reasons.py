"""Every reason once, the most frequent first. Source: predict-recommend.md section 14."""

from fpmsdk.recommendation.reasons import distinct_reasons
from tests.recommendation.made import made


def test_reasons_that_differ_in_numbers_alone_are_one_line():
    slow = {"status": "infeasible", "reason_category": "sla_constraint"}
    candidates = [
        made(0, status="failed", reason_category="replay_runtime", reason="request 3 cannot go on"),
        made(1, **slow, reason="mean_ttft_ms 118.5 is over sla.ttft_ms 80"),
        made(2),
        made(3, **slow, reason="mean_ttft_ms 1.2e+03 is over sla.ttft_ms 80"),
        made(4, **slow, reason="mean_e2e_latency_ms 118.5 is over sla.e2e_ms 80"),
    ]
    assert [reason.line() for reason in distinct_reasons(candidates)] == [
        "2 infeasible (sla_constraint), such as candidate-000002: mean_ttft_ms 118.5 is over sla.ttft_ms 80",
        "1 failed (replay_runtime), candidate-000001: request 3 cannot go on",
        "1 infeasible (sla_constraint), candidate-000005: mean_e2e_latency_ms 118.5 is over sla.e2e_ms 80",
    ]
