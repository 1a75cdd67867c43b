"""The replay loop: arrivals, workers and what a run records."""

from libc.stdint cimport int64_t

from fpmsdk._ext.pricing cimport PassPrice, PassPricer
from fpmsdk._ext.scheduler cimport PassRecord, Requests, Scheduler


cdef struct PassRow:
    double start_ms
    double end_ms
    double prefill_ms
    double decode_ms
    int64_t worker
    int64_t composed
    PassRecord record


cdef struct GapRow:
    double gap_ms
    int64_t count


cdef struct AdmissionRow:
    int64_t request
    double at_ms
    int64_t reused_tokens


cdef class Rows:
    cdef object dtype
    cdef char* memory
    cdef size_t row_bytes
    cdef int64_t length, capacity, num_exports

    cdef void* append(self) except NULL nogil


cdef struct RecordedRequests:
    double* arrival_ms
    double* first_admit_ms
    double* first_token_ms
    double* second_token_ms
    double* last_token_ms
    double* end_ms
    int64_t* reused_tokens
    int64_t* first_reused_tokens
    int64_t* num_admissions
    int64_t* worker


cdef class Recorder:
    cdef dict columns
    cdef RecordedRequests requests
    cdef readonly Rows passes, gaps, admissions
    cdef bint keeps_passes
    cdef readonly int64_t committed_prefill_tokens

    cdef int count_gap(self, double gap_ms, int64_t first_entry) except -1 nogil


cdef class Rank:
    cdef Scheduler scheduler
    cdef PassPricer pricer
    cdef Recorder recorder
    cdef int64_t index
    cdef bint in_pass
    cdef double start_ms
    cdef PassPrice price

    cdef bint has_work(self) noexcept nogil
    cdef bint submit(self, int64_t request, double now) except -1 nogil
    cdef double start_pass(self, double now, int64_t wave_step) except? -1.0 nogil
    cdef bint pass_had_effect(self) noexcept nogil
    cdef bint is_in_pass(self) noexcept nogil
    cdef int complete_pass(self, double end_ms) except -1 nogil
    cdef int64_t num_ended(self) noexcept nogil
    cdef int64_t ended(self, int64_t position) noexcept nogil
    cdef int _record_token_times(self, double now) except -1 nogil
    cdef int _record_pass(self, double end_ms) except -1 nogil


cdef struct Worker:
    bint busy
    double end_ms
    int64_t wave_step


cdef struct Arrival:
    double at_ms
    int64_t order
    int64_t request


cdef class Replay:
    cdef Requests requests
    cdef readonly Recorder recorder
    cdef list ranks                # keeps alive what `rank_pointers` points to
    cdef void** rank_pointers
    cdef Worker* workers
    cdef int64_t num_workers, dp_size
    cdef object request_ids

    cdef int64_t[::1] next_turn
    cdef double[::1] delay_ms
    cdef int64_t[::1] first_turns
    cdef int64_t num_started       # first turns that arrived or are scheduled to
    cdef bint closed_loop
    cdef Arrival* arrivals         # binary heap
    cdef int64_t num_arrivals, arrivals_capacity, num_scheduled_arrivals
    cdef int64_t num_placed

    cdef double max_sim_time_ms
    cdef readonly double now_ms

    cdef int _run(self) except -1 nogil
    cdef double _next_event_ms(self) noexcept nogil
    cdef int _settle(self) except -1 nogil
    cdef bint _has_work(self, int64_t worker) noexcept nogil
    cdef int _place(self, int64_t request) except -1 nogil
    cdef int _request_ended(self, int64_t request) except -1 nogil
    cdef int _start_next_session(self) except -1 nogil
    cdef bint _start_pass(self, int64_t worker) except -1 nogil
    cdef int _complete_pass(self, int64_t worker) except -1 nogil
    cdef int _schedule_arrival(self, double at_ms, int64_t request) except -1 nogil
    cdef Arrival _pop_arrival(self) noexcept nogil
