"""Axes, splits and feasibility of the measured grid (collector.md sections 1.4, 5.2 and 12)."""

import gzip
import json
from pathlib import Path

import pytest

from fpmsdk.collect.grid import (
    EngineLimits,
    Samples,
    balanced,
    capture_axis,
    capture_of,
    decode_fits,
    decode_points,
    imbalanced,
    kv_ladder,
    prefill_points,
    steady_tokens,
    thin,
    thin_axis,
    with_replicas,
)
from fpmsdk.collect.sampling import prefill_sampling
from fpmsdk.errors import OnboardError

VECTORS = Path(__file__).parents[1] / "vectors"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"total": 10, "count": 4, "minimum": 1}, [3, 3, 2, 2]),
        ({"total": 128, "count": 4, "unit": 16, "minimum": 1}, [32] * 4),
        ({"total": 80, "count": 3, "unit": 16, "minimum": 1}, [32, 32, 16]),
    ],
)
def test_an_even_split_is_in_whole_units(arguments, parts):
    assert balanced(**arguments) == parts


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"total": 256, "count": 4, "minimum": 1, "high_count": 1, "fraction": 0.5}, [96, 54, 53, 53]),
        ({"total": 256, "count": 4, "unit": 16, "minimum": 1, "high_count": 2, "fraction": 0.25}, [80, 80, 48, 48]),
    ],
)
def test_an_uneven_split_keeps_the_total(arguments, parts):
    assert imbalanced(**arguments) == parts


def test_a_split_below_its_minimum_is_refused():
    with pytest.raises(OnboardError, match="leave 0, less than 1"):
        balanced(2, 3, minimum=1)


@pytest.mark.parametrize(
    ("captures", "limit", "axis"),
    [
        ([1, 2, 4, 8], 40, [1, 2, 3, 4, 5, 8, 9, 16, 32, 40]),
        ([], 20, [1, 2, 4, 8, 16, 20]),
        ([64], 40, [40]),
        ([1, 2, 4, 8], 8, [1, 2, 3, 4, 5, 8]),
    ],
)
def test_an_axis_has_both_sides_of_every_capture(captures, limit, axis):
    assert capture_axis(captures, limit) == axis


@pytest.mark.parametrize(
    ("values", "samples", "kept"),
    [(range(10), 4, [0, 3, 6, 9]), (range(5), 2, [0, 4]), ([1, 2, 4, 8, 16, 32, 64], 3, [1, 8, 64])],
)
def test_thinning_keeps_both_ends(values, samples, kept):
    assert thin(values, samples) == kept


@pytest.mark.parametrize(
    ("values", "captures", "samples", "kept"),
    [
        (range(1, 21), [16], 8, [1, 6, 11, 16, 17, 18, 19, 20]),
        (range(1, 11), [4], 4, [1, 4, 7, 10]),
    ],
)
def test_a_short_eager_tail_stays_whole(values, captures, samples, kept):
    assert thin_axis(values, captures, samples) == kept


@pytest.mark.parametrize(
    ("batch", "kv_tokens", "steady"),
    [(1, 1, 2), (1, 2, 2), (3, 3, 6), (3, 4, 6), (3, 5, 6), (3, 6, 6), (3, 8, 8), (4, 16, 16)],
)
def test_the_second_step_reads_at_least_two_tokens_a_request(batch, kv_tokens, steady):
    assert steady_tokens(batch, kv_tokens) == steady


@pytest.mark.parametrize(
    ("batch", "most", "ladder"),
    [
        (1, 100, [2, 4, 8, 16, 32, 64, 100]),
        (3, 100, [6, 8, 16, 32, 64, 100]),
        (8, 1000, [16, 32, 64, 128, 256, 512, 1000]),
    ],
)
def test_the_ladder_of_contexts_doubles(batch, most, ladder):
    assert kv_ladder(batch, most) == ladder


@pytest.mark.parametrize(
    ("tokens", "options", "captures", "axis", "kv_samples"),
    [
        (8192, {}, 99, 199, 29),
        (1000, {}, 67, 132, 22),
        (1000, {"max_batch_size": 16}, 67, 132, 16),
        (512, {}, 51, 100, 21),
        (300, {}, 38, 74, 19),
        (16, {}, 5, 8, 11),
        (2, {}, 2, 2, 5),
        (8192, {"max_capture": 512}, 51, 105, 29),
        (1024, {"max_batch_size": 64}, None, None, 19),
    ],
)
def test_sampling_of_prefill(tokens, options, captures, axis, kv_samples):
    sampling = prefill_sampling(tokens, **options)
    if captures is not None:
        assert (len(sampling.captures), len(sampling.axis)) == (captures, axis)
    assert sampling.kv_token_samples == kv_samples


@pytest.mark.parametrize(("tokens", "last"), [(8192, (1952, 1984, 2016, 2048)), (1000, (928, 960, 992, 1000))])
def test_the_largest_captures(tokens, last):
    assert prefill_sampling(tokens).captures[-4:] == last


def test_the_engine_captures_its_own_graphs_under_policy_runtime():
    sampling = prefill_sampling(8192, max_batch_size=256, policy="runtime")
    assert sampling.kv_token_samples == 24
    document = sampling.document()
    assert document["cudagraph_policy"] == "runtime"
    assert {name for name, value in document.items() if value is None} == {
        "cudagraph_capture_sizes",
        "cudagraph_capture_size_count",
        "max_cudagraph_capture_size",
        "new_token_axis_points",
        "new_token_axis_point_count",
        "prefill_max_new_token_samples",
    }


@pytest.mark.parametrize(("tokens", "options"), [(1, {}), (8, {"policy": "runtime", "max_capture": 4})])
def test_impossible_sampling_is_refused(tokens, options):
    with pytest.raises(OnboardError):
        prefill_sampling(tokens, **options)


LIMITS = EngineLimits(
    max_model_len=1024,
    max_num_batched_tokens=64,
    max_num_seqs=8,
    block_size=16,
    usable_blocks=40,
    captures=(1, 2, 4, 8),
    decode_captures=(1, 2, 4),
)


@pytest.mark.parametrize(
    ("batch", "kv_tokens", "fits"),
    [
        (1, 639, True),  # 640 tokens with the one that is written: 40 blocks
        (1, 640, False),
        (2, 638, True),
        (2, 640, False),
        (8, 8, True),
    ],
)
def test_a_decode_pass_fits_when_its_blocks_are_there(batch, kv_tokens, fits):
    assert decode_fits(LIMITS, batch, kv_tokens) is fits


def test_sequences_may_not_outgrow_the_context():
    short = EngineLimits(
        max_model_len=100, max_num_batched_tokens=64, max_num_seqs=8, block_size=16, usable_blocks=1000
    )
    assert decode_fits(short, 1, 98)
    assert not decode_fits(short, 1, 99)


def test_prefill_runs_from_the_largest_to_the_smallest():
    points = prefill_points(LIMITS, Samples(), prefix_caching=True)
    tokens = [point.total_prefill_tokens for point in points]
    assert tokens == sorted(tokens, reverse=True)
    assert {point.batch_size for point in points} == {1, 2, 3, 4}
    assert all(point.total_kv_read_tokens % LIMITS.block_size == 0 for point in points)
    assert any(point.total_kv_read_tokens for point in points)
    assert not any(point.total_kv_read_tokens for point in prefill_points(LIMITS, Samples(), prefix_caching=False))


def test_warm_decode_runs_from_large_to_small_so_that_the_cache_is_filled_once():
    points = decode_points(LIMITS, Samples(), warm_kv=True)
    order = [(point.batch_size, point.total_kv_read_tokens) for point in points]
    assert order == sorted(order, reverse=True)
    assert {point.batch_size for point in points} == {1, 2, 3, 4, 5, 8}


def test_every_eager_shape_is_run_once_before_it_is_measured():
    points = decode_points(LIMITS, Samples())
    replicas = [point for point in with_replicas(points, LIMITS.decode_captures) if point.is_replica]
    assert sorted(point.batch_size for point in replicas) == [5, 8]


def test_reasons_say_on_which_side_of_a_capture_a_point_lies():
    reasons = {point.batch_size: point.reasons[0] for point in decode_points(LIMITS, Samples())}
    assert reasons == {
        1: "capture",
        2: "capture",
        3: "post_capture",
        4: "capture",
        5: "post_capture",
        8: "engine_limit",
    }


def test_the_smallest_capture_that_holds_a_pass_is_used():
    assert [capture_of(tokens, (4, 8)) for tokens in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, None]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_grid_is_the_one_that_a_real_engine_measured(phase):
    """Recorded: vLLM 0.31.0 on CPUs with the benchmark scheduler of Dynamo 1.6.1, in the order in which it ran."""
    recorded = json.loads(gzip.decompress((VECTORS / "collect_grid_vllm_cpu.json.gz").read_bytes()))[phase]
    found, asked = recorded["limits"], recorded["samples"]
    limits = EngineLimits(
        max_model_len=found["max_model_len"],
        max_num_batched_tokens=found["max_num_scheduled_tokens"],
        max_num_seqs=found["max_num_running_reqs"],
        block_size=found["block_size"],
        usable_blocks=recorded["usable_blocks"],
    )
    samples = Samples(
        prefill_new_tokens=asked["prefill_max_new_token_samples"],
        prefill_kv_tokens=asked["prefill_max_kv_read_token_samples"],
        prefix_batches=asked["prefix_max_batch_size_samples"],
        decode_kv_tokens=asked["decode_max_kv_read_token_samples"],
        decode_batches=asked["decode_max_batch_size_samples"],
    )
    points = (
        decode_points(limits, samples) if phase == "decode" else prefill_points(limits, samples, prefix_caching=True)
    )
    stamps = {"kvwarm_fake_fallback", "prefill_real_seed"}
    assert [
        [point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens, list(point.reasons)]
        for point in points
    ] == [
        [batch, tokens, kv_tokens, [reason for reason in reasons if reason not in stamps]]
        for batch, tokens, kv_tokens, reasons in recorded["points"]
    ]
