"""Cache capacity of launches that leave the blocks out: from a profile, or from the model's operators."""

import pytest

from fpmsdk import EngineLaunchConfig, materialize_engine_launch_config
from fpmsdk.errors import ConfigError, InfeasibleMemoryError, LaunchConfigError, UnknownSystemError
from tests.perfdb.pairs import VERSION
from tests.perfdb.synthetic import Systems
from tests.perfmodel import tiny
from tests.perfmodel.deployments import DEPLOYMENT, checkpoint, profile

DECLARED = {"weights_bytes": 100, "activations_bytes": 20, "runtime_overhead_bytes": 30, "comm_overhead_bytes": 50}
RUNTIME = {
    "runtime_memory": {
        "kv_cache_bytes": 6000,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 4096,
        "provenance": "measured",
    }
}
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
SCHEDULER = {"max_num_batched_tokens": 128, "max_num_seqs": 8}


@pytest.fixture
def materialize(tmp_path):
    Systems(tmp_path / "systems").hardware(gpu={"mem_capacity": 10_000})
    checkpoint(tmp_path / "model")

    def launch(resources, args=(), **changes):
        config = {
            "model": str(tmp_path / "model"),
            "system": "x100",
            "backend": "vllm",
            "backend_version": VERSION,
            "worker_type": "aggregated",
            "fpm_profile": profile(tmp_path / "model", DEPLOYMENT | {"resources": resources | ENVELOPE}),
            "systems_paths": [str(tmp_path / "systems")],
            "fpm_interpolation": "direct",
            "estimation_mode": "fpm_interpolation",
            **changes,
        }
        timing = {"type": "external", "provider": "aic", "config": config}
        return materialize_engine_launch_config(
            "vllm", VERSION, {}, SCHEDULER | {"timing_model": timing} | dict(args), "aggregated"
        )

    return launch


@pytest.mark.parametrize(
    ("memory", "args", "blocks"),
    [
        (DECLARED, {"block_size": 16}, 55),  # (10000 * 0.9 - 200) / 10 / 16
        (DECLARED, {}, 13),  # blocks of 64
        (DECLARED, {"block_size": 16, "gpu_memory_utilization": 0.5}, 30),
        (DECLARED, {"block_size": 16, "cuda_graph_reserved_bytes": 800}, 50),
        (RUNTIME, {"block_size": 16, "gpu_memory_utilization": 0.8, "max_model_len": 4096}, 37),
    ],
)
def test_blocks_of_a_linear_profile_are_the_whole_ones_that_fit(materialize, memory, args, blocks):
    made = materialize(LINEAR | memory, args)
    assert (made["engine"]["num_gpu_blocks"], made["num_gpu_blocks_is_explicit"]) == (blocks, False)
    assert EngineLaunchConfig.from_mapping(made).to_dict() == made


def test_a_grouped_profile_gives_groups_and_bytes(materialize):
    made = materialize(GROUPED | DECLARED, {"enable_prefix_caching": False})
    engine = made["engine"]
    assert (engine["kv_cache_groups"], engine["kv_cache_capacity_bytes"]) == ([GROUP], 8800)
    assert (engine["num_gpu_blocks"], made["num_gpu_blocks_is_explicit"]) == (16384, False)
    assert EngineLaunchConfig.from_mapping(made).to_dict() == made


def test_groups_keep_the_rules_of_a_launch(materialize):
    with pytest.raises(LaunchConfigError, match="enable_prefix_caching"):
        materialize(GROUPED | DECLARED, {"enable_prefix_caching": True})


def test_the_memory_fraction_is_kept_unless_the_blocks_are_explicit(materialize):
    args = {"gpu_memory_utilization": 0.5}
    assert materialize(LINEAR | DECLARED, args)["gpu_memory_utilization"] == 0.5
    assert materialize(LINEAR | DECLARED, args | {"num_gpu_blocks": 7})["gpu_memory_utilization"] is None


def test_explicit_blocks_ask_no_profile(materialize):
    made = materialize(LINEAR, {"num_gpu_blocks": 7})
    assert (made["engine"]["num_gpu_blocks"], made["num_gpu_blocks_is_explicit"]) == (7, True)


@pytest.mark.parametrize(
    ("resources", "args", "error", "words"),
    [
        (LINEAR, {}, ConfigError, "pending runtime profiling"),
        (LINEAR | DECLARED | {"weights_bytes": 9000}, {}, InfeasibleMemoryError, "needs? 9101 bytes .* 9000 are avail"),
        (LINEAR | DECLARED, {"block_size": 1000}, LaunchConfigError, "no block of 1000 tokens"),
        (LINEAR | DECLARED, {"mem_fraction_static": 0.5}, LaunchConfigError, "use gpu_memory_utilization"),
        (LINEAR | DECLARED, {"max_num_batched_tokens": 256}, ConfigError, "max_num_tokens must be in 1..=128"),
        (LINEAR | RUNTIME, {"max_num_seqs": 4, "gpu_memory_utilization": 0.8}, ConfigError, "the recorded 8, found 4"),
    ],
)
def test_what_memory_does_not_support_is_an_error(materialize, resources, args, error, words):
    with pytest.raises(error, match=words):
        materialize(resources, args)


def test_a_system_without_memory_needs_blocks(materialize, tmp_path):
    Systems(tmp_path / "systems").hardware()
    with pytest.raises(LaunchConfigError, match=r"x100.*mem_capacity.*num_gpu_blocks"):
        materialize(LINEAR | DECLARED)


class TestWithoutAProfile:
    """The memory rules of the model's operators."""

    @pytest.fixture
    def launch(self, tmp_path):
        systems = tiny.write_root(tmp_path / "systems")
        model = tiny.write_model(tmp_path / "tiny")

        def materialize(mem_capacity, args=(), **changes):
            systems.hardware(gpu={"mem_capacity": mem_capacity}, misc={"nccl_mem": {1: 0, 2: 0}})
            config = {
                "model": str(model),
                "system": "x100",
                "backend": "vllm",
                "worker_type": "aggregated",
                "systems_paths": [str(systems.path)],
                **changes,
            }
            timing = {"type": "external", "provider": "aic", "config": config}
            return materialize_engine_launch_config(
                config["backend"], tiny.VERSION, {}, {"timing_model": timing, **dict(args)}, "aggregated"
            )

        return materialize

    # 2 layers of (256*512 + 256*256 + 3*256*512) parameters and 2*1024*256 of embedding and logits, 2 bytes each;
    # activations of 8192 tokens: 2 * 8192 * 256 * 11. A token takes 2 * 2 * 64 * 2 * 2 bytes.
    WEIGHTS = 2 * (2 * (256 * 512 + 256 * 256 + 3 * 256 * 512) + 2 * 1024 * 256)
    ACTIVATIONS = 70 * 2**20

    def test_blocks_are_those_that_the_operators_leave_room_for(self, launch):
        capacity = 2 * (self.WEIGHTS + self.ACTIVATIONS + 64 * 1024 * 5)
        made = launch(capacity, {"gpu_memory_utilization": 0.5})
        assert made["engine"]["num_gpu_blocks"] == 5
        assert made["num_gpu_blocks_is_explicit"] is False

    def test_a_model_that_does_not_fit_is_infeasible(self, launch):
        with pytest.raises(InfeasibleMemoryError, match="smallest tensor-parallel size|no tensor-parallel size"):
            launch(70 * 2**20)

    def test_an_unknown_system_names_its_kin(self, launch):
        with pytest.raises(UnknownSystemError, match="x100"):
            launch(10**9, system="x200")
