"""KV cache groups over one block pool, as real vLLM has them."""

from libc.stdint cimport int64_t

from fpmsdk._ext.pages cimport KvCache


cdef struct PoolGroup:
    int64_t block_size
    int64_t window          # 0: full attention or a state
    int64_t cap             # blocks of the group in the admission test at most
    int64_t tail            # consecutive blocks that a hit needs; 0: all from the start


cdef class HybridCache(KvCache):
    cdef PoolGroup* groups
    cdef int64_t num_groups
    cdef int64_t alignment              # a hit is a multiple of it
    cdef bint keeps_every_block
    cdef int64_t max_model_len
    cdef const int64_t[::1] prompt_tokens
    cdef int64_t* first_live            # per request and group, blocks before it left the window
    cdef int64_t* junction              # per request, tokens up to which one group alone had a hit
    cdef int64_t* group_hits            # [group][block] of the last lookup, NO_BLOCK outside the window
    cdef int64_t group_hits_capacity, hit_tokens

    cdef int64_t _group_key(self, int64_t request, int64_t group, int64_t block) noexcept nogil
    cdef bint _all_have(self, int64_t request, int64_t spec, int64_t block) noexcept nogil
    cdef int64_t _longest_hit(self, int64_t request, int64_t spec, int64_t max_tokens) noexcept nogil
    cdef bint _same_spec(self, int64_t one, int64_t other) noexcept nogil
    cdef int _collect_hits(self, int64_t request) except -1 nogil
    cdef int64_t _needed(self, int64_t tokens, bint capped) noexcept nogil
    cdef bint _is_kept(self, int64_t request, int64_t group, int64_t block) noexcept nogil
    cdef void _leave_window(self, int64_t request, int64_t computed) noexcept nogil
    cdef int _grow_tables(self, int64_t request, int64_t tokens) except -1 nogil
