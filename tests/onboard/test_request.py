"""Requests: what is accepted and refused, the identities, and the bytes in which older ones are written again."""

import hashlib
import json

import pytest

from fpmsdk.documents.yaml_files import read_mapping
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.request import SupportRequest, load_request, request_id, validation_id
from tests.vectors import load_vectors

# What the peer makes of these requests: bytes of the file, both ids, and derived facts.
PEER = load_vectors("onboarding_requests_peer")

IDENTITY = {
    "model": "org/model",
    "model_revision": "rev-1",
    "model_kind": "dense",
    "framework_version": "0.27.0",
    "gpu": "h200_sxm",
    "interconnect": "nvswitch",
}
VECTOR = {
    "identity": IDENTITY,
    "search": {"tensor_parallel": 2, "context_length": 8192},
    "collection": {"prefill_cudagraph_policy": "runtime", "gpu_memory_utilization": 0.9},
}


def parsed(document):
    return SupportRequest.model_validate(document)


def by_name(entries):
    return pytest.mark.parametrize("entry", entries, ids=[entry["name"] for entry in entries])


@by_name(PEER["accepted"])
def test_a_request_has_the_bytes_and_ids_of_the_peer(entry):
    request = parsed(entry["request"])
    assert hashlib.sha256(request.yaml_bytes()).hexdigest() == entry["yaml_sha256"]
    assert (request_id(request), validation_id(request)) == (entry["request_id"], entry["validation_id"])
    assert request.scheduler_limits() == entry["limits"]
    assert (request.parallel_preset, request.worker_gpus) == (entry["preset"], entry["gpus"])
    assert request.search.context_length == entry["context"]


@by_name(PEER["accepted"])
def test_a_written_request_reads_as_itself(entry, tmp_path):
    request = parsed(entry["request"])
    path = tmp_path / "request.yaml"
    path.write_bytes(request.yaml_bytes())
    assert load_request(path).yaml_bytes() == request.yaml_bytes()


@by_name(PEER["refused"])
def test_what_the_peer_refuses_is_refused_in_one_line_a_field(entry, tmp_path):
    path = tmp_path / "request.yaml"
    path.write_text(json.dumps(entry["request"]))
    with pytest.raises(OnboardError) as fault:
        load_request(path)
    assert all(line.startswith(f"{path}: ") for line in str(fault.value).splitlines())


def test_the_ids_are_those_of_the_specification():
    request = parsed(VECTOR)
    assert request_id(request) == "onboarding-f0cadbee96ffd01c1847b33d966d147cf20c9ad4947cbe7c1ac8d99da66ab400"
    assert validation_id(request) == "validation-be066bb79084155f0b39e40852cc461c09f9f6536b30457dd8d482741eab0a5e"
    decode = request_id(request.replaced({"worker_type": "decode"}))
    assert decode == "onboarding-1319295799017e49e7104e5e20579885aa3b3e10084cd22605a481cd2906bfe6"
    unlabelled = request_id(request.replaced({"identity": {"framework_version": None}}))
    assert unlabelled == "onboarding-1505bb05a5e7d522ae83d79ee2fcef58279e359f3b1ebce359be894b10e0bb42"


def test_the_example_is_no_part_of_what_is_collected():
    request = parsed(VECTOR)
    other = request.replaced({"workload": {"input_tokens": 7}, "search": {"objective": "ttft", "seed": 1}})
    assert request_id(other) == request_id(request)
    assert validation_id(other) != validation_id(request)


@pytest.mark.parametrize(
    ("role", "phases"),
    [
        (None, ("prefill", "decode")),
        ("aggregated", ("prefill", "decode")),
        ("prefill", ("prefill",)),
        ("decode", ("decode",)),
    ],
)
def test_a_single_role_measures_its_own_phase(role, phases):
    assert parsed(VECTOR).replaced({"worker_type": role}).collection_phases == phases


@pytest.mark.parametrize("target", [float("inf"), float("nan")])
def test_numbers_are_finite(target):
    with pytest.raises(ValueError, match="finite"):
        parsed({**VECTOR, "workload": {"slo": {"ttft_ms": target}}})


def test_a_policy_runtime_leaves_capture_sizes_to_the_runtime():
    settings = parsed(VECTOR).collection_settings()
    assert settings["prefill_cudagraph_policy"] == "runtime"
    assert settings["max_prefill_cudagraph_size"] is None
    assert settings["sources"].keys() == settings.keys() - {"sources"}


def test_a_request_without_a_policy_captures_up_to_2048():
    settings = parsed({"identity": IDENTITY}).collection_settings()
    assert settings["max_prefill_cudagraph_size"] == 2048
    assert "prefill_cudagraph_policy" not in settings and "gpu_memory_utilization" not in settings


def test_there_is_a_token_for_every_sequence():
    request = parsed({**VECTOR, "collection": {"max_num_tokens": 128}})
    with pytest.raises(OnboardError, match="max_num_tokens 128 must be at least max_batch_size 256"):
        request.scheduler_limits()


def test_obsolete_fields_are_listed_at_once():
    document = {"identity": {**IDENTITY, "gpu_count": 8, "node_count": 1}, "search": {"max_candidates": 3}}
    with pytest.raises(ValueError, match="identity.gpu_count, identity.node_count, search.max_candidates"):
        parsed(document)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("identity: {}\nidentity: {}", "given twice"),
        ("1: 2", "keys must be text"),
        ("- 1", "one mapping"),
        ("a: [", "invalid YAML"),
    ],
)
def test_a_request_file_is_one_mapping_with_keys_given_once(tmp_path, text, found):
    path = tmp_path / "request.yaml"
    path.write_text(text)
    with pytest.raises(OnboardError, match=found):
        read_mapping(path)
