"""The leaves that a forest reaches, by table instead of by walk."""

from libc.stdint cimport int32_t

from fpmsdk._ext.forest cimport MAX_FEATURES, Forest


cdef struct FeatureBins:
    # Thresholds of one feature, ascending. Bin b holds the values above b of them; one more bin, missing values.
    int32_t feature
    int32_t num_thresholds
    const double* thresholds
    const char* masks                    # [bins, trees]


cdef class LeafIndex:
    cdef readonly Forest forest
    cdef readonly Py_ssize_t num_bytes   # of the masks
    cdef int mask_bytes                  # 2, 4 or 8
    cdef Py_ssize_t leaves_of_tree       # room for the leaves of one tree
    cdef int num_bins                    # features in use
    cdef FeatureBins bins[MAX_FEATURES]
    cdef double* thresholds
    cdef char* masks
    cdef double* value                   # [trees, leaves_of_tree], leaves from left to right

    # As `Forest.raw`, of rows of `width` features.
    cdef void raw_rows(
        self, const double* features, Py_ssize_t width, Py_ssize_t num_rows, double* raw
    ) noexcept nogil
    cdef void look_up(self, const double* features, const char** masks) noexcept nogil
    cdef int fill(self) except -1
    cdef FeatureBins* bins_of(self, int feature) noexcept nogil


cdef LeafIndex index_of(Forest forest, Py_ssize_t limit_bytes)
