"""Gradient-boosted trees of one store, laid out for walking many of them at once."""

from libc.stdint cimport int16_t, int32_t, uint8_t, uint16_t

cdef enum:
    MAX_FEATURES = 135           # as many as forest_features knows
    TREES_AT_ONCE = 8            # walked side by side, so that their loads overlap
    CHUNK = 64                   # trees whose leaves are gathered before they are added in tree order


cdef struct ForestNode:
    # Sixteen bytes; the children of a node lie side by side. A leaf is its own child and never goes right.
    double threshold
    int32_t child                # left one, the right one follows it
    int16_t feature
    uint16_t missing_left


cdef class Forest:
    cdef readonly double baseline
    cdef readonly bint log_target
    cdef readonly Py_ssize_t num_trees
    cdef readonly Py_ssize_t num_nodes
    cdef Py_ssize_t num_features         # one more than the largest feature index in use
    cdef ForestNode* nodes
    cdef double* value                   # of each node; only those of leaves are read
    cdef int32_t* root                   # node of each tree
    cdef int32_t* order                  # trees of each chunk by depth, so that those walked together end together
    cdef int32_t* steps                  # of each group of TREES_AT_ONCE in that order

    # Replaces the trees by those in parallel arrays of nodes; a tree is the nodes under its root, and `left` is
    # negative at leaves. Values are not checked: see fpmsdk.learned.artifact.
    cdef int build(
        self, Py_ssize_t num_trees, const int32_t* root, Py_ssize_t num_nodes, const int16_t* feature,
        const double* threshold, const int32_t* left, const int32_t* right, const double* value,
        const uint8_t* missing_left,
    ) except -1
    # The same trees, with values of its own.
    cdef Forest copied(self)
    # Baseline plus the leaves in tree order; features beyond the largest in use are not read.
    cdef double raw(self, const double* features) noexcept nogil
    # Latency in ms, at least 1e-6; NaN when there is no answer.
    cdef double predict_ms(self, const double* features) noexcept nogil

    cdef void release(self)
    cdef void arrange(self, const int32_t* tree_depth) noexcept nogil
    cdef void walk_group(
        self, const int32_t* trees, int32_t steps, Py_ssize_t first, const double* features, double* leaves
    ) noexcept nogil
    cdef double walk(self, int32_t at, const double* features) noexcept nogil
    cdef double latency_ms(self, double raw) noexcept nogil
