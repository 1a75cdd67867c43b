"""Op-level estimates against figures recorded from the public software, on the public data.

Runs where `FPMSDK_TEST_SYSTEMS_013` and `FPMSDK_TEST_SYSTEMS_012` name the systems roots of the two data packages.
"""

import os
from pathlib import Path

import msgspec
import pytest

from fpmsdk import ForwardPassPerfModel, errors
from fpmsdk._ext.native import NativeEstimator
from fpmsdk.opgraph.ops import Fallback, GenerationAttention, Op
from fpmsdk.perfdb import open_database, open_root
from fpmsdk.perfmodel.oplevel import compile_engine
from tests.vectors import load_vectors

pytestmark = pytest.mark.peer_data

# Recorded figures have twelve significant digits.
TOLERANCE = 1e-9

V13 = load_vectors("op_level_peer_0.13")
V12 = load_vectors("op_level_peer")


@pytest.fixture(scope="module")
def systems_root():
    return str(Path(os.environ["FPMSDK_TEST_SYSTEMS_013"]))


@pytest.fixture(scope="module")
def build(systems_root):
    models = {}

    def build_model(name, **changes):
        key = (name, tuple(changes.items()))
        if key not in models:
            config = V13["canonical_configs"][name] | {
                "systems_paths": [systems_root],
                "estimation_mode": "op_level",
                "fallback_policy": "deny",
            }
            models[key] = ForwardPassPerfModel.best_available(config | changes)
        return models[key]

    return build_model


def iteration(num_prefill, prefill_tokens, prefill_kv, num_decode, decode_kv):
    return {
        "scheduled_requests": {
            "num_prefill_requests": num_prefill,
            "sum_prefill_tokens": prefill_tokens,
            "sum_prefill_kv_tokens": prefill_kv,
            "num_decode_requests": num_decode,
            "sum_decode_kv_tokens": decode_kv,
        }
    }


@pytest.mark.parametrize("name", V13["configs"])
def test_every_recorded_point(build, name):
    model = build(name)
    points = V13["points"][name]
    estimates = [model.estimate_forward_pass_time_ms(iteration(*load)) for *load, _ in points]
    assert estimates == pytest.approx([ms for *_, ms in points], rel=TOLERANCE)
    assert model.estimate_many([iteration(*load) for *load, _ in points]).tolist() == estimates


@pytest.mark.parametrize(
    ("config", "points", "static_ms"),
    [
        (
            {"model": "Qwen/Qwen3-32B", "tp": 2},
            [
                ((0, 0, 0, 12, 12_000), 13.206414525280259),
                ((0, 0, 0, 192, 192 * 16_384), 47.916739125297546),
                ((2, 512, 0, 12, 12_000), 33.49317067984082),
            ],
            1294.7530475384294,
        ),
        (
            {"model": "deepseek-ai/DeepSeek-V3", "tp": 8, "moe_tp_size": 1, "moe_ep_size": 8},
            [
                ((0, 0, 0, 12, 12_000), 22.154711226121098),
                ((0, 0, 0, 192, 192 * 16_384), 76.4773058150244),
                ((2, 512, 0, 12, 12_000), 55.39685854386551),
            ],
            2489.6321373362903,
        ),
    ],
    ids=["dense attention", "latent attention"],
)
def test_speculation_by_lookup_verifies_its_tokens_in_one_pass(systems_root, config, points, static_ms):
    # Recorded from the peer; a decode request stands for three tokens.
    model = ForwardPassPerfModel.best_available(
        {
            "system": "h200_sxm",
            "backend": "vllm",
            "worker_type": "aggregated",
            "estimation_mode": "op_level",
            "systems_paths": [systems_root],
            "speculation": {"kind": "ngram", "params": {"num_speculative_tokens": 2}},
            **config,
        }
    )
    estimates = [model.estimate_forward_pass_time_ms(iteration(*load)) for load, _ in points]
    assert estimates == pytest.approx([ms for _, ms in points], rel=TOLERANCE)
    found = model.static_phase_latency(batch_size=8, input_tokens=700, output_tokens=100, prefill=False)
    assert found == pytest.approx(static_ms, rel=TOLERANCE)
    assert model.diagnostics()["provenance"]["config"]["nextn"] == 0
    if "moe_ep_size" not in config:
        with pytest.raises(ValueError, match="scale_num_tokens"):
            model.estimate_forward_pass_time_ms(iteration(0, 0, 0, 13, 13_000))


@pytest.mark.parametrize("name", V12["configs"])
def test_every_recorded_point_of_the_older_generation(name):
    # That generation prices decode attention without its QK norm: the one switch between the two.
    config = V12["configs"][name]
    root = open_root(os.environ["FPMSDK_TEST_SYSTEMS_012"])
    model = ForwardPassPerfModel.best_available(
        V13["canonical_configs"][name]
        | {"systems_paths": [root.path], "estimation_mode": "op_level", "backend_version": None}
    )
    spec = msgspec.structs.replace(
        model._kind.spec, generation_ops=tuple(map(without_decode_norm, model._kind.spec.generation_ops))
    )
    database = open_database(
        root,
        config["system_name"],
        config["backend"],
        spec.engine["backend_version"],
        enable_shared_layer=True,
        strict_provenance=False,
    )
    engine = compile_engine(spec, database, root.spec(config["system_name"]))
    serving = NativeEstimator(engine, None).serving
    points = V12["points"][name]
    estimates = [serving.estimate_iteration(iteration(*load), None) for *load, _ in points]
    assert estimates == pytest.approx([ms for *_, ms in points], rel=TOLERANCE)


def without_decode_norm(op: Op) -> Op:
    if isinstance(op, GenerationAttention):
        return msgspec.structs.replace(op, use_qk_norm=False)
    if isinstance(op, Fallback):
        return msgspec.structs.replace(op, fallback=tuple(map(without_decode_norm, op.fallback)))
    return op


@pytest.mark.parametrize(
    ("load", "expected"), V13["edge_points"]["points"], ids=lambda value: str(value).replace(" ", "")[:40]
)
def test_loads_at_and_beyond_the_edges(build, load, expected):
    model = build(V13["edge_points"]["config"])
    if isinstance(expected, str):
        with pytest.raises(getattr(errors, expected.split(":")[0], ValueError)):
            model.estimate_forward_pass_time_ms(iteration(*load))
        return
    assert model.estimate_forward_pass_time_ms(iteration(*load)) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("case", V13["multi_rank"], ids=lambda case: case["config"])
def test_the_slowest_rank_ends_the_iteration(build, case):
    ranks = [iteration(*load) for load in case["ranks"]]
    detailed = build(case["config"]).estimate_forward_pass_detailed(ranks)
    assert detailed["latency_ms"] == pytest.approx(case["ms"], rel=TOLERANCE)
    assert detailed["max_rank"] == 0


@pytest.mark.parametrize("name", V13["per_op"])
def test_every_operator_of_a_breakdown(build, name):
    model = build(name)
    for label, expected in V13["per_op"][name].items():
        arguments = dict(pair.split("=") for pair in label[label.index("(") + 1 : -1].split(","))
        batch, isl = int(arguments["batch"]), int(arguments["isl"])
        if label.startswith("context"):
            prefix = int(arguments["prefix"])
            rows = model.static_phase_diagnostics(batch_size=batch, context_length=isl, prefill=True, prefix=prefix)
            total = model.predict_prefill_latency(batch, isl, prefix)
        else:
            rows = model.static_phase_diagnostics(batch_size=batch, context_length=isl, prefill=False)
            total = model.static_phase_latency(batch_size=batch, input_tokens=isl, output_tokens=2, prefill=False)
        assert [(row["name"], row["source"]) for row in rows] == [(row, source) for row, _, source in expected]
        assert [row["latency_ms"] for row in rows] == pytest.approx([ms for _, ms, _ in expected], rel=TOLERANCE)
        assert total == pytest.approx(sum(row["latency_ms"] for row in rows), rel=1e-12)


@pytest.mark.parametrize("name", V13["steps"])
def test_static_phases(build, name):
    model = build(name)
    for key, cases in V13["steps"][name].items():
        if not key.startswith("run_static"):
            continue
        for (batch, isl, osl, prefix, _), (context_ms, generation_ms, _) in cases:
            decode = {"batch_size": batch, "input_tokens": isl, "output_tokens": osl, "prefill": False}
            assert model.predict_prefill_latency(batch, isl, prefix) == pytest.approx(context_ms, rel=TOLERANCE)
            assert model.static_phase_latency(**decode) == pytest.approx(generation_ms, rel=TOLERANCE)


@pytest.mark.parametrize("mode", ["SILICON", "SOL"])
def test_database_modes(build, mode):
    rows = V13["database_modes"]["rows(mode->[point 1,1024,0,0,0; point 0,0,0,8,16384])"]
    model = build(V13["database_modes"]["config"], database_mode=mode)
    estimates = [
        model.estimate_forward_pass_time_ms(iteration(*load)) for load in ((1, 1024, 0, 0, 0), (0, 0, 0, 8, 16384))
    ]
    assert estimates == pytest.approx(rows[mode], rel=TOLERANCE)


@pytest.mark.parametrize("mode", ["HYBRID", "EMPIRICAL"])
def test_modes_of_a_later_release_are_refused(build, mode):
    with pytest.raises(errors.MissingCapabilityError, match=f"database_mode '{mode}'"):
        build(V13["database_modes"]["config"], database_mode=mode)


@pytest.mark.parametrize("case", [case for case in V13["errors"] if "fpm" in case], ids=str)
def test_malformed_metrics_are_refused_as_recorded(build, case):
    model = build("q32_vllm_tp2")
    if isinstance(case["result"], dict):
        with pytest.raises(ValueError, match="invalid forward pass metrics"):
            model.estimate_forward_pass_time_ms(case["fpm"])
        return
    assert model.estimate_forward_pass_time_ms(case["fpm"]) == case["result"]


def test_prefill_of_a_checkpoint_whose_own_precision_has_rows(systems_root):
    [case] = [case for case in V13["errors"] if "ms" in case]
    config = {
        "model": case["config"]["model_name"],
        "system": case["config"]["system_name"],
        "backend": case["config"]["backend"],
        "worker_type": "aggregated",
        "tp": case["config"]["tp_size"],
        "moe_tp_size": case["config"]["moe_tp_size"],
        "moe_ep_size": case["config"]["moe_ep_size"],
        "estimation_mode": "op_level",
        "systems_paths": [systems_root],
    }
    loads = iteration(*case["point"])
    estimate = ForwardPassPerfModel.best_available(config).estimate_forward_pass_time_ms(loads)
    assert estimate == pytest.approx(case["ms"], rel=TOLERANCE)


def test_the_planner_session_of_a_static_model(systems_root):
    # clients.md, V4.
    config = {"model": "Qwen/Qwen3-32B", "system": "h200_sxm", "backend": "vllm", "backend_version": "current"}
    model = ForwardPassPerfModel.best_available(
        config | {"worker_type": "aggregated", "tp": 4, "estimation_mode": "op_level", "systems_paths": [systems_root]}
    )

    def prefill(batch, isl, prefix):
        return model.estimate_forward_pass_time_ms(iteration(batch, batch * isl, batch * prefix, 0, 0))

    def decode(batch, isl, osl):
        return sum(
            model.estimate_forward_pass_time_ms(iteration(0, 0, 0, batch, batch * (isl + step + 1)))
            * min(32, osl - 1 - step)
            for step in range(0, osl - 1, 32)
        )

    assert prefill(1, 1024, 0) == pytest.approx(34.48387323771425, rel=TOLERANCE)
    assert prefill(4, 2048, 512) == pytest.approx(265.63329613454886, rel=TOLERANCE)
    assert decode(1, 1024, 2) == pytest.approx(8.657651573409936, rel=TOLERANCE)
    assert decode(64, 2048, 2) == pytest.approx(11.847677692093644, rel=TOLERANCE)
    assert decode(16, 3000, 150) == pytest.approx(1455.4151970713085, rel=TOLERANCE)
