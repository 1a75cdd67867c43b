import json

import pytest

from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.measurement import extract_measurements
from fpmsdk.collect.measurement_compare import compare_measurements
from fpmsdk.errors import CollectionError
from tests.collect.native import DECODE, cell_of, decode_sweep, recorded, sha, with_measurements, write

DEP2 = cell_of("decode", "dep", dp=2, moe_ep=2)
DEEPEST = sha({"batch_size": 3, "total_kv_read_tokens": 48})


def launch(tmp_path, run="run", change=None, version=2, **options):
    """Evidence of a launch of two ranks; `change` is done to every rank file and repeated in the groups."""
    files = with_measurements(decode_sweep(), **options)
    for document in files:
        document["run_id"] = run
        if change is not None:
            change(document)
    for document in files:
        for number, group in enumerate(document["iteration_groups"]):
            for rank, one in enumerate(group["rank_results"]):
                one["fpms"] = files[rank]["results"][number]["fpms"]
    raw = write(tmp_path / run, DEP2, files)
    return extract_measurements(raw, validate_native(None, DEP2, raw), evidence_version=version)


def samples(document):
    for row in document["results"]:
        yield row["fpms"][0]["benchmark_measurement"]


def test_complete_evidence_is_recorded_with_what_nobody_observed(tmp_path):
    evidence = launch(tmp_path)
    assert (evidence["status"], evidence["reasons"], len(evidence["points"])) == ("recorded", [], 3)
    assert evidence["scheduling"]["1"]["async_scheduling"] is False
    assert "gpu_clocks" in evidence["unobserved"] and "observed_per_call_graph_dispatch" not in evidence["unobserved"]
    point = evidence["points"][DEEPEST]
    assert (point["point"]["benchmark_id"], point["wall_time_seconds"]) == (3, 0.031)
    # The deepest point runs first: nothing precedes it.
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert point["ranks"]["0"]["execution_prefix_sha256"] == nothing
    assert [one["forward_index"] for one in point["ranks"]["0"]["observed_execution"]["samples"]] == [5, 6]


def test_finding_22_evidence_of_version_2_lists_what_stays_unknown(tmp_path):
    assert {
        "sampled_continuation_token_ids",
        "kv_cache_tensors",
        "recurrent_state_tensors",
        "execution_history_equivalence",
        "complete_cuda_graph_descriptor",
        "capture_versus_replay",
        "gpu_execution_time",
        "warmup_graph_kernel_and_cache_equivalence",
        "decode_real_kv_chain_warmup_history",
    } <= set(launch(tmp_path)["unobserved"])


def test_artifacts_without_a_protocol_are_unestablished_not_refused(tmp_path):
    raw = recorded(tmp_path, DECODE, 1) / "raw"
    evidence = extract_measurements(raw, validate_native(None, DECODE, raw))
    assert (evidence["status"], evidence["measurement_protocol"]) == ("unestablished", None)
    assert evidence["reasons"][0] == "legacy artifact has no measurement protocol"
    assert {point["status"] for point in evidence["points"].values()} == {"unestablished"}
    assert evidence["scheduling"]["0"]["async_scheduling"] is False  # the engine block of the artifact says so


def unavailable(document):
    for measurement in samples(document):
        measurement["prompts"] = {"status": "unavailable", "requests": [], "sha256": None}


def blind(document):
    for measurement in samples(document):
        for raw in measurement["raw_fpms"]:
            raw["benchmark_sample"]["cudagraph"] = {"status": "unavailable"}


def running(document):
    document["warmup_evidence"]["records"][0] |= {
        "status": "running",
        "forward_index_end": None,
        "observed_forward_count": 0,
    }


def forgotten(document):
    document["warmup_evidence"] = {"status": "unavailable", "records": []}
    for measurement in samples(document):
        measurement["preparation"]["warmup_records_before"] = None


def undated(document):
    for measurement in samples(document):
        for raw in measurement["raw_fpms"]:
            raw["benchmark_sample"]["timing"]["start_monotonic"] = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unavailable, "rank 0: injected prompt hashes unavailable"),
        (blind, "rank 0: per-sample CUDA graph dispatch is unavailable"),
        (running, "rank 0: referenced warmup preparation is still running"),
        (forgotten, "rank 0: warmup history is unavailable"),
        (undated, "rank 0: sample timing start is unavailable"),
    ],
)
def test_what_was_not_observed_leaves_a_point_unestablished(tmp_path, change, reason):
    evidence = launch(tmp_path, change=change)
    assert evidence["status"] == evidence["points"][DEEPEST]["status"] == "unestablished"
    assert reason in evidence["points"][DEEPEST]["reasons"]


def test_prompts_that_are_missing_earlier_leave_later_points_open(tmp_path):
    def first(document):
        next(samples(document))["prompts"] = {"status": "unavailable", "requests": [], "sha256": None}

    points = launch(tmp_path, change=first)["points"].values()
    open_points = [one for one in points if "rank 0: preceding prompt evidence incomplete" in one["reasons"]]
    assert [one["point"]["benchmark_id"] for one in open_points] == [1, 2]


def graph(document):
    for row in document["results"]:
        row["point"] |= {"expected_cudagraph_mode": "FULL"}
    for group in document["iteration_groups"]:
        group["point"] |= {"expected_cudagraph_mode": "FULL"}


def test_a_graph_point_needs_its_capture_and_padding(tmp_path):
    assert launch(tmp_path, change=graph)["points"][DEEPEST]["reasons"] == [
        "missing expected CUDA graph capture size",
        "missing expected CUDA graph padding",
    ]


PLACES = {
    "protocol": lambda document: document["measurement_protocol"],
    "preparation": lambda document: document["measurement_protocol"]["preparation"],
    "history": lambda document: document["warmup_evidence"],
    "warmup": lambda document: document["warmup_evidence"]["records"][0],
    "measurement": lambda document: next(samples(document)),
    "prompts": lambda document: next(samples(document))["prompts"],
    "request": lambda document: next(samples(document))["prompts"]["requests"][0],
    "prepared": lambda document: next(samples(document))["preparation"],
    "raw": lambda document: next(samples(document))["raw_fpms"][1],
    "estimate": lambda document: next(samples(document))["estimate"],
    "sample": lambda document: next(samples(document))["raw_fpms"][1]["benchmark_sample"],
    "timing": lambda document: next(samples(document))["raw_fpms"][1]["benchmark_sample"]["timing"],
    "graph": lambda document: next(samples(document))["raw_fpms"][1]["benchmark_sample"]["cudagraph"],
    "retained": lambda document: document["results"][0]["fpms"][0],
}


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        ("protocol", "schema_version", 2, "measurement_protocol.schema_version: expected 1"),
        ("protocol", "timing_metric", "gpu", "timing_metric: expected 'scheduler_wall_time'"),
        ("protocol", "independent_repetitions", True, "independent_repetitions: expected 1"),
        ("protocol", "synthetic_content", "prose", "synthetic_content: expected random"),
        ("protocol", "content_seed", None, "content_seed: expected text"),
        ("protocol", "unobserved", [""], "unobserved: expected non-empty text"),
        ("protocol", "execution_evidence", {}, "execution_evidence: expected"),
        ("preparation", "giant_kv_repeats", -1, "giant_kv_repeats: expected an integer"),
        ("preparation", "prefill_real_seed", 1, "prefill_real_seed: expected true or false"),
        ("history", "status", "lost", "warmup_evidence.status"),
        ("history", "status", "unavailable", "none while unavailable"),
        ("warmup", "kind", "other", r"records\[0\].kind"),
        ("warmup", "completed_points_before", 1, "0 for a global warm-up"),
        ("warmup", "observed_forward_count", 4, "observed_forward_count: expected 5, from start to end"),
        ("warmup", "forward_index_start", None, "null only for a failed eager_shape"),
        ("warmup", "forward_index_end", None, "null only while running"),
        ("warmup", "validation", {"status": "failed"}, "validation.status"),
        ("warmup", "status", "failed", None),
        ("measurement", "point_key", "0" * 64, "point_key"),
        ("measurement", "dp_rank", 5, "dp_rank"),
        ("measurement", "raw_fpms", [], "1 to 2 samples"),
        ("measurement", "expected_internal_samples", 1, "expected '?1 to 1 samples"),
        ("prompts", "sha256", "0" * 64, "the digest of the requests"),
        ("prompts", "requests", [], "at least one request"),
        ("request", "slot", 1, r"requests\[0\].slot: expected 0"),
        ("request", "sha256", "x", "64 lowercase hexadecimal digits"),
        ("prepared", "grid_digest", "other", "preparation.grid_digest"),
        ("prepared", "completed_points_before", 1, "0, the position"),
        ("prepared", "kv_seed_regime", "legacy", "preparation.kv_seed_regime: expected 'real_kv'"),
        ("prepared", "warmup_records_before", 0, "1, as the warm-ups say"),
        ("raw", "counter_id", 9, "counter_id: expected 3"),
        ("raw", "wall_time", 0, "a positive finite number"),
        ("raw", "wall_time", 0.5, "of the raw samples"),
        ("estimate", "method", "single_step", "a method for 2 of 2 samples"),
        ("estimate", "raw_sample_indices", [0], r"raw_sample_indices: expected \[1\]"),
        ("sample", "sample_index", 0, "sample_index: expected 1"),
        ("sample", "forward_index", 5, "forward_index: expected an integer of at least 6"),
        ("timing", "basis", "guess", "timing.basis"),
        ("timing", "end_monotonic", None, "end_monotonic: expected a finite number"),
        ("timing", "end_monotonic", 99.0, "an interval of"),
        ("graph", "status", "unavailable", "no values while unavailable"),
        ("graph", "num_paddings", 2, "num_paddings: expected 1"),
        ("graph", "runtime_mode", "EAGER", "runtime_mode: expected a graph mode"),
        ("retained", "benchmark_sample", {}, "absent on a retained estimate"),
    ],
)
def test_evidence_that_contradicts_itself_is_refused(tmp_path, place, name, value, message):
    def change(document):
        PLACES[place](document)[name] = value

    if message is None:
        assert launch(tmp_path, change=change)["status"] == "recorded"
        return
    with pytest.raises(CollectionError, match=message):
        launch(tmp_path, change=change)


def test_all_ranks_follow_one_protocol(tmp_path):
    files = with_measurements(decode_sweep())
    del files[1]["measurement_protocol"]
    raw = write(tmp_path, DEP2, files)
    with pytest.raises(CollectionError, match="benchmark_dp1.json: measurement_protocol: expected the same"):
        extract_measurements(raw, validate_native(None, DEP2, raw))


def worker(raw, rank, **changes):
    document = {
        "schema_name": "aisimulate_fpm_runtime_execution",
        "schema_version": 1,
        "collector_provenance": {"attempt_id": "a" * 32},
        "backend_version": "0.27.0",
        "status": "observed",
        "dp_rank": rank,
        "resolved_config": {"scheduler_config": {"async_scheduling": False}},
    }
    folder = raw / f"node{rank:04d}"
    (folder / f"fpm-execution-worker-dp{rank}-tp0-pp0.json").write_text(json.dumps(document | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collector_provenance": {"attempt_id": "b"}}, "of another attempt"),
        ({"backend_version": "0.28.0"}, "of another attempt, engine version or rank"),
        ({"dp_rank": 7}, "of another attempt"),
        ({"resolved_config": {"scheduler_config": {"async_scheduling": 0}}}, "expected true, false or null"),
        ({"resolved_config": {"scheduler_config": {"async_scheduling": True}}}, "rank 1: engine and workers disagree"),
    ],
)
def test_workers_and_engine_agree_on_scheduling(tmp_path, changes, message):
    raw = write(tmp_path, DEP2, with_measurements(decode_sweep()))
    collection = validate_native(None, DEP2, raw)
    worker(raw, 0)
    worker(raw, 1)
    scheduling = extract_measurements(raw, collection)["scheduling"]
    assert [len(scheduling[rank]["observations"]) for rank in ("0", "1")] == [2, 2]
    worker(raw, 1, **changes)
    with pytest.raises(CollectionError, match=message):
        extract_measurements(raw, collection)


# --- comparison ---


def compare(left, right, **options):
    return compare_measurements(left, right, point_key=DEEPEST, **options)


def test_two_launches_under_the_same_conditions_are_comparable_whatever_their_latency(tmp_path):
    def slower(document):
        for row in document["results"]:
            (sample,) = row["fpms"]
            sample["wall_time"] *= 3
            for raw in sample["benchmark_measurement"]["raw_fpms"]:
                raw["wall_time"] *= 3
                timing = raw["benchmark_sample"]["timing"]
                timing["end_monotonic"] = timing["start_monotonic"] + raw["wall_time"]
        for group in document["iteration_groups"]:
            group["wall_time"] *= 3
        document["timing"] = {
            "benchmark_elapsed_seconds": 9,
            "measured_iteration_seconds": sum(one["wall_time"] for one in document["iteration_groups"][::-1]),
        }

    found = compare(launch(tmp_path, "one"), launch(tmp_path, "two", slower))
    assert (found["status"], found["reasons"], found["context"]) == ("comparable", [], "matched_native_sweep")


def test_across_contexts_the_history_stays_unproven(tmp_path):
    found = compare(launch(tmp_path, "one"), launch(tmp_path, "two"), same_context=False)
    assert (found["status"], found["identity_status"]) == ("unestablished", "comparable")
    assert found["reasons"] == ["cross-context execution history equivalence has not been established"]


def set_at(place, name, value):
    def change(document):
        PLACES[place](document)[name] = value

    return change


def top(name, value):
    return lambda document: document.update({name: value})


def other_prompt(document):
    prompts = next(samples(document))["prompts"]
    prompts["requests"][0]["sha256"] = "0" * 64
    prompts["sha256"] = sha(prompts["requests"])


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        (top("run_id", "one"), "mismatch", "runtime_run_id is not an independent launch"),
        (top("limits", {"max_model_len": 1}), "mismatch", "runtime_identity differs"),
        (top("config", {"mode": "decode", "timeout": 5}), "mismatch", "benchmark_config differs"),
        (
            top("engine", {"scheduler": {"async_scheduling": True}}),
            "mismatch",
            "rank 0: effective async_scheduling differs",
        ),
        (top("engine", {}), "unestablished", "candidate: rank 0: effective async_scheduling is unreported"),
        (set_at("protocol", "content_seed", "other"), "mismatch", "measurement_protocol differs"),
        (set_at("protocol", "unobserved", []), "comparable", None),
        (set_at("graph", "runtime_mode", "PIECEWISE"), "mismatch", "rank 0: observed graph dispatch differs"),
        (
            set_at("timing", "basis", "schedule_to_output"),
            "mismatch",
            "rank 0: observed sample order or timing basis differs",
        ),
        (set_at("warmup", "requested_shape", [1]), "mismatch", "rank 0: observed warmup preparation differs"),
        (other_prompt, "mismatch", "rank 0: prompts differs"),
        (blind, "unestablished", "rank 0: observed graph dispatch comparison is unestablished"),
        (forgotten, "unestablished", "rank 0: observed warmup comparison is unestablished"),
    ],
)
def test_a_difference_outweighs_a_gap_and_a_gap_outweighs_agreement(tmp_path, change, status, reason):
    one, two = launch(tmp_path, "one"), launch(tmp_path, "two", change)
    found = compare(one, two)
    assert found["status"] == status
    assert reason is None or reason in found["reasons"]


def test_a_point_that_one_side_lacks_is_unestablished(tmp_path):
    found = compare_measurements(launch(tmp_path, "one"), launch(tmp_path, "two"), point_key="0" * 64)
    assert (found["status"], found["reasons"]) == ("unestablished", ["point is missing from reference or candidate"])


def test_older_evidence_compares_without_forwards(tmp_path):
    options = {"execution": False, "version": 1}
    assert compare(launch(tmp_path, "one", **options), launch(tmp_path, "two", **options))["status"] == "comparable"
    mixed = compare(launch(tmp_path, "three"), launch(tmp_path, "four", execution=False))
    assert mixed["status"] == "unestablished"
    assert "rank 0: per-sample execution comparison is unestablished" in mixed["reasons"]
