"""The canonical form of an engine launch: recorded cases, every rule, its words and its order."""

import copy
import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.errors import LaunchConfigError
from fpmsdk.launch.config import EngineConfig, EngineLaunchConfig, SglangConfig
from fpmsdk.launch.fields import ENGINE, LAUNCH
from fpmsdk.launch.rules import canonical_accept_rates
from tests.vectors import load_vectors

CASES = [case for case in load_vectors("config_peer")["cases"] if case["kind"] == "launch"]
# fields that the recorded release did not have yet
LATER_FIELDS = ("vlm_cache_bytes", "host_loop")


def launch(**engine):
    return EngineLaunchConfig.from_mapping({"engine": engine})


def fault(mapping):
    with pytest.raises(LaunchConfigError) as caught:
        EngineLaunchConfig.from_mapping(mapping)
    return caught.value


def test_the_recorded_cases_are_complete():
    assert len(CASES) == 36


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_recorded_launches(case):
    if case["accepted"]:
        written = EngineLaunchConfig.from_mapping(case["input"]).to_dict()
        for name in LATER_FIELDS:
            del written["engine"]["sglang"][name]
        assert json.dumps(written) == json.dumps(case["normalized"])
        return
    expected = case["error"]
    caught = fault(case["input"])
    if expected["stage"] == "parse":
        assert caught.path == expected["path"]
        assert str(caught).startswith(f"invalid engine launch config: {expected['path']}: ")
    assert [name for name in expected.get("mentions", []) if name not in str(caught)] == []


def test_dataclass_defaults_are_the_defaults_of_the_tables():
    assert EngineLaunchConfig() == EngineLaunchConfig.from_mapping({"engine": {}})
    assert [field.name for field in dataclasses.fields(EngineConfig)] == [item.name for item in ENGINE.fields]
    assert [field.name for field in dataclasses.fields(EngineLaunchConfig)] == [item.name for item in LAUNCH.fields]


@pytest.mark.parametrize(("backend", "size"), [("vllm", 64), ("sglang", 1), ("trtllm", 32)])
@pytest.mark.parametrize("given_null", [True, False])
def test_the_block_size_follows_the_backend(backend, size, given_null):
    engine = {"backend": backend} | ({"block_size": None} if given_null else {})
    assert launch(**engine).engine.block_size == size


@pytest.mark.parametrize(
    ("mapping", "explicit"),
    [
        ({"engine": {}}, False),
        ({"engine": {"num_gpu_blocks": 16384}}, True),
        ({"engine": {"num_gpu_blocks": 5}, "num_gpu_blocks_is_explicit": False}, False),
        ({"engine": {}, "num_gpu_blocks_is_explicit": True}, True),
    ],
)
def test_blocks_are_explicit_when_written_unless_said_otherwise(mapping, explicit):
    assert EngineLaunchConfig.from_mapping(mapping).num_gpu_blocks_is_explicit is explicit


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [None, 2**64 - 1])
def test_null_and_the_largest_count_mean_no_limit(name, value):
    made = launch(**{name: value})
    assert getattr(made.engine, name) is None
    assert made.to_dict()["engine"][name] is None


@pytest.mark.parametrize(
    ("mapping", "path"),
    [
        ({"bogus": 1}, "bogus"),
        ({"engine": {"bogus": 1}}, "engine.bogus"),
        ({"engine": {"vision": None}}, "engine.vision"),
        ({"engine": {"sglang": {"bogus": 1}}}, "engine.sglang.bogus"),
        ({"engine": {"sglang": None}}, "engine.sglang"),
        ({"engine": None}, "engine"),
        ({"engine": {"num_gpu_blocks": None}}, "engine.num_gpu_blocks"),
        ({"engine": {"num_gpu_blocks": True}}, "engine.num_gpu_blocks"),
        ({"engine": {"num_gpu_blocks": 2.0}}, "engine.num_gpu_blocks"),
        ({"engine": {"num_gpu_blocks": 2**64}}, "engine.num_gpu_blocks"),
        ({"engine": {"enable_prefix_caching": 1}}, "engine.enable_prefix_caching"),
        ({"engine": {"worker_type": "agg"}}, "engine.worker_type"),
        ({"engine": {"kv_cache_groups": None}}, "engine.kv_cache_groups"),
        ({"engine": {"kv_cache_groups": [{"name": "a"}]}}, "engine.kv_cache_groups[0]"),
        ({"engine": {"timing_model": None}}, "engine.timing_model"),
        ({"engine": {"timing_model": {}}}, "engine.timing_model"),
        ({"engine": {"timing_model": {"type": "x"}}}, "engine.timing_model.type"),
        ({"engine": {"timing_model": {"type": "fixed", "prefill_ms": 1}}}, "engine.timing_model"),
        ({"engine": {"timing_model": {"type": "external"}}}, "engine.timing_model"),
        ({"engine": {}, "dp_size": 2**32}, "dp_size"),
        ({"engine": {}, "tensor_parallel_size": None}, "tensor_parallel_size"),
        ({"engine": {}, "num_gpu_blocks_is_explicit": None}, "num_gpu_blocks_is_explicit"),
        ({"engine": {"kv_bytes_per_token": 1, "kv_transfer_bytes_per_token": 1}}, "engine"),
    ],
)
def test_parse_faults_name_their_path(mapping, path):
    caught = fault(mapping)
    assert caught.path == path
    assert str(caught).startswith(f"invalid engine launch config: {path}: ")


def test_fields_are_read_in_document_order_and_missing_ones_last():
    assert fault({"engine": {"zzz": 1, "aaa": 1}}).path == "engine.zzz"
    assert fault({"dp_size": "x", "engine": {"aaa": 1}}).path == "dp_size"
    group = {"name": "a", "zzz": 1}
    assert fault({"engine": {"kv_cache_groups": [group]}}).path == "engine.kv_cache_groups[0].zzz"


def test_the_transfer_bytes_have_an_alias():
    assert launch(kv_bytes_per_token=5).engine.kv_transfer_bytes_per_token == 5


def test_other_keys_of_a_timing_model_are_ignored():
    fixed = {"type": "fixed", "prefill_ms": 1, "decode_ms": 2, "bogus": 3}
    assert launch(timing_model=fixed).engine.timing_model == {
        "type": "fixed",
        "prefill_ms": 1.0,
        "decode_ms": 2.0,
    }
    external = {"type": "external", "provider": "p", "bogus": 3}
    assert launch(timing_model=external).engine.timing_model == {
        "type": "external",
        "provider": "p",
        "config": None,
    }


def test_the_configuration_of_a_foreign_provider_is_kept_as_it_is():
    config = {"a": [1, {"b": None}], "c": 1.5}
    external = {"type": "external", "provider": "p", "config": config}
    assert launch(timing_model=external).engine.timing_model["config"] == config


GROUP = {"name": "full", "kind": "attention", "num_layers": 2, "block_size_tokens": 64, "page_size_bytes": 64}
GROUPED = {"enable_prefix_caching": False, "kv_cache_capacity_bytes": 1000}


def grouped(*groups, **changes):
    return {"engine": GROUPED | {"kv_cache_groups": list(groups or [GROUP])} | changes}


def engine(**fields):
    return {"engine": fields}


def fixed(**latencies):
    return engine(timing_model={"type": "fixed", "prefill_ms": 1, "decode_ms": 1, **latencies})


def sglang(**options):
    return engine(backend="sglang", sglang=options)


NAN = float("nan")
# in the order in which faults are reported
REFUSED = [
    (engine(num_gpu_blocks=0), "num_gpu_blocks must be positive"),
    (engine(block_size=0), "block_size must be positive"),
    (engine(block_size=1), "vLLM/TRT-LLM block_size must be at least two"),
    (engine(block_size=1, backend="trtllm"), "vLLM/TRT-LLM block_size must be at least two"),
    (engine(max_num_seqs=0), "max_num_seqs must be positive"),
    (engine(max_num_batched_tokens=0), "max_num_batched_tokens must be positive"),
    (engine(prefill_schedule_interval=0), "prefill_schedule_interval must be positive"),
    (engine(prefill_schedule_interval=2, backend="sglang"), "prefill_schedule_interval needs backend vllm"),
    (engine(prefill_schedule_interval=2, backend="trtllm"), "prefill_schedule_interval needs backend vllm"),
    (engine(prefill_decode_interval=1), "prefill_decode_interval needs backend sglang"),
    (engine(sglang={"host_loop": True}), "sglang.host_loop needs backend sglang"),
    (engine(max_model_len=0), "max_model_len must be positive"),
    (engine(speedup_ratio=-1), "speedup_ratio must be finite and non-negative"),
    (engine(speedup_ratio=NAN), "speedup_ratio must be finite and non-negative"),
    (engine(decode_speedup_ratio=-0.1), "decode_speedup_ratio must be finite and non-negative"),
    (engine(aic_nextn=0), "aic_nextn must be in 1..=5"),
    (engine(aic_nextn=6), "aic_nextn must be in 1..=5"),
    (
        engine(aic_nextn=1, aic_nextn_accept_rates="0.5,7"),
        "aic_nextn_accept_rates[1] must be finite and in [0, 1], got 7",
    ),
    (engine(aic_nextn=1, decode_speedup_ratio=2), "burst sampling"),
    (engine(aic_nextn_accept_rates="0.5"), "aic_nextn_accept_rates needs aic_nextn"),
    (engine(aic_nextn_accept_rates=""), "aic_nextn_accept_rates needs aic_nextn"),
    (engine(backend="sglang", enable_chunked_prefill=False), "enable_chunked_prefill"),
    (sglang(max_prefill_tokens=0), "sglang.max_prefill_tokens must be positive"),
    (sglang(chunked_prefill_size=0), "sglang.chunked_prefill_size must be positive"),
    (
        sglang(schedule_conservativeness=-1),
        "sglang.schedule_conservativeness must be finite and non-negative",
    ),
    (
        engine(backend="sglang", block_size=3, sglang={"chunked_prefill_size": 10}),
        "sglang.chunked_prefill_size must be a multiple of block_size",
    ),
    (engine(emit_kv_token_ids=True), "emit_kv_token_ids needs emit_kv_events"),
    (engine(kv_transfer_bytes_per_token=0), "kv_transfer_bytes_per_token must be positive"),
    (engine(kv_cache_bytes_per_token=0), "kv_cache_bytes_per_token must be positive"),
    (grouped(backend="sglang", enable_prefix_caching=True), "backend vllm and worker_type aggregated"),
    (grouped(worker_type="decode"), "backend vllm and worker_type aggregated"),
    (grouped(enable_prefix_caching=True), "kv_cache_groups need enable_prefix_caching false"),
    (grouped(aic_nextn=1), "kv_cache_groups do not support aic_nextn"),
    (grouped(emit_kv_events=True), "emit_kv_events"),
    *(
        (grouped(**{name: 5}), name)
        for name in ("kv_cache_bytes_per_token", "kv_transfer_bytes_per_token", "kv_transfer_bandwidth")
    ),
    *((grouped(kv_cache_capacity_bytes=size), "kv_cache_capacity_bytes") for size in (None, 0, 2**53 + 1)),
    (grouped(GROUP | {"name": " "}), "name must not be blank"),
    *(
        (grouped(GROUP | {name: 0}), f"{name} must be positive")
        for name in ("num_layers", "block_size_tokens", "page_size_bytes", "sliding_window")
    ),
    (grouped(GROUP | {"page_size_bytes": 2**53 + 1}), "page_size_bytes"),
    (grouped(GROUP | {"kind": "convolution"}), "sliding_window"),
    (grouped(GROUP, GROUP), "not unique"),
    (engine(kv_cache_capacity_bytes=5), "kv_cache_capacity_bytes requires kv_cache_groups"),
    (engine(kv_transfer_bandwidth=-1), "kv_transfer_bandwidth must be finite and non-negative"),
    (engine(kv_transfer_bandwidth=2, worker_type="prefill"), "needs kv_transfer_bytes_per_token"),
    (engine(timing_model={"type": "external", "provider": ""}), "provider must not be empty"),
    (fixed(prefill_ms=-1), "fixed prefill latency must be finite and non-negative"),
    (fixed(decode_ms=NAN), "fixed decode latency must be finite and non-negative"),
    ({"engine": {}, "dp_size": 0}, "dp_size must be positive"),
    ({"engine": {}, "tensor_parallel_size": 0}, "tensor_parallel_size must be positive"),
    ({"engine": {}, "tensor_parallel_size": 2**32}, "tensor_parallel_size exceeds the engine contract"),
    ({"engine": {}, "startup_time": -1}, "startup_time must be finite and non-negative"),
    ({"engine": {}, "startup_time": NAN}, "startup_time must be finite and non-negative"),
    ({"engine": {}, "gpu_memory_utilization": 1.1}, "gpu_memory_utilization must be finite and in [0, 1]"),
    ({"engine": {}, "mem_fraction_static": -0.1}, "mem_fraction_static must be finite and in [0, 1]"),
    (
        {"engine": {}, "free_gpu_memory_fraction": NAN},
        "free_gpu_memory_fraction must be finite and in [0, 1]",
    ),
]


@pytest.mark.parametrize(("mapping", "text"), REFUSED, ids=range(len(REFUSED)))
def test_a_broken_rule_is_refused_in_its_words(mapping, text):
    assert text in str(fault(mapping))


ORDER = [
    engine(num_gpu_blocks=0),
    engine(block_size=1),
    engine(max_num_seqs=0),
    engine(max_num_batched_tokens=0),
    engine(prefill_schedule_interval=0),
    engine(prefill_decode_interval=1),
    engine(max_model_len=0),
    engine(speedup_ratio=-1),
    engine(decode_speedup_ratio=-1),
    engine(aic_nextn=6),
    engine(emit_kv_token_ids=True),
    engine(kv_transfer_bytes_per_token=0),
    engine(kv_cache_bytes_per_token=0),
    engine(kv_cache_capacity_bytes=5),
    engine(kv_transfer_bandwidth=-1),
    fixed(prefill_ms=-1),
    {"dp_size": 0},
    {"tensor_parallel_size": 0},
    {"startup_time": -1},
    {"gpu_memory_utilization": 2},
    {"mem_fraction_static": 2},
    {"free_gpu_memory_fraction": 2},
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_first_broken_rule_wins(first):
    alone = str(fault({"engine": {}} | ORDER[first]))
    for later in ORDER[first + 1 :]:
        rank = later.get("engine", {}) | ORDER[first].get("engine", {})
        assert str(fault(later | ORDER[first] | {"engine": rank})) == alone


ACCEPTED = [
    engine(speedup_ratio=0, decode_speedup_ratio=0),
    engine(prefill_schedule_interval=2),
    engine(backend="sglang", prefill_decode_interval=1, sglang={"host_loop": True}),
    engine(sglang={"max_prefill_tokens": 0, "schedule_conservativeness": -1}),
    engine(emit_kv_events=True, emit_kv_token_ids=True),
    engine(kv_transfer_bandwidth=2, worker_type="decode"),
    engine(kv_transfer_bandwidth=0, worker_type="prefill"),
    engine(kv_transfer_bandwidth=2, kv_transfer_bytes_per_token=1, worker_type="prefill"),
    grouped(GROUP, GROUP | {"name": "w", "sliding_window": 4}),
    grouped(GROUP | {"kind": "convolution", "sliding_window": 1, "page_size_bytes": 2**53}),
    grouped(kv_cache_capacity_bytes=2**53),
    {
        "engine": {},
        "gpu_memory_utilization": 0,
        "mem_fraction_static": 1,
        "cuda_graph_reserved_bytes": 2**64 - 1,
    },
    {"engine": {}, "tensor_parallel_size": 2**32 - 1, "dp_size": 2**32 - 1, "startup_time": 0},
]


@pytest.mark.parametrize("mapping", ACCEPTED, ids=range(len(ACCEPTED)))
def test_the_edge_of_a_rule_is_accepted_and_written_back(mapping):
    made = EngineLaunchConfig.from_mapping(mapping)
    assert EngineLaunchConfig.from_mapping(made.to_dict()) == made
    assert EngineLaunchConfig.from_mapping(json.dumps(made.to_dict())) == made


def test_grouped_fields_are_written_only_when_set():
    optional = {"kv_cache_groups", "kv_cache_capacity_bytes", "kv_cache_bytes_per_token"}
    assert not optional & set(launch().to_dict()["engine"])
    written = EngineLaunchConfig.from_mapping(grouped()).to_dict()["engine"]
    assert written["kv_cache_groups"] == [GROUP | {"sliding_window": None}]
    assert launch(kv_cache_bytes_per_token=4).to_dict()["engine"]["kv_cache_bytes_per_token"] == 4


@pytest.mark.parametrize(
    ("rates", "nextn", "canonical"),
    [
        (None, 1, "0.85"),
        (None, 5, "0.85,0.3,0,0,0"),
        ("", 2, "0.85,0.3"),
        ("  ", 3, "0.85,0.3,0"),
        ("0.5", 2, "0.5,0"),
        (" 0.50 , 5e-1", 2, "0.5,0.5"),
        ("0.1,0.2,0.3", 2, "0.1,0.2"),
        ("1", 1, "1"),
        ("-0", 1, "-0"),
        ("+.5,1.", 2, "0.5,1"),
        ("1e-10", 1, "0.0000000001"),
        ("0.30000000000000004", 1, "0.30000000000000004"),
    ],
)
def test_accept_rates_become_exactly_nextn_shortest_decimals(rates, nextn, canonical):
    assert canonical_accept_rates(rates, nextn) == canonical


@pytest.mark.parametrize(
    ("rates", "index"),
    [
        *(("0.5,", 1), (",", 0), ("x", 0), ("0.5,2", 1), ("nan", 0), ("inf", 0), ("-0.1", 0)),
        *(("1_0", 0), ("0x1", 0), ("0.1,0.2,0.3,0.4,0.5,7", 5)),
    ],
)
def test_a_wrong_accept_rate_is_named_even_when_it_would_be_dropped(rates, index):
    assert f"aic_nextn_accept_rates[{index}]" in str(fault(engine(aic_nextn=1, aic_nextn_accept_rates=rates)))


@pytest.mark.parametrize("document", [5, None, [], "5", "{", '{"engine": {}, "engine": {}}'])
def test_what_is_no_document_is_refused(document):
    assert str(fault(document)).startswith("invalid engine launch config: ")


def test_launches_are_frozen_values():
    made = launch(max_num_seqs=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.dp_size = 2
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert made.engine.sglang == SglangConfig()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "backend": st.sampled_from(["vllm", "sglang", "trtllm"]),
            "num_gpu_blocks": st.integers(1, 2**64 - 1),
            "max_model_len": st.none() | st.integers(1, 2**40),
            "max_num_seqs": st.none() | st.integers(1, 2**64 - 1),
            "speedup_ratio": st.floats(0, 1e9) | st.integers(0, 9),
            "aic_nextn": st.none() | st.integers(1, 5),
            "worker_type": st.sampled_from(["aggregated", "decode"]),
            "preemption_mode": st.sampled_from(["lifo", "fifo"]),
            "kv_transfer_bandwidth": st.none() | st.floats(0, 1e9),
        },
    )
)
def test_the_written_form_reads_back_to_the_same_launch(fields):
    made = launch(**fields)
    again = EngineLaunchConfig.from_mapping(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert json.dumps(again.to_dict()) == json.dumps(made.to_dict())
