# Walks the trees of a learned forest (regression-and-learned.md section 3.1). One walk waits for memory at every node,
# so eight are advanced in turn; a node costs the same whichever way it goes. Leaves are added in tree order.

from libc.math cimport INFINITY, NAN, exp, isfinite, isnan
from libc.stdint cimport int16_t, int32_t, uint8_t, uint16_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

cimport numpy as cnp

import numpy as np

cnp.import_array()

cdef double FLOOR_MS = 1e-6


cdef class Forest:
    """Trees of one store. Immutable once built; any number of threads may ask it.

    Parameters
    ----------
    baseline: added to the leaves, in the target's space.
    log_target: leaves and baseline are natural logarithms of ms, else ms.
    root: int32[trees], index of each tree's root.
    feature, threshold, left, right, value, missing_left: arrays of all nodes (int16, float64, int32, int32, float64,
        uint8); a node with a negative `left` is a leaf, others go left when the feature is at most the threshold.

    Source: regression-and-learned.md section 3.1.

    Example
    -------
    >>> import numpy as np
    >>> forest = Forest(2.0, True, np.array([0], "i4"), np.array([0, 0, 0], "i2"), np.array([4.5, 0.0, 0.0]),
    ...     np.array([1, -1, -1], "i4"), np.array([2, -1, -1], "i4"), np.array([0.0, -0.5, 0.25]),
    ...     np.array([1, 1, 1], "u1"))
    >>> forest.predict([4.0]), forest.predict([5.0])
    (4.4816890703380645, 9.487735836358526)
    """

    def __init__(
        self, double baseline, bint log_target, cnp.ndarray root, cnp.ndarray feature, cnp.ndarray threshold,
        cnp.ndarray left, cnp.ndarray right, cnp.ndarray value, cnp.ndarray missing_left,
    ):
        cdef Py_ssize_t num_nodes = feature.shape[0]
        nodes = {"feature": (feature, "i2"), "threshold": (threshold, "f8"), "left": (left, "i4"),
                 "right": (right, "i4"), "value": (value, "f8"), "missing_left": (missing_left, "u1")}
        for name, (array, kind) in ({"root": (root, "i4")} | nodes).items():
            if array.dtype != np.dtype(kind) or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"{name}: expected a contiguous array of {kind}, found {array.dtype} {array.shape}")
            if name != "root" and array.shape[0] != num_nodes:
                raise ValueError(f"{name}: expected {num_nodes} nodes, found {array.shape[0]}")
        self.baseline = baseline
        self.log_target = log_target
        self.build(
            root.shape[0], <const int32_t*>cnp.PyArray_DATA(root), num_nodes,
            <const int16_t*>cnp.PyArray_DATA(feature), <const double*>cnp.PyArray_DATA(threshold),
            <const int32_t*>cnp.PyArray_DATA(left), <const int32_t*>cnp.PyArray_DATA(right),
            <const double*>cnp.PyArray_DATA(value), <const uint8_t*>cnp.PyArray_DATA(missing_left),
        )

    def __dealloc__(self):
        self.release()

    cdef void release(self):
        free(self.nodes)
        free(self.value)
        free(self.root)
        free(self.order)
        free(self.steps)
        self.nodes = NULL
        self.value = NULL
        self.root = self.order = self.steps = NULL

    cdef int build(
        self, Py_ssize_t num_trees, const int32_t* root, Py_ssize_t num_nodes, const int16_t* feature,
        const double* threshold, const int32_t* left, const int32_t* right, const double* value,
        const uint8_t* missing_left,
    ) except -1:
        cdef int32_t* source = <int32_t*>malloc((num_nodes + 1) * sizeof(int32_t))   # node behind each place
        cdef int32_t* depth = <int32_t*>malloc((num_nodes + 1) * sizeof(int32_t))
        cdef int32_t* tree_depth = <int32_t*>malloc((num_trees + 1) * sizeof(int32_t))
        cdef Py_ssize_t groups = num_trees // TREES_AT_ONCE + num_trees // CHUNK + 2
        cdef Py_ssize_t tree, place, end = 0, node
        cdef ForestNode* packed
        cdef bint well_formed = True
        self.release()
        self.nodes = <ForestNode*>malloc((num_nodes + 1) * sizeof(ForestNode))
        self.value = <double*>malloc((num_nodes + 1) * sizeof(double))
        self.root = <int32_t*>malloc((num_trees + 1) * sizeof(int32_t))
        self.order = <int32_t*>malloc((num_trees + 1) * sizeof(int32_t))
        self.steps = <int32_t*>calloc(groups, sizeof(int32_t))
        if (
            source == NULL or depth == NULL or tree_depth == NULL or self.nodes == NULL or self.value == NULL
            or self.root == NULL or self.order == NULL or self.steps == NULL
        ):
            free(source)
            free(depth)
            free(tree_depth)
            raise MemoryError
        self.num_trees = num_trees
        self.num_features = 0
        for tree in range(num_trees):
            if not 0 <= root[tree] < num_nodes or end >= num_nodes:
                well_formed = False
                break
            # Breadth first: the upper levels of a tree, which every walk passes, share cache lines.
            self.root[tree] = end
            source[end] = root[tree]
            depth[end] = 0
            place = end
            end += 1
            while place < end:
                node = source[place]
                packed = &self.nodes[place]
                self.value[place] = value[node]
                if left[node] < 0:
                    packed[0] = ForestNode(INFINITY, place, 0, 1)
                elif (
                    left[node] >= num_nodes or not 0 <= right[node] < num_nodes or end + 2 > num_nodes
                    or not 0 <= feature[node] < MAX_FEATURES
                ):
                    well_formed = False
                else:
                    packed[0] = ForestNode(threshold[node], end, feature[node], missing_left[node] != 0)
                    self.num_features = max(self.num_features, feature[node] + 1)
                    source[end] = left[node]
                    source[end + 1] = right[node]
                    depth[end] = depth[end + 1] = depth[place] + 1
                    end += 2
                tree_depth[tree] = depth[place]
                place += 1
        self.num_nodes = end
        if well_formed:
            self.arrange(tree_depth)
        free(source)
        free(depth)
        free(tree_depth)
        if not well_formed:
            self.num_trees = 0
            raise ValueError("the nodes do not form trees: an index is out of range, or a node has two parents")
        return 0

    cdef Forest copied(self):
        cdef Forest copy = Forest.__new__(Forest)
        cdef Py_ssize_t groups = self.num_trees // TREES_AT_ONCE + self.num_trees // CHUNK + 2
        copy.nodes = <ForestNode*>malloc((self.num_nodes + 1) * sizeof(ForestNode))
        copy.value = <double*>malloc((self.num_nodes + 1) * sizeof(double))
        copy.root = <int32_t*>malloc((self.num_trees + 1) * sizeof(int32_t))
        copy.order = <int32_t*>malloc((self.num_trees + 1) * sizeof(int32_t))
        copy.steps = <int32_t*>malloc(groups * sizeof(int32_t))
        if copy.nodes == NULL or copy.value == NULL or copy.root == NULL or copy.order == NULL or copy.steps == NULL:
            raise MemoryError
        copy.baseline, copy.log_target = self.baseline, self.log_target
        copy.num_trees, copy.num_nodes, copy.num_features = self.num_trees, self.num_nodes, self.num_features
        memcpy(copy.nodes, self.nodes, self.num_nodes * sizeof(ForestNode))
        memcpy(copy.value, self.value, self.num_nodes * sizeof(double))
        memcpy(copy.root, self.root, self.num_trees * sizeof(int32_t))
        memcpy(copy.order, self.order, self.num_trees * sizeof(int32_t))
        memcpy(copy.steps, self.steps, groups * sizeof(int32_t))
        return copy

    cdef void arrange(self, const int32_t* tree_depth) noexcept nogil:
        # Trees of a chunk in ascending depth, by counting insertion; a group takes the steps of its deepest tree.
        cdef Py_ssize_t first = 0, last, tree, at, group = 0
        while first < self.num_trees:
            last = min(first + CHUNK, self.num_trees)
            for tree in range(first, last):
                at = tree
                while at > first and tree_depth[self.order[at - 1]] > tree_depth[tree]:
                    self.order[at] = self.order[at - 1]
                    at -= 1
                self.order[at] = tree
            at = first
            while at < last:
                self.steps[group] = tree_depth[self.order[min(at + TREES_AT_ONCE, last) - 1]]
                group += 1
                at += TREES_AT_ONCE
            first = last

    cdef double raw(self, const double* features) noexcept nogil:
        cdef double leaves[CHUNK]
        cdef double total = self.baseline
        cdef Py_ssize_t first = 0, last, at, i, group = 0
        cdef bint any_missing = False
        for i in range(self.num_features):
            any_missing |= features[i] != features[i]
        while first < self.num_trees:
            last = min(first + CHUNK, self.num_trees)
            at = first
            while at < last:
                if at + TREES_AT_ONCE <= last and not any_missing:
                    self.walk_group(&self.order[at], self.steps[group], first, features, leaves)
                else:
                    for i in range(at, min(at + TREES_AT_ONCE, last)):
                        leaves[self.order[i] - first] = self.walk(self.root[self.order[i]], features)
                group += 1
                at += TREES_AT_ONCE
            for i in range(last - first):
                total += leaves[i]
            first = last
        return total

    cdef void walk_group(
        self, const int32_t* trees, int32_t steps, Py_ssize_t first, const double* features, double* leaves
    ) noexcept nogil:
        # No feature is missing.
        cdef int32_t at[TREES_AT_ONCE]
        cdef const ForestNode* node
        cdef int i
        cdef int32_t step
        for i in range(TREES_AT_ONCE):
            at[i] = self.root[trees[i]]
        for step in range(steps):
            for i in range(TREES_AT_ONCE):
                node = &self.nodes[at[i]]
                at[i] = node.child + (features[node.feature] > node.threshold)
        for i in range(TREES_AT_ONCE):
            leaves[trees[i] - first] = self.value[at[i]]

    cdef double walk(self, int32_t at, const double* features) noexcept nogil:
        cdef const ForestNode* node = &self.nodes[at]
        cdef double x
        while node.child != at:
            x = features[node.feature]
            at = node.child + (not node.missing_left if isnan(x) else x > node.threshold)
            node = &self.nodes[at]
        return self.value[at]

    cdef double predict_ms(self, const double* features) noexcept nogil:
        return self.latency_ms(self.raw(features))

    cdef double latency_ms(self, double raw) noexcept nogil:
        cdef double latency_ms = exp(raw) if self.log_target else raw
        return max(latency_ms, FLOOR_MS) if isfinite(latency_ms) else NAN

    def features_read(self):
        """Positions of the features that some node reads, ascending."""
        cdef Py_ssize_t i
        return sorted({self.nodes[i].feature for i in range(self.num_nodes) if self.nodes[i].child != i})

    def predict(self, features):
        """Latency in ms of one row of features; NaN when there is no answer."""
        row = np.ascontiguousarray(features, np.float64)
        if row.ndim != 1 or row.shape[0] < self.num_features:
            raise ValueError(f"features: expected at least {self.num_features} values, found shape {row.shape}")
        return self.predict_ms(<const double*>cnp.PyArray_DATA(row))

    def predict_rows(self, rows):
        """Latencies in ms of many rows, float64[n]; `rows` is float64[n, features], NaN where there is no answer."""
        cdef cnp.ndarray given = np.ascontiguousarray(rows, np.float64)
        cdef cnp.ndarray latencies = np.empty(len(given))
        cdef Py_ssize_t width, i
        if given.ndim != 2 or given.shape[1] < self.num_features:
            raise ValueError(f"rows: expected at least {self.num_features} columns, found shape {rows.shape}")
        width = given.shape[1]
        cdef const double* row = <const double*>cnp.PyArray_DATA(given)
        cdef double* latency_ms = <double*>cnp.PyArray_DATA(latencies)
        cdef Py_ssize_t num_rows = given.shape[0]
        with nogil:
            for i in range(num_rows):
                latency_ms[i] = self.predict_ms(row + i * width)
        return latencies
