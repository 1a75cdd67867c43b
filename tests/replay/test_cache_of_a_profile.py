"""Replays whose cache follows from the profile of the model that prices them.

Source: fpm-interpolation.md section 7.
"""

import pytest

from fpmsdk import EngineLaunchConfig, Trace, replay_trace
from fpmsdk.errors import ConfigError, InfeasibleMemoryError, LaunchConfigError
from fpmsdk.launch import capacity
from tests.perfdb.pairs import decode, prefill
from tests.perfdb.synthetic import Systems
from tests.perfmodel.deployments import DECLARED, DEPLOYMENT, checkpoint, profile
from tests.perfmodel.test_wholeforward import model_of

ROWS = [
    *(prefill(1, tokens, 0, tokens / 10) for tokens in (1, 128)),
    *(decode(1, kv, 3.0 + kv / 100) for kv in (1, 128)),
]
CAPACITY = 10_000
ENVELOPE = {"max_num_tokens": 128, "max_batch_size": 8, "provenance": "test"}
LINEAR = {"cache_layout": "linear", "kv_bytes_per_token": 10}
GROUP = {
    "name": "g",
    "kind": "attention",
    "num_layers": 2,
    "block_size_tokens": 16,
    "page_size_bytes": 160,
    "sliding_window": 32,
}
GROUPED = {"cache_layout": "grouped", "cache_groups": [GROUP]}
RUNTIME = {
    "runtime_memory": {
        "kv_cache_bytes": 6000,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 4096,
        "provenance": "measured",
    }
}
ENGINE = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 4096, "enable_prefix_caching": False}


@pytest.fixture
def replay(tmp_path):
    systems = Systems(tmp_path / "systems")
    systems.hardware(gpu={"mem_capacity": CAPACITY})
    checkpoint(tmp_path / "model")

    def run(resources, engine=(), changes=(), others=(), **options):
        deployment = DEPLOYMENT | {"resources": resources | ENVELOPE} | dict(changes)
        model = model_of(tmp_path, ROWS, fpm_profile=profile(tmp_path / "model", deployment, *others))
        launch = {"engine": ENGINE | dict(engine), **options.pop("launch", {})}
        return replay_trace(Trace.from_arrays([0.0], [32], [4]), launch=launch, timing=model, **options)

    return run


def launched(report):
    engine = report.options["launch"]["engine"]
    return engine["num_gpu_blocks"], engine.get("kv_cache_groups"), engine.get("kv_cache_capacity_bytes")


@pytest.mark.parametrize(
    ("resources", "engine", "launch", "expected"),
    [
        (GROUPED | DECLARED, {}, {}, (16384, [GROUP], 8800)),  # 10000 * 0.9 - 200
        (GROUPED | DECLARED, {}, {"gpu_memory_utilization": 0.5}, (16384, [GROUP], 4800)),
        (GROUPED | DECLARED, {}, {"cuda_graph_reserved_bytes": 800}, (16384, [GROUP], 8000)),
        (GROUPED | DECLARED, {"kv_cache_groups": [GROUP], "kv_cache_capacity_bytes": 8800}, {}, (16384, [GROUP], 8800)),
        (GROUPED | RUNTIME, {}, {"gpu_memory_utilization": 0.8}, (16384, [GROUP], 6000)),
        (LINEAR | DECLARED, {"block_size": 16}, {}, (55, None, None)),  # 8800 / 10 / 16
        (LINEAR | RUNTIME, {"block_size": 16}, {"gpu_memory_utilization": 0.8}, (37, None, None)),
        # The profile that only declares its memory is not asked for blocks that are given.
        (LINEAR | DECLARED, {"num_gpu_blocks": 7}, {}, (7, None, None)),
        # Implicit blocks are a placeholder.
        (
            LINEAR | DECLARED,
            {"num_gpu_blocks": 7, "block_size": 16},
            {"num_gpu_blocks_is_explicit": False},
            (55, None, None),
        ),
    ],
)
def test_the_profile_sizes_the_cache_of_a_launch(replay, resources, engine, launch, expected):
    assert launched(replay(resources, engine, launch=launch)) == expected


@pytest.mark.parametrize(
    ("resources", "engine", "launch", "error", "words"),
    [
        (
            GROUPED | DECLARED,
            {"num_gpu_blocks": 7},
            {},
            LaunchConfigError,
            "grouped FPM cache cannot use fixed num_gpu_bl",
        ),
        (
            GROUPED | RUNTIME,
            {"num_gpu_blocks": 7},
            {},
            LaunchConfigError,
            "grouped FPM cache cannot use fixed num_gpu_bl",
        ),
        (
            LINEAR | RUNTIME,
            {"num_gpu_blocks": 7},
            {},
            LaunchConfigError,
            "runtime FPM memory cannot use fixed num_gpu_bl",
        ),
        (LINEAR, {}, {}, ConfigError, "pending runtime profiling"),
        (LINEAR, {"num_gpu_blocks": 7}, {}, ConfigError, "pending runtime profiling"),
        (GROUPED, {}, {}, ConfigError, "pending runtime profiling"),
        (
            GROUPED | DECLARED,
            {"kv_cache_groups": [GROUP], "kv_cache_capacity_bytes": 8801},
            {},
            LaunchConfigError,
            "kv_cache_capacity_bytes 8801 contradicts .* 8800",
        ),
        (
            GROUPED | DECLARED,
            {"kv_cache_groups": [GROUP | {"page_size_bytes": 320}], "kv_cache_capacity_bytes": 8800},
            {},
            LaunchConfigError,
            "kv_cache_groups .* contradicts",
        ),
        (
            LINEAR | DECLARED,
            {"kv_cache_groups": [GROUP], "kv_cache_capacity_bytes": 8800},
            {},
            LaunchConfigError,
            "kv_cache_groups .* contradicts .* None",
        ),
        (GROUPED | DECLARED, {"enable_prefix_caching": True}, {}, LaunchConfigError, "enable_prefix_caching"),
        (GROUPED | DECLARED, {"max_num_seqs": 9}, {}, ConfigError, "max_batch_size must be in 1..=8, .* found 9"),
        (GROUPED | DECLARED, {"max_num_batched_tokens": None}, {}, ConfigError, "max_num_tokens must be in 1..=128"),
        (
            GROUPED | RUNTIME,
            {"max_num_seqs": 4},
            {"gpu_memory_utilization": 0.8},
            ConfigError,
            "the recorded 8, found 4",
        ),
        (GROUPED | RUNTIME, {}, {}, ConfigError, "the recorded gpu_memory_utilization 0.8, found 0.9"),
        (GROUPED | DECLARED, {"max_model_len": 70_000}, {}, ConfigError, "context_length must be in 1..=65536"),
        (LINEAR | DECLARED, {"block_size": 1000}, {}, LaunchConfigError, "no block of 1000 tokens"),
        (LINEAR | DECLARED, {}, {"mem_fraction_static": 0.5}, LaunchConfigError, "use gpu_memory_utilization"),
        (LINEAR | DECLARED, {}, {"gpu_memory_utilization": 0.01}, InfeasibleMemoryError, "201 bytes .* 100 are avail"),
    ],
)
def test_a_launch_that_the_profile_does_not_support_is_refused(replay, resources, engine, launch, error, words):
    with pytest.raises(error, match=words):
        replay(resources, engine, launch=launch)


def test_workers_of_both_kinds_have_the_cache_of_their_own_profile(tmp_path):
    Systems(tmp_path / "systems").hardware(gpu={"mem_capacity": CAPACITY})
    checkpoint(tmp_path / "model")

    def priced(role, kv_bytes_per_token):
        resources = LINEAR | DECLARED | ENVELOPE | {"kv_bytes_per_token": kv_bytes_per_token}
        deployment = DEPLOYMENT | {"resources": resources, "worker_type": role}
        return model_of(tmp_path, ROWS, worker_type=role, fpm_profile=profile(tmp_path / "model", deployment))

    def launch(role):
        return {"engine": ENGINE | {"worker_type": role, "block_size": 16}}

    report = replay_trace(
        Trace.from_arrays([0.0], [32], [4]),
        launch=launch("decode"),
        timing=priced("decode", 10),
        prefill_launch=launch("prefill"),
        prefill_timing=priced("prefill", 20),
    )
    sizes = [report.options[name]["engine"]["num_gpu_blocks"] for name in ("launch", "prefill_launch")]
    assert sizes == [55, 27]


@pytest.mark.parametrize(
    ("launch", "config", "is_asked"),
    [
        ({"backend": "vllm"}, {"fpm_profile": {}, "pp": 1}, True),
        ({"backend": "vllm"}, {"fpm_profile": None, "pp": 1}, False),
        ({"backend": "sglang"}, {"fpm_profile": {}, "pp": 1}, False),
        ({"backend": "vllm"}, {"fpm_profile": {}, "pp": 2}, False),
    ],
)
def test_finding_3_a_profile_is_asked_for_a_cache_of_vllm_without_pipeline_alone(launch, config, is_asked, monkeypatch):
    asked = []

    def selected(profile, canonical):
        asked.append(canonical)
        raise ConfigError("asked")

    monkeypatch.setattr(capacity, "load_fpm_profile", lambda document: document)
    monkeypatch.setattr(capacity, "select_deployment", selected)
    given = EngineLaunchConfig.from_mapping({"engine": launch})
    if is_asked:
        with pytest.raises(ConfigError, match="asked"):
            capacity.sized_launch(given, config)
    else:
        assert capacity.sized_launch(given, config) is given
    assert bool(asked) is is_asked


def test_finding_10_a_grouped_cache_is_counted_in_bytes_and_has_no_tokens(replay):
    report = replay(GROUPED | DECLARED)
    assert report.summary["completed_requests"] == 1
    engine = report.options["launch"]["engine"]
    assert (engine["kv_cache_capacity_bytes"], engine.get("kv_cache_bytes_per_token")) == (8800, None)


def test_finding_11_flat_arguments_are_normalised_before_the_cache_is_looked_at(replay):
    flat = ENGINE | {"engine_type": "VLLM", "block_size": 16}
    assert EngineLaunchConfig.from_mapping(flat | {"num_gpu_blocks": 40}).engine.num_gpu_blocks == 40
    with pytest.raises(LaunchConfigError, match="kv_cache_groups need kv_cache_capacity_bytes"):
        EngineLaunchConfig.from_mapping(flat | {"kv_cache_groups": [GROUP]})
    # A deployment of another topology with groups does not concern a linear replay.
    other = DEPLOYMENT | {"tp": 2, "resources": GROUPED | DECLARED | ENVELOPE}
    assert launched(replay(LINEAR | DECLARED, {"block_size": 16}, others=(other,))) == (55, None, None)


@pytest.mark.parametrize(
    "engine",
    [
        {"backend": "sglang"},
        {"backend": "trtllm"},
        {"worker_type": "decode"},
        {"enable_prefix_caching": True},
    ],
)
def test_finding_6_engines_without_grouped_caches_refuse_them_and_say_what_they_need(engine):
    grouped = ENGINE | {"kv_cache_groups": [GROUP], "kv_cache_capacity_bytes": 8800} | engine
    with pytest.raises(LaunchConfigError, match="kv_cache_groups need") as caught:
        EngineLaunchConfig.from_mapping({"engine": grouped})
    assert caught.value.path == "engine.kv_cache_groups"
