"""Static estimates behind the Planner's bootstrap sweep: refusals here, numbers against the public data."""

import os
from pathlib import Path

import pytest

from fpmsdk.compat.static import (
    ModelConfig,
    RuntimeConfig,
    StaticBackend,
    StaticModel,
    compile_engine,
    latest_version,
    model_facts,
    open_database,
)

QWEN = StaticModel("Qwen/Qwen3-32B", ModelConfig(tp_size=2), "vllm")


@pytest.fixture
def root(monkeypatch):
    path = str(Path(os.environ["FPMSDK_TEST_SYSTEMS_013"]))
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", path)
    return path


def test_unknown_places_have_no_version_and_no_database(tmp_path):
    root = tmp_path / "systems"
    root.mkdir()
    assert latest_version("h200_sxm", "vllm", str(root)) is None
    assert open_database("h200_sxm", "vllm", None, [str(root)]) is None


@pytest.mark.parametrize("name", ["tensorrt", "VLLM", ""])
def test_an_unknown_backend_is_refused(name):
    with pytest.raises(ValueError, match="vllm, sglang or trtllm"):
        StaticBackend(name)


@pytest.mark.parametrize(
    ("mode", "stride", "beam_width", "said"),
    [("full", 32, 1, "static_ctx"), ("static", 16, 1, "stride"), ("static", 32, 2, "beam width")],
)
def test_what_is_not_served_is_refused(mode, stride, beam_width, said):
    runtime = RuntimeConfig(batch_size=1, isl=8, osl=2, beam_width=beam_width)
    with pytest.raises(ValueError, match=said):
        StaticBackend("vllm").run_static(QWEN, None, runtime, mode, stride)


def test_unknown_settings_are_type_errors():
    with pytest.raises(TypeError):
        ModelConfig(tensor_parallel=2)


# --- recorded from the public peer over its data ---


@pytest.mark.peer_data
def test_the_numbers_of_a_batch(root):
    database = open_database("h200_sxm", "vllm", latest_version("h200_sxm", "vllm"))
    assert (database.version, database.system_spec["gpu"]["mem_capacity"]) == ("0.24.0", 151397597184)
    backend = StaticBackend("vllm")
    found = backend.run_static(QWEN, database, RuntimeConfig(batch_size=4, isl=1000, osl=100), "static").row
    wanted = {"ttft": 206.093, "tpot": 12.725, "request_latency": 1465.914, "seq/s": 2.729}
    assert {name: round(found[name], 3) for name in wanted} == wanted
    prefill = backend.run_static(QWEN, database, RuntimeConfig(batch_size=4, isl=1000, osl=100), "static_ctx").row
    decode = backend.run_static(QWEN, database, RuntimeConfig(batch_size=4, isl=1000, osl=100), "static_gen").row
    assert (prefill["context_latency"], prefill["generation_latency"]) == (found["context_latency"], 0.0)
    assert (decode["context_latency"], decode["tpot"]) == (0.0, found["tpot"])


@pytest.mark.peer_data
def test_sizes_of_experts_divide_no_dense_model(root):
    database = open_database("h200_sxm", "vllm", "current")
    sized = StaticModel("Qwen/Qwen3-32B", ModelConfig(tp_size=2, moe_tp_size=1, moe_ep_size=1), "vllm")
    runtime, backend = RuntimeConfig(batch_size=4, isl=1000, osl=100), StaticBackend("vllm")
    rows = [backend.run_static(model, database, runtime, "static").row for model in (QWEN, sized)]
    assert rows[0]["ttft"] == rows[1]["ttft"]
    assert backend._get_memory_usage(sized, database, 4, 1, 1000, 100)["weights"] == 30.511474609375


@pytest.mark.peer_data
def test_the_memory_of_a_rank(root):
    database = open_database("h200_sxm", "vllm", "current")
    assert StaticBackend("vllm")._get_memory_usage(QWEN, database, 4, 1, 1000, 100) == {
        "total": 35.279296875,
        "weights": 30.511474609375,
        "activations": 0.396728515625,
        "kvcache": 0.537109375,
        "nccl": 0.333984375,
        "others": 3.5,
    }


@pytest.mark.peer_data
def test_specifications_and_facts_of_a_model(root):
    assert compile_engine("Qwen/Qwen3-32B", "h200_sxm", "vllm", tp_size=2).startswith(b'{"schema_version":29')
    with pytest.raises(ValueError, match="bogus"):
        compile_engine("Qwen/Qwen3-32B", "h200_sxm", "vllm", bogus=2)
    facts = model_facts("Qwen/Qwen3-32B")
    assert (facts["max_position_embeddings"], facts["raw_config"]["num_hidden_layers"]) == (40960, 64)
