"""The immutable view of what a model learned; what compiled callers price with."""

from fpmsdk._ext.declarations cimport FpmRank


cdef class ServingView:
    cdef double estimate(self, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil
