"""The walk over trees: direction at a node, missing values, the order of sums, what is no forest."""

import math

import numpy as np
import pytest

from fpmsdk._ext.forest import Forest


def forest(trees, baseline=0.0, log_target=False):
    """Trees as lists of nodes (feature, threshold, left, right, missing_left) or leaf values."""
    root, rows = [], []
    for tree in trees:
        start = len(rows)
        root.append(start)
        for node in tree:
            if isinstance(node, tuple):
                feature, threshold, left, right, *missing_left = node
                rows.append((feature, threshold, left + start, right + start, 0.0, *(missing_left or (True,))))
            else:
                rows.append((0, 0.0, -1, -1, node, True))
    columns = list(zip(*rows, strict=True)) or [()] * 6
    return Forest(
        baseline,
        log_target,
        np.array(root, "i4"),
        np.array(columns[0], "i2"),
        np.array(columns[1], "f8"),
        np.array(columns[2], "i4"),
        np.array(columns[3], "i4"),
        np.array(columns[4], "f8"),
        np.array(columns[5], "u1"),
    )


STUMP = [(0, 4.5, 1, 2), -0.5, 0.25]


@pytest.mark.parametrize(
    ("x", "expected"),
    [(4.0, 4.4816890703380645), (4.5, 4.4816890703380645), (5.0, 9.487735836358526), (math.inf, 9.487735836358526)],
)
def test_a_feature_up_to_the_threshold_goes_left(x, expected):
    assert forest([STUMP], 2.0, True).predict([x]) == expected


@pytest.mark.parametrize(("missing_left", "expected"), [(True, 1.0), (False, 2.0)])
def test_a_missing_feature_goes_where_the_node_says(missing_left, expected):
    nodes = [(0, 4.5, 1, 2, missing_left), 1.0, 2.0]
    assert forest([nodes]).predict([math.nan]) == expected
    assert forest([nodes] * 9, baseline=-8.0 * expected).predict([math.nan]) == expected


def test_a_feature_that_no_node_reads_may_be_missing():
    assert forest([STUMP], 1.0).predict([4.0, math.nan]) == 0.5


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 65, 150])
def test_leaves_are_added_to_the_baseline_in_tree_order(count):
    # Of widely different size, so that another order has other last bits; depths vary, so that trees are not walked
    # in their order.
    leaves = [10.0 ** (i * 7 % 19 - 9) * (-1) ** i for i in range(count)]
    trees = [chain(i * 5 % 4, leaf) for i, leaf in enumerate(leaves)]
    expected = 0.1
    for leaf in leaves:
        expected += leaf
    assert forest(trees, 0.1).predict([1.0]) == max(expected, 1e-6)


def chain(depth, leaf):
    """A tree whose right children are nodes, with `leaf` at the end."""
    nodes = []
    for k in range(depth):
        nodes += [(0, 0.5, 2 * k + 1, 2 * k + 2), 1e300]
    return [*nodes, leaf]


def test_a_forest_without_trees_answers_its_baseline():
    assert forest([], 3.5).predict([]) == 3.5


def test_no_answer_is_below_a_nanosecond():
    assert forest([], -5.0).predict([]) == 1e-6


@pytest.mark.parametrize(("baseline", "log_target"), [(1000.0, True), (math.nan, False), (math.inf, False)])
def test_a_latency_that_is_not_finite_is_no_answer(baseline, log_target):
    assert math.isnan(forest([], baseline, log_target).predict([]))


@pytest.mark.parametrize(
    "nodes",
    [
        [(0, 0.5, 1, 3), 1.0, 2.0],
        [(0, 0.5, 1, 1), (0, 0.5, 2, 2), 1.0],
        [(0, 0.5, 0, 1), 1.0, 2.0],
        [(135, 0.5, 1, 2), 1.0, 2.0],
        [(-1, 0.5, 1, 2), 1.0, 2.0],
    ],
    ids=["child out of range", "child twice", "own child", "feature beyond all", "negative feature"],
)
def test_nodes_that_form_no_trees_are_refused(nodes):
    with pytest.raises(ValueError, match="do not form trees"):
        forest([nodes])


def test_a_row_with_too_few_features_is_refused():
    with pytest.raises(ValueError, match="at least 1 values"):
        forest([STUMP]).predict([])


def test_arrays_of_another_type_are_refused():
    with pytest.raises(ValueError, match="feature: expected a contiguous array of i2"):
        Forest(0.0, False, *(np.zeros(1, kind) for kind in ("i4", "i8", "f8", "i4", "i4", "f8", "u1")))
