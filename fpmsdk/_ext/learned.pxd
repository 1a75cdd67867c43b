"""Frozen forests as estimators: one per workload kind, corrected like native estimates."""

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport NUM_KINDS, FaultSite
from fpmsdk._ext.forest_features cimport FeatureProgram
from fpmsdk._ext.native cimport NativeEstimator, NativeView


cdef enum:
    BLOCK = 64                           # rows of one kind that a batch gathers before it asks for their latencies


cdef struct Block:
    # Rows of one workload kind that wait: their features, place in the batch and correction factor.
    Py_ssize_t size
    double* features
    Py_ssize_t at[BLOCK]
    double factor[BLOCK]


cdef class ForestSet:
    cdef readonly FeatureProgram program
    cdef int role
    cdef tuple memory                    # keeps what is below alive
    cdef void* forests[NUM_KINDS]        # by workload kind, NULL where nothing was trained
    cdef void* indexes[NUM_KINDS]        # their tables, NULL where they are walked

    # Workload kind of an iteration. Returns a `Fault` for work of another role.
    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil
    # Workload kind of an iteration, and its features where a forest for it reads them. Returns a `Fault`.
    cdef int prepare(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind, double* features) noexcept nogil
    # Uncorrected latency in ms: NaN without a forest for the workload, 0.0 without work. Returns a `Fault`.
    cdef int latency_ms(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil
    # Latencies in ms of rows of features, of a trained kind.
    cdef void predict(self, int kind, const double* features, Py_ssize_t num_rows, double* latency_ms) noexcept nogil


cdef class LearnedView(NativeView):
    cdef readonly ForestSet forests

    cdef void answer_block(self, int kind, Block* block, double* latency_ms) noexcept nogil


cdef class LearnedEstimator(NativeEstimator):
    cdef readonly ForestSet forests


# The exception for a fault of an iteration that forests were asked about.
cdef object learned_error(const FaultSite* site)
