# One store of the online learner (regression-and-learned.md sections 4.2 to 4.4): which rows count, how much, and when
# they become a batch. What a batch does to the trees is `online_trees.pyx` and `online_forest.pyx`.

from libc.float cimport DBL_MAX
from libc.math cimport fabs, isnan
from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t

cimport cython
cimport numpy as cnp

from fpmsdk._ext.forest cimport MAX_FEATURES, Forest
from fpmsdk._ext.online_trees cimport Leaf, Node, OnlineTrees

import itertools

import numpy as np

from fpmsdk._ext.online_forest import OnlineForest as _OnlineForest
from fpmsdk._ext.online_trees import NODE_TYPES
from fpmsdk._ext.online_trees import OnlineTrees as _OnlineTrees
from fpmsdk._ext.sampler import wrong_state

cnp.import_array()

cdef enum:
    RECENT = 0
    PENDING
    ACCEPTED
    EVICTED
    PUBLICATIONS
    EAGER_UPDATES
    LAZY_UPDATES
    LAZY_FALLBACKS
    BATCHES_SINCE_EAGER
    REBUILT_NODES
    UPDATE_FAILURES
    NUM_COUNTERS

# Rows at hand first, then what `diagnostics()` counts.
COUNTERS = (
    "recent_rows", "pending_rows", "accepted_observations", "evicted_observations", "publications", "eager_updates",
    "lazy_updates", "lazy_fallbacks", "batches_since_eager", "rebuilt_nodes", "update_failures",
)

# Slots are numbered with 32 bits; so many rows would not fit into memory long before.
cdef int64_t MOST_ROWS = 1 << 30


cdef uint8_t code_of(const double* thresholds, int64_t count, double value) noexcept nogil:
    # How many thresholds lie below a value; missing values have the code after the last bin.
    cdef int64_t low = 0, high = count, middle
    if isnan(value):
        return <uint8_t>(count + 1)
    while low < high:
        middle = (low + high) // 2
        if thresholds[middle] < value:
            low = middle + 1
        else:
            high = middle
    return <uint8_t>low


def bin_codes(cnp.ndarray[double, ndim=2, mode="c"] rows not None, list thresholds not None):
    """Bin codes of rows, uint8 [row, feature].

    Parameters
    ----------
    rows: float64 [row, feature]; NaN is missing.
    thresholds: per feature float64, strictly increasing, at most 254.
    """
    cdef cnp.ndarray codes = np.empty((rows.shape[0], rows.shape[1]), np.uint8)
    cdef uint8_t* into = <uint8_t*>cnp.PyArray_DATA(codes)
    cdef const double* values = <const double*>cnp.PyArray_DATA(rows)
    cdef int64_t count, i, features = rows.shape[1], total = rows.shape[0]
    cdef const double* limits
    for f in range(features):
        limits = <const double*>cnp.PyArray_DATA(thresholds[f])
        count = len(thresholds[f])
        for i in range(total):
            into[i * features + <int64_t>f] = code_of(limits, count, values[i * features + <int64_t>f])
    return codes


def sum_groups(cnp.ndarray[int64_t, mode="c"] group_of not None, cnp.ndarray[double, mode="c"] targets not None, count):
    """(rows, sum of targets) of each group, summed in row order."""
    cdef cnp.ndarray rows = np.zeros(count, np.int64)
    cdef cnp.ndarray sums = np.zeros(count)
    cdef int64_t* row_data = <int64_t*>cnp.PyArray_DATA(rows)
    cdef double* sum_data = <double*>cnp.PyArray_DATA(sums)
    cdef int64_t i
    for i in range(group_of.shape[0]):
        row_data[group_of[i]] += 1
        sum_data[group_of[i]] += targets[i]
    return rows, sums


@cython.final
cdef class OnlineStore:
    """Rows and forest of one workload kind.

    Parameters
    ----------
    saved: arrays of the layout `online_store`, of a seed or of a saved state; already checked.
    controls: `estimator_config.fpm_learned`.
    place: of the store in the order of workload kinds.
    """

    def __init__(self, dict saved, dict controls, place):
        cdef int64_t rows, recent
        baseline, learning_rate, l2 = (float(number) for number in saved["rates"])
        min_samples_leaf, max_depth = (int(number) for number in saved["limits"])
        # As the trees read it, so that they need no copy.
        group_rows = saved["group_rows"].astype(np.uint32)
        self.forest = (_OnlineForest if controls["update_mode"] == "structural" else _OnlineTrees)(
            saved["columns"], saved["column_of"], saved["num_bins"], group_rows, saved["group_sum"],
            saved["tree_slots"], saved["tree_nodes"], {name: saved[name] for name in NODE_TYPES},
            controls | {
                "baseline": baseline, "learning_rate": learning_rate, "l2_regularization": l2,
                "min_samples_leaf": min_samples_leaf, "max_depth": max_depth, "store": place,
            },
        )
        changing = {*NODE_TYPES, "tree_nodes", "row_ids", "stamps", "targets", "codes", "gradients", "clock"}
        self.constants = {name: array for name, array in saved.items() if name not in changing}
        self.constants["group_rows"] = group_rows
        self.num_features = self.forest.num_features
        self.num_trees = self.forest.num_trees
        self.thresholds = <const double*>cnp.PyArray_DATA(self.constants["thresholds"])
        self.threshold_start = <const int64_t*>cnp.PyArray_DATA(self.constants["threshold_start"])
        self.window = min(controls["recent_window"], MOST_ROWS)
        self.max_age = min(controls["recent_max_age_observations"] or INT64_MAX, INT64_MAX)
        self.update_every = min(controls["update_every"], MOST_ROWS)
        self.refresh_interval = min(controls["eager_refresh_interval"], INT64_MAX)
        self.always_eager = controls["derivative_refresh"] == "eager"
        self.weight = -1.0 if controls["history_weight"] is None else controls["history_weight"]
        self.ramp = min(controls["history_weight_ramp_observations"], INT64_MAX)
        self.clock_array = np.array(saved["clock"], np.int64)
        self.clock = <int64_t*>cnp.PyArray_DATA(self.clock_array)
        recent = self.clock[RECENT]
        rows = recent + self.clock[PENDING]
        self.head = 0
        self.capacity = 0
        self.make_ring(max(rows, 1))
        ids, stamps, targets, codes, gradients, listed = self.ring
        ids[:rows], stamps[:rows], targets[:rows] = saved["row_ids"], saved["stamps"], saved["targets"]
        codes[:rows], gradients[:recent] = saved["codes"], saved["gradients"]
        self.forest.begin(self.listed, recent)

    cdef int make_ring(self, int64_t capacity) except -1:
        # A ring of so many slots with the rows at its start.
        cdef int64_t rows = self.clock[RECENT] + self.clock[PENDING]
        cdef list before = self.ring
        self.ring = [
            np.zeros(capacity, np.int64), np.zeros(capacity, np.int64), np.zeros(capacity),
            np.zeros((capacity, self.num_features), np.uint8), np.zeros((capacity, self.num_trees)),
            np.arange(capacity, dtype=np.int32),
        ]
        if self.capacity:
            slots = (self.head + np.arange(rows)) % self.capacity
            for new, old in zip(self.ring[:5], before[:5]):
                new[:rows] = old[slots]
        self.head = 0
        self.capacity = capacity
        self.bind()
        return 0

    cdef int bind(self) except -1:
        self.row_ids = <int64_t*>cnp.PyArray_DATA(self.ring[0])
        self.stamps = <int64_t*>cnp.PyArray_DATA(self.ring[1])
        self.targets = <double*>cnp.PyArray_DATA(self.ring[2])
        self.codes = <uint8_t*>cnp.PyArray_DATA(self.ring[3])
        self.gradients = <double*>cnp.PyArray_DATA(self.ring[4])
        self.listed = <int32_t*>cnp.PyArray_DATA(self.ring[5])
        self.forest.bind_ring(self.codes, self.targets, self.gradients, self.capacity)
        return 0

    cdef int reserve(self, int64_t num_observations) except -1:
        # Room for so many further rows; batches keep them below the window and one batch.
        cdef int64_t rows = self.clock[RECENT] + self.clock[PENDING], most = self.window + self.update_every
        cdef int64_t wanted = min(rows + num_observations, most)
        if wanted > self.capacity:
            self.make_ring(max(wanted, min(2 * self.capacity, most)))
        return 0

    # --- learning ---------------------------------------------------------------------------------------------------

    cdef void observe(self, const double* features, double target, int64_t row_id, int64_t now) noexcept nogil:
        # Take a row of the store; `now` is the model's count of accepted rows, this one included.
        cdef int64_t slot = (self.head + self.clock[RECENT] + self.clock[PENDING]) % self.capacity, start
        cdef int f
        for f in range(self.num_features):
            start = self.threshold_start[f]
            self.codes[slot * self.num_features + f] = code_of(
                self.thresholds + start, self.threshold_start[f + 1] - start, features[f]
            )
        self.targets[slot] = target
        self.row_ids[slot] = row_id
        self.stamps[slot] = now
        self.clock[PENDING] += 1
        self.clock[ACCEPTED] += 1
        if self.clock[PENDING] == self.update_every:
            self.run_batch(now)

    cdef double raw(self, const double* features) noexcept nogil:
        # What the trees say now, in target space.
        cdef uint8_t codes[MAX_FEATURES]
        cdef int64_t start
        cdef int f
        for f in range(self.num_features):
            start = self.threshold_start[f]
            codes[f] = code_of(self.thresholds + start, self.threshold_start[f + 1] - start, features[f])
        return self.forest.predict(codes)

    cdef int64_t batches(self) noexcept nogil:
        return self.clock[PUBLICATIONS]

    cdef bint is_due(self, int64_t now) noexcept nogil:
        # Whether a flush would change anything: rows wait, or have grown too old.
        return self.clock[PENDING] > 0 or (
            self.clock[RECENT] > 0 and self.stamps[self.head] <= now - self.max_age
        )

    cdef void weigh(self, int64_t recent, double* history_weight, double* recent_weight) noexcept nogil:
        # Weight of every row of the past, and of every recent one.
        # The order of the operations is that of the public wheel, to the last bit.
        cdef double past = <double>self.forest.history_rows, rows = <double>recent, ramped = 1.0, share
        history_weight[0] = recent_weight[0] = 1.0
        if recent == 0 or self.weight < 0.0:
            return
        if self.ramp > 0:
            ramped = min(1.0, rows / <double>self.ramp)
        share = (1.0 - ramped) * rows / (past + rows) + ramped * (1.0 - self.weight)
        history_weight[0] = (1.0 - share) * (past + rows) / past
        recent_weight[0] = share * (past + rows) / rows

    cdef void run_batch(self, int64_t now) noexcept nogil:
        cdef int64_t recent = self.clock[RECENT], total = recent + self.clock[PENDING], leaving, stay, i
        cdef double history_weight, recent_weight
        cdef bint lazy, done = False, must_rebuild = False
        leaving = max(0, total - self.window)
        while leaving < total and self.stamps[(self.head + leaving) % self.capacity] <= now - self.max_age:
            leaving += 1
        for i in range(total):
            self.listed[i] = <int32_t>((self.head + i) % self.capacity)
        self.weigh(total - leaving, &history_weight, &recent_weight)
        self.forest.set_weights(history_weight, recent_weight)
        stay = min(leaving, recent)
        lazy = not self.always_eager and self.clock[BATCHES_SINCE_EAGER] + 1 < self.refresh_interval
        self.forest.rebuilt = 0
        if lazy:
            done = self.forest.lazy(
                self.listed + stay, recent - stay, self.listed + max(recent, leaving), total - max(recent, leaving),
                self.listed, stay, &must_rebuild,
            )
        if not lazy or must_rebuild:
            done = self.forest.eager(self.listed + leaving, total - leaving)
        self.clock[PENDING] = 0
        if not done:
            self.clock[UPDATE_FAILURES] += 1
            return
        if lazy and not must_rebuild:
            self.clock[LAZY_UPDATES] += 1
            self.clock[BATCHES_SINCE_EAGER] += 1
        else:
            self.clock[EAGER_UPDATES] += 1
            self.clock[LAZY_FALLBACKS] += must_rebuild
            self.clock[BATCHES_SINCE_EAGER] = 0
            self.clock[REBUILT_NODES] += self.forest.rebuilt
        self.clock[PUBLICATIONS] += 1
        self.clock[RECENT] = total - leaving
        self.clock[EVICTED] += leaving
        self.head = (self.head + leaving) % self.capacity

    cdef Forest published(self, bint log_target, Forest before):
        # The trees as they are now, for serving; `before` are those of an earlier batch, None without any.
        if before is None or self.forest.structural:
            return self.published_anew(log_target)
        return self.published_like(before)

    cdef Forest published_like(self, Forest before):
        # Only leaves have moved. Both list them level by level, tree after tree.
        cdef Forest built = before.copied()
        cdef const Leaf* leaf = self.forest.leaves
        cdef int64_t place
        for place in range(built.num_nodes):
            if built.nodes[place].child == place:
                built.value[place] = leaf.value
                leaf += 1
        return built

    cdef Forest published_anew(self, bint log_target):
        cdef OnlineTrees forest = self.forest
        cdef int64_t nodes = forest.num_nodes, t, slot, start, f
        cdef cnp.ndarray root = np.empty(self.num_trees, np.int32)
        cdef cnp.ndarray feature = np.zeros(nodes, np.int16)
        cdef cnp.ndarray threshold = np.zeros(nodes)
        cdef cnp.ndarray left = np.empty(nodes, np.int32)
        cdef cnp.ndarray right = np.empty(nodes, np.int32)
        cdef cnp.ndarray value = np.empty(nodes)
        cdef cnp.ndarray missing_left = np.empty(nodes, np.uint8)
        cdef int32_t* roots = <int32_t*>cnp.PyArray_DATA(root)
        cdef int16_t* features = <int16_t*>cnp.PyArray_DATA(feature)
        cdef double* thresholds = <double*>cnp.PyArray_DATA(threshold)
        cdef int32_t* lefts = <int32_t*>cnp.PyArray_DATA(left)
        cdef int32_t* rights = <int32_t*>cnp.PyArray_DATA(right)
        cdef double* values = <double*>cnp.PyArray_DATA(value)
        cdef uint8_t* missing = <uint8_t*>cnp.PyArray_DATA(missing_left)
        cdef const Node* node
        cdef Forest built = Forest.__new__(Forest)
        for t in range(self.num_trees):
            start = forest.tree_start[t]
            roots[t] = <int32_t>start
            for slot in range(start, forest.tree_start[t + 1]):
                node = &forest.nodes[slot]
                values[slot] = forest.leaves[node.right].value if node.left < 0 else 0.0
                missing[slot] = node.missing_left != 0
                lefts[slot] = rights[slot] = -1
                if node.left >= 0:
                    f = self.threshold_start[node.feature]
                    features[slot] = <int16_t>node.feature
                    # The last bin divides values from missing ones: every value is at most the largest number.
                    thresholds[slot] = (
                        self.thresholds[f + node.bin] if f + node.bin < self.threshold_start[node.feature + 1] else DBL_MAX
                    )
                    lefts[slot] = <int32_t>(start + node.left)
                    rights[slot] = <int32_t>(start + node.right)
        built.baseline = forest.baseline
        built.log_target = log_target
        built.build(self.num_trees, roots, nodes, features, thresholds, lefts, rights, values, missing)
        return built

    # --- reports and state ------------------------------------------------------------------------------------------

    def counters(self):
        """Counts by name of `COUNTERS`."""
        return dict(zip(COUNTERS, self.clock_array.tolist()))

    def weights(self):
        """(weight of a row of the past, of a recent row) as of the last batch."""
        cdef double history_weight, recent_weight
        self.weigh(self.clock[RECENT], &history_weight, &recent_weight)
        return history_weight, recent_weight

    def history_ids_sha256(self):
        """Digest of the row ids of the past, hexadecimal."""
        return self.constants["history_ids_sha256"].tobytes().hex()

    def check_restored(self):
        """Raise for the first number of a restored store that its rows and trees do not lead to.

        Raises
        ------
        StateSnapshotError: recent derivatives of a leaf are not those of its rows, but for rounding.
        """
        cdef int64_t t, place, i, recent = self.clock[RECENT]
        cdef int32_t row
        cdef double found
        cdef double[::1] sums = np.zeros(self.forest.num_leaves)
        cdef double[::1] sizes = np.zeros(self.forest.num_leaves)
        for t in range(self.forest.first_mutable, self.num_trees):
            for i in range(recent):
                row = self.listed[i]
                place = self.forest.leaf_of(t, self.codes + row * self.num_features) - self.forest.leaves
                sums[place] += self.gradients[row * self.num_trees + t]
                sizes[place] += fabs(self.gradients[row * self.num_trees + t])
        for place in range(self.forest.leaf_start[self.forest.first_mutable], self.forest.num_leaves):
            found = self.forest.leaves[place].recent_gradient
            # Rows that came and went leave rounding behind, relative to what they were.
            if not fabs(found - sums[place]) <= 1e-6 * (1.0 + sizes[place]):
                raise wrong_state("recent_gradient", f"{sums[place]!r}, but for rounding", repr(found))

    def retained_row_ids(self):
        """Ids of the recent rows, oldest first; int64."""
        slots = (self.head + np.arange(self.clock[RECENT])) % self.capacity
        return self.ring[0][slots]

    def nbytes(self):
        """Bytes of everything that the store holds between batches, working memory included."""
        # Trees read some constants where they are.
        arrays = [*self.ring, *self.constants.values(), self.clock_array, *self.forest.arrays()]
        return sum(array.nbytes for array in {id(array): array for array in arrays}.values())

    def limits(self):
        """Bin thresholds of each feature, float64."""
        return [
            self.constants["thresholds"][start:end]
            for start, end in itertools.pairwise(self.constants["threshold_start"].tolist())
        ]

    def trees(self):
        """Serving trees of the store, each a dict of arrays as a learned artifact names them."""
        counts, nodes = self.forest.node_arrays()
        # Values against missing ones: every value is at most the largest number.
        padded = np.full((self.num_features, 256), np.finfo(np.float64).max)
        for feature, limit in enumerate(self.limits()):
            padded[feature, : len(limit)] = limit
        inner = nodes["left"] >= 0
        threshold = np.where(inner, padded[nodes["feature"], nodes["bin"]], 0.0)
        found = []
        start = 0
        for count in counts.tolist():
            part = slice(start, start + count)
            found.append({
                "left": nodes["left"][part], "right": nodes["right"][part],
                "feature": np.where(inner[part], nodes["feature"][part], -1).astype(np.int32),
                "threshold": threshold[part], "value": nodes["value"][part],
                "missing_left": nodes["missing_left"][part].astype(bool),
            })
            start += count
        return found

    def saved(self):
        """Copies of every array of the layout `online_store`, exactly as long as what they hold."""
        cdef int64_t recent = self.clock[RECENT], rows = recent + self.clock[PENDING]
        self.reserve(0)
        slots = (self.head + np.arange(rows)) % self.capacity
        counts, nodes = self.forest.node_arrays()
        ids, stamps, targets, codes, gradients, listed = self.ring
        return {name: array.copy() for name, array in self.constants.items()} | nodes | {
            "group_rows": self.constants["group_rows"].astype(np.int64),
            "tree_nodes": counts, "row_ids": ids[slots], "stamps": stamps[slots], "targets": targets[slots],
            "codes": codes[slots], "gradients": gradients[slots[:recent]], "clock": self.clock_array.copy(),
        }

    # --- for tests and tools ----------------------------------------------------------------------------------------

    def learn_rows(self, cnp.ndarray[double, ndim=2, mode="c"] rows not None, cnp.ndarray[double, mode="c"] targets,
                   first_id, now):
        """Observe rows one by one.

        Parameters
        ----------
        rows: float64 [row, feature].
        targets: float64 [row], in target space.
        first_id, now: id of the first row, and the model's count of accepted rows with it.
        """
        cdef int64_t i
        self.reserve(rows.shape[0])
        for i in range(rows.shape[0]):
            self.observe(&rows[i, 0], targets[i], first_id + i, now + i)

    def flush(self, int64_t now):
        """Run a batch if rows wait or have grown too old; whether it did."""
        self.reserve(0)
        if not self.is_due(now):
            return False
        self.run_batch(now)
        return True

    def predict_rows(self, cnp.ndarray[double, ndim=2, mode="c"] rows not None):
        """Raw values in target space of rows, float64 [row]."""
        cdef cnp.ndarray found = np.empty(rows.shape[0])
        cdef double* data = <double*>cnp.PyArray_DATA(found)
        cdef cnp.ndarray codes
        cdef int64_t i
        codes = bin_codes(rows, self.limits())
        for i in range(rows.shape[0]):
            data[i] = self.forest.predict(<uint8_t*>cnp.PyArray_DATA(codes) + i * self.num_features)
        return found
