import json

import numpy as np
import pytest

from fpmsdk.collect.artifact import validate_native
from fpmsdk.errors import CollectionError
from tests.collect.native import (
    ATTEMPT,
    DECODE,
    PLAN,
    PREFILL,
    REAL_KV,
    artifact,
    cell_of,
    decode_sweep,
    point,
    recorded,
    unit,
    write,
)

DEP2 = cell_of("decode", "dep", dp=2, moe_ep=2)


@pytest.mark.parametrize(
    ("cell", "points", "measured_s", "regimes"),
    [
        (PREFILL, 162, 2.8120845220014417, {"real_prefix", "not_applicable"}),
        (DECODE, 55, 0.3486170440028218, {"fake_fallback"}),
    ],
)
def test_the_artifacts_of_a_real_engine_are_valid(tmp_path, cell, points, measured_s, regimes):
    found = validate_native(PLAN, cell, recorded(tmp_path, cell, 1) / "raw")
    assert (found.phase, found.num_points, found.measured_s) == (cell.workload_kind, points, measured_s)
    assert (set(found.regimes), found.backend_version) == (regimes, "0.31.0")
    assert found.coordinates.shape == (3, points) and found.engines[0]["versions"]["vllm"] == "0.31.0"


def test_points_are_in_the_order_of_their_ids_and_as_slow_as_their_slowest_rank(tmp_path):
    found = validate_native(PLAN, DEP2, write(tmp_path, DEP2, decode_sweep()), attempt_id=ATTEMPT)
    assert [one["benchmark_id"] for one in found.points] == [1, 2, 3]
    np.testing.assert_allclose(found.rank_wall_s, [[0.01, 0.011], [0.02, 0.021], [0.03, 0.031]])
    np.testing.assert_allclose(found.wall_s, [0.011, 0.021, 0.031])
    assert [(one.rank, round(one.measured_s, 9)) for one in found.timings] == [(0, 0.063), (1, 0.063)]


def test_ranks_may_lie_in_one_unit_and_merged_results_are_not_read(tmp_path):
    raw = write(tmp_path, DEP2, decode_sweep(), per_unit=2)
    (raw / "node0000" / "benchmark_merged.json").write_text("{}")
    (raw / "node0000" / "benchmark_extra.json").write_text('{"artifact_type": "merged"}')
    (raw / "node0000" / "benchmark_merged_worker_probe.json").write_text(
        '{"schema": "dynamo.fpm.benchmark_worker_probe", "schema_version": 1}'
    )
    assert validate_native(PLAN, DEP2, raw).num_points == 3


def at(path, value):
    """A change of an artifact: what stands at a dotted path."""
    *folders, name = [int(part) if part.isdigit() else part for part in path.split(".")]

    def change(document):
        for folder in folders:
            document = document[folder]
        if value is ...:
            del document[name]
        else:
            document[name] = value

    return change


# Fields of the recorded prefill artifact, a value that breaks a rule, and what the refusal says.
BROKEN = [
    ("schema_version", 1, "schema_version: expected 2, found 1"),
    ("schema_version", 2.0, "schema_version: expected 2, found 2.0"),
    ("artifact_type", "other", "artifact_type: expected 'rank'"),
    ("status", "partial", "status: expected 'complete', found 'partial'"),
    ("valid", False, "valid: expected True"),
    ("usable", 1, "usable: expected True, found 1"),
    ("timing_valid", ..., "timing_valid: expected True, found None"),
    ("stop_reason", "timeout", "stop_reason: expected None, found 'timeout'"),
    ("error", "boom", "error: expected None"),
    ("skipped_points", [{"reason": "kv"}], r"skipped_points: expected \[\]"),
    ("missing_phases", ["decode"], r"missing_phases: expected \[\]"),
    ("config.mode", "decode", "config.mode: expected 'prefill', found 'decode'"),
    ("coverage", [], "coverage: expected an object"),
    ("coverage.expected_points", 161, "coverage.completed_points: expected 161, found 162"),
    ("coverage.skipped_points", 1, "coverage.skipped_points: expected 0, found 1"),
    ("coverage.expected_points", True, "coverage.expected_points: expected an integer"),
    ("results", {}, "results: expected a list"),
    ("iteration_groups", ..., "iteration_groups: expected a list, found None"),
    ("dp.size", 2, "dp.size: expected 1, found 2"),
    ("dp.rank", 1, "dp.rank"),
    ("dp.rank", True, "dp.rank: expected an integer"),
    ("run_id", "", "run_id: expected non-empty text"),
    ("grid_digest", None, "grid_digest: expected non-empty text"),
    ("timing", None, "timing: expected an object"),
    ("timing.benchmark_elapsed_seconds", 1.0, "at most the elapsed 1.0 s"),
    ("timing.measured_iteration_seconds", 2.8, "measured_iteration_seconds: expected .*the sum of its iterations"),
    ("timing.measured_iteration_seconds", -1, "a finite number that is not negative"),
    ("kvwarm", [], "kvwarm: expected an object"),
    ("results.0.point", None, r"results\[0\].point: expected an object"),
    ("results.0.point.point_type", "decode", "point_type: expected 'prefill'"),
    ("results.0.point.benchmark_id", 163, "fpms.0..counter_id: expected 163, found 1"),
    ("results.0.point.batch_size", 4.0, "batch_size: expected an integer"),
    ("results.0.point.batch_size", True, "batch_size: expected an integer"),
    ("results.0.point.total_prefill_tokens", 3, "total_prefill_tokens: expected an integer of at least 4"),
    ("results.0.point.total_kv_read_tokens", 7553, "sum_prefill_kv_tokens: expected 7553"),
    ("results.0.point.sample_reasons", "prefill_real_seed", "sample_reasons: expected a list of words"),
    ("results.0.point.partition", {"axis": "new"}, r"iteration_groups\[0\].point"),
    ("results.0.fpms", [], "exactly one sample, found '0 samples'"),
    ("results.0.fpms.0.counter_id", 2, "counter_id: expected 1, found 2"),
    ("results.0.fpms.0.dp_rank", 1, "dp_rank: expected 0, found 1"),
    ("results.0.fpms.0.wall_time", 0, "a positive finite number"),
    ("results.0.fpms.0.wall_time", True, "a positive finite number"),
    ("results.0.fpms.0.wall_time", 0.05, "the sample that the rank itself reports"),
    ("results.0.fpms.0.worker_id", "w1", "the sample that the rank itself reports"),
    ("results.0.fpms.0.scheduled_requests.num_decode_requests", 1, "num_decode_requests: expected 0"),
    ("results.0.kv_seed_regime", "fake_prefix", "a regime that the sample reasons"),
    ("results.0.kv_seed_regime", "", "kv_seed_regime: expected non-empty text"),
    ("results.0.kv_seed_regime", "skip:flag_off", "a regime that the sample reasons"),
    ("iteration_groups.1.benchmark_id", 1, "that no other group has"),
    ("iteration_groups.0.benchmark_id", "1", "benchmark_id: expected an integer"),
    ("iteration_groups.0.expected_dp_ranks", [0, 1], r"expected_dp_ranks: expected \[0\]"),
    ("iteration_groups.0.complete", False, "complete: expected true"),
    ("iteration_groups.0.wall_time", 0.5, "of its slowest rank"),
    ("iteration_groups.0.rank_results.0.dp_rank", 1, "rank_results: expected 'ranks"),
    ("iteration_groups.0.rank_results.0.fpms.0.wall_time", -1, "a positive finite number"),
    ("iteration_groups.0", None, r"iteration_groups\[0\]: expected an object"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_every_rule_of_a_rank_file_refuses_what_breaks_it(tmp_path, path, value, message):
    cell_dir = recorded(tmp_path, PREFILL, 1, at(path, value))
    message = message.replace("'ranks", "ranks")
    with pytest.raises(CollectionError, match=message) as error:
        validate_native(PLAN, PREFILL, cell_dir / "raw")
    assert "benchmark.json: " in str(error.value)


def test_no_point_is_measured_twice(tmp_path):
    def repeats(document):
        document["results"][1] = document["results"][0]

    with pytest.raises(CollectionError, match="results: expected every benchmark id from 1 on, once"):
        validate_native(PLAN, PREFILL, recorded(tmp_path, PREFILL, 1, repeats) / "raw")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a JSON object"),
        (b"[]", "expected a JSON object"),
        (b'{"schema_version": 2, "status": "comp', "expected a JSON object"),
        (b'{"artifact_type": NaN}', "expected a JSON object"),
        (b"\xff\xfe", "expected a JSON object"),
        (b'{"artifact_type": 1e400}', "artifact_type: Number out of range"),
    ],
)
def test_a_truncated_or_foreign_file_is_named(tmp_path, content, message):
    cell_dir = recorded(tmp_path, PREFILL, 1)
    (cell_dir / "raw" / "node0000" / "benchmark.json").write_bytes(content)
    with pytest.raises(CollectionError, match=f"benchmark.json: {message}"):
        validate_native(PLAN, PREFILL, cell_dir / "raw")


def test_a_rank_file_may_not_be_a_link(tmp_path):
    cell_dir = recorded(tmp_path, PREFILL, 1)
    file = cell_dir / "raw" / "node0000" / "benchmark.json"
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CollectionError, match="expected a regular file, found a symbolic link"):
        validate_native(PLAN, PREFILL, cell_dir / "raw")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell_id": "fpm-other"}, "cell_id: expected 'fpm-307ef7a8ae9516e2', found 'fpm-other'"),
        ({"plan_sha256": "0" * 64}, "plan_sha256: expected 'b9c93944"),
        ({"attempt_id": "b" * 32}, "attempt_id: expected 'aaaa"),
        ({"schema_version": 2}, "schema_version: expected 1"),
        ({"schema_version": True}, "schema_version: expected 1"),
        ({"schema_name": "x"}, "schema_name: expected 'aic_fpm_collector_provenance'"),
        ({"runtime": {"backend": "sglang", "backend_version": "1"}}, "runtime.backend: expected 'vllm'"),
        ({"runtime": {"backend": "vllm", "backend_version": ""}}, "runtime.backend_version: expected non-empty"),
        ({"runtime": None}, "runtime: expected an object"),
    ],
)
def test_a_result_of_something_else_is_refused(tmp_path, changes, message):
    cell_dir = recorded(tmp_path, PREFILL, 1)
    unit(cell_dir / "raw" / "node0000", PREFILL, **changes)
    with pytest.raises(CollectionError, match=message):
        validate_native(PLAN, PREFILL, cell_dir / "raw", attempt_id=ATTEMPT)


def test_without_results_or_provenance_or_unit_nothing_is_valid(tmp_path):
    with pytest.raises(CollectionError, match="wrote no results"):
        validate_native(PLAN, PREFILL, tmp_path)
    cell_dir = recorded(tmp_path, PREFILL, 1)
    (cell_dir / "raw" / "node0000" / "collector-provenance.json").unlink()
    with pytest.raises(CollectionError, match="collector-provenance.json: the provenance is missing"):
        validate_native(PLAN, PREFILL, cell_dir / "raw")
    (cell_dir / "raw" / "node0000" / "benchmark.json").rename(cell_dir / "raw" / "benchmark.json")
    with pytest.raises(CollectionError, match="must lie in the folder of the unit"):
        validate_native(PLAN, PREFILL, cell_dir / "raw")


def test_units_must_be_of_one_attempt_but_may_differ_in_dynamo_labels(tmp_path):
    raw = write(tmp_path, DEP2, decode_sweep())
    unit(raw / "node0001", DEP2, dynamo_version="1.6.1")
    assert validate_native(PLAN, DEP2, raw).num_points == 3
    unit(raw / "node0001", DEP2, attempt_id="b" * 32)
    with pytest.raises(CollectionError, match="the provenance differs from .*node0000"):
        validate_native(PLAN, DEP2, raw)


def rank_one(path, value):
    def change(files):
        at(path, value)(files[1])

    return change


def every(path, value):
    def change(files):
        for document in files:
            at(path, value)(document)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop(), r"results of ranks \[1\] are missing, found \[0\]"),
        (rank_one("dp.rank", 0), "dp.rank"),
        (rank_one("run_id", "other"), "run_id: expected the same"),
        (rank_one("grid_digest", "other"), "grid_digest: expected the same"),
        (rank_one("kvwarm.enabled", False), "kvwarm: expected real KV"),
        (rank_one("results.0.kv_seed_regime", None), "kv_seed_regime: expected the same"),
        (rank_one("results.0.point.expected_cudagraph_mode", "FULL"), "points: expected the same"),
        (rank_one("iteration_groups.0.wall_time", 0.5), "iteration_groups: expected the same"),
        (rank_one("timing.measured_iteration_seconds", 0.06), "benchmark_dp1.json: timing.measured_iteration_seconds"),
        (every("iteration_groups.0.rank_results.1.fpms.0.worker_id", "x"), "another sample of rank 1"),
        (every("iteration_groups.0.rank_results", []), "rank_results: expected"),
    ],
)
def test_ranks_must_agree(tmp_path, change, message):
    files = decode_sweep()
    change(files)
    with pytest.raises(CollectionError, match=message):
        validate_native(PLAN, DEP2, write(tmp_path, DEP2, files))


def test_equal_groups_may_be_spelled_differently(tmp_path):
    files = decode_sweep()
    files[1]["iteration_groups"] = json.loads(json.dumps(files[1]["iteration_groups"], sort_keys=True))
    assert validate_native(PLAN, DEP2, write(tmp_path, DEP2, files)).num_points == 3


SKIPPED = {"enabled": True, "warm_eligible": False, "skip_reason": "dataset_unavailable"}


@pytest.mark.parametrize("strategy", ["tep", "dep", "pure_tp"])
@pytest.mark.parametrize("kvwarm", [None, SKIPPED, {"enabled": False, "warm_eligible": True, "skip_reason": None}])
def test_layouts_that_depend_on_cache_contents_need_warm_kv(tmp_path, strategy, kvwarm):
    cell = cell_of("decode", strategy)
    raw = write(tmp_path, cell, artifact([point(1, "decode", 1, 0, 4)], ["legacy"], kvwarm=kvwarm))
    with pytest.raises(CollectionError, match="kvwarm: expected"):
        validate_native(PLAN, cell, raw)


@pytest.mark.parametrize(
    ("kvwarm", "message"),
    [
        ({"enabled": 1, "warm_eligible": True}, "kvwarm.enabled: expected true or false"),
        ({"enabled": True, "warm_eligible": None}, "kvwarm.warm_eligible: expected true or false"),
        ({"enabled": True, "warm_eligible": True, "skip_reason": "x"}, "kvwarm.skip_reason: expected null"),
        ({"enabled": True, "warm_eligible": False}, "kvwarm.skip_reason: expected non-empty text"),
    ],
)
def test_a_warm_up_may_not_contradict_itself(tmp_path, kvwarm, message):
    cell = cell_of("decode", "single")
    raw = write(tmp_path, cell, artifact([point(1, "decode", 1, 0, 4)], ["legacy"], kvwarm=kvwarm))
    with pytest.raises(CollectionError, match=message):
        validate_native(PLAN, cell, raw)


@pytest.mark.parametrize(
    ("phase", "kv", "reasons", "regime", "kvwarm", "message"),
    [
        ("decode", 4, ["kvwarm_real_kv"], "real_kv", SKIPPED, "as the warm-up was not done"),
        ("decode", 4, ["prefill_real_seed"], "real_prefix", None, "no prefix regime on a decode point"),
        ("prefill", 0, ["prefill_fake_prefix"], "fake_prefix", None, "no fake prefix on a point without KV"),
        ("decode", 4, ["kvwarm_real_kv", "kvwarm_fake_fallback"], "real_kv", REAL_KV, "that the sample reasons"),
        ("prefill", 0, ["prefill_real_seed"], "real_prefix", None, None),
        ("decode", 4, ["kvwarm_real_kv"], "real_kv", REAL_KV, None),
        ("decode", 4, [], None, None, None),
    ],
)
def test_a_regime_is_confirmed_by_its_stamp_its_phase_and_the_warm_up(
    tmp_path, phase, kv, reasons, regime, kvwarm, message
):
    cell = cell_of(phase, "single")
    tokens = 8 if phase == "prefill" else 0
    raw = write(tmp_path, cell, artifact([point(1, phase, 1, tokens, kv, reasons)], [regime], kvwarm=kvwarm))
    if message is None:
        assert validate_native(PLAN, cell, raw).regimes == (regime,)
        return
    with pytest.raises(CollectionError, match=message):
        validate_native(PLAN, cell, raw)
