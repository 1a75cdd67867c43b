"""Tables and walk reach the same leaves: every width of masks, missing and infinite values, ties at thresholds."""

import numpy as np
import pytest

from fpmsdk._ext.forest import Forest
from fpmsdk._ext.forest_index import index_rows, indexed

PLENTY = 2**30


def grown(random, num_trees, num_leaves, num_features, levels):
    """A forest of random trees whose thresholds are few, so that rows meet them exactly."""
    root, feature, threshold, left, right, missing = [], [], [], [], [], []
    for _ in range(num_trees):
        start = len(feature)
        root.append(start)
        leaves = [start]
        size = 1
        children = {}
        for _ in range(int(random.integers(0, num_leaves))):
            node = leaves.pop(int(random.integers(0, len(leaves))))
            children[node] = (start + size, start + size + 1)
            leaves += children[node]
            size += 2
        for node in range(start, start + size):
            one, other = children.get(node, (-1, -1))
            left.append(one)
            right.append(other)
            feature.append(int(random.integers(0, num_features)))
            threshold.append(float(random.integers(0, levels)))
            missing.append(bool(random.integers(0, 2)))
    return Forest(
        0.1,
        False,
        np.array(root, "i4"),
        np.array(feature, "i2"),
        np.array(threshold, "f8"),
        np.array(left, "i4"),
        np.array(right, "i4"),
        random.normal(size=len(feature)) + 1.0,
        np.array(missing, "u1"),
    )


def rows_of(random, num_rows, num_features, levels):
    rows = random.integers(-1, levels + 1, (num_rows, num_features)).astype(float)
    rows[random.random(rows.shape) < 0.3] += 0.5
    rows[random.random(rows.shape) < 0.1] = np.nan
    rows[random.random(rows.shape) < 0.05] = np.inf
    rows[random.random(rows.shape) < 0.05] = -np.inf
    return rows


@pytest.mark.parametrize("num_leaves", [1, 2, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("num_trees", "num_rows"), [(1, 1), (7, 3), (150, 9), (300, 64), (600, 5)])
def test_tables_answer_as_the_walk(num_leaves, num_trees, num_rows):
    random = np.random.default_rng(num_leaves * 1000 + num_trees)
    forest = grown(random, num_trees, num_leaves, 6, 12)
    rows = rows_of(random, num_rows, 6, 12)
    one_by_one = np.array([forest.predict(row) for row in rows])
    np.testing.assert_array_equal(index_rows(indexed(forest, PLENTY), rows), one_by_one)
    np.testing.assert_array_equal(forest.predict_rows(rows), one_by_one)


def test_a_forest_without_trees_answers_its_baseline():
    forest = grown(np.random.default_rng(0), 0, 1, 1, 1)
    assert index_rows(indexed(forest, PLENTY), np.zeros((5, 0))).tolist() == [0.1] * 5


def test_more_leaves_than_a_mask_has_bits_are_walked():
    random = np.random.default_rng(5)
    forests = [grown(random, 20, leaves, 3, 200) for leaves in (64, 200)]
    assert [indexed(forest, PLENTY) is None for forest in forests] == [False, True]


def test_tables_beyond_the_limit_are_not_made():
    forest = grown(np.random.default_rng(6), 20, 16, 3, 20)
    size = indexed(forest, PLENTY).num_bytes
    assert indexed(forest, size) is not None
    assert indexed(forest, size - 1) is None


def test_rows_with_too_few_features_are_refused():
    forest = grown(np.random.default_rng(7), 20, 16, 3, 20)
    for call in (forest.predict_rows, lambda rows: index_rows(indexed(forest, PLENTY), rows)):
        with pytest.raises(ValueError, match="at least 3 columns"):
            call(np.zeros((2, 2)))
