from fpmsdk.recommendation.candidate import Candidate, Outcome, Sample
from fpmsdk.recommendation.uncovered import merged_coverage


def gap(kv_tokens, occurrences, phase="decode"):
    return {
        "phase": phase,
        "purpose": "forward_pass",
        "model_path": "org/m",
        "cell_identity": {"tp": "1"},
        "cell_ids": ["cell"],
        "coordinates": {"batch_size": 1.0, "total_kv_read_tokens": float(kv_tokens)},
        "reason": "no support",
        "occurrences": occurrences,
    }


def counters(measured, gaps=(), omitted=0):
    unsupported = sum(one["occurrences"] for one in gaps) + omitted
    counts = {"measured": measured, "interpolated": 1, "unsupported": unsupported}
    none = dict.fromkeys(counts, 0)
    return {
        "counting_unit": "native_lookup_resolutions",
        "queries": counts,
        "prefill": none,
        "decode": counts,
        "mixed_decode_baseline": none,
        "gaps": list(gaps),
        "gap_limit": 128,
        "omitted_gap_queries": omitted,
    }


def candidate(number, status="feasible", category=None, **roles):
    coverage = None
    if roles:
        found = [{"worker_type": name, "coverage": value} for name, value in roles.items()]
        coverage = {"status": "covered" if status == "feasible" else "incomplete", "roles": found}
    outcome = Outcome(status, category, None if category is None else "why", coverage=coverage)
    return Candidate(f"candidate-{number:06d}", Sample("aggregated", "vllm", 0), {}, outcome)


UNCOVERED = ("uncovered", "fpm_uncovered")


def test_gaps_of_all_candidates_are_merged_and_the_most_frequent_comes_first():
    merged = merged_coverage(
        [
            candidate(1, *UNCOVERED, aggregated=counters(4, [gap(64, 1)])),
            candidate(2, aggregated=counters(10)),
            candidate(3, *UNCOVERED, aggregated=counters(2, [gap(32, 2), gap(64, 4)], omitted=3)),
        ]
    )
    (role,) = merged["roles"]
    assert role["worker_type"] == "aggregated"
    gaps = role["coverage"]["gaps"]
    assert [(one["coordinates"]["total_kv_read_tokens"], one["occurrences"]) for one in gaps] == [(64.0, 5), (32.0, 2)]
    assert [one["candidate_ids"] for one in gaps] == [["candidate-000001", "candidate-000003"], ["candidate-000003"]]
    assert role["coverage"]["omitted_gap_queries"] == 3
    assert merged["queries"] == {"measured": 16, "interpolated": 3, "unsupported": 10}
    assert (merged["status"], merged["replay_completed"]) == ("incomplete", False)
    assert merged["candidates"] == {"covered": 1, "uncovered": 2, "not_counted": 0}


def test_roles_are_kept_apart():
    merged = merged_coverage(
        [candidate(1, *UNCOVERED, prefill=counters(1), decode=counters(2, [gap(8, 1)])), candidate(2)]
    )
    assert [(role["worker_type"], len(role["coverage"]["gaps"])) for role in merged["roles"]] == [
        ("prefill", 0),
        ("decode", 1),
    ]
    assert merged["candidates"] == {"covered": 0, "uncovered": 1, "not_counted": 1}


def test_more_gaps_are_kept_than_one_model_counts():
    merged = merged_coverage(
        [candidate(n, *UNCOVERED, aggregated=counters(1, [gap(1000 * n + kv, 1) for kv in range(100)])) for n in (1, 2)]
    )
    assert len(merged["roles"][0]["coverage"]["gaps"]) == 200


def test_a_search_without_a_miss_is_covered_though_candidates_are_ruled_out():
    merged = merged_coverage(
        [
            candidate(1, aggregated=counters(4)),
            candidate(2, "infeasible", "sla_constraint", aggregated=counters(4)),
        ]
    )
    assert merged["status"] == "covered"


def test_without_counters_there_is_no_coverage():
    assert merged_coverage([candidate(1)]) is None
