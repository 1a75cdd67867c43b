"""What an online learner and a causal selector keep: declared arrays, and the rules that saved ones obey.

Source: regression-and-learned.md sections 4.2, 5 and 6.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from fpmsdk._ext.causal_selector import KEYS
from fpmsdk._ext.learned_online import LEARNER_CLOCKS
from fpmsdk._ext.online import COUNTERS
from fpmsdk._ext.online_trees import DEPTH_LIMIT
from fpmsdk._ext.sampler import wrong_state
from fpmsdk.snapshot.layout import StateField, StateLayout

if TYPE_CHECKING:
    from fpmsdk.snapshot.layout import Arrays

# Further counting has to stay far from where numbers wrap.
_MOST_OBSERVATIONS = 1 << 62

ONLINE_MODEL = StateLayout(
    "online_model",
    1,
    (
        StateField(
            "clock",
            "i8",
            (len(LEARNER_CLOCKS) + 1,),
            ", ".join((*LEARNER_CLOCKS, "rejected_observations")),
            minimum=0,
            maximum=_MOST_OBSERVATIONS,
        ),
    ),
)

ONLINE_STORE = StateLayout(
    "online_store",
    1,
    (
        StateField("num_bins", "i4", ("features",), "bins of each feature, missing left out", minimum=1, maximum=255),
        StateField("column_of", "i4", ("features",), "which column of codes each feature reads", minimum=0),
        StateField("threshold_start", "i8", ("features+1",), "first threshold of each feature", minimum=0),
        StateField("thresholds", "f8", ("thresholds",), "upper bounds of bins, feature after feature"),
        StateField("group_rows", "i8", ("groups",), "rows of the past in each group", minimum=1),
        StateField("group_sum", "f8", ("groups",), "summed targets of each group"),
        StateField("columns", "u1", ("columns", "groups"), "bin codes of the groups"),
        StateField("history_ids_sha256", "u1", (32,), "digest of the row ids of the past"),
        StateField("rates", "f8", (3,), "baseline, learning rate, L2 regularization"),
        StateField("limits", "i8", (2,), "rows of a leaf at least, depth at most (0: no limit)", minimum=0),
        StateField("tree_slots", "i8", ("trees",), "nodes that each tree may have", minimum=1),
        StateField("tree_nodes", "i8", ("trees",), "nodes of each tree", minimum=1),
        StateField("left", "i4", ("nodes",), "left child in its tree, -1 for leaves", minimum=-1),
        StateField("right", "i4", ("nodes",), "right child in its tree, -1 for leaves", minimum=-1),
        StateField("feature", "i4", ("nodes",), "feature of a split, 0 for leaves", minimum=0),
        StateField("bin", "i4", ("nodes",), "codes up to this one go left, 0 for leaves", minimum=0),
        StateField("missing_left", "i4", ("nodes",), "whether missing values go left", minimum=0, maximum=1),
        StateField("budget", "i4", ("nodes",), "leaves that a rebuild may grow", minimum=1),
        StateField("generation", "i8", ("nodes",), "rebuilds a node has come through", minimum=0),
        StateField("value", "f8", ("nodes",), "what a leaf adds, target space"),
        StateField("refreshed_value", "f8", ("nodes",), "leaf value in the stored derivatives of the past"),
        StateField("recent_gradient", "f8", ("nodes",), "summed derivatives of a leaf's recent rows"),
        StateField("row_ids", "i8", ("rows",), "ids of recent, then pending rows, oldest first", minimum=0),
        StateField("stamps", "i8", ("rows",), "accepted observations of the model at each row", minimum=0),
        StateField("targets", "f8", ("rows",), "targets of recent and pending rows"),
        StateField("codes", "u1", ("rows", "features"), "bin codes of recent and pending rows"),
        StateField("gradients", "f8", ("recent", "trees"), "stored derivatives of recent rows"),
        StateField("clock", "i8", (len(COUNTERS),), ", ".join(COUNTERS), minimum=0, maximum=_MOST_OBSERVATIONS),
    ),
)

CAUSAL_SELECTOR = StateLayout(
    "causal_selector",
    1,
    (
        StateField("observations", "i8", (len(KEYS),), "observations of each key", minimum=0),
        StateField("stable_ewma", "f8", (len(KEYS),), "smoothed relative error of the stable expert", minimum=0.0),
        StateField("online_ewma", "f8", (len(KEYS),), "smoothed relative error of the learning expert", minimum=0.0),
        StateField("online_selected", "u1", (len(KEYS),), "whether the learning expert answers", maximum=1),
        StateField("streak", "i8", (len(KEYS),), "consecutive observations in favour of the other", minimum=0),
        StateField("switches", "i8", (len(KEYS),), "changes of the selected expert", minimum=0),
    ),
)

# Stores of a selector's saved state: the calibration of each key, then the evidence.
SELECTOR_STORE = "selector"


def calibration_name(workload: str, query: str) -> str:
    """How a saved state calls the calibration of a key."""
    return f"{workload}.{query}"


CALIBRATION_STORES = tuple(calibration_name(*key) for key in KEYS)

# The store that holds what the stores of a learner share.
LEARNER_STORE = "learner"


def check_online_store(saved: "Arrays", controls: dict[str, Any], num_features: int) -> None:
    """Raise `StateSnapshotError` for the first array of a saved store that no run under these controls leaves behind.

    Parameters
    ----------
    saved: arrays of `ONLINE_STORE`, within their declared bounds.
    controls: `estimator_config.fpm_learned`.
    num_features: of the model.
    """
    _check_bins(saved, num_features)
    _check_rates(saved)
    _check_trees(saved)
    if controls["update_mode"] == "leaf_only":
        _check_never_rebuilt(saved)
    _check_rows(saved, controls)


def _require(holds: Any, field: str, expected: Any, found: Any) -> None:
    if not bool(holds):
        raise wrong_state(field, expected, found)


def _check_bins(saved: "Arrays", num_features: int) -> None:
    bins, start, thresholds = saved["num_bins"], saved["threshold_start"], saved["thresholds"]
    _require(len(bins) == num_features, "num_bins", f"{num_features} features", len(bins))
    _require(start[0] == 0 and start[-1] == len(thresholds), "threshold_start", f"0 to {len(thresholds)}", start)
    _require((np.diff(start) == bins - 1).all(), "threshold_start", "one threshold less than bins", start)
    inside = np.ones(max(len(thresholds) - 1, 0), bool)
    inside[start[1:-1][(start[1:-1] > 0) & (start[1:-1] < len(thresholds))] - 1] = False
    _require((np.diff(thresholds)[inside] > 0).all(), "thresholds", "strictly increasing per feature", "others")
    columns, column_of = saved["columns"], saved["column_of"]
    _require(len(saved["group_rows"]) > 0, "group_rows", "at least one group", 0)
    # Added by Python, which does not wrap.
    total = sum(saved["group_rows"].tolist())
    _require(total < 1 << 32, "group_rows", "fewer than 2^32 rows", total)
    expected = np.arange(len(columns))
    _require(np.array_equal(np.unique(column_of), expected), "column_of", f"all of {len(columns)} columns", column_of)
    for feature, column in enumerate(column_of):
        _require(
            columns[column].max() <= bins[feature], "columns", f"codes up to {bins[feature]}", columns[column].max()
        )
        _require(bins[feature] == bins[np.argmax(column_of == column)], "column_of", "one of as many bins", int(column))


def _check_rates(saved: "Arrays") -> None:
    _, learning_rate, l2 = saved["rates"]
    _require(learning_rate > 0 and l2 >= 0, "rates", "a learning rate above 0 and no negative penalty", saved["rates"])
    _require(saved["limits"][0] >= 1, "limits[0]", "at least 1", saved["limits"][0])


def _check_trees(saved: "Arrays") -> None:
    slots, counts, nodes = saved["tree_slots"], saved["tree_nodes"], len(saved["left"])
    _require((counts <= slots).all(), "tree_nodes", "at most tree_slots", counts)
    _require(counts.sum() == nodes, "tree_nodes", f"{nodes} in all", counts.sum())
    # Every leaf of a seed holds a group, so that no more memory is asked for than the groups need themselves.
    most = 2 * len(saved["group_rows"]) - 1
    _require((slots <= most).all(), "tree_slots", f"at most {most}", slots.max(initial=0))
    _require(sum(slots.tolist()) < 1 << 31, "tree_slots", "less than 2^31 in all", sum(slots.tolist()))
    leaf = saved["left"] < 0
    for name in ("value", "refreshed_value", "recent_gradient"):
        # Not -0.0 either: inner nodes are written as 0.0, and equal state has to give equal bytes.
        _require(not saved[name][~leaf].view(np.int64).any(), name, "0.0 at inner nodes", "others")
    for name in ("feature", "bin", "missing_left"):
        _require((saved[name][leaf] == 0).all(), name, "0 at leaves", "others")
    bins = saved["num_bins"]
    _require((saved["feature"] < len(bins)).all(), "feature", f"below {len(bins)}", saved["feature"].max())
    _require((saved["bin"] < bins[saved["feature"]]).all(), "bin", "a bin of its feature", "another")
    generation = int(saved["generation"].max(initial=0))
    _require(generation <= _MOST_OBSERVATIONS, "generation", f"at most {_MOST_OBSERVATIONS}", generation)
    start = 0
    for tree, (count, most) in enumerate(zip(counts.tolist(), slots.tolist(), strict=True)):
        left, right = (saved[name][start : start + count].tolist() for name in ("left", "right"))
        budget = saved["budget"][start : start + count].tolist()
        _check_tree(tree, left, right, budget, most)
        start += count


def _check_never_rebuilt(saved: "Arrays") -> None:
    generation = int(saved["generation"].max(initial=0))
    _require(generation == 0, "generation", "0 where only leaves learn", generation)
    # A root may have no fewer leaves than there are, so that every node has as many as it may.
    leaves, most = int((saved["left"] < 0).sum()), int(((saved["tree_slots"] + 1) // 2).sum())
    _require(leaves == most, "budget", f"{leaves} leaves in all, where only leaves learn", most)


def _check_tree(tree: int, left: list[int], right: list[int], budget: list[int], slots: int) -> None:
    # In preorder: a left child follows its parent, a right child the left subtree.
    where = f"left, right of tree {tree}"
    _require(slots == 2 * budget[0] - 1, f"budget of tree {tree}", f"{(slots + 1) / 2}", budget[0])
    waiting, place = [(0, 0)], 0
    while waiting:
        expected, depth = waiting.pop()
        _require(expected == place and place < len(left), where, "nodes in preorder", expected)
        _require(depth <= DEPTH_LIMIT, where, f"a depth of at most {DEPTH_LIMIT}", depth)
        one, two = left[place], right[place]
        if one >= 0:
            _require(one == place + 1 and one < two < len(left), where, "nodes in preorder", (one, two))
            shared = budget[one] + budget[two]
            _require(
                budget[place] >= shared, f"budget of tree {tree}, node {place}", f"at least {shared}", budget[place]
            )
            waiting += [(two, depth + 1), (one, depth + 1)]
        else:
            _require(two < 0, where, "two children or none", (one, two))
        place += 1
    _require(place == len(left), where, f"{len(left)} nodes that can be reached", place)


def _check_rows(saved: "Arrays", controls: dict[str, Any]) -> None:
    clock = dict(zip(COUNTERS, saved["clock"].tolist(), strict=True))
    recent, pending, rows = clock["recent_rows"], clock["pending_rows"], len(saved["row_ids"])
    _require(recent + pending == rows, "clock (recent_rows, pending_rows)", f"{rows} rows", (recent, pending))
    _require(recent == len(saved["gradients"]), "clock (recent_rows)", len(saved["gradients"]), recent)
    _require(recent <= controls["recent_window"], "clock (recent_rows)", f"at most {controls['recent_window']}", recent)
    _require(pending < controls["update_every"], "clock (pending_rows)", f"below {controls['update_every']}", pending)
    fixed = len(saved["tree_slots"]) - (controls["mutable_tree_tail"] or len(saved["tree_slots"]))
    _require(
        (saved["gradients"][:, : max(fixed, 0)] == 0.0).all(), "gradients", "0.0 of trees that are fixed", "others"
    )
    for name in ("row_ids", "stamps"):
        _require((np.diff(saved[name]) > 0).all(), name, "ascending", saved[name])
    _require((saved["codes"] <= saved["num_bins"]).all(), "codes", "bins of their features", "others")
    accepted, evicted = clock["accepted_observations"], clock["evicted_observations"]
    _require(rows + evicted <= accepted, "clock (accepted_observations)", f"at least {rows + evicted}", accepted)
    updates = clock["eager_updates"] + clock["lazy_updates"]
    _require(clock["publications"] == updates, "clock (publications)", updates, clock["publications"])
    _require(
        clock["lazy_fallbacks"] <= clock["eager_updates"],
        "clock (lazy_fallbacks)",
        f"at most {clock['eager_updates']}",
        clock["lazy_fallbacks"],
    )
    _require(
        clock["batches_since_eager"] <= clock["lazy_updates"]
        and clock["batches_since_eager"] < controls["eager_refresh_interval"],
        "clock (batches_since_eager)",
        f"below {controls['eager_refresh_interval']}, at most {clock['lazy_updates']}",
        clock["batches_since_eager"],
    )
