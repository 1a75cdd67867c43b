"""From flat engine arguments to the canonical launch of one role, and the timing configuration on the way."""

import pytest

from fpmsdk import EngineLaunchConfig, materialize_engine_launch_config
from fpmsdk.errors import ConfigError, LaunchConfigError
from fpmsdk.launch.materialize import canonical_performance_config

CONFIG = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"}
FIXED = {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0}
ARGS = {"num_gpu_blocks": 64, "timing_model": FIXED}


def materialize(args, parallel=None, backend="vllm", role="decode"):
    return materialize_engine_launch_config(backend, "1", parallel or {}, args, role)


def native(provider="aic", **config):
    external = {"type": "external", "provider": provider, "config": CONFIG | config}
    return {"num_gpu_blocks": 64, "timing_model": external}


def fault(args, parallel=None, **where):
    with pytest.raises(ConfigError) as caught:
        materialize(args, parallel, **where)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_the_documented_example(backend):
    args = ARGS | {"block_size": 16, "max_model_len": 128, "dp_size": 2, "tensor_parallel_size": 2}
    made = materialize(args, backend=backend)
    assert (made["engine"]["backend"], made["engine"]["worker_type"]) == (backend, "decode")
    assert (made["engine"]["max_model_len"], made["dp_size"], made["tensor_parallel_size"]) == (128, 2, 2)
    assert made["num_gpu_blocks_is_explicit"] is True
    assert made["startup_time"] == 0.0
    assert "engine_type" not in made["engine"]


def test_the_result_is_a_canonical_launch():
    made = materialize(ARGS | {"startup_time": 2})
    assert EngineLaunchConfig.from_mapping(made).to_dict() == made
    assert made["startup_time"] == 2.0


def test_blocks_that_are_not_given_are_not_explicit():
    made = materialize({"timing_model": FIXED})
    assert (made["num_gpu_blocks_is_explicit"], made["engine"]["num_gpu_blocks"]) == (False, 16384)


@pytest.mark.parametrize("provider", ["aic", "ais"])
def test_a_native_timing_model_returns_canonical_under_its_present_name(provider):
    timing = materialize(native(provider))["engine"]["timing_model"]
    assert (timing["type"], timing["provider"]) == ("external", "ais")
    assert timing["config"] == canonical_performance_config(CONFIG, worker_type="decode")


def test_sizes_follow_a_native_timing_model():
    made = materialize(native(tp=4, attention_dp=2))
    assert (made["tensor_parallel_size"], made["dp_size"]) == (4, 2)
    assert made["cuda_graph_reserved_bytes"] == 0


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("name", ["tensor_parallel_size", "dp_size"])
def test_a_size_that_differs_from_the_timing_model_is_refused(name, size):
    assert fault(native() | {name: size}) == f"{name} conflicts with canonical timing topology"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (ARGS | {"gpu_memory_utilization": 2.0}, "gpu_memory_utilization must be finite and in [0, 1]"),
        (ARGS | {"startup_time": -1}, "startup_time must be finite and non-negative"),
        (ARGS | {"startup_time": None}, "startup_time must be finite and non-negative"),
        (native(pp=2), "engine launch supports only pp=1; got pp=2"),
        (
            native(speculation={"kind": "ngram", "params": {"num_speculative_tokens": 1}}),
            "engine launch does not implement ngram draft scheduling",
        ),
        (native(nextn=1), "canonical nextn conflicts with scheduler aic_nextn"),
        (native(worker_type="prefill"), "estimator worker_type does not match replay role"),
        (
            ARGS | {"aic_tp_size": 2, "tensor_parallel_size": 3},
            "engine config has conflicting tensor parallel aliases: 3 and 2",
        ),
        (ARGS | {"cuda_graph_reserved_bytes": 5, "dp_size": 0}, "dp_size must be positive"),
        (
            native() | {"cuda_graph_reserved_bytes": 2**53 + 1},
            "cuda_graph_reserved_bytes must be at most 2^53",
        ),
        ({"num_gpu_blocks": 64}, "engine arguments need a timing_model"),
    ],
)
def test_refusals(args, text):
    assert fault(args) == text


@pytest.mark.parametrize("name", ["engine_type", "aic_backend", "backend"])
def test_every_spelling_of_the_backend_must_agree(name):
    assert materialize(ARGS | {name: "vllm"}) == materialize(ARGS)
    assert name in fault(ARGS | {name: "sglang"})


def test_the_role_is_forced():
    assert materialize(ARGS | {"worker_type": "prefill"}) == materialize(ARGS)


def test_size_aliases():
    made = materialize(ARGS | {"aic_tp_size": 2, "aic_attention_dp_size": 3, "dp_size": 3})
    assert (made["tensor_parallel_size"], made["dp_size"]) == (2, 3)


def test_scheduler_fields_may_be_nested_but_not_mixed():
    assert materialize({"rank": ARGS, "dp_size": 2})["dp_size"] == 2
    assert materialize({"rank": ARGS}) == materialize(ARGS)
    assert "block_size" in fault({"rank": ARGS, "block_size": 4})
    assert "rank" in fault({"rank": 5})


@pytest.mark.parametrize(
    ("role", "parallel", "accepted"),
    [
        ("decode", {"decode_tp": 2}, True),
        ("decode", {"decode_tp": 3}, False),
        ("decode", {"decode_attention_dp": 2}, False),
        ("decode", {"tp": 3, "prefill_tp": 3}, True),
        ("prefill", {"prefill_tp": 3}, False),
        ("aggregated", {"tp": 3}, False),
        ("aggregated", {"tp": 2, "attention_dp": 1}, True),
    ],
)
def test_the_parallel_configuration_of_the_role_must_agree(role, parallel, accepted):
    args = ARGS | {"tensor_parallel_size": 2}
    if accepted:
        assert materialize(args, parallel, role=role)["tensor_parallel_size"] == 2
    else:
        assert "parallel_config." in fault(args, parallel, role=role)


@pytest.mark.parametrize(
    "args",
    [
        {"is_prefill": True},
        {"ais_nextn": 1},
        {"sglang": {"page_size": 1}},
        {"num_gpu_blocks": None},
        {"timing_model": {"type": "default"}},
        {"preemption_mode": "LIFO"},
        {"num_gpu_blocks_is_explicit": True},
        {"bogus": 1},
    ],
)
def test_loose_spellings_of_the_other_flat_form_are_refused(args):
    with pytest.raises(LaunchConfigError):
        materialize(ARGS | args)


def test_memory_fractions_are_null_when_the_blocks_are_explicit():
    made = materialize(native() | {"gpu_memory_utilization": 0.9, "cuda_graph_reserved_bytes": 7})
    assert (made["gpu_memory_utilization"], made["cuda_graph_reserved_bytes"]) == (None, 7)
    assert materialize(ARGS | {"cuda_graph_reserved_bytes": 7})["cuda_graph_reserved_bytes"] is None


@pytest.mark.parametrize("name", ["gpu_memory_utilization", "cuda_graph_reserved_bytes"])
def test_memory_inputs_need_blocks_or_a_native_timing_model(name):
    assert name in fault({"timing_model": FIXED, name: 1})


@pytest.mark.parametrize("config", [None, 5, []])
def test_a_native_timing_model_needs_a_configuration(config):
    timing = {"type": "external", "provider": "aic", "config": config}
    assert "timing_model.config" in fault({"num_gpu_blocks": 1, "timing_model": timing})


WITHOUT_ROLE = {key: value for key, value in CONFIG.items() if key != "worker_type"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, {"estimation_mode": "auto", "worker_type": "decode"}),
        (WITHOUT_ROLE, {"estimation_mode": "op_level", "worker_type": "decode"}),
        (WITHOUT_ROLE | {"estimation_mode": "fpm_regression"}, {"estimation_mode": "fpm_regression"}),
        (WITHOUT_ROLE | {"forward_model": "fpm"}, {"estimation_mode": "fpm_interpolation"}),
        (
            CONFIG | {"tp_size": 2, "pp_size": 2, "attention_dp_size": 2},
            {"tp": 2, "pp": 2, "attention_dp": 2},
        ),
        (CONFIG | {"systems_path": "/"}, {"systems_paths": ["/"]}),
        (CONFIG | {"systems_path": None}, {"systems_paths": []}),
        (CONFIG | {"systems_path": "/tmp", "systems_paths": ["/"]}, {"systems_paths": ["/"]}),
        (CONFIG | {"shared_layer": True}, {"enable_shared_layer": True}),
        (CONFIG | {"gpu_memory_utilization": 5, "cuda_graph_reserved_bytes": 5}, {}),
    ],
)
def test_older_spellings_of_a_timing_configuration(config, expected):
    assert canonical_performance_config(config, worker_type="decode").items() >= expected.items()


def test_the_model_may_be_given_as_a_path():
    config = {("model_path" if key == "model" else key): value for key, value in CONFIG.items()}
    assert canonical_performance_config(config, worker_type="decode")["model"] == "m"


def test_flat_interpolation_fields_join_the_estimator_controls():
    config = CONFIG | {"fpm_interpolation": "sol", "estimator_config": {"correction": {"mode": "fixed"}}}
    estimator = canonical_performance_config(config, worker_type="decode")["estimator_config"]
    assert estimator["fpm_interpolation"] == {"method": "sol"}
    assert estimator["correction"]["mode"] == "fixed"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (CONFIG | {"worker_type": "prefill"}, "worker_type"),
        (CONFIG | {"model_path": "x"}, "duplicate field `model`"),
        (CONFIG | {"shared_layer": True, "enable_shared_layer": True}, "enable_shared_layer"),
        (CONFIG | {"bogus": 1}, "bogus"),
        (CONFIG | {"tp": 0}, "tp"),
        (CONFIG | {"estimator_config": 5, "fpm_interpolation": "sol"}, "estimator_config"),
    ],
)
def test_wrong_timing_configurations_are_refused(config, text):
    with pytest.raises(ConfigError, match=text):
        canonical_performance_config(config, worker_type="decode")
