"""Points that are repeated: keys, order and bounded selections.

Source: collector.md sections 7.4 and 12.
"""

import pytest

from fpmsdk.collect.repeatability_points import bounded_selection, bounding_sizes, captured_sizes, published_points
from fpmsdk.errors import OnboardError
from tests.collect.sweeps import captured_decodes, decode_point, prefill_point, sweep


@pytest.mark.parametrize(
    ("point", "key"),
    [
        (prefill_point(1, 4, 257, 128), "3a09ade0b3045202ba60e2ae86f316a9a0c88ba3361fc0ee9a94b493dc452363"),
        (decode_point(1, 4, 128), "500ee1e846772803ad34b48342f6192d1aff993513f8ae56a18ed65facaa765f"),
    ],
)
def test_the_key_of_a_point_is_the_digest_of_its_coordinates(point, key):
    [published] = published_points(sweep([point]), "cell")
    assert published.key == key


def test_points_are_ordered_by_batch_then_tokens_then_kv():
    points = [
        prefill_point(1, 2, 8, 0),
        prefill_point(2, 1, 16, 0),
        prefill_point(3, 1, 8, 64),
        prefill_point(4, 1, 8, 0),
    ]
    assert [published.point["benchmark_id"] for published in published_points(sweep(points), "cell")] == [4, 3, 2, 1]


def test_the_wall_time_of_a_point_is_that_of_its_slowest_rank():
    [published] = published_points(sweep([decode_point(1, 4, 128)], walls=[[0.010, 0.012]]), "cell")
    assert published.wall_s == 0.012
    assert published.rank_walls_document() == [[0, 0.010], [1, 0.012]]


def test_six_points_stand_for_the_recorded_grid():
    points = published_points(captured_decodes(), "cell")
    chosen = bounded_selection(points, 6)
    batches = {published.point["batch_size"] for published, _ in chosen}
    assert len(chosen) == 6
    assert {1, 32} <= batches
    assert [size for size in captured_sizes(points) if size not in bounding_sizes(points)] == [2, 4, 8]


def test_strata_name_extremes_regimes_and_both_sides_of_the_outer_captures():
    chosen = bounded_selection(published_points(captured_decodes(), "cell"), 6)
    assert sorted(set().union(*(reasons for _, reasons in chosen))) == [
        "batch_maximum",
        "batch_minimum",
        "capture_16_above",
        "capture_16_at",
        "capture_16_below",
        "capture_1_above",
        "capture_1_at",
        "kv_per_request_maximum",
        "kv_per_request_minimum",
        "new_tokens_maximum",
        "new_tokens_minimum",
        "regime:real_kv:FULL",
        "regime:real_kv:NONE",
    ]


def test_a_limit_that_cannot_cover_every_stratum_is_refused_and_names_the_rest():
    with pytest.raises(OnboardError, match=r"max_points_per_cell: 2 points cannot stand for .*capture_1"):
        bounded_selection(published_points(captured_decodes(), "cell"), 2)


def test_what_is_left_of_the_limit_is_spread_over_the_sweep():
    points = published_points(sweep([decode_point(n, 1, 16 * n) for n in range(1, 11)]), "cell")
    chosen = bounded_selection(points, 4)
    assert [published.point["total_kv_read_tokens"] for published, _ in chosen] == [16, 64, 112, 160]


def test_a_limit_above_the_sweep_takes_all_of_it():
    points = published_points(captured_decodes(), "cell")
    assert [published for published, _ in bounded_selection(points, 100)] == list(points)
