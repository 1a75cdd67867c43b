"""Hardware descriptions: units, defaults, optional keys, and faults that name the key."""

import pytest

from fpmsdk.errors import PerfDataCorruptError, PerfDataNotAvailableError, UnknownSystemError
from fpmsdk.perfdb import open_root


def test_every_key_is_read_in_its_unit(systems):
    systems.hardware(
        gpu={
            "mem_bw_empirical_scaling_factor": 0.8,
            "mem_empirical_constant_latency": 3e-6,
            "mem_capacity": 151397597184,
            "int8_tc_flops": 1.978e15,
            "fp8_tc_flops": 1.979e15,
            "fp4_tc_flops": 4e15,
            "fp32_flops": 6.7e13,
            "power": 700,
        },
        node={"pcie_bw": 6.4e10, "p2p_latency": 1e-5, "num_gpus_per_rack": 72, "inter_rack_bw": 2.5e10},
        misc={"nccl_mem": {1: 0, 2: 358612992}, "other_mem": 3758096384, "oneccl_version": "2021.15.9"},
    )
    spec = open_root(systems.path).spec("x100")
    assert spec.mem_bw_bytes_per_s == 4.8e12
    assert spec.mem_bw_scaling_factor == 0.8
    assert spec.mem_constant_latency_s == 3e-6
    assert spec.mem_capacity_bytes == 151397597184
    assert spec.tc_flops == {"bf16": 9.89e14, "int8": 1.978e15, "fp8": 1.979e15, "fp4": 4e15}
    assert spec.fp32_flops == 6.7e13
    assert (spec.power_w, spec.sm_version) == (700, 90)
    assert (spec.pcie_bw_bytes_per_s, spec.p2p_latency_s) == (6.4e10, 1e-5)
    assert spec.nccl_mem_bytes == {1: 0, 2: 358612992}
    assert spec.other_mem_bytes == 3758096384
    assert (spec.nccl_version, spec.oneccl_version) == ("2.26.2", "2021.15.9")


def test_what_may_be_absent_has_the_documented_default(systems):
    spec = open_root(systems.path).spec("x100")
    assert (spec.mem_bw_scaling_factor, spec.mem_constant_latency_s, spec.p2p_latency_s) == (1.0, 0.0, 0.0)
    assert spec.mem_capacity_bytes is spec.fp32_flops is spec.power_w is spec.pcie_bw_bytes_per_s is None
    assert spec.gpus_per_rack is spec.inter_rack_bw_bytes_per_s is spec.oneccl_version is None


@pytest.mark.parametrize("flops", [None, 0, -1.0])
def test_a_dtype_without_positive_flops_is_unsupported(systems, flops):
    systems.hardware(gpu={"fp8_tc_flops": flops})
    assert open_root(systems.path).spec("x100").tc_flops == {"bf16": 9.89e14}


def test_an_exponent_without_a_dot_is_a_number(systems):
    text = systems.hardware().read_text().replace("mem_bw: 4800000000000.0", "mem_bw: 48e11")
    systems.text("x100.yaml", text)
    assert open_root(systems.path).spec("x100").mem_bw_bytes_per_s == 4.8e12


@pytest.mark.parametrize(
    ("rack", "gpus", "bandwidth"),
    [
        ({}, 8, 4.5e11),
        ({}, 9, 5e10),
        ({}, 10_000, 5e10),
        ({"num_gpus_per_rack": 72, "inter_rack_bw": 1e9}, 72, 5e10),
        ({"num_gpus_per_rack": 72, "inter_rack_bw": 1e9}, 73, 1e9),
        ({"num_gpus_per_rack": 72}, 73, 5e10),
    ],
)
def test_point_to_point_bandwidth_follows_node_and_rack(systems, rack, gpus, bandwidth):
    systems.hardware(node=rack)
    assert open_root(systems.path).spec("x100").p2p_bandwidth(gpus) == bandwidth


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"data_dir": 5}, "data_dir"),
        ({"gpu": {"mem_bw": None}}, "gpu.mem_bw"),
        ({"gpu": {"mem_bw": 0}}, "gpu.mem_bw"),
        ({"gpu": {"mem_bw": "fast"}}, "gpu.mem_bw"),
        ({"gpu": {"mem_bw": float("nan")}}, "gpu.mem_bw"),
        ({"gpu": {"sm_version": True}}, "gpu.sm_version"),
        ({"node": {"num_gpus_per_node": None}}, "node.num_gpus_per_node"),
        ({"misc": {"nccl_mem": [1]}}, "misc.nccl_mem"),
        ({"misc": {"nccl_mem": {"two": 1}}}, "misc.nccl_mem"),
        ({"misc": {"nccl_mem": {1: float("inf")}}}, "misc.nccl_mem"),
        ({"misc": {"nccl_mem": {0: 1}}}, "misc.nccl_mem"),
        ({"misc": {"nccl_mem": {1: -1}}}, "misc.nccl_mem"),
        ({"misc": {"other_mem": -1}}, "misc.other_mem"),
        ({"misc": {"nccl_version": 2.30}}, "misc.nccl_version"),
        ({"data_dir": "a\0b"}, "data_dir"),
        ({"gpu": {"mem_bw": 2**1024}}, "gpu.mem_bw"),
        ({"gpu": {"mem_empirical_constant_latency": -1e-6}}, "gpu.mem_empirical_constant_latency"),
        ({"gpu": {"sm_version": 90.5}}, "gpu.sm_version"),
        ({"gpu": {"mem_capacity": 0}}, "gpu.mem_capacity"),
        ({"gpu": {"power": -1}}, "gpu.power"),
        ({"node": {"num_gpus_per_node": 0.5}}, "node.num_gpus_per_node"),
        ({"node": {"num_gpus_per_rack": -1}}, "node.num_gpus_per_rack"),
        ({"node": {"inter_rack_bw": 0}}, "node.inter_rack_bw"),
        ({"node": {"p2p_latency": -1}}, "node.p2p_latency"),
    ],
)
def test_a_fault_names_file_and_key(systems, sections, key):
    path = systems.hardware(**sections)
    with pytest.raises(PerfDataCorruptError, match=f"{path}: ({key} must be|not valid YAML)") as caught:
        open_root(systems.path).spec("x100")
    assert caught.value.path == str(path)


def test_a_missing_section_is_named(systems):
    systems.document("x100.yaml", {"data_dir": "data/x100", "gpu": {}})
    with pytest.raises(PerfDataCorruptError, match="node must be a mapping"):
        open_root(systems.path).spec("x100")


@pytest.mark.parametrize(
    "content",
    [
        "gpu: [",
        "- 1\n",
        "\x00",
        "a: &a [*a]",
        "a: 99999999999999999999999999",
        f"a: {'9' * 5000}",
        "a: 2026-99-99",
        "a: !!int x",
        "a: !!bool x",
        "a: !!timestamp x",
        "a: !!python/name:os.system x",
        "? [a, b]\n: 1",
        f"a: {'[' * 3000}",
    ],
)
def test_broken_yaml_is_corruption(systems, content):
    systems.text("x100.yaml", content)
    with pytest.raises(PerfDataCorruptError, match=r"x100\.yaml"):
        open_root(systems.path).spec("x100")


def test_a_key_written_twice_is_corruption_wherever_it_is(systems):
    text = systems.hardware().read_text()
    systems.text("x100.yaml", text.replace("gpu:", "gpu:\n  mem_bw: 1.0e+12", 1))
    with pytest.raises(
        PerfDataCorruptError, match=r"x100\.yaml: not valid YAML: mem_bw given more than once in .* line 3"
    ):
        open_root(systems.path).spec("x100")


def test_merged_keys_are_not_written_twice(systems):
    text = systems.hardware().read_text()
    systems.text("x100.yaml", f"base: &base {{a: 1}}\nother: {{<<: *base, a: 2}}\nthird: {{<<: *base, b: 2}}\n{text}")
    assert open_root(systems.path).spec("x100").sm_version == 90


def test_a_git_lfs_pointer_in_place_of_a_document_says_how_to_get_it(systems):
    systems.text("x100.yaml", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(PerfDataNotAvailableError, match=r"x100\.yaml is a Git LFS pointer.*git lfs pull"):
        open_root(systems.path).spec("x100")


def test_a_description_that_leads_nowhere_is_missing_data(systems):
    (systems.path / "y200.yaml").symlink_to("nowhere")
    with pytest.raises(PerfDataNotAvailableError, match=r"y200\.yaml has vanished"):
        open_root(systems.path).spec("y200")


def test_the_systems_are_the_hardware_files(systems):
    systems.hardware("y200")
    for name in ("query_versions.yaml", "perf_data_reuse_manifest.yaml", "attention_lane_defaults.yaml", ".hid.yaml"):
        systems.text(name)
    systems.text("silicon_sample.csv")
    assert open_root(systems.path).systems() == ("x100", "y200")


def test_an_unknown_system_names_the_nearest(systems):
    systems.hardware("h100_sxm")
    systems.hardware("h200_sxm")
    with pytest.raises(UnknownSystemError, match="no system 'h2000_sxm'.*nearest: h200_sxm, h100_sxm"):
        open_root(systems.path).spec("h2000_sxm")


def test_another_case_is_another_name_but_a_near_one(systems):
    systems.hardware("h100_sxm")
    systems.hardware("GB300")
    for asked, nearest in (("H100_SXM", "h100_sxm"), ("gb300", "GB300")):
        with pytest.raises(UnknownSystemError, match=f"no system '{asked}'.*nearest: {nearest}"):
            open_root(systems.path).spec(asked)


def test_an_unknown_system_never_becomes_a_file_elsewhere(systems):
    systems.hardware("../other")
    with pytest.raises(UnknownSystemError):
        open_root(systems.path).spec("../other")


def test_a_missing_root_has_no_systems(tmp_path):
    with pytest.raises(UnknownSystemError, match="nearest: none"):
        open_root(tmp_path / "absent").spec("x100")
