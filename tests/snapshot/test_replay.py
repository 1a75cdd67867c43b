"""Replays use the tuned model, in this process and in others. Source: snapshot.md sections 9 and 10."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from fpmsdk import ForwardPassPerfModel, Trace, replay_trace, sample
from fpmsdk._ext.pricing import modeled_duration
from tests.perfdb.pairs import decode, prefill, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfmodel.deployments import checkpoint, direct_config, rank
from tests.snapshot.kinds import corrected, iterations, op_level_config
from tests.snapshot.processes import run_module, run_worker
from tests.snapshot.replayer import told

LAUNCH = {"engine": {"max_num_batched_tokens": 256, "num_gpu_blocks": 512, "block_size": 16}}
TRACE = ([0.0, 0.1, 0.2, 0.3, 2.0, 2.1], [512, 300, 40, 700, 90, 333], [3, 40, 60, 9, 25, 4])


def test_four_processes_replay_the_model_that_a_planner_tuned(tmp_path):
    config = corrected(op_level_config(tmp_path / "data"), "hybrid")
    planner = run_worker("uninterrupted", 1, config=config, folder=str(tmp_path))
    assert planner["saved"] != planner["untuned"]

    def replay(seed, config=planner["config"]):
        task = json.dumps({"config": config, "trace": TRACE, "launch": LAUNCH})
        return run_module("tests.snapshot.replayer", task, seed=seed)

    with ThreadPoolExecutor(2) as pool:
        replays = list(pool.map(replay, (11, 22, 33, 44)))
    assert replays[1:] == replays[:1] * 3
    cold = replay(55, config)
    assert cold["passes"] != replays[0]["passes"]
    assert [row["end_ms"] for row in cold["requests"]] != [row["end_ms"] for row in replays[0]["requests"]]
    # The process that tunes, too, prices as they do.
    here = ForwardPassPerfModel.best_available(planner["config"])
    report = replay_trace(Trace.from_arrays(*TRACE), launch=LAUNCH, timing=here, record_passes=True)
    assert told(report.passes) == replays[0]["passes"]


def test_a_regression_is_replayed_as_it_was_tuned(tmp_path):
    model = ForwardPassPerfModel.best_available(sample.MODEL)
    model.tune_with_fpms([[frame] for frame in iterations(sample.MODEL, "train", 3000)])
    config = model.save_state_snapshot(tmp_path / "saved")
    run = sample.eval_run()
    arrays = (run.trace.arrival_ms.tolist(), run.trace.prompt_tokens.tolist(), run.trace.output_tokens.tolist())
    task = json.dumps({"config": config, "trace": [part[:60] for part in arrays], "launch": sample.launch(run)})
    elsewhere = run_module("tests.snapshot.replayer", task, seed=9)
    report = replay_trace(run.trace.head(60), launch=sample.launch(run), timing=model, record_passes=True)
    assert [row["end_ms"] for row in elsewhere["requests"]] == [row["end_ms"] for row in told(report.requests)]
    assert elsewhere["passes"] == told(report.passes)


# --- a doubled correction ---


@pytest.fixture
def doubled(tmp_path):
    """A fixed correction whose every factor is 2.0, over measured passes of whole milliseconds."""
    bare = Systems(tmp_path / "bare")
    bare.hardware()
    model = checkpoint(tmp_path / "model")
    rows = [
        prefill(batch, tokens, kv, 8.0 + batch, model=str(model))
        for batch in range(1, 5)
        for tokens in (4, 64, 512)
        for kv in (0, 8, 512, 4096)
    ]
    rows += [decode(batch, kv, 2.0 + kv / 4096, model=str(model)) for batch in range(1, 9) for kv in (8, 4096)]
    config = direct_config(model, bare.path, write_pair(tmp_path / "pair", rows))
    # One cell a store, and observations that the bound cuts to exactly 2.
    one_cell = {"sampling": {"bins_per_axis": [1, 1], "max_observations": 4}, "min_observations": 1}
    config["estimator_config"]["correction"] = {"mode": "fixed", **one_cell}
    tuned = ForwardPassPerfModel.best_available(config)
    for query in (rank(1, 64), rank(num_decode=2, decode_kv=600), rank(1, 64, 0, 2, 600)):
        tuned.tune_with_fpms([[query | {"wall_time": 1.0}]])
    assert [factor.factors() for factor in tuned._kind.serving.tables()] == [[2.0]] * 3
    return config, tuned.save_state_snapshot(tmp_path / "saved")


def replayed(config, trace, record_passes=True, launch=None):
    model = ForwardPassPerfModel.best_available(config)
    return replay_trace(
        Trace.from_arrays(*trace),
        launch=launch or {"engine": {"max_num_batched_tokens": 512, "num_gpu_blocks": 512}},
        timing=model.timing_model(),  # the profile tells nothing of the memory
        record_passes=record_passes,
    )


ONE_REQUEST = ([0.0], [512], [3])


def test_a_doubled_correction_doubles_the_steps_of_one_request(doubled):
    config, pinned = doubled
    (cold,), (tuned,) = (replayed(given, ONE_REQUEST).requests.to_pylist() for given in (config, pinned))
    for name in ("ttft_ms", "ttst_ms", "e2e_latency_ms"):
        assert tuned[name] > cold[name]
    assert tuned["ttst_ms"] == 2 * cold["ttst_ms"]
    assert (cold["ttft_ms"], tuned["ttft_ms"]) == (9.0, 18.0)
    steps = [
        [row["end_ms"] - row["start_ms"] for row in replayed(given, ONE_REQUEST).passes.to_pylist()]
        for given in (config, pinned)
    ]
    assert [2 * step for step in steps[0]] == steps[1]


def test_recording_passes_changes_nothing(doubled):
    _, pinned = doubled
    with_passes, without = (replayed(pinned, TRACE, record) for record in (True, False))
    assert with_passes.requests.equals(without.requests)


def test_every_mixed_pass_is_the_mixed_estimate_of_the_model(doubled):
    _, pinned = doubled
    model = ForwardPassPerfModel.best_available(pinned)
    # A chunk at a time beside decoding requests.
    launch = {"engine": {"max_num_batched_tokens": 64, "num_gpu_blocks": 512}}
    passes = replayed(pinned, ([0.0, 1.0, 2.0], [64, 200, 300], [30, 8, 4]), launch=launch).passes.to_pylist()
    mixed = [row for row in passes if row["priced_num_prefill"] and row["priced_num_decode"]]
    assert len(mixed) > 3 and all(row["composed"] for row in mixed)
    for row in mixed:
        query = rank(
            row["priced_num_prefill"],
            row["priced_sum_prefill_end_tokens"] - row["priced_sum_prefill_past_tokens"],
            row["priced_sum_prefill_past_tokens"],
            row["priced_num_decode"],
            row["priced_sum_decode_tokens"] - row["priced_num_decode"],  # as telemetry counts them
        )
        expected_ms = model.estimate_forward_pass_time_ms(query)
        assert row["prefill_ms"] + row["decode_ms"] == modeled_duration(expected_ms, 0.0)
        assert expected_ms == 2 * model.estimate_forward_pass_detailed(query)["native_latency_ms"]
