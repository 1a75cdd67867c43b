"""Features of learned forests: named values of one iteration."""

from libc.stdint cimport int16_t, int64_t, uint64_t

from fpmsdk._ext.declarations cimport FpmRank

# What a program adds to the faults of `features`.
cdef enum:
    FAULT_REQUEST_LISTS = 2000   # request features without usable lists on every active rank
    FAULT_OUT_OF_MEMORY


cdef struct RequestLengths:
    uint64_t past, extend


cdef class FeatureProgram:
    cdef readonly tuple names
    cdef readonly Py_ssize_t num_features
    cdef int16_t* codes                  # position of each feature in NAMES
    cdef readonly bint needs_requests    # some feature reads the per-request lists
    cdef bint needs_order                # some feature is a slot
    cdef bint needs_logs

    # The features of an iteration in the order of the names. Returns FAULT_NONE, FAULT_REQUEST_LISTS (request features
    # are NaN then, slots 0) or FAULT_OUT_OF_MEMORY.
    cdef int fill(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* features) noexcept nogil
    cdef int fill_lists(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* values) noexcept nogil
