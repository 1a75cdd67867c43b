# The common shape of every estimator. What tuning has learned is read through a `ServingView`, which never
# changes: tuning builds the next view and replaces the old one in a single step, so readers need no lock, keep
# the view they took, and always see the result of some prefix of the tuning run.

from libc.math cimport NAN, isnan
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cimport numpy as cnp

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport (
    FAULT_NONE, KIND_IDLE, NUM_SKIPS, SKIP_IDLE, SKIP_NONE, FaultSite, check_ranks, fault_error, tuning_target_ms,
)
from fpmsdk._ext.frames cimport (
    Columns, IterationSource, LengthLists, free_lists, is_rank, new_scratch, read_rank,
)

import numpy as np

from fpmsdk._ext.features import SKIP_REASONS

cnp.import_array()


cdef inline int64_t monotonic_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t>now.tv_sec * 1000000000 + <int64_t>now.tv_nsec


cdef class ServingView:
    """Immutable answer sheet of an estimator.

    Every method may be called from any number of threads at once.
    """

    cdef int evaluate(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil:
        latency_ms[0] = NAN
        return FAULT_NONE

    cdef object error(self, const FaultSite* site, const FpmRank* ranks, Py_ssize_t num_ranks):
        # The exception for a fault of `evaluate` or of the checks before it.
        return fault_error(site)

    def estimate_iteration(self, metrics, decode_frame):
        """Latency in ms of one iteration, given as a rank or as the list of its ranks; None when not ready."""
        cdef FpmRank few[8]
        cdef FpmRank* ranks = few
        cdef LengthLists* lists = NULL
        cdef tuple given = (metrics,) if is_rank(metrics) else tuple(metrics)
        cdef Py_ssize_t num_ranks = len(given), r
        cdef FaultSite site
        cdef double latency_ms = NAN
        site.iteration = -1
        if num_ranks > 8:
            ranks = <FpmRank*>malloc(num_ranks * sizeof(FpmRank))
            if ranks == NULL:
                raise MemoryError
        try:
            for r in range(num_ranks):
                read_rank(given[r], decode_frame, False, &ranks[r], &lists)
            site.fault = check_ranks(ranks, num_ranks, &site.rank)
            if site.fault == FAULT_NONE:
                site.fault = self.evaluate(ranks, num_ranks, &latency_ms)
            if site.fault != FAULT_NONE:
                raise self.error(&site, ranks, num_ranks)
        finally:
            free_lists(lists)
            if ranks != few:
                free(ranks)
        return None if isnan(latency_ms) else latency_ms

    def estimate_columns(self, Columns source not None):
        """Latencies in ms of every iteration, as float64[n]; NaN where not ready."""
        cdef cnp.ndarray latencies = np.empty(source.num_iterations)
        cdef double* latency_ms = <double*>cnp.PyArray_DATA(latencies)
        cdef FpmRank* scratch = new_scratch(source)
        cdef const FpmRank* ranks
        cdef Py_ssize_t num_ranks, i
        cdef FaultSite site
        site.fault = FAULT_NONE
        with nogil:
            for i in range(source.num_iterations):
                site.iteration = i
                ranks = source.ranks_of(i, scratch, &num_ranks)
                site.fault = check_ranks(ranks, num_ranks, &site.rank)
                if site.fault == FAULT_NONE:
                    site.fault = self.evaluate(ranks, num_ranks, &latency_ms[i])
                if site.fault != FAULT_NONE:
                    break
        error = None if site.fault == FAULT_NONE else self.error(&site, ranks, num_ranks)
        free(scratch)
        if error is not None:
            raise error
        return latencies


cdef class Estimator:
    """Learns from iterations in order and publishes a `ServingView` after each call. One thread at a time."""

    cdef int reserve(self, Py_ssize_t num_iterations) except -1:
        # Make room for so many further observations; the learning loop allocates nothing.
        return 0

    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil:
        # Workload kind of an iteration, KIND_IDLE without work. Returns a `Fault`.
        kind[0] = KIND_IDLE
        return FAULT_NONE

    cdef int learn(self, const FpmRank* ranks, Py_ssize_t num_ranks, int kind, double target_ms) noexcept nogil:
        # Take an iteration as an observation. Returns a `Fault`, with nothing changed.
        return FAULT_NONE

    cdef int publish(self) except -1:
        return 0

    def learn_from(self, IterationSource source not None):
        """Learn from a source of iterations, in order.

        An iteration that breaks a rule between fields raises, with the iterations before it learned and the others
        untouched. No Python code runs in between.
        """
        cdef FpmRank* scratch
        cdef const FpmRank* ranks
        cdef Py_ssize_t num_ranks, i
        cdef int kind, skip
        cdef double target_ms
        cdef FaultSite site
        site.fault = FAULT_NONE
        self.reserve(source.num_iterations)
        scratch = new_scratch(source)
        with nogil:
            for i in range(source.num_iterations):
                site.iteration = i
                ranks = source.ranks_of(i, scratch, &num_ranks)
                site.fault = check_ranks(ranks, num_ranks, &site.rank)
                if site.fault == FAULT_NONE:
                    site.fault = self.classify(ranks, num_ranks, &kind)
                if site.fault != FAULT_NONE:
                    break
                skip = SKIP_IDLE if kind == KIND_IDLE else tuning_target_ms(ranks, num_ranks, &target_ms)
                if skip != SKIP_NONE:
                    self.skipped[skip] += 1
                    continue
                site.fault = self.learn(ranks, num_ranks, kind, target_ms)
                if site.fault != FAULT_NONE:
                    break
        error = None if site.fault == FAULT_NONE else self.serving.error(&site, ranks, num_ranks)
        free(scratch)
        self.publish()
        if error is not None:
            raise error

    def predict_then_learn(self, IterationSource source not None):
        """Answer every iteration, then learn from it, before the next one.

        Returns
        -------
        Latencies in ms, float64[n], NaN where not ready, and the nanoseconds that learning took, int64[n], -1 where
        nothing was learned. An iteration that breaks a rule raises, with those before it learned.
        """
        cdef cnp.ndarray latencies = np.full(source.num_iterations, np.nan)
        cdef cnp.ndarray durations = np.full(source.num_iterations, -1, np.int64)
        cdef double* latency_ms = <double*>cnp.PyArray_DATA(latencies)
        cdef int64_t* update_ns = <int64_t*>cnp.PyArray_DATA(durations)
        cdef FpmRank* scratch
        cdef const FpmRank* ranks
        cdef Py_ssize_t num_ranks, i
        cdef int kind, skip
        cdef int64_t began_ns
        cdef double target_ms
        cdef FaultSite site
        self.reserve(source.num_iterations)
        scratch = new_scratch(source)
        try:
            for i in range(source.num_iterations):
                site.iteration = i
                ranks = source.ranks_of(i, scratch, &num_ranks)
                site.fault = check_ranks(ranks, num_ranks, &site.rank)
                if site.fault == FAULT_NONE:
                    site.fault = self.classify(ranks, num_ranks, &kind)
                if site.fault == FAULT_NONE:
                    site.fault = self.serving.evaluate(ranks, num_ranks, &latency_ms[i])
                if site.fault == FAULT_NONE:
                    skip = SKIP_IDLE if kind == KIND_IDLE else tuning_target_ms(ranks, num_ranks, &target_ms)
                    if skip != SKIP_NONE:
                        self.skipped[skip] += 1
                        continue
                    began_ns = monotonic_ns()
                    site.fault = self.learn(ranks, num_ranks, kind, target_ms)
                    if site.fault == FAULT_NONE:
                        self.publish()
                        update_ns[i] = monotonic_ns() - began_ns
                if site.fault != FAULT_NONE:
                    raise self.serving.error(&site, ranks, num_ranks)
        finally:
            free(scratch)
        return latencies, durations

    def republish(self):
        """Publish the state of the stores anew, after it was restored."""
        self.serving = None
        self.publish()

    def skipped_iterations(self):
        """Iterations that taught nothing, counted by reason since construction."""
        return {reason: self.skipped[i + 1] for i, reason in enumerate(SKIP_REASONS)}
