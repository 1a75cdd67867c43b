"""The replay loop: arrivals, workers, and the transfer of prompts between them."""

from libc.stdint cimport int64_t

from fpmsdk._ext.recorder cimport Recorder
from fpmsdk._ext.scheduler cimport IndexList, Requests
from fpmsdk._ext.workers cimport Rank, WorkerPool


cdef struct Event:
    double at_ms
    int64_t order
    int64_t request


cpdef enum Happening:
    ARRIVED = 0
    EMITTED = 1
    SOURCE_HELD = 2
    DESTINATION_RESERVED = 3
    DESTINATION_ACTIVATED = 4
    SOURCE_RELEASED = 5
    ENDED = 6


cdef struct EventQueue:
    Event* events       # binary heap
    int64_t length, capacity, num_pushed


cdef class Replay:
    cdef Requests requests
    cdef readonly Recorder recorder
    cdef WorkerPool workers, prefill
    cdef double transfer_bytes_per_token, transfer_bytes_per_s, handoff_ms
    cdef bint transfers_missing_only
    cdef object request_ids

    cdef int64_t[::1] next_turn
    cdef bint branches
    cdef int64_t[::1] follower_offsets, followers, session
    cdef int64_t[::1] num_awaited      # of each request, those that have not ended
    cdef int64_t[::1] num_left         # of each session, likewise
    cdef double[::1] delay_ms
    cdef int64_t[::1] dp_rank, prefill_dp_rank
    cdef int64_t[::1] output_tokens    # as asked for
    cdef int64_t[::1] first_turns
    cdef double[::1] first_arrival_ms  # of those
    cdef int64_t num_started           # first turns that arrived or are scheduled to
    cdef double pending_ms             # when the next one arrives of its own
    cdef bint closed_loop
    cdef int64_t concurrency

    cdef object supply                 # None: all requests are here from the start
    cdef bint supply_ended
    cdef int64_t ended_at_once
    cdef int64_t[::1] free_slots       # a stack of indices that stand for nobody
    cdef int64_t num_free_slots
    cdef IndexList ended               # requests to tell the supply of
    cdef readonly bint interruptible   # no: nothing runs, or the supply is being told
    cdef EventQueue arrivals, transfers

    cdef double max_sim_time_ms
    cdef double sample_interval_ms     # 0: no samples
    cdef int64_t num_samples
    cdef double last_sample_ms
    cdef readonly double now_ms

    cdef list happenings               # for who steps; None: nobody listens
    cdef IndexList cancels             # requests to take out as soon as no pass of theirs is in flight

    cdef int _tell(self, Happening kind, int64_t request, int64_t tokens) except -1 nogil
    cdef int _apply_cancels(self) except -1 nogil
    cdef bint _cancel(self, int64_t request) except -1 nogil
    cdef bint _cancel_in(self, WorkerPool pool, int64_t rank, int64_t request) except -1 nogil
    cdef _place_rows(self, rows)
    cdef int _begin(self) except -1 nogil
    cdef bint _has_first_turn(self) except -1 nogil
    cdef int _find_next_first(self) except -1 nogil
    cdef double _next_arrival_ms(self) noexcept nogil
    cdef int64_t _pop_arrival(self) except -1 nogil
    cdef bint _take_requests(self) except -1
    cdef list _pools(self)
    cdef _grow(self, int64_t count)
    cdef _hand_over(self)
    cdef _hand_over_under_way(self)
    cdef _give_up(self, slots)
    cdef _hand_over_all(self)
    cdef int _run(self) except -1 nogil
    cdef int _sample_before(self, double at_ms) except -1 nogil
    cdef int _sample(self, double at_ms) except -1 nogil
    cdef double _next_event_ms(self) noexcept nogil
    cdef int _settle(self) except -1 nogil
    cdef int64_t _settle_disaggregated(self) except -1 nogil
    cdef int _place(self, WorkerPool pool, int64_t request) except -1 nogil
    cdef int _request_ended(self, int64_t request) except -1 nogil
    cdef int _branch_ended(self, int64_t request) except -1 nogil
    cdef bint _is_let_go(self, int64_t request) noexcept nogil
    cdef int _start_next_session(self) except -1 nogil
    cdef int _complete_pass(self, int64_t worker) except -1 nogil
    cdef int _complete_ranks(self, WorkerPool pool, int64_t worker) except -1 nogil
    cdef int _note_ended(self, Rank rank, IndexList* ended) except -1 nogil
    cdef int _tell_tokens(self, Rank rank) except -1 nogil
    cdef int64_t _announce_ended(self, int64_t worker) except -1 nogil
    cdef int _complete_prefill_pass(self, int64_t worker) except -1 nogil
    cdef int64_t _announce_prompts(self, int64_t worker) except -1 nogil
    cdef int _request_destination(self, int64_t request, Rank rank) except -1 nogil
    cdef int _fail(self, int64_t request) except -1 nogil
    cdef int64_t _reserve_destinations(self, int64_t worker) except -1 nogil
    cdef bint _reserve_next(self, Rank rank) except -1 nogil
    cdef double _transfer_ms(self, int64_t tokens) noexcept nogil
    cdef int _transferred(self, int64_t request) except -1 nogil
    cdef int _activate(self, int64_t request) except -1 nogil
    cdef int _release_source(self, int64_t request) except -1 nogil
    cdef _raise_never_fits(self, Rank rank, int64_t request)
