"""The estimates behind the passes of a replay. Source: fpm-interpolation.md section 4.4."""

from collections import Counter

import pytest

from fpmsdk import ForwardPassPerfModel, Trace, replay_trace
from fpmsdk._ext.pricing import modeled_duration
from fpmsdk.errors import ConfigError
from fpmsdk.replay.estimates import pass_estimates
from tests.perfdb.pairs import decode, prefill
from tests.perfdb.synthetic import Systems
from tests.perfmodel import tiny
from tests.perfmodel.deployments import IN_MEMORY, checkpoint, profile
from tests.perfmodel.test_wholeforward import model_of

ROWS = [
    *(prefill(batch, tokens, 0, batch + tokens / 10) for batch in (1, 2) for tokens in (2, 256)),
    *(prefill(1, tokens, 64, 5 + tokens / 10) for tokens in (2, 256)),
    *(decode(batch, kv, batch + kv / 100) for batch in (1, 2, 4) for kv in (4, 1024)),
]
ENGINE = {"num_gpu_blocks": 64, "block_size": 16, "enable_prefix_caching": False}


@pytest.fixture
def model(tmp_path):
    Systems(tmp_path / "systems").hardware(gpu={"mem_capacity": 100_000})
    checkpoint(tmp_path / "model")
    return model_of(tmp_path, ROWS, fpm_profile=profile(tmp_path / "model", IN_MEMORY))


def replay(model, trace, engine=(), **options):
    return replay_trace(trace, launch={"engine": ENGINE | dict(engine)}, timing=model, **options)


def figures(rows):
    # count, scale, native latency, and the coordinates of the lookups
    return [
        (
            row["count"],
            row["latency_scale"],
            row["estimate"]["latency_ms"],
            [tuple(query["query"].values()) for rank in row["estimate"]["ranks"] for query in rank["queries"]],
        )
        for row in rows
    ]


def test_equal_estimates_are_counted_once_and_none_is_left_out(model):
    # Three requests one after the other: a prefill of 40 tokens each, then decodes at 40 and 41 tokens.
    trace = Trace.from_arrays([0.0, 1000.0, 2000.0], [40, 40, 40], [3, 3, 3])
    estimates = pass_estimates(replay(model, trace), model)
    assert figures(estimates["fpm_prefill"]) == [(3, 1.0, 5.0, [(1.0, 40.0, 0.0)])]
    assert figures(estimates["fpm_decode"]) == [
        (3, 1.0, pytest.approx(1.40), [(1.0, None, 40.0)]),
        (3, 1.0, pytest.approx(1.41), [(1.0, None, 41.0)]),
    ]
    assert estimates["fpm_mixed"] == []


def test_speedups_scale_the_latency(model):
    trace = Trace.from_arrays([0.0], [40], [2])
    estimates = pass_estimates(replay(model, trace, {"speedup_ratio": 2.0, "decode_speedup_ratio": 4.0}), model)
    assert [(scale, latency) for _, scale, latency, _ in figures(estimates["fpm_prefill"])] == [(0.5, 5.0)]
    assert [(scale, latency) for _, scale, latency, _ in figures(estimates["fpm_decode"])] == [
        (0.125, pytest.approx(1.40))
    ]


STAGGERED = Trace.from_arrays([0.0, 6.0, 7.0], [40, 40, 40], [8, 4, 6])


def test_a_mixed_pass_is_one_estimate_where_it_was_priced_as_one(model):
    mixed = pass_estimates(replay(model, STAGGERED), model)["fpm_mixed"]
    lookups = [(query["phase"], query["decode_baseline"]) for query in mixed[0]["estimate"]["ranks"][0]["queries"]]
    assert lookups == [("prefill", False), ("decode", False), ("decode", True)]
    apart = pass_estimates(replay(model, STAGGERED, mixed_pass_pricing="separate"), model)
    assert apart["fpm_mixed"] == []


def durations(report, estimates, speedups=()):
    """Durations of parts of passes with how often each occurs: as replayed, and as the estimates say."""
    passes = report.passes.to_pydict()
    replayed = Counter(ms for ms in (*passes["prefill_ms"], *passes["decode_ms"]) if ms > 0.0)
    scales = {"speedup_ratio": 1.0, "decode_speedup_ratio": 1.0} | dict(speedups)
    told = Counter()
    for operation, rows in estimates.items():
        speedup = scales["speedup_ratio"] * (scales["decode_speedup_ratio"] if operation == "fpm_decode" else 1.0)
        for row in rows:
            told[modeled_duration(row["estimate"]["latency_ms"], speedup)] += row["count"]
    return replayed, told


@pytest.mark.parametrize("pricing", ["composed", "separate"])
@pytest.mark.parametrize("speedups", [{}, {"speedup_ratio": 4.0, "decode_speedup_ratio": 0.5}])
def test_the_estimates_are_what_the_passes_were_priced_with(model, pricing, speedups):
    report = replay(model, STAGGERED, speedups, mixed_pass_pricing=pricing)
    replayed, told = durations(report, pass_estimates(report, model), speedups)
    assert replayed == told


def test_estimates_of_operators_are_asked_by_known_tokens(tmp_path):
    systems = tiny.write_root(tmp_path / "systems")
    config = {
        "model": str(tiny.write_model(tmp_path / "tiny")),
        "system": "x100",
        "backend": "vllm",
        "worker_type": "aggregated",
        "estimation_mode": "op_level",
        "systems_paths": [str(systems.path)],
    }
    model = ForwardPassPerfModel.best_available(config)
    report = replay(model, STAGGERED)
    replayed, told = durations(report, pass_estimates(report, model))
    assert replayed == told


def test_pools_of_disaggregated_serving_are_told_apart(model):
    trace = Trace.from_arrays([0.0, 1000.0], [40, 40], [3, 3])
    report = replay_trace(
        trace,
        launch={"engine": ENGINE | {"worker_type": "decode"}},
        prefill_launch={"engine": ENGINE | {"worker_type": "prefill", "speedup_ratio": 2.0}},
        timing=model,
        prefill_timing=model,
    )
    prefill_rows = pass_estimates(report, model, pool="prefill")["fpm_prefill"]
    assert figures(prefill_rows) == [(2, 0.5, 5.0, [(1.0, 40.0, 0.0)])]
    assert pass_estimates(report, model, pool="prefill")["fpm_decode"] == []
    decode_rows = pass_estimates(report, model, pool="decode")["fpm_decode"]
    assert {count for count, *_ in figures(decode_rows)} == {2}
    with pytest.raises(ConfigError, match="None; the passes are of decode and prefill"):
        pass_estimates(report, model)


def test_what_cannot_be_told_is_an_error(model):
    report = replay(model, STAGGERED, record_passes=False)
    with pytest.raises(ConfigError, match="record_passes"):
        pass_estimates(report, model)
    with pytest.raises(ConfigError, match="'decode'; the passes are of agg"):
        pass_estimates(replay(model, STAGGERED), model, pool="decode")
