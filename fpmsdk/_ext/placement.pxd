"""Which rank of a pool of workers serves a request."""

from libc.stdint cimport int32_t, int64_t

from fpmsdk._ext.pages cimport BlockPool, PrefixKeys
from fpmsdk._ext.scheduler cimport Requests


cdef class Placement:
    cdef readonly int64_t num_workers, dp_size
    cdef bint fills_workers
    cdef int64_t next_turn
    cdef int64_t[::1] placed_on        # per worker, without the requests whose rank was given

    cdef grow(self, int64_t num_requests)
    cdef int64_t choose(self, int64_t request, int64_t dp_rank) except -1 nogil
    cdef int prompt_done(self, int64_t request) except -1 nogil
    cdef int ended(self, int64_t request) except -1 nogil
    cdef int pass_ended(self, int64_t rank, BlockPool pool) except -1 nogil


cdef class KvAwarePlacement(Placement):
    cdef Requests requests
    cdef PrefixKeys keys
    cdef int32_t[:, ::1] resident      # [rank, key] copies in the cache as of the last pass end
    cdef int32_t[:, ::1] wanted        # [rank, key] unfinished requests with this prompt block
    cdef int64_t[::1] wanted_blocks    # [rank] distinct prompt blocks of unfinished requests
    cdef int64_t[::1] pending_tokens   # [rank] prompt tokens still to compute, as expected at placement
    cdef int64_t[::1] rank_of, expected_tokens

    cdef int64_t _overlap(self, int64_t rank, int64_t request) noexcept nogil
    cdef int64_t _want(self, int64_t rank, int64_t request, int change) noexcept nogil
