import pytest

from fpmsdk.config.profile import CacheGroup, Resources
from fpmsdk.errors import ConfigError, InfeasibleMemoryError
from fpmsdk.launch.cache_budget import estimate_cache_budget, live_blocks, request_bytes
from tests.perfdb.pairs import VERSION
from tests.perfmodel.deployments import DEPLOYMENT, profile

GROUP = {
    "name": "g",
    "kind": "attention",
    "num_layers": 2,
    "block_size_tokens": 16,
    "page_size_bytes": 160,
    "sliding_window": 32,
}
DECLARED = {
    "weights_bytes": 100,
    "activations_bytes": 20,
    "runtime_overhead_bytes": 30,
    "comm_overhead_bytes": 50,
}
RUNTIME = {
    "runtime_memory": {
        "kv_cache_bytes": 600,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 4096,
        "provenance": "measured",
    }
}
ENVELOPE = {"max_num_tokens": 128, "max_batch_size": 8, "provenance": "test"}
LINEAR = {"cache_layout": "linear", "kv_bytes_per_token": 10}
GROUPED = {"cache_layout": "grouped", "cache_groups": [GROUP]}
ASKED = {
    "total_gpu_capacity_bytes": 1000,
    "memory_fraction_kind": "of_total",
    "memory_fraction_value": 0.8,
    "max_num_tokens": 128,
    "max_batch_size": 8,
    "context_length": 4096,
}


def budget(layout, memory, **changes):
    config = {
        "model": "m",
        "system": "x100",
        "backend": "vllm",
        "backend_version": VERSION,
        "worker_type": "aggregated",
        "fpm_profile": profile("m", DEPLOYMENT | {"resources": layout | memory | ENVELOPE}),
        **dict.fromkeys(("tp", "pp", "attention_dp"), 1),
        **dict.fromkeys(("moe_tp_size", "moe_ep_size", "speculation")),
        "nextn": 0,
    }
    config |= {name: changes.pop(name) for name in ("pp", "nextn", "fpm_profile") if name in changes}
    return estimate_cache_budget(config, ASKED | changes)


def test_declared_bytes_leave_the_rest_to_the_cache():
    answer = budget(GROUPED, DECLARED, cuda_graph_reserved_bytes=20, tolerance_fraction=0.1)
    assert answer["total_kv_size_bytes"] == 580
    assert answer["memory_breakdown"] == DECLARED | {"cuda_graph_reserved_bytes": 20}
    assert answer["tolerance_adjusted"] == {
        "tolerance_fraction": 0.1,
        "total_kv_size_bytes": 522,
        "total_kv_size_tokens": None,
    }
    assert (answer["request_peak_cache_bytes"], answer["total_kv_size_tokens"]) == (1760, None)
    assert (answer["source"], answer["cache_groups"]) == ("profile", [GROUP])


def test_runtime_memory_is_taken_as_recorded():
    answer = budget(GROUPED, RUNTIME)
    assert (answer["total_kv_size_bytes"], answer["request_peak_cache_bytes"]) == (600, 1760)
    assert answer["memory_breakdown"] is None


def test_a_linear_cache_is_told_in_tokens():
    answer = budget(LINEAR, RUNTIME, total_gpu_capacity_bytes=2000, tolerance_fraction=0.1)
    assert (answer["total_kv_size_bytes"], answer["total_kv_size_tokens"]) == (600, 60)
    assert answer["kv_size_per_token_bytes"] == 10
    adjusted = answer["tolerance_adjusted"]
    assert (adjusted["total_kv_size_bytes"], adjusted["total_kv_size_tokens"]) == (540, 54)


def test_fractions_of_bytes_are_rounded_down_once():
    answer = budget(LINEAR, DECLARED, total_gpu_capacity_bytes=4096, memory_fraction_value=0.9)
    assert answer["total_kv_size_bytes"] == 3486


@pytest.mark.parametrize(("layout", "expected"), [(GROUPED, 480), (LINEAR, 11520)])
def test_occupancy_is_what_one_request_of_a_length_holds(layout, expected):
    assert budget(layout, DECLARED, request_occupancy_tokens=1152)["request_occupancy_cache_bytes"] == expected
    assert "request_occupancy_cache_bytes" not in budget(layout, DECLARED)


def test_the_context_of_the_profile_is_the_default():
    assert budget(LINEAR, DECLARED, context_length=None)["request_peak_cache_bytes"] == 655360


@pytest.mark.parametrize(
    ("memory", "changes", "words"),
    [
        (DECLARED, {"foo": 1}, ["foo"]),
        (DECLARED, {"memory_fraction_kind": "of_free"}, ["memory_fraction_kind", "of_total"]),
        (DECLARED, {"total_gpu_capacity_bytes": 0}, ["total_gpu_capacity_bytes"]),
        (DECLARED, {"total_gpu_capacity_bytes": 2**53 + 1}, ["total_gpu_capacity_bytes"]),
        (DECLARED, {"memory_fraction_value": 1.5}, ["memory_fraction_value", "1.5"]),
        (DECLARED, {"max_num_tokens": 129}, ["max_num_tokens", "128", "129"]),
        (DECLARED, {"max_batch_size": 0}, ["max_batch_size"]),
        (DECLARED, {"context_length": 65537}, ["context_length", "65536"]),
        (DECLARED, {"request_occupancy_tokens": 4097}, ["request_occupancy_tokens", "4096"]),
        (DECLARED, {"tolerance_fraction": 1.0}, ["tolerance_fraction"]),
        (DECLARED, {"pp": 2}, ["pp 1"]),
        (DECLARED, {"nextn": 1}, ["nextn"]),
        ({}, {}, ["pending runtime profiling"]),
        (RUNTIME, {"max_num_tokens": 64}, ["max_num_tokens", "128", "64"]),
        (RUNTIME, {"context_length": 4097}, ["context_length", "4096"]),
        (RUNTIME, {"memory_fraction_value": 0.9}, ["memory_fraction_value", "0.8", "0.9"]),
        (RUNTIME, {"cuda_graph_reserved_bytes": 1}, ["cuda_graph_reserved_bytes"]),
    ],
)
def test_what_the_profile_does_not_support_is_an_error(memory, changes, words):
    with pytest.raises(ConfigError) as caught:
        budget(LINEAR, memory, **changes)
    assert all(word in str(caught.value) for word in words)


class TestWhatDoesNotFit:
    def refused(self, *deployments, capacity=250):
        records = [DEPLOYMENT | changes | {"resources": LINEAR | memory | ENVELOPE} for changes, memory in deployments]
        with pytest.raises(InfeasibleMemoryError) as caught:
            budget(LINEAR, {}, total_gpu_capacity_bytes=capacity, fpm_profile=profile("m", *records))
        return caught.value

    def test_needed_and_available_bytes_are_told(self):
        error = self.refused(({}, DECLARED))
        assert (error.needed_bytes, error.available_bytes) == (201, 200)
        assert "need 201 bytes of one rank, 200 are available" in str(error)

    def test_one_byte_for_the_cache_is_enough(self):
        assert budget(LINEAR, DECLARED, total_gpu_capacity_bytes=252)["total_kv_size_bytes"] == 1

    def test_the_smallest_recorded_size_that_fits_is_named(self):
        sizes = [({"tp": tp, "moe_tp": tp}, DECLARED | {"weights_bytes": 392 // tp}) for tp in (8, 1, 4, 2)]
        error = self.refused(*sizes)
        assert error.smallest_tp == 4
        assert "the smallest tensor-parallel size that fits is 4" in str(error)

    def test_a_recorded_size_of_another_role_does_not_count(self):
        larger = {"tp": 2, "moe_tp": 2, "worker_type": "prefill"}
        assert self.refused(({}, DECLARED), (larger, DECLARED | {"weights_bytes": 1})).smallest_tp == 2
        assert "records none" in str(self.refused(({}, DECLARED), (larger, DECLARED | {"weights_bytes": 1})))

    def test_without_a_record_the_declared_weights_are_divided(self):
        error = self.refused(({}, DECLARED | {"weights_bytes": 790}))
        # 100 bytes are not weights and one is cache: 99 are left of 200.
        assert error.smallest_tp == 8
        assert "if its weights divide evenly; the profile records none" in str(error)

    def test_what_is_not_weights_may_be_too_much_already(self):
        error = self.refused(({}, DECLARED | {"activations_bytes": 500}))
        assert error.smallest_tp is None
        assert "no tensor-parallel size fits" in str(error)

    def test_a_recorded_cache_that_is_larger_than_the_gpu(self):
        error = self.refused(({}, RUNTIME), capacity=749)
        assert (error.needed_bytes, error.available_bytes, error.smallest_tp) == (600, 599, None)


def test_products_beyond_exact_integers_are_errors():
    resources = Resources(**LINEAR | {"kv_bytes_per_token": 2**53}, **ENVELOPE)
    with pytest.raises(ConfigError, match="9007199254740992"):
        request_bytes(resources, 2, 1)


@pytest.mark.parametrize(
    ("window", "computed", "target", "blocks"),
    [
        (32, 32, 33, range(0, 3)),
        (32, 48, 49, range(1, 4)),
        (32, 512, 640, range(30, 40)),
        (32, 64, 65, range(2, 5)),
        (None, 64, 65, range(0, 5)),
        (32, 0, 32, range(0, 2)),
    ],
)
def test_blocks_before_the_window_are_not_live(window, computed, target, blocks):
    assert live_blocks(CacheGroup(**GROUP | {"sliding_window": window}), computed, target) == blocks
