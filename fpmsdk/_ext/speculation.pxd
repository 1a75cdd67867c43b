"""How many draft tokens of a multi-token prediction (MTP) are accepted."""

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef class RandomWords:
    cdef uint32_t state[16]
    cdef uint32_t block[16]
    cdef int used

    cdef uint64_t draw(self) noexcept nogil
    cdef void _refill(self) noexcept nogil


cdef enum:
    MAX_DRAFT_TOKENS = 5


cdef class DraftAcceptance:
    cdef readonly int64_t draft_tokens
    cdef double rates[MAX_DRAFT_TOKENS]
    cdef uint64_t thresholds[MAX_DRAFT_TOKENS]
    cdef RandomWords words

    cdef int64_t burst(self, int64_t width) noexcept nogil
