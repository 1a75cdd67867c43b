"""Attention lanes: what pins a lane, how the others are ranked, and which overrides exist."""

import pytest

from fpmsdk.errors import PerfDataCorruptError, UnsupportedAttentionBackendError
from fpmsdk.perfdb import lanes, open_database
from tests.perfdb.synthetic import ATTENTION, rows

UNPINNED = ("fa3", "fla", "flashinfer", "triton", "trtllm_mha", "default")
DEFAULTS = {
    "sglang": {"0.5.14": {90: "fa3", 100: "triton"}, "0.6.0": {90: "fla"}},
    "vllm": {"0.24.0": {90: "default"}},
    "architectures": {"Qwen": {"sglang": {"0.5.17": {90: "trtllm_mha"}}}},
}


def measured(systems, lanes_of_rows, backend="sglang", version="0.5.14"):
    """Attention rows, one coordinate each: a name, or (name, head size)."""
    given = [lane if isinstance(lane, tuple) else (lane, 128) for lane in lanes_of_rows]
    changes = [{"kernel_source": lane, "head_dim": d, "isl": isl} for isl, (lane, d) in enumerate(given, 1)]
    systems.table(f"attention/{backend}/{version}", "context_attention_perf", rows(ATTENTION, *changes))


def order(systems, backend="sglang", version="0.5.14", architecture=None, override=None):
    opened = open_database(systems.path, "x100", backend, version, tolerate_dirless=True)
    return opened.lane_order("context_attention_perf", architecture, override)


def test_without_override_and_recorded_default_there_is_one_lane(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["torch_flow"], backend="trtllm", version="1.0")
    assert order(systems, "trtllm", "1.0") == ("default",)


def test_without_a_file_of_defaults_there_is_one_lane(systems):
    measured(systems, ["fa3", "triton"])
    assert order(systems) == ("default",)


@pytest.mark.parametrize(
    ("version", "pinned"), [("0.5.14", "fa3"), ("0.5.14.post1", "fa3"), ("0.5.20rc1", "fa3"), ("0.6.0rc1", "fla")]
)
def test_the_framework_default_of_the_highest_version_not_above_is_pinned(systems, version, pinned):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["triton"], version=version)
    assert order(systems, version=version)[0] == pinned


@pytest.mark.parametrize("version", ["0.5.13", "dev-abc"])
def test_a_version_below_every_entry_has_no_default(systems, version):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["triton"], version=version)
    assert order(systems, version=version) == ("default",)


def test_the_default_depends_on_the_sm_version(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    systems.hardware(gpu={"sm_version": 120})
    measured(systems, ["triton"])
    assert order(systems) == ("default",)


def test_the_default_of_an_architecture_replaces_the_general_one(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["fa3"], version="0.5.17")
    assert order(systems, version="0.5.17", architecture="Qwen")[:2] == ("trtllm_mha", "fa3")
    assert order(systems, version="0.5.17", architecture="Llama")[0] == "fa3"


def test_an_architecture_below_its_first_version_has_the_general_default(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["fa3"])
    assert order(systems, architecture="Qwen")[0] == "fa3"


def test_a_recorded_default_of_default_pins_nothing_but_admits_the_others(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["vllm_fa3", "vllm_fa3", ("vllm_fa4", 64)], backend="vllm", version="0.24.0")
    assert order(systems, "vllm", "0.24.0") == ("vllm_fa3", "vllm_fa4", *UNPINNED)


def test_lanes_rank_by_slices_then_rows_then_name(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    given = ["triton", ("triton", 64), "fla", "fla", "flashinfer", "zz", "aa", "aa", "default", "fa3"]
    measured(systems, given)
    assert order(systems) == ("fa3", "triton", "fla", "flashinfer", "default", "aa", "zz", "trtllm_mha")


def test_lanes_of_the_own_version_come_before_those_of_donors(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["triton"])
    measured(systems, [("flashinfer", 64), ("flashinfer", 128), "kernel", "triton"], version="0.5.13")
    assert order(systems) == ("fa3", "triton", "flashinfer", "fla", "trtllm_mha", "default", "kernel")


def test_without_measurements_the_known_lanes_follow_by_name(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    assert order(systems) == UNPINNED


def test_an_override_comes_before_the_framework_default(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["fa3", "triton", "flashinfer", "flashinfer"])
    assert order(systems, override="triton") == ("triton", "fa3", "flashinfer", "fla", "trtllm_mha", "default")


def test_an_override_needs_no_recorded_default(systems):
    measured(systems, ["triton"])
    assert order(systems, override="triton")[0] == "triton"


def test_an_override_ignores_the_default_of_the_architecture(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["triton"], version="0.5.17")
    assert order(systems, version="0.5.17", architecture="Qwen", override="triton")[:2] == ("triton", "fa3")


def test_the_override_default_is_the_framework_choice(systems):
    systems.document("attention_lane_defaults.yaml", DEFAULTS)
    measured(systems, ["triton"], version="0.5.17")
    assert order(systems, version="0.5.17", architecture="Qwen", override="default")[0] == "trtllm_mha"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("triton", ("vllm_triton_attn",)),
        ("flashinfer", ("vllm_flashinfer_trtllmprefill", "vllm_flashinfer_trtllmdecode", "vllm_flashinfer")),
    ],
)
def test_vllm_names_are_translated_to_its_kernels(systems, override, expected):
    measured(systems, [expected[-1]], backend="vllm", version="1.0")
    assert order(systems, "vllm", "1.0", override=override)[: len(expected)] == expected


@pytest.mark.parametrize(("backend", "override"), [("vllm", "fa3"), ("trtllm", "triton"), ("sglang", "made_up")])
def test_an_override_that_the_backend_does_not_know_is_refused(systems, backend, override):
    measured(systems, ["fa3"], backend=backend, version="1.0")
    with pytest.raises(UnsupportedAttentionBackendError, match=f"'{override}' does not exist for {backend}; accepted"):
        order(systems, backend, "1.0", override=override)


def test_an_override_without_measurements_is_refused(systems):
    measured(systems, ["fa3"])
    with pytest.raises(UnsupportedAttentionBackendError, match=r"no measurements.*found \['fa3'\]"):
        order(systems, override="triton")


@pytest.mark.parametrize(
    "document",
    ["sglang: [", "sglang: text", "sglang: {0.5.14: text}", "sglang: {0.5.14: {90: made_up}}", "architectures: text"],
)
def test_a_broken_file_of_defaults_is_corruption(systems, document):
    systems.text("attention_lane_defaults.yaml", document)
    measured(systems, ["fa3"])
    with pytest.raises(PerfDataCorruptError, match=r"attention_lane_defaults\.yaml"):
        order(systems)


def test_density_counts_distinct_rows_and_keys(systems):
    measured(systems, ["fa3", ("fa3", 64), "triton"])
    measured(systems, ["fa3", "fa3", "other"], version="0.5.13")
    table = open_database(systems.path, "x100", "sglang", "0.5.14").table("context_attention_perf")
    assert lanes.density(table, primary_only=True) == {"fa3": (2, 2), "triton": (1, 1)}
    assert lanes.density(table, primary_only=False) == {"fa3": (2, 3), "triton": (1, 1), "other": (1, 1)}
