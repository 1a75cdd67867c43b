# Finds the leaf that every tree reaches without walking: a tree's mask has a bit for each leaf, from left to right, and
# a node that sends a row to the right clears the leaves below its left child; the lowest bit that stays is the leaf
# reached. For every feature and every interval between its thresholds the masks of all nodes on that feature are
# combined beforehand, so that a row costs one binary search and one pass of AND over the trees per feature in use.
# (The idea is QuickScorer's; with few thresholds, as of trees trained on 255 bins, its nodes fold into tables.)

from libc.math cimport isnan
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

cimport numpy as cnp

from fpmsdk._ext.forest cimport MAX_FEATURES, Forest, ForestNode

import numpy as np

cnp.import_array()

cdef extern from *:
    """
    #include <stdint.h>
    #define FPM_TREES_AT_ONCE 256
    /* Adds, for ROWS rows side by side, the leaves of all trees in tree order to `total`. */
    #define FPM_ADD_LEAVES(NAME, T, CTZ, ROWS)                                                        \
        static void NAME(const char **masks, Py_ssize_t row_masks, int num_bins,                      \
                         Py_ssize_t num_trees, const double *value, Py_ssize_t leaves, double *total) { \
            T reached[ROWS][FPM_TREES_AT_ONCE];                                                       \
            Py_ssize_t first, count, t;                                                               \
            int r, b;                                                                                 \
            for (first = 0; first < num_trees; first += count) {                                      \
                count = num_trees - first;                                                            \
                if (count > FPM_TREES_AT_ONCE) count = FPM_TREES_AT_ONCE;                             \
                for (r = 0; r < ROWS; r++) {                                                          \
                    T *out = reached[r];                                                              \
                    for (t = 0; t < count; t++) out[t] = (T)-1;                                       \
                    for (b = 0; b < num_bins; b++) {                                                  \
                        const T *mask = (const T *)masks[r * row_masks + b] + first;                  \
                        for (t = 0; t < count; t++) out[t] &= mask[t];                                \
                    }                                                                                 \
                }                                                                                     \
                for (t = 0; t < count; t++, value += leaves)                                          \
                    for (r = 0; r < ROWS; r++) total[r] += value[CTZ(reached[r][t])];                 \
            }                                                                                         \
        }
    FPM_ADD_LEAVES(fpm_leaves_16, uint16_t, __builtin_ctz, 1)
    FPM_ADD_LEAVES(fpm_leaves_32, uint32_t, __builtin_ctz, 1)
    FPM_ADD_LEAVES(fpm_leaves_64, uint64_t, __builtin_ctzll, 1)
    FPM_ADD_LEAVES(fpm_leaves_16_by_4, uint16_t, __builtin_ctz, 4)
    FPM_ADD_LEAVES(fpm_leaves_32_by_4, uint32_t, __builtin_ctz, 4)
    FPM_ADD_LEAVES(fpm_leaves_64_by_4, uint64_t, __builtin_ctzll, 4)
    static void fpm_add_leaves(int rows, int mask_bytes, const char **masks, Py_ssize_t row_masks, int num_bins,
                               Py_ssize_t num_trees, const double *value, Py_ssize_t leaves, double *total) {
        if (rows == 1 && mask_bytes == 2)
            fpm_leaves_16(masks, row_masks, num_bins, num_trees, value, leaves, total);
        else if (rows == 1 && mask_bytes == 4)
            fpm_leaves_32(masks, row_masks, num_bins, num_trees, value, leaves, total);
        else if (rows == 1)
            fpm_leaves_64(masks, row_masks, num_bins, num_trees, value, leaves, total);
        else if (mask_bytes == 2)
            fpm_leaves_16_by_4(masks, row_masks, num_bins, num_trees, value, leaves, total);
        else if (mask_bytes == 4)
            fpm_leaves_32_by_4(masks, row_masks, num_bins, num_trees, value, leaves, total);
        else
            fpm_leaves_64_by_4(masks, row_masks, num_bins, num_trees, value, leaves, total);
    }

    static void fpm_keep(char *masks, Py_ssize_t at, int mask_bytes, uint64_t kept) {
        if (mask_bytes == 2) ((uint16_t *)masks)[at] &= (uint16_t)kept;
        else if (mask_bytes == 4) ((uint32_t *)masks)[at] &= (uint32_t)kept;
        else ((uint64_t *)masks)[at] &= kept;
    }
    """
    void fpm_add_leaves(
        int rows, int mask_bytes, const char** masks, Py_ssize_t row_masks, int num_bins, Py_ssize_t num_trees,
        const double* value, Py_ssize_t leaves, double* total,
    ) noexcept nogil
    void fpm_keep(char* masks, Py_ssize_t at, int mask_bytes, uint64_t kept) noexcept nogil

cdef enum:
    ROWS_AT_ONCE = 4             # rows whose sums, each a chain of additions, run side by side
    MAX_LEAVES = 64


cdef inline int32_t bin_of(double x, const FeatureBins* bins) noexcept nogil:
    # Thresholds below x; every step takes the same time, whichever half it keeps.
    cdef const double* at = bins.thresholds
    cdef int32_t count = bins.num_thresholds, half
    if isnan(x):
        return bins.num_thresholds + 1
    while count > 1:
        half = count // 2
        at += half if at[half - 1] < x else 0
        count -= half
    return <int32_t>(at - bins.thresholds) + (at[0] < x)


cdef class LeafIndex:
    """Tables of a forest; made by `indexed`. Immutable, shared by any number of threads."""

    def __dealloc__(self):
        free(self.thresholds)
        free(self.masks)
        free(self.value)

    cdef int fill(self) except -1:
        # The tables, once sizes are known and everything is allocated.
        cdef Forest forest = self.forest
        cdef Py_ssize_t tree, node, last, num_trees = forest.num_trees
        cdef const ForestNode* here
        cdef FeatureBins* bins
        cdef char* masks
        cdef int32_t* leaves = <int32_t*>malloc((forest.num_nodes + 1) * sizeof(int32_t))      # below each node
        cdef int32_t* leaf = <int32_t*>malloc((forest.num_nodes + 1) * sizeof(int32_t))        # first of them
        cdef int32_t bin_below, b, i
        cdef uint64_t kept
        if leaves == NULL or leaf == NULL:
            free(leaves)
            free(leaf)
            raise MemoryError
        memset(self.masks, 0xFF, self.num_bytes)
        for tree in range(num_trees):
            # Children lie behind their parent.
            last = forest.root[tree + 1] if tree + 1 < num_trees else forest.num_nodes
            for node in range(last - 1, forest.root[tree] - 1, -1):
                here = &forest.nodes[node]
                leaves[node] = 1 if here.child == node else leaves[here.child] + leaves[here.child + 1]
            leaf[forest.root[tree]] = 0
            for node in range(forest.root[tree], last):
                here = &forest.nodes[node]
                if here.child == node:
                    self.value[tree * self.leaves_of_tree + leaf[node]] = forest.value[node]
                    continue
                leaf[here.child] = leaf[node]
                leaf[here.child + 1] = leaf[node] + leaves[here.child]
                kept = ~(((<uint64_t>1 << leaves[here.child]) - 1) << leaf[node])
                bins = self.bins_of(here.feature)
                masks = <char*>bins.masks
                # Values in the bin that ends with the threshold go left, those above to the right.
                bin_below = bin_of(here.threshold, bins)
                fpm_keep(masks, (bin_below + 1) * num_trees + tree, self.mask_bytes, kept)
                if not here.missing_left:
                    fpm_keep(masks, (bins.num_thresholds + 1) * num_trees + tree, self.mask_bytes, kept)
        for i in range(self.num_bins):
            for b in range(1, self.bins[i].num_thresholds + 1):
                masks = <char*>self.bins[i].masks + b * num_trees * self.mask_bytes
                for node in range(num_trees * self.mask_bytes):
                    masks[node] &= masks[node - num_trees * self.mask_bytes]
        free(leaves)
        free(leaf)
        return 0

    cdef FeatureBins* bins_of(self, int feature) noexcept nogil:
        cdef int i = 0
        while self.bins[i].feature != feature:
            i += 1
        return &self.bins[i]

    cdef void look_up(self, const double* features, const char** masks) noexcept nogil:
        cdef const FeatureBins* bins
        cdef int i
        for i in range(self.num_bins):
            bins = &self.bins[i]
            masks[i] = bins.masks + bin_of(features[bins.feature], bins) * self.forest.num_trees * self.mask_bytes

    cdef void raw_rows(
        self, const double* features, Py_ssize_t width, Py_ssize_t num_rows, double* raw
    ) noexcept nogil:
        cdef const char* masks[ROWS_AT_ONCE * MAX_FEATURES]
        cdef Py_ssize_t row = 0, trees = self.forest.num_trees
        cdef int r
        for row in range(num_rows):
            raw[row] = self.forest.baseline
        row = 0
        while row + ROWS_AT_ONCE <= num_rows:
            for r in range(ROWS_AT_ONCE):
                self.look_up(features + (row + r) * width, &masks[r * MAX_FEATURES])
            fpm_add_leaves(
                ROWS_AT_ONCE, self.mask_bytes, masks, MAX_FEATURES, self.num_bins, trees, self.value,
                self.leaves_of_tree, &raw[row],
            )
            row += ROWS_AT_ONCE
        while row < num_rows:
            self.look_up(features + row * width, masks)
            fpm_add_leaves(
                1, self.mask_bytes, masks, MAX_FEATURES, self.num_bins, trees, self.value, self.leaves_of_tree,
                &raw[row],
            )
            row += 1


cdef LeafIndex index_of(Forest forest, Py_ssize_t limit_bytes):
    # None where some tree has more leaves than a mask has bits, or where the masks would take more than the limit.
    cdef LeafIndex index
    cdef Py_ssize_t node, tree, last, leaves, most = 1, at = 0, first = 0
    cdef dict found = {}
    for tree in range(forest.num_trees):
        last = forest.root[tree + 1] if tree + 1 < forest.num_trees else forest.num_nodes
        leaves = (last - forest.root[tree] + 1) // 2
        most = max(most, leaves)
        for node in range(forest.root[tree], last):
            if forest.nodes[node].child != node:
                found.setdefault(forest.nodes[node].feature, set()).add(forest.nodes[node].threshold)
    if most > MAX_LEAVES:
        return None
    index = LeafIndex.__new__(LeafIndex)
    index.forest = forest
    index.mask_bytes = 2 if most <= 16 else 4 if most <= 32 else 8
    index.leaves_of_tree = most
    index.num_bins = len(found)
    thresholds = [sorted(found[feature]) for feature in sorted(found)]
    index.num_bytes = sum(len(values) + 2 for values in thresholds) * forest.num_trees * index.mask_bytes
    if index.num_bytes > limit_bytes:
        return None
    index.thresholds = <double*>malloc((sum(map(len, thresholds)) + 1) * sizeof(double))
    index.masks = <char*>malloc(index.num_bytes + 1)
    index.value = <double*>malloc((forest.num_trees * most + 1) * sizeof(double))
    if index.thresholds == NULL or index.masks == NULL or index.value == NULL:
        raise MemoryError
    for i, feature in enumerate(sorted(found)):
        index.bins[i] = FeatureBins(feature, len(thresholds[i]), index.thresholds + first, index.masks + at)
        for value in thresholds[i]:
            index.thresholds[first] = value
            first += 1
        at += (len(thresholds[i]) + 2) * forest.num_trees * index.mask_bytes
    index.fill()
    return index


def indexed(Forest forest not None, Py_ssize_t limit_bytes):
    """The tables of a forest, None where they would take more than `limit_bytes` or a tree has more than 64 leaves."""
    return index_of(forest, limit_bytes)


def index_rows(LeafIndex index not None, rows):
    """Latencies in ms of rows, float64[n], as `Forest.predict_rows` answers them."""
    cdef cnp.ndarray given = np.ascontiguousarray(rows, np.float64)
    cdef cnp.ndarray latencies = np.empty(given.shape[0])
    cdef double* latency_ms = <double*>cnp.PyArray_DATA(latencies)
    cdef Py_ssize_t i, num_rows = given.shape[0]
    if given.ndim != 2 or given.shape[1] < index.forest.num_features:
        raise ValueError(f"rows: expected at least {index.forest.num_features} columns, found shape {rows.shape}")
    index.raw_rows(<const double*>cnp.PyArray_DATA(given), given.shape[1], num_rows, latency_ms)
    for i in range(num_rows):
        latency_ms[i] = index.forest.latency_ms(latency_ms[i])
    return latencies
