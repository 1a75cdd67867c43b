"""Grouped KV caches under one budget of bytes."""

from libc.stdint cimport int64_t

from fpmsdk._ext.pages cimport KvCache


cdef struct ByteGroup:
    int64_t block_tokens
    int64_t page_bytes
    int64_t window          # 0: none
    # Members of the cohort by the pass, modulo `block_tokens`, in which they start a block and drop one.
    int64_t* growing
    int64_t* dropping


cdef class ByteBudgetCache(KvCache):
    cdef readonly int64_t capacity_bytes
    cdef int64_t used, active
    cdef ByteGroup* groups
    cdef int64_t num_groups
    cdef int64_t* lease_bytes
    cdef int64_t* lease_blocks
    cdef readonly bint counts_members   # blocks are short enough to count members by their place in one

    cdef int64_t _blocks(self, const ByteGroup* group, int64_t computed, int64_t tokens) noexcept nogil
    cdef int64_t _blocks_for(self, int64_t computed, int64_t tokens) noexcept nogil
    cdef int64_t bytes_for(self, int64_t computed, int64_t tokens) noexcept nogil
    cdef int64_t _first_drop(self, const ByteGroup* group) noexcept nogil
    cdef void _count_drops(self, ByteGroup* group, int64_t computed, int64_t cohort_pass, int change) noexcept nogil
    cdef void _count_member(self, int64_t computed, int64_t cohort_pass, int change) noexcept nogil
    cdef int _check_forward(self, int64_t request, int64_t computed, int64_t tokens) except -1 nogil
