"""The state that an online learner starts from: the rows and trees of a training checkpoint as flat arrays.

Source: regression-and-learned.md sections 4.2 and 4.6.
"""

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.online import COUNTERS, bin_codes, sum_groups

if TYPE_CHECKING:
    from fpmsdk.learned.artifact import StoreForest, Tree
    from fpmsdk.learned.training_checkpoint import TrainingStore

# A threshold of at least this size divides values from missing ones.
_LARGEST = float(np.finfo(np.float64).max)

Arrays = dict[str, NDArray[Any]]


def seed_arrays(forest: "StoreForest", store: "TrainingStore", *, grouping: bool) -> Arrays:
    """The arrays of one store, as `fpmsdk.perfmodel.online_state` declares them, before any observation.

    Parameters
    ----------
    forest, store: trees and rows of one workload kind, verified.
    grouping: whether rows with equal bin codes become one.
    """
    codes = bin_codes(store.rows, list(store.bin_thresholds))
    group_of, first = _groups(codes) if grouping else (np.arange(len(codes)), np.arange(len(codes)))
    rows, sums = sum_groups(group_of.astype(np.int64), store.targets, len(first))
    columns, column_of = _columns(codes[first], [len(limits) + 1 for limits in store.bin_thresholds])
    sizes = np.array([len(limits) for limits in store.bin_thresholds], np.int64)
    counts = np.array([len(tree.left) for tree in forest.trees], np.int64)
    num_nodes = int(counts.sum())
    return {
        "num_bins": (sizes + 1).astype(np.int32),
        "column_of": column_of,
        "threshold_start": np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        "thresholds": np.concatenate([np.zeros(0), *store.bin_thresholds]),
        "columns": columns,
        "group_rows": rows,
        "group_sum": sums,
        "history_ids_sha256": np.frombuffer(ids_digest(store.row_ids), np.uint8).copy(),
        "rates": np.array([forest.baseline, store.learning_rate, store.l2_regularization]),
        "limits": np.array([store.min_samples_leaf, store.max_depth or 0], np.int64),
        "tree_slots": counts,
        "tree_nodes": counts.copy(),
        **_nodes(forest, store),
        "budget": np.zeros(num_nodes, np.int32),
        "generation": np.zeros(num_nodes, np.int64),
        "recent_gradient": np.zeros(num_nodes),
        "row_ids": np.zeros(0, np.int64),
        "stamps": np.zeros(0, np.int64),
        "targets": np.zeros(0),
        "codes": np.zeros((0, len(sizes)), np.uint8),
        "gradients": np.zeros((0, len(counts))),
        "clock": np.zeros(len(COUNTERS), np.int64),
    }


def ids_digest(row_ids: NDArray[np.int64]) -> bytes:
    """SHA-256 of row ids as little-endian integers of 8 bytes.

    Example
    -------
    >>> ids_digest(np.array([1200, 1201, 1202, 2013, 2014, 2015, 2374, 2460])).hex()[:16]
    'f689f5d98d6a9b87'
    """
    return hashlib.sha256(row_ids.astype("<u8").tobytes()).digest()


def _groups(codes: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # (group of each row, a row of each group); groups in the order of their codes.
    whole = np.ascontiguousarray(codes).view(np.dtype((np.void, codes.shape[1]))).ravel()
    _, first, group_of = np.unique(whole, return_index=True, return_inverse=True)
    return group_of, first


def _columns(codes: NDArray[np.uint8], num_bins: list[int]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    # (distinct columns, column of each feature): features that bin every row alike are looked at once.
    places: dict[tuple[int, bytes], int] = {}
    columns: list[NDArray[np.uint8]] = []
    column_of = []
    for feature, bins in enumerate(num_bins):
        column = np.ascontiguousarray(codes[:, feature])
        place = places.setdefault((bins, column.tobytes()), len(columns))
        if place == len(columns):
            columns.append(column)
        column_of.append(place)
    return np.array(columns, np.uint8), np.array(column_of, np.int32)


def _nodes(forest: "StoreForest", store: "TrainingStore") -> Arrays:
    # Nodes in preorder, with thresholds as the bins they close.
    names = ("left", "right", "feature", "bin", "missing_left", "value")
    found: dict[str, list[float]] = {name: [] for name in names}
    for tree in forest.trees:
        slots = _preorder(tree)
        place = {slot: i for i, slot in enumerate(slots)}
        for slot in slots:
            inner = tree.left[slot] >= 0
            feature = int(tree.feature[slot]) if inner else 0
            found["left"].append(place[int(tree.left[slot])] if inner else -1)
            found["right"].append(place[int(tree.right[slot])] if inner else -1)
            found["feature"].append(feature)
            found["bin"].append(bin_of(store.bin_thresholds[feature], tree.threshold[slot]) if inner else 0)
            found["missing_left"].append(int(tree.missing_left[slot]) if inner else 0)
            found["value"].append(0.0 if inner else float(tree.value[slot]))
    nodes: Arrays = {name: np.array(found[name], np.int32) for name in names[:5]}
    nodes["value"] = np.array(found["value"], np.float64)
    nodes["refreshed_value"] = nodes["value"].copy()
    return nodes


def bin_of(thresholds: NDArray[np.float64], threshold: float) -> int:
    """The bin that a tree's threshold closes; -1 when it is none of the feature's.

    Example
    -------
    >>> bin_of(np.array([1.5, 2.5]), 2.5), bin_of(np.array([1.5, 2.5]), 2.0)
    (1, -1)
    """
    if threshold == _LARGEST:
        return len(thresholds)
    place = int(np.searchsorted(thresholds, threshold))
    return place if place < len(thresholds) and thresholds[place] == threshold else -1


def _preorder(tree: "Tree") -> list[int]:
    order, waiting = [], [0]
    while waiting:
        slot = waiting.pop()
        order.append(slot)
        if tree.left[slot] >= 0:
            waiting += [int(tree.right[slot]), int(tree.left[slot])]
    return order
