"""Frozen forests as estimators: one per workload kind, corrected like native estimates."""

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport NUM_KINDS, FaultSite
from fpmsdk._ext.forest cimport Forest
from fpmsdk._ext.forest_features cimport FeatureProgram
from fpmsdk._ext.native cimport NativeEstimator, NativeView


cdef class ForestSet:
    cdef readonly FeatureProgram program
    cdef int role
    cdef tuple memory                    # keeps the forests below alive
    cdef void* forests[NUM_KINDS]        # by workload kind, NULL where nothing was trained

    # Workload kind of an iteration, and its features where a forest for it reads them. Returns a `Fault`.
    cdef int prepare(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind, double* features) noexcept nogil
    # Uncorrected latency in ms: NaN without a forest for the workload, 0.0 without work. Returns a `Fault`.
    cdef int latency_ms(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil
    cdef Forest forest_of(self, int kind)


cdef class LearnedView(NativeView):
    cdef readonly ForestSet forests


cdef class LearnedEstimator(NativeEstimator):
    cdef readonly ForestSet forests


# The exception for a fault of an iteration that forests were asked about.
cdef object learned_error(const FaultSite* site)
