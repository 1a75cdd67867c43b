"""Correction stores as units (fpm-model.md section 6; vectors V5 to V9 of that page)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk._ext.correction import CorrectionStore, DynamicLocalStore, FixedStore
from fpmsdk.config import normalize_config
from fpmsdk.perfmodel.correction import DYNAMIC_STORE, FIXED_STORE, build_corrections


def ratio(i):
    return 0.25 + (37 * i % 64) / 32


def dynamic(bins, max_observations, min_observations, bounds=(None, None)):
    store = DynamicLocalStore(DYNAMIC_STORE, bins, max_observations, min_observations)
    return CorrectionStore(None, store, len(bins), *bounds)


def fixed(maxima, bins, max_observations, min_observations, bounds=(None, None)):
    store = FixedStore(FIXED_STORE, maxima, bins, max_observations, min_observations)
    return CorrectionStore(store, None, len(bins), *bounds)


def feed(store, locate, count, native_ms=8.0):
    """Observe `count` rows and yield after each."""
    for i in range(count):
        store.observe(locate(i), observed_ms=native_ms * ratio(i), native_ms=native_ms)
        yield i


V5 = {
    3: (4, 0, 1.0, 1.0, 1.0, 1.0, 1.0),
    4: (5, 5, 0.8519906184020968, 0.875, 0.875, 0.875, 0.875),
    15: (16, 7, 1.0971208040331326, 1.234375, 1.2897338734261452, 1.2020488299882064, 1.234375),
    47: (48, 7, 0.9639741082132184, 1.1875, 0.9921761988483836, 1.179317954777056, 1.1875),
    48: (48, 7, 1.0361577477138206, 1.234375, 1.0210411569154376, 1.2136273479593103, 1.234375),
    100: (48, 7, 1.2308843757730847, 1.203125, 1.1374038786515308, 1.3379824355472518, 1.203125),
    128: (48, 7, 1.264345960444224, 1.15625, 1.2021890009590097, 1.3162676839824774, 1.15625),
    159: (48, 7, 1.4014781144339812, 1.265625, 1.3891286921110075, 1.067468433521641, 1.265625),
}


def test_dynamic_local_on_one_axis():
    store = dynamic((16,), 64, 5, bounds=(0.5, 2.0))
    seen = {
        i: (
            store.table.retained,
            store.table.ready_cells,
            *(store.table.factor((x,)) for x in (64.0, 100.0, 1024.0, 4096.0, 5000.0)),
        )
        for i in feed(store, lambda i: (64.0 * 2.0 ** (5 * i % 7),), 160)
    }
    assert {i: seen[i] for i in V5} == V5


V6 = {
    1: (2, 0, 1.0, 1.0, 1.0, 1.0),
    2: (3, 3, 0.5411927009931752, 0.5875868271973888, 0.5625, 0.5625),
    8: (9, 5, 1.24033371855334, 1.377521787438214, 1.34375, 1.34375),
    15: (12, 6, 1.322614239518308, 1.445502118048947, 1.4816265237183837, 1.4375),
    20: (12, 6, 1.5791847539812451, 1.5987346846392843, 1.5502396478496463, 1.640625),
    40: (12, 6, 1.2145671603088668, 1.2141327576506842, 1.165847978323447, 1.1875),
    63: (12, 5, 1.359375, 1.3806501577624208, 1.3213670359540188, 1.359375),
}


def test_dynamic_local_on_two_axes():
    store = dynamic((2, 3), 16, 3)
    points = ((1.0, 128.0), (5.0, 700.0), (13.0, 2176.0), (14.0, 2176.0))
    seen = {
        i: (store.table.retained, store.table.ready_cells, *map(store.table.factor, points))
        for i in feed(store, lambda i: (1.0 + 7 * i % 13, 128.0 * (1 + 11 * i % 17)), 64)
    }
    assert {i: seen[i] for i in V6} == V6


V7 = {
    4: (5, 0.5, 0.5, 1.40625, 1.0, 1.0),
    10: (10, 0.5, 0.5, 1.609375, 1.5, 1.0),
    63: (57, 0.5, 0.5, 1.4375, 1.5, 1.0),
    99: (64, 0.5, 0.5, 1.046875, 1.15625, 1.0),
}


def test_fixed_on_one_axis():
    store = fixed((8192.0,), (16,), 64, 5, bounds=(0.5, 2.0))
    seen = {
        i: (store.table.retained, *(store.table.factor((x,)) for x in (0.0, 511.0, 512.0, 8192.0, 8193.0)))
        for i in feed(store, lambda i: (float(997 * i % 9000),), 100)
    }
    assert {i: seen[i] for i in V7} == V7


V8 = {
    7: ([1, 1, 1, 2, 1, 1], 0.25, 1.1875, 1.71875, 1.0),
    8: ([1, 1, 2, 2, 1, 1], 0.25, 1.1875, 1.71875, 1.0),
    12: ([2, 2, 1, 1, 1, 1], 1.1875, 1.1875, 1.8125, 1.0),
    19: ([2, 2, 1, 1, 1, 1], 2.171875, 1.0625, 1.28125, 1.0),
}


def test_fixed_on_two_axes():
    store = fixed((10.0, 10.0), (2, 3), 8, 2)
    points = ((0.0, 0.0), (5.0, 4.0), (10.0, 10.0), (10.0, 11.0))
    seen = {}
    for i in feed(store, lambda i: (float(3 * i % 11), float(7 * i % 12)), 20):
        starts = store.fixed.arrays["bucket_start"][: store.fixed.num_cells + 1]
        seen[i] = ((starts[1:] - starts[:-1]).tolist(), *map(store.table.factor, points))
    assert {i: seen[i] for i in V8} == V8


@pytest.mark.parametrize(
    ("max_observations", "min_observations", "retained", "local_active"),
    [
        (64, 5, 48, True),
        (64, 10, 48, True),
        (16, 5, 11, True),
        (30, 1, 23, True),
        (20, 9, 11, True),
        (7, 5, 5, False),
        (9, 5, 5, False),
        (5, 5, 5, False),
        (1, 1, 1, False),
    ],
)
def test_dynamic_local_capacity(max_observations, min_observations, retained, local_active):
    store = dynamic((16,), max_observations, min_observations)
    for _ in feed(store, lambda i: (100.0,), 400):
        pass
    assert (store.table.retained, store.table.ready_cells > 0) == (retained, local_active)


def test_fixed_reservoir_evicts_from_the_fullest_bucket_with_the_largest_key():
    # regression-and-learned.md, vector 8.
    store = fixed((10.0, 10.0), (2, 3), 4, 1)
    for point in ((0.0, 0.0), (10.0, 10.0), (7.0, 7.0), (8.0, 8.0), (2.0, 0.0)):
        store.observe(point, observed_ms=1.0 + point[0], native_ms=1.0)
    kept = store.fixed.arrays["ratio"][store.fixed.arrays["order"][:4]]
    assert sorted(kept - 1.0) == [0.0, 2.0, 7.0, 8.0]


@pytest.mark.parametrize(
    ("observed_ms", "native_ms"),
    [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf), (1e308, 1e-10)],
)
@pytest.mark.parametrize("store", [dynamic((4,), 8, 1), fixed((100.0,), (4,), 8, 1)], ids=["dynamic", "fixed"])
def test_an_unusable_ratio_is_refused(store, observed_ms, native_ms):
    assert not store.observe((10.0,), observed_ms=observed_ms, native_ms=native_ms)
    assert (store.table.retained, store.table.ready, store.table.factors()) == (0, False, [])


def test_ratios_are_clamped_to_the_bounds():
    store = fixed((100.0,), (1,), 8, 1, bounds=(0.5, 2.0))
    store.observe((1.0,), observed_ms=90.0, native_ms=1.0)
    assert store.table.factor((1.0,)) == 2.0
    store.observe((1.0,), observed_ms=1.0, native_ms=90.0)
    assert store.table.factor((1.0,)) == 1.25


def hybrid(min_observations=1):
    parts = (
        FixedStore(FIXED_STORE, (100.0,), (4,), 8, min_observations),
        DynamicLocalStore(DYNAMIC_STORE, (4,), 8, min_observations),
    )
    return CorrectionStore(*parts, 1, None, None)


def test_hybrid_asks_the_fixed_store_inside_its_range_and_the_dynamic_one_outside():
    store = hybrid()
    store.observe((10.0,), observed_ms=1.5, native_ms=1.0)
    store.observe((500.0,), observed_ms=3.0, native_ms=1.0)
    assert store.table.factor((10.0,)) == 1.5
    assert store.table.factor((60.0,)) == 1.0  # an empty fixed cell says nothing, and the dynamic store is not asked
    assert store.table.factor((5000.0,)) == 2.25
    assert store.table.retained == 3


def test_reported_numbers_of_a_hybrid_are_those_of_its_parts():
    store = hybrid()
    store.observe((10.0,), observed_ms=1.5, native_ms=1.0)
    assert store.table.ready
    assert store.table.ready_cells == 2
    assert store.table.factors() == [1.5, 1.5, 1.5]


def test_one_axis_takes_the_cells_of_the_grid_of_two():
    config = normalize_config({"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"})
    stores = build_corrections(config["estimator_config"]["correction"], "fixed")
    for tokens in (0.0, 511.0, 512.0, 8192.0, 8193.0):
        stores["prefill"].observe((tokens,), observed_ms=1.0, native_ms=1.0)
    assert stores["prefill"].fixed.arrays["bucket_key"][:3].tolist() == [0, 1, 15]
    assert stores["prefill"].table.retained == 4
    assert stores["decode"].observe((512.0, 2_000_000.0), observed_ms=1.0, native_ms=1.0)
    assert not stores["mixed"].observe((8193.0, 0.0), observed_ms=1.0, native_ms=1.0)


def test_coordinates_of_the_wrong_number_are_an_error():
    with pytest.raises(ValueError, match="expected 1 workload coordinates, found 2"):
        dynamic((4,), 8, 1).table.factor((1.0, 2.0))


@given(
    rows=st.lists(st.tuples(st.integers(0, 5000), st.floats(0.01, 100.0)), min_size=1, max_size=80),
    max_observations=st.integers(1, 20),
)
def test_a_dynamic_factor_lies_among_the_ratios_it_keeps(rows, max_observations):
    store = dynamic((4,), max_observations, 1)
    for tokens, observed in rows:
        store.observe((float(tokens),), observed_ms=observed, native_ms=1.0)
    state = store.dynamic.arrays
    recent = state["recent"][: state["extent"][0]]
    kept = [*recent, *state["ratio"][: state["extent"][1]]]
    assert all(min(kept) <= store.table.factor((float(tokens),)) <= max(kept) for tokens, _ in rows)
    assert recent.tolist() == [observed for _, observed in rows][-len(recent) :]


@pytest.mark.parametrize("kind", [FixedStore, DynamicLocalStore, CorrectionStore])
def test_there_is_no_store_without_its_arrays(kind):
    with pytest.raises(TypeError):
        kind.__new__(kind)
