"""Table formats: keys and axes of each, sentinels, rewrites and rows that do not count."""

import pytest

from fpmsdk.errors import PerfDataNotAvailableError
from fpmsdk.perfdb import SCHEMAS, open_database
from tests.perfdb.synthetic import ATTENTION, GEMM, MLA, MOE, rows


def load(systems, name, table_rows, backend="vllm", place="any/vllm/1.0"):
    systems.table(place, SCHEMAS[name].file.removesuffix(".parquet"), table_rows)
    return open_database(systems.path, "x100", backend, "1.0").table(name)


def coordinates(one):
    return list(zip(*(axis.tolist() for axis in one.axes), strict=True))


@pytest.mark.parametrize(
    ("name", "row", "key", "coordinate"),
    [
        ("gemm_perf", GEMM, ("bfloat16",), (1, 64, 32)),
        ("computescale_perf", {"quant_dtype": "fp8", "m": 2, "k": 3, "latency": 1.0}, ("fp8",), (2, 3)),
        ("scale_matrix_perf", {"quant_dtype": "fp8", "m": 2, "k": 3, "latency": 1.0}, ("fp8",), (2, 3)),
        ("context_attention_perf", ATTENTION, ("fa3", "bfloat16", "bfloat16", 8, 128, 0), (32, 16, 1)),
        (
            "generation_attention_perf",
            ATTENTION | {"step": 5, "batch_size": 4},
            ("fa3", "bfloat16", 8, 128, 0),
            (32, 4, 21),
        ),
        ("context_mla_perf", MLA, ("bfloat16", "fp8"), (16, 16, 1)),
        ("generation_mla_perf", MLA, ("fp8",), (16, 1, 17)),
        ("mla_context_module_perf", MLA, ("bfloat16", "fp8", "fp8_block", 128), (16, 16, 1)),
        ("mla_generation_module_perf", MLA, ("fp8", "fp8_block", 128), (16, 1, 17)),
        (
            "mla_bmm_perf",
            {"bmm_dtype": "fp8", "op_name": "mla_gen_pre", "num_heads": 16, "num_tokens": 4, "latency": 1.0},
            ("fp8", "mla_gen_pre", 16),
            (4,),
        ),
        ("moe_perf", MOE, ("bfloat16", "balanced", 8, 128, 2048, 768, 1, 4), (16,)),
        (
            "custom_allreduce_perf",
            {"allreduce_dtype": "bfloat16", "num_gpus": 4, "message_size": 128, "latency": 1.0},
            (4,),
            (128,),
        ),
    ],
)
def test_key_and_axes_of_a_table(systems, name, row, key, coordinate):
    table = load(systems, name, [row])
    assert list(table.slices) == [key]
    assert coordinates(table.slices[key]) == [coordinate]


@pytest.mark.parametrize("library", ["nccl", "oneccl"])
def test_key_and_axis_of_a_communication_library(systems, library):
    systems.hardware(misc={f"{library}_version": "2.26.2"})
    systems.text("data/x100/any/vllm/1.0/other")
    row = {"nccl_dtype": "half", "op_name": "all_reduce", "num_gpus": 2, "message_size": 512, "latency": 1.0}
    table = load(systems, f"{library}_perf", [row], place=f"comm/{library}/2.26.2")
    assert coordinates(table.slices["half", "all_reduce", 2]) == [(512,)]


@pytest.mark.parametrize(("heads", "kv_heads", "in_key"), [(32, 8, 8), (32, 32, 0), (8, 8, 0), (8, 1, 1)])
def test_as_many_kv_heads_as_heads_is_written_as_zero(systems, heads, kv_heads, in_key):
    row = ATTENTION | {"num_heads": heads, "num_key_value_heads": kv_heads}
    assert [key[3] for key in load(systems, "context_attention_perf", [row]).slices] == [in_key]


def test_an_absent_window_is_zero(systems):
    row = {name: value for name, value in ATTENTION.items() if name != "window_size"}
    assert [key[-1] for key in load(systems, "generation_attention_perf", [row]).slices] == [0]


@pytest.mark.parametrize("kernel", ["", None, "absent"])
def test_a_row_without_a_kernel_is_in_the_default_lane(systems, kernel):
    row = {name: value for name, value in ATTENTION.items() if name != "kernel_source"}
    given = [row] if kernel == "absent" else [ATTENTION, row | {"kernel_source": kernel}]
    assert [key[0] for key in load(systems, "context_attention_perf", given).slices][-1] == "default"


@pytest.mark.parametrize("dtype", ["awq", "gptq"])
def test_gemm_dtypes_that_no_operator_serves_are_skipped(systems, dtype):
    table = load(systems, "gemm_perf", rows(GEMM, {"gemm_dtype": dtype}, {}))
    assert list(table.slices) == [("bfloat16",)]


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        ("deepseek-ai/DeepSeek-V3", 128),
        ("deepseek-ai/DeepSeek-R1", 128),
        ("nvidia/DeepSeek-V3.1-NVFP4", 128),
        ("moonshotai/Kimi-K3", 96),
    ],
)
def test_native_heads_follow_from_the_checkpoint(systems, model, heads):
    table = load(systems, "mla_generation_module_perf", [MLA | {"model": model}])
    assert [key[-1] for key in table.slices] == [heads]


def test_an_unknown_checkpoint_fails_the_module_table(systems):
    with pytest.raises(PerfDataNotAvailableError, match=r"unknown models \['acme/Model'\]"):
        load(systems, "mla_context_module_perf", rows(MLA, {}, {"model": "acme/Model"}))


@pytest.mark.parametrize(
    ("dtype", "kernel", "served_as"),
    [
        ("w4a8_mxfp4_mxfp8", "sglang_mxfp4_flashinfer_trtllm_moe", "w4a8_mxfp4_mxfp8_trtllm"),
        ("w4a8_mxfp4_mxfp8", "another", "w4a8_mxfp4_mxfp8"),
        ("w4a16_mxfp4", "sglang_flashinfer_cutlass_moe", "w4a16_mxfp4_cutlass"),
        ("nvfp4", "sglang_flashinfer_cutlass_moe", "nvfp4"),
    ],
)
def test_a_kernel_can_make_a_moe_dtype_of_its_own(systems, dtype, kernel, served_as):
    given = rows(MOE, {"moe_dtype": dtype, "kernel_source": kernel}, {})
    assert [key[0] for key in load(systems, "moe_perf", given).slices] == [served_as, "bfloat16"]


def test_low_latency_moe_rows_are_a_table_of_their_own(systems):
    given = rows(MOE, {"latency": 7.0}, {"kernel_source": "moe_torch_flow_min_latency", "latency": 2.0})
    table = load(systems, "moe_perf", given)
    low_latency = open_database(systems.path, "x100", "vllm", "1.0").table("moe_perf_low_latency")
    (key,) = table.slices
    assert table.slices[key].latency_ms.tolist() == [7.0]
    assert low_latency.slices[key].latency_ms.tolist() == [2.0]


def test_moe_rows_that_a_framework_would_not_choose_are_skipped(systems):
    given = rows(MOE, {"default_eligible": False, "latency": 7.0}, {"default_eligible": True})
    (only,) = load(systems, "moe_perf", given).slices.values()
    assert only.latency_ms.tolist() == [1.0]


ALL_REDUCE = {"num_gpus": 2, "message_size": 128, "latency": 1.0, "kernel_source": "graph", "backend": "vllm_graph"}


@pytest.mark.parametrize("mark", [{"kernel_source": "custom_eager"}, {"backend": "vllm_eager"}])
def test_uncaptured_collectives_are_skipped(systems, mark):
    table = load(systems, "custom_allreduce_perf", rows(ALL_REDUCE, mark | {"latency": 9.0}, {}))
    assert table.slices[2,].latency_ms.tolist() == [1.0]


def test_a_part_without_an_sm_version_serves_uncaptured_collectives(systems):
    systems.hardware(gpu={"sm_version": None})
    table = load(systems, "custom_allreduce_perf", rows(ALL_REDUCE, {"backend": "vllm_eager", "latency": 9.0}))
    assert table.slices[2,].latency_ms.tolist() == [9.0]
