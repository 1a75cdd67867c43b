"""Grouped KV caches under one budget of bytes."""

from libc.stdint cimport int64_t

from fpmsdk._ext.pages cimport KvCache


cdef struct ByteGroup:
    int64_t block_tokens
    int64_t page_bytes
    int64_t window          # 0: none


cdef class ByteBudgetCache(KvCache):
    cdef readonly int64_t capacity_bytes
    cdef int64_t used, active
    cdef ByteGroup* groups
    cdef int64_t num_groups
    cdef int64_t* lease_bytes
    cdef int64_t* lease_blocks

    cdef int64_t _blocks(self, const ByteGroup* group, int64_t computed, int64_t tokens) noexcept nogil
    cdef int64_t bytes_for(self, int64_t computed, int64_t tokens) noexcept nogil
    cdef int _check_forward(self, int64_t request, int64_t computed, int64_t tokens) except -1 nogil
