"""Native estimators: an engine that prices ranks from data, and online correction on top."""

from libc.stdint cimport int64_t

from fpmsdk._ext.correction cimport CorrectionStore, CorrectionTable
from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.operators cimport OpQuery

# Correction stores, in the order of reports.
cdef enum NativeKind:
    NATIVE_IDLE = -1
    NATIVE_PREFILL = 0
    NATIVE_DECODE = 1
    NATIVE_MIXED = 2
    NUM_NATIVE_KINDS = 3

# What a native engine adds to the faults of `features`.
cdef enum:
    FAULT_NATIVE = 1000          # the engine cannot price a rank; it knows why


# Workload of an iteration with the coordinates of its correction store: those of the rank with the largest sum, the last
# one on ties.
cdef int iteration_kind(const FpmRank* ranks, Py_ssize_t num_ranks, double* coordinates) noexcept nogil


cdef class NativeEngine:
    # Whether `count_queries` has to be told of every estimate.
    cdef readonly bint counts_queries
    # As in `ServingView`.
    cdef bint counts_known_tokens

    # Uncorrected latency of one rank in ms; 0.0 without work. Returns FAULT_NONE or FAULT_NATIVE.
    cdef int rank_ms(self, const FpmRank* rank, double* latency_ms) noexcept nogil
    # The exception that explains an iteration whose rank `faulty` is the first that cannot be priced.
    cdef object explain(self, const FpmRank* ranks, Py_ssize_t num_ranks, Py_ssize_t faulty)
    # Take note of the data behind one estimate.
    cdef void count_queries(self, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil
    # What the estimates of ranks rest on, in a form of the engine's own.
    cdef object evidence(self, const FpmRank* ranks, Py_ssize_t num_ranks)


cdef struct Miss:
    # The operator of a pass that could not answer, and what it was asked.
    void* operator
    OpQuery query


cdef enum:
    MAX_SHARED = 16

cdef struct PassOp:
    void* operator
    double scale_factor
    int role
    int slot                 # where operators of one role with one answer share it, -1: not shared
    bint is_repeat           # an earlier one fills the slot

cdef class PassOps:
    cdef readonly tuple operators
    cdef PassOp* items
    cdef Py_ssize_t size


cdef class OpLevelEngine(NativeEngine):
    cdef PassOps context_ops, generation_ops
    cdef readonly object describe_miss
    cdef readonly bint speed_of_light

    # Each adds to `latency_ms` and returns an `OpStatus`; `miss` is set when that is not OK.
    cdef int context_pass(
        self, int64_t batch, int64_t seq_len, int64_t prefix, double* latency_ms, Miss* miss
    ) noexcept nogil
    cdef int generation_step(self, int64_t batch, int64_t position, double* latency_ms, Miss* miss) noexcept nogil
    cdef int mixed_pass(self, const FpmRank* rank, double* latency_ms, Miss* miss) noexcept nogil
    cdef int price_rank(self, const FpmRank* rank, double* latency_ms, Miss* miss) noexcept nogil
    cdef list queries_of(self, const FpmRank* rank)
    cdef object error(self, const Miss* miss)


cdef class NativeView(ServingView):
    cdef readonly NativeEngine engine
    # None when correction is disabled.
    cdef readonly CorrectionTable prefill
    cdef readonly CorrectionTable decode
    cdef readonly CorrectionTable mixed

    # `native_ms` of an estimate, which the engine may count.
    cdef int counted_ms(
        self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms, Py_ssize_t* slowest
    ) noexcept nogil
    cdef int native_ms(
        self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms, Py_ssize_t* slowest
    ) noexcept nogil
    cdef double correction(self, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil


cdef class NativeEstimator(Estimator):
    cdef readonly NativeEngine engine
    cdef readonly CorrectionStore prefill
    cdef readonly CorrectionStore decode
    cdef readonly CorrectionStore mixed
    cdef bint enabled

    cdef int publish_factors(self, NativeView view) except -1
