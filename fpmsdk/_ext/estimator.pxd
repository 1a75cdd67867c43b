"""What every estimator offers to the rest: an immutable view to read, and one way to learn."""

from libc.stdint cimport int64_t

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport NUM_SKIPS, FaultSite
from fpmsdk._ext.frames cimport IterationSource


cdef class ServingView:
    # A replay asks for a decode step by the known tokens of its requests: the newest one counts, though its KV is
    # computed in this very step. False: by the tokens computed before, as telemetry counts them.
    cdef bint counts_known_tokens

    # One iteration in ms: NaN when the model cannot answer yet, 0.0 without work. Returns a `Fault`.
    cdef int evaluate(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil
    cdef object error(self, const FaultSite* site, const FpmRank* ranks, Py_ssize_t num_ranks)


cdef class Estimator:
    cdef readonly ServingView serving
    cdef int64_t skipped[NUM_SKIPS]

    cdef int reserve(self, Py_ssize_t num_iterations) except -1
    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil
    cdef int learn(self, const FpmRank* ranks, Py_ssize_t num_ranks, int kind, double target_ms) noexcept nogil
    cdef int publish(self) except -1
