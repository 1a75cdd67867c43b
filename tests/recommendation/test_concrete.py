"""What a written configuration pins. Source: predict-recommend.md section 10.2."""

import json

from msgspec import structs

from fpmsdk.recommendation.concrete import concrete_config
from tests.recommendation.made import made

SOURCE = {"estimator": "fpm_interpolation", "data_identity": {"backend_version": "7.7.7-pr"}}


def resolved(candidate, **outcome):
    return concrete_config(structs.replace(candidate, outcome=structs.replace(candidate.outcome, **outcome)))


def test_version_and_estimator_of_the_evaluation_are_named_without_fallback():
    candidate = made(0, score=1.0)
    before = json.dumps(candidate.document)
    engine = resolved(candidate, provenance={"aggregated": SOURCE})["engine"]
    assert engine["backend_version"] == "7.7.7-pr"
    timing = {"type": "default", "estimation_mode": "fpm_interpolation", "fallback_policy": "deny"}
    assert engine["workers"]["aggregated"]["timing"] == timing
    assert engine["workers"]["aggregated"]["parallelism"]["tensor"] == 1
    assert json.dumps(candidate.document) == before


def test_what_a_worker_says_of_its_timing_stays():
    candidate = made(0, score=1.0)
    candidate.document["engine"]["workers"]["aggregated"]["timing"] = {"type": "default", "gemm_quant_mode": "fp8"}
    timing = resolved(candidate, provenance={"aggregated": SOURCE})["engine"]["workers"]["aggregated"]["timing"]
    assert timing["gemm_quant_mode"] == "fp8"


def test_a_formula_is_left_as_it_is():
    candidate = made(0, score=1.0)
    source = {"estimator": "fixed", "data_version": None}
    assert resolved(candidate, provenance={"aggregated": source}) == candidate.document


def test_a_load_relative_to_the_cache_becomes_the_requests_in_flight():
    load = {"concurrency": 4, "capacity_requests": 9, "capacity_tokens": 2400}
    traffic = resolved(made(0, score=1.0), kv_load=load)["traffic"]
    assert traffic == {"source": {"type": "synthetic"}, "load": {"type": "concurrency", "concurrency": 4}}
