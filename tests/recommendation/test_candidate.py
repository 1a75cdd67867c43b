"""Candidates go through JSON unchanged, and a status takes the reasons that belong to it.

Source: predict-recommend.md section 6.5.
"""

import json

import pytest

from fpmsdk.recommendation.candidate import Candidate, Outcome, Sample

SIZES = {"aggregated": {"tensor": 2, "replicas": 1}}


def test_a_candidate_goes_through_json_unchanged():
    sample = Sample("disaggregated", "vllm", 3, (("engine.a", 2), ("engine.b", 0.5), ("traffic.c", "x")))
    outcome = Outcome("feasible", metrics={"duration_ms": 1.5}, used_gpus=2, kv_load={"concurrency": 9})
    candidate = Candidate("candidate-000001", sample, {"engine": {}}, outcome, 3.5, {"throughput_per_gpu": 3.5})
    assert Candidate.from_json(json.loads(json.dumps(candidate.to_json()))) == candidate


@pytest.mark.parametrize(
    "other",
    [
        ("disaggregated", "vllm", (("a", 1),), SIZES),
        ("aggregated", "sglang", (("a", 1),), SIZES),
        ("aggregated", "vllm", (("a", 2),), SIZES),
        ("aggregated", "vllm", (("a", 1),), {"aggregated": {"tensor": 1, "replicas": 2}}),
    ],
)
def test_candidates_that_differ_have_fingerprints_that_differ(other):
    mode, backend, knobs, sizes = other
    own = Sample("aggregated", "vllm", 0, (("a", 1),)).fingerprint(SIZES)
    assert Sample(mode, backend, 0, knobs).fingerprint(sizes) != own


def test_the_number_of_an_arm_is_no_part_of_the_identity():
    first, second = Sample("aggregated", "vllm", 0), Sample("aggregated", "vllm", 5)
    assert first.fingerprint(SIZES) == second.fingerprint(SIZES)


@pytest.mark.parametrize(
    ("status", "category"), [("feasible", "sla_constraint"), ("infeasible", None), ("uncovered", "replay_runtime")]
)
def test_a_status_takes_no_reason_of_another(status, category):
    with pytest.raises(ValueError, match=f"reason_category of status {status}"):
        Outcome(status, category, "why")


def test_an_unknown_status_is_refused():
    with pytest.raises(ValueError, match="found 'good', accepted are feasible"):
        Outcome("good")
