"""Searches that the peer has made: every candidate's status, figures and score, and the order of the good ones.

Recorded with aisimulate 0.13.0.dev202610270000000085 on the table of `tests/prediction/cases.py`. What it calls failed
where the table lacks a point is uncovered here. Source: predict-recommend.md section 13.
"""

import pytest

from fpmsdk.prediction import predict, read_config
from fpmsdk.recommendation.candidate import Candidate, candidate_id
from fpmsdk.recommendation.config import RecommendConfig
from fpmsdk.recommendation.evaluate import evaluate_document
from fpmsdk.recommendation.files import write_results
from fpmsdk.recommendation.ledger import Result, Search
from fpmsdk.recommendation.objectives import Objective
from tests.prediction.cases import filled, peer_systems
from tests.recommendation.spaces import enumerated
from tests.vectors import load_vectors

CASES = load_vectors("recommend_peer")["cases"]
PEER_RULES = {"scheduler_rules": "simulator", "mixed_pass_pricing": "separate"}
# Where the peer's knobs are in a configuration, below the worker of their role.
KNOBS = {
    "tp": ("parallelism", "tensor"),
    "replicas": ("parallelism", "replicas"),
    "max_num_batched_tokens": ("scheduler", "max_batched_tokens"),
    "max_num_seqs": ("scheduler", "max_sequences"),
}
PREFIXES = {"agg_": "aggregated", "prefill_": "prefill", "decode_": "decode"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return peer_systems(tmp_path_factory.mktemp("peer"))


@pytest.fixture(scope="module")
def searched(places):
    """A function that evaluates every candidate of a case, once."""
    results = {}

    def search(name):
        if name not in results:
            results[name] = _search(filled(CASES[name]["config"], places))
        return results[name]

    return search


def _search(document):
    config = RecommendConfig.from_source(document | {"execution": PEER_RULES})
    goal = config.optimization
    objective = Objective(goal.target, goal.strict_sla, goal.constraints.min_goodput_rps)
    candidates = []
    for index, (sample, concrete) in enumerate(enumerated(config)):
        outcome = evaluate_document(concrete, objective.to_json())
        candidates.append(Candidate(candidate_id(index), sample, concrete, outcome, *objective.scored(outcome)))
    return Result.of(Search(document, objective, "grid"), candidates)


def is_of(peer, candidate):
    """Whether a candidate of ours is that of the peer."""
    workers, load = candidate.document["engine"]["workers"], candidate.document["traffic"]["load"]
    for knob, value in peer["knobs"].items():
        prefix = next((prefix for prefix in PREFIXES if knob.startswith(prefix)), None)
        field = KNOBS.get(knob.removeprefix(prefix or ""))
        if field is not None:
            worker = workers[PREFIXES[prefix or "agg_"]]
            found = worker[field[0]].get(field[1], 1)
        elif knob == "traffic_load":
            found = load.get("concurrency", load.get("fraction"))
        else:
            continue
        if found != value:
            return False
    return True


def pairs(name, result):
    """Every candidate of the peer with that of ours."""
    found = []
    for peer in CASES[name]["candidates"]:
        (own,) = [candidate for candidate in result.candidates if is_of(peer, candidate)]
        found.append((peer, own))
    assert len({own.candidate_id for _, own in found}) == len(result.candidates)
    return found


@pytest.mark.parametrize("name", CASES)
def test_status_and_figures_of_every_candidate_are_those_of_the_peer(name, searched):
    for peer, own in pairs(name, searched(name)):
        category = peer["reason_category"]
        status = ("uncovered", "fpm_uncovered") if category == "replay_runtime" else (peer["status"], category)
        assert (own.outcome.status, own.outcome.reason_category) == status, own.outcome.reason
        assert own.outcome.used_gpus == peer["used_gpus"]
        metrics = {figure: own.outcome.metrics[figure] for figure in peer["metrics"]}
        assert metrics == pytest.approx(peer["metrics"], rel=1e-9)
        assert own.score == (None if peer["score"] is None else pytest.approx(peer["score"], rel=1e-9))
        assert own.objectives == (None if peer["objectives"] is None else pytest.approx(peer["objectives"], rel=1e-9))
        assert (own.outcome.reason is None) == (own.outcome.status == "feasible")
        assert own.outcome.reason is None or "\n" not in own.outcome.reason


@pytest.mark.parametrize("name", CASES)
def test_the_order_is_that_of_the_peer_but_among_equals(name, searched):
    result = searched(name)
    of_peer = {own.candidate_id: peer for peer, own in pairs(name, result)}
    selected = [CASES[name]["candidates"][index] for index in CASES[name]["selected"]]
    found = [of_peer[candidate.candidate_id] for candidate in result.order]
    assert [key(peer) for peer in found] == [key(peer) for peer in selected]
    assert sorted(map(str, found)) == sorted(map(str, selected))


def key(peer):
    # The last digits of the peer's figures are noise, and the text of its configurations is not ours.
    return round(peer["score"], 6), peer["used_gpus"]


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_peer(name, searched):
    counts = searched(name).counts()
    counts["failed"] += counts.pop("uncovered")
    assert counts == CASES[name]["counts"]


def test_a_load_relative_to_the_cache_is_told_as_the_requests_it_was(searched):
    for peer, own in pairs("r7_kv_capacity_fraction", searched("r7_kv_capacity_fraction")):
        assert own.outcome.kv_load == {
            "concurrency": peer["knobs"]["concurrency"],
            "capacity_requests": peer["knobs"]["kv_load_concurrency_capacity"],
            "capacity_tokens": peer["knobs"]["kv_load_capacity_tokens"],
        }


@pytest.mark.parametrize(
    "name", ["r1_goodput_per_gpu", "r2_pareto_fpm", "r6_disagg_presets", "r7_kv_capacity_fraction"]
)
def test_a_written_configuration_has_exactly_the_figures_of_its_candidate(name, searched, tmp_path):
    result = searched(name)
    written = write_results(result, tmp_path)
    for entry in written["recommendations"]:
        (candidate,) = [one for one in result.candidates if one.candidate_id == entry["candidate_id"]]
        prediction = predict(read_config(tmp_path / entry["config_path"]), tmp_path / f"output-{entry['rank']}")
        assert candidate.outcome.kv_load is None or "kv_capacity" not in (tmp_path / entry["config_path"]).read_text()
        figures = {figure: prediction.report[figure] for figure in candidate.outcome.metrics}
        assert figures == candidate.outcome.metrics
