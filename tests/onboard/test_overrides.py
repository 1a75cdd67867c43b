"""Stated profile fields: what each takes, and quantities as a person types them."""

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.overrides import check_overrides, load_overrides, read_answer

GROUP = {"name": "g", "kind": "attention", "num_layers": 2, "block_size_tokens": 16, "page_size_bytes": 64}


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        ("70", 70),
        ("70 B", 70),
        ("1kb", 1000),
        ("2 MB", 2_000_000),
        ("1.5GB", 1_500_000_000),
        ("3 TB", 3_000_000_000_000),
        ("1 KiB", 1024),
        ("512 MiB", 536870912),
        ("1.5 GiB", 1610612736),
        ("0.5 tib", 549755813888),
    ],
)
def test_bytes_are_typed_with_units(answer, size):
    assert read_answer("weights_bytes", answer) == size


@pytest.mark.parametrize("answer", ["0.1 KiB", "1.0001 KB", "five", "1 XB", "1 iB", "-1 B", "1.5", "9 PB", "10000 TiB"])
def test_other_quantities_are_refused(answer):
    with pytest.raises(OnboardError, match="weights_bytes"):
        read_answer("weights_bytes", answer)


@pytest.mark.parametrize(
    ("name", "answer", "value"),
    [
        ("max_num_tokens", "4096", 4096),
        ("kv_cache_dtype", "fp8", "fp8"),
        ("cache_block_sizes", '{"full_attention": 16}', {"full_attention": 16}),
        ("cache_groups", f"[{GROUP}]", [GROUP | {"sliding_window": None}]),
    ],
)
def test_answers_read_as_their_fields(name, answer, value):
    assert read_answer(name, answer) == value


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"unknown": 1}, "unknown override fields: unknown"),
        ([], "flat mapping"),
        ({"max_num_tokens": 0}, "max_num_tokens"),
        ({"max_num_tokens": "4 KiB"}, "max_num_tokens"),
        ({"weights_bytes": "70 GiB"}, "weights_bytes"),
        ({"weights_bytes": 2**53 + 1}, "weights_bytes"),
        ({"weights_bytes": 2**53, "activations_bytes": 1}, "add up to"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token"),
        ({"num_experts": -1}, "num_experts"),
        ({"kv_cache_dtype": "fp4"}, "must be one of bfloat16, int8, fp8"),
        ({"cache_layout": "paged"}, "must be one of linear, grouped"),
        ({"architecture": " "}, "architecture"),
        ({"cache_groups": []}, "cache_groups"),
        ({"cache_groups": [GROUP, GROUP]}, "unique"),
        ({"cache_groups": [GROUP | {"page_size_bytes": 1.5}]}, r"cache_groups\[0\]: page_size_bytes"),
        ({"cache_groups": [GROUP], "kv_bytes_per_token": 4}, "contradict"),
        ({"cache_groups": [GROUP], "cache_layout": "linear"}, "contradict"),
        ({"kv_bytes_per_token": 4, "cache_layout": "grouped"}, "contradicts"),
        ({"cache_block_sizes": {"other": 16}}, "cache_block_sizes"),
        ({"cache_block_sizes": {"full_attention": 0}}, "cache_block_sizes.full_attention"),
    ],
)
def test_other_values_are_refused_by_name(overrides, found):
    with pytest.raises(OnboardError, match=found):
        check_overrides(overrides)


def test_zero_bytes_and_experts_are_values():
    stated = {"comm_overhead_bytes": 0, "num_experts": 0}
    assert check_overrides(stated) == stated


def test_a_fault_of_the_file_names_it(tmp_path):
    path = tmp_path / "overrides.yaml"
    path.write_text("unknown: 1")
    with pytest.raises(OnboardError, match=rf"{path}: unknown override fields"):
        load_overrides(path)
