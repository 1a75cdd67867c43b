"""Ranks and the pools of workers that they form."""

from libc.stdint cimport int64_t

from fpmsdk._ext.placement cimport Placement
from fpmsdk._ext.pricing cimport PassPrice, PassPricer
from fpmsdk._ext.recorder cimport Gauges, Recorder
from fpmsdk._ext.rolling cimport RollingKeys
from fpmsdk._ext.scheduler cimport IndexList, Requests, Scheduler


cdef class Rank:
    cdef Scheduler scheduler
    cdef PassPricer pricer
    cdef Recorder recorder
    cdef int64_t index
    cdef bint in_pass
    cdef double start_ms
    cdef PassPrice price
    cdef double last_token_ms      # end of the last pass
    cdef Gauges gauges             # kept up to date when the recorder keeps samples

    cdef int leave_cohort(self) except -1 nogil
    cdef int _clear_left(self) except -1 nogil

    cdef bint has_work(self) noexcept nogil
    cdef bint submit(self, int64_t request, double now) except -1 nogil
    cdef double start_pass(self, double now, int64_t wave_step) except? -1.0 nogil
    cdef int _record_admission(self, int64_t request, int64_t reused, double now) except -1 nogil
    cdef bint pass_had_effect(self) noexcept nogil
    cdef bint is_in_pass(self) noexcept nogil
    cdef int complete_pass(self, double end_ms, int64_t iteration) except -1 nogil
    cdef void _count_pass(self) noexcept nogil
    cdef void observe(self) noexcept nogil
    cdef int sample(self, int64_t sample, double at_ms) except -1 nogil
    cdef int64_t num_ended(self) noexcept nogil
    cdef int64_t ended(self, int64_t position) noexcept nogil
    cdef int _record_token_times(self, double now) except -1 nogil
    cdef int _record_pass(self, double end_ms, int64_t iteration) except -1 nogil


cdef struct Worker:
    bint busy
    double end_ms
    int64_t wave_step
    int64_t iterations      # passes started
    IndexList ended         # requests that finished or were rejected in the pass, to be announced
    IndexList deferred      # requests with a command that waits for the end of the pass


cdef class WorkerPool:
    cdef list ranks                # keeps alive what `rank_pointers` points to
    cdef void** rank_pointers
    cdef Worker* workers
    cdef readonly Placement placement
    cdef RollingKeys rolling_keys
    cdef Requests requests
    cdef Recorder recorder
    cdef int64_t num_workers, dp_size

    cdef int leave_cohorts(self) except -1 nogil
    cdef grow(self, int64_t num_requests)
    cdef assign(self, slots, rows)
    cdef forget(self, slots)
    cdef int sample(self, int64_t sample, double at_ms) except -1 nogil
    cdef bint has_work(self, int64_t worker) noexcept nogil
    cdef bint has_pending(self) noexcept nogil
    cdef bint is_followed_at_once(self, int64_t worker, double now) noexcept nogil
    cdef bint is_due(self, int64_t worker, double now) noexcept nogil
    cdef bint can_start(self, int64_t worker) noexcept nogil
    cdef double next_event_ms(self) noexcept nogil
    cdef bint start_pass(self, int64_t worker, double now) except -1 nogil
    cdef int complete_rank(self, int64_t rank, double end_ms) except -1 nogil
    cdef int pass_over(self, int64_t worker) except -1 nogil
    cdef int defer(self, int64_t worker, int64_t request) except -1 nogil
