"""Features of iterations equal those of the public trainer; what makes per-request lists usable."""

import math

import pytest

from fpmsdk._ext.forest_features import NAMES
from fpmsdk.learned.features import PRESETS, feature_matrix
from fpmsdk.metrics import FpmBatch
from tests.vectors import load_vectors

CASES = load_vectors("learned_peer")["features"]


def features_of(ranks, names=NAMES):
    rows, complete = feature_matrix(FpmBatch.from_dicts([[{"scheduled_requests": rank} for rank in ranks]]), names)
    return dict(zip(names, rows[0].tolist(), strict=True)), bool(complete[0])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_feature_is_bit_equal_to_the_recorded_one(case):
    found, _ = features_of(case["iteration"])
    assert len(found) == 135
    for name, value in found.items():
        expected = case["values"].get(name, 0.0) if name.startswith("slot") else case["values"][name]
        assert math.isnan(value) if expected is None else value == expected, name


def decode(extend, past, kv=None):
    return {
        "num_decode_requests": len(extend),
        "sum_decode_kv_tokens": sum(past) if kv is None else kv,
        "extend_lengths": list(extend),
        "past_kv_lengths": list(past),
    }


@pytest.mark.parametrize(
    ("ranks", "usable"),
    [
        ([decode([1, 1], [10, 20])], True),
        ([decode([1, 1], [10, 20], kv=28)], True),  # the requests' own new tokens may be counted
        ([decode([1, 1], [10, 20], kv=27)], False),
        ([{"num_decode_requests": 1, "sum_decode_kv_tokens": 5}], False),
        ([decode([1], [5]), {"num_decode_requests": 1, "sum_decode_kv_tokens": 5}], False),
        ([decode([1], [5]), {}], True),  # idle ranks do not matter
        ([decode([1], [5]), decode([1, 1], [2**63, 2**63], kv=1)], False),  # no wrap-around
        ([decode([1], [2**64 - 1], kv=7)], False),
    ],
)
def test_lists_are_usable_when_every_active_rank_has_them_and_they_fit_its_sums(ranks, usable):
    found, complete = features_of(ranks)
    assert complete is usable
    assert math.isnan(found["req_batch_size"]) is not usable
    assert found["slot0_present"] == usable


def test_slots_hold_the_longest_requests_of_all_ranks_first():
    found, _ = features_of([decode([1, 3], [5, 9]), decode([2, 4], [9, 1])])
    slots = [(found[f"slot{i}_past"], found[f"slot{i}_extend"]) for i in range(5)]
    assert slots == [(9.0, 3.0), (9.0, 2.0), (5.0, 1.0), (1.0, 4.0), (0.0, 0.0)]
    assert [found[f"slot{i}_present"] for i in range(5)] == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_more_requests_than_slots_keep_the_longest():
    found, _ = features_of([decode([1] * 300, range(300))])
    assert found["slot0_past"] == 299.0
    assert found["slot31_past"] == 268.0
    assert found["req_batch_size"] == 300.0


def test_sums_beyond_exact_integers_run_from_the_longest_request():
    # 2**60 first, then each 1 is lost; the other way round the last place of 2**60 would be one more.
    found, _ = features_of([decode([1] * 257, [1] * 256 + [2**30])], ("req_sum_past_squared",))
    assert found["req_sum_past_squared"] == 2.0**60


@pytest.mark.parametrize(
    ("preset", "count"),
    [("v1", 21), ("fpm5", 17), ("atomic5", 5), ("atomic10", 10), ("sglang18", 18), ("hisim", 97), ("all", 135)],
)
def test_presets_name_known_features(preset, count):
    assert len(set(PRESETS[preset])) == len(PRESETS[preset]) == count
    assert set(PRESETS[preset]) <= set(NAMES)


def test_only_the_features_asked_for_are_returned_in_their_order():
    names = ("sum_decode_kv_tokens", "num_active_ranks")
    rows, _ = feature_matrix(FpmBatch.from_dicts([{"scheduled_requests": decode([1], [5])}]), names)
    assert rows.tolist() == [[5.0, 1.0]]
