"""Prefix keys of requests that come and go."""

from libc.stdint cimport int8_t, int64_t

from fpmsdk._ext.pages cimport PrefixKeys, PrefixTrie


cdef struct KeyChain:
    int64_t* keys           # of the full prompt blocks
    int64_t length
    int64_t first_own       # key of the first other block


cdef class RollingKeys(PrefixKeys):
    cdef int64_t trace_block_tokens, pieces
    cdef int64_t num_requests
    cdef KeyChain* chains
    cdef PrefixTrie trie
    cdef int64_t few_nodes
    cdef int64_t num_kept           # trie nodes after the last look
    cdef int64_t next_own_key

    cdef assign(
        self,
        const int64_t[::1] slots,
        const int64_t[::1] prompt_tokens,
        const int64_t[::1] output_tokens,
        const int64_t[::1] hash_offsets,
        const int64_t[::1] hash_ids,
    )
    cdef forget(self, const int64_t[::1] slots, list pools)
    cdef grow(self, int64_t num_requests)
    cdef _sweep(self, list pools)
    cdef void _mark_key(self, int8_t[::1] is_used, int64_t key) noexcept nogil
