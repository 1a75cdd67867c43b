"""What the real Planner classes compute over fpmsdk: the recorded numbers of clients.md section 8, V3 and V4."""

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.planner

# Imported by the tests alone: an ordinary test run has no Dynamo.
LIMITS = {"max_num_batched_tokens": 8192, "max_num_seqs": 512, "max_kv_tokens": 2_000_000}
TOLERANCE = 1e-9


def planner_model(role):
    from dynamo.planner.config.planner_config import PlannerConfig
    from dynamo.planner.core.perf_model.ais_adapter import PlannerEnginePerfModel
    from dynamo.planner.core.types import EngineCapabilities

    config = PlannerConfig.model_construct(
        ais_perf_model=None,
        model_name="m",
        namespace="n",
        backend="vllm",
        max_num_fpm_samples=64,
        load_min_observations=5,
        fpm_sample_bucket_size=16,
        ttft_ms=500.0,
        itl_ms=50.0,
        speculative_nextn=0,
    )
    return PlannerEnginePerfModel(worker_type=role, config=config, capabilities=EngineCapabilities(**LIMITS))


def message(counter, wall_time, **scheduled):
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics

    return ForwardPassMetrics(
        worker_id="w", counter_id=counter, wall_time=wall_time, scheduled_requests=ScheduledRequestMetrics(**scheduled)
    )


def observation(role, i):
    decodes = 8 * (i % 10 + 1)
    kv_tokens = decodes * (500 + 100 * (i % 7))
    tokens = 256 * (i % 8 + 1)
    decode_s = 0.004 + 2e-5 * decodes + 1.2e-8 * kv_tokens
    decode = {"num_decode_requests": decodes, "sum_decode_kv_tokens": kv_tokens}
    if role == "prefill":
        prefill = {"num_prefill_requests": 1 + i % 3, "sum_prefill_tokens": tokens}
        return message(i + 1, 0.003 + 2.5e-5 * tokens + 1e-9 * tokens**2, **prefill)
    if role == "decode" or i % 3 == 0:
        return message(i + 1, decode_s, **decode)
    return message(i + 1, decode_s + 2.5e-5 * tokens, num_prefill_requests=1, sum_prefill_tokens=tokens, **decode)


def tuned(role):
    model = planner_model(role)
    for i in range(40):
        model.add_observations({("w", 0): observation(role, i)})
    return model


def query():
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics, QueuedRequestMetrics, ScheduledRequestMetrics

    return ForwardPassMetrics(
        worker_id="w",
        scheduled_requests=ScheduledRequestMetrics(num_decode_requests=32, sum_decode_kv_tokens=32_000),
        queued_requests=QueuedRequestMetrics(num_prefill_requests=2, sum_prefill_tokens=20_000),
    )


AVERAGES = {"prefill": (716.8, None), "decode": (None, 787.5), "aggregated": (768.0, 787.5)}
QUEUED_PREFILL_S = {
    "prefill": (0.5752829415368924, 0.2884655770552951, 0.5595069996279707),
    "aggregated": (0.5335823986780746, 0.26929968810068833, 0.5144071210407926),
}
DECODE_ITL_S = {"decode": (0.005053456, 0.005024), "aggregated": (0.024217222970007692, 0.02419225516058415)}
# rps, TTFT and ITL in ms; then with half of the prompts' tokens cached and two tokens a step.
CAPACITY = {
    "prefill": ((11.79728040974851, 84.76529888817974, None), (19.677269678464008, 101.64011738828384, None)),
    "decode": ((103.01976691777729, None, 33.1328), (206.03953383555458, None, 16.5664)),
    "aggregated": (
        (11.615461881028557, 123.68897571340821, 48.7855474427753),
        (20.457305276275534, 144.66193562918545, 49.85993933340284),
    ),
}


@pytest.mark.parametrize("role", AVERAGES)
def test_the_averages_of_next_requests(role):
    model = tuned(role)
    for value, wanted in zip((model.avg_isl, model.avg_decode_length), AVERAGES[role], strict=True):
        assert wanted is None or value == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("role", QUEUED_PREFILL_S)
def test_the_drain_of_queued_prefills(role):
    model = tuned(role)
    found = [
        model.estimate_queued_prefill_time([query()], max_num_batched_tokens=8192, **more)
        for more in ({}, {"kv_hit_rate": 0.5}, {"add_next_request": False})
    ]
    assert found == pytest.approx(QUEUED_PREFILL_S[role], rel=TOLERANCE)


@pytest.mark.parametrize("role", DECODE_ITL_S)
def test_the_decode_of_the_next_request(role):
    model = tuned(role)
    found = [model.estimate_scheduled_decode_itl([query()], **more) for more in ({}, {"add_next_request": False})]
    assert found == pytest.approx(DECODE_ITL_S[role], rel=TOLERANCE)


@pytest.mark.parametrize("role", CAPACITY)
def test_the_capacity_of_one_engine(role):
    model = tuned(role)
    asked = {"isl": 3000, "osl": 150, "ttft_sla_ms": 500.0, "itl_sla_ms": 50.0}
    for more, wanted in zip(({}, {"kv_hit_rate": 0.4, "accept_length": 2.0}), CAPACITY[role], strict=True):
        found = model.find_engine_capacity_rps(**asked, **more)
        for value, number in zip((found.rps, found.ttft_ms, found.itl_ms), wanted, strict=True):
            assert number is None or value == pytest.approx(number, rel=TOLERANCE)


def test_what_the_stores_retain():
    stores = tuned("aggregated")._engine_model._model.regression_store_diagnostics()
    assert [store["retained_observations"] for store in stores] == [14, 26, 0, 0]


@pytest.mark.parametrize(
    ("query", "latency_ms"),
    [
        (("predict_prefill", 1, 1024, 0), 34.48387323771425),
        (("predict_prefill", 4, 2048, 512), 265.63329613454886),
        (("predict_decode", 1, 1024, 2), 8.657651573409936),
        (("predict_decode", 64, 2048, 2), 11.847677692093644),
        (("predict_decode", 16, 3000, 150), 1455.4151970713085),
    ],
)
def test_a_static_session(query, latency_ms):
    # Recorded over the data of 0.13.
    from dynamo._internal.ais import create_session

    session = create_session(
        {
            "model": "Qwen/Qwen3-32B",
            "system": "h200_sxm",
            "backend": "vllm",
            "backend_version": "current",
            "worker_type": "aggregated",
            "estimation_mode": "op_level",
            "tp": 4,
            "systems_paths": [os.environ["FPMSDK_TEST_SYSTEMS_013"]],
        }
    )
    name, *arguments = query
    assert getattr(session, name)(*arguments) == pytest.approx(latency_ms, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "pick"),
    [
        ("Qwen/Qwen3-32B", {"tp": 2, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1}),
        ("Qwen/Qwen3-30B-A3B", {"tp": 2, "pp": 1, "dp": 2, "moe_tp": 1, "moe_ep": 4}),
    ],
    ids=["dense", "experts"],
)
@pytest.mark.parametrize("component", ["prefill", "decode"])
def test_the_bootstrap_sweep(monkeypatch, model, pick, component):
    # Recorded over the peer and its data: model, component, prefill tokens, decodes, KV tokens, ms to three digits.
    from dynamo.planner.config.aic_interpolation_spec import AICInterpolationSpec
    from dynamo.planner.config.defaults import SubComponentType
    from dynamo.planner.config.parallelization import PickedParallelConfig
    from dynamo.planner.monitoring.aic_interpolation import run_aic_interpolation

    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", os.environ["FPMSDK_TEST_SYSTEMS_013"])
    spec = AICInterpolationSpec(
        hf_id=model,
        system="h200_sxm",
        backend="vllm",
        isl=3000,
        osl=150,
        sweep_max_context_length=8192,
        prefill_interpolation_granularity=8,
        decode_interpolation_granularity=6,
        prefill_pick=PickedParallelConfig(**pick),
        decode_pick=PickedParallelConfig(**pick),
    )
    found = [
        [model, component, work.sum_prefill_tokens, work.num_decode_requests, work.sum_decode_kv_tokens, seconds]
        for point in run_aic_interpolation(spec, SubComponentType(component))
        for work, seconds in ((point.scheduled_requests, round(point.wall_time * 1e3, 3)),)
    ]
    recorded = json.loads((Path(__file__).parent / "bootstrap_sweep.json").read_text())
    assert found == [row for row in recorded if row[:2] == [model, component]]
