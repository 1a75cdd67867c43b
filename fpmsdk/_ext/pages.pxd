"""KV blocks of one scheduler rank: prefix keys, the block pool, and the cache of one attention group over it."""

from libc.stdint cimport int8_t, int64_t
from libc.stdlib cimport realloc


cdef inline void* resized(void* memory, size_t size) except NULL nogil:
    cdef void* moved = realloc(memory, size)
    if moved == NULL:
        with gil:
            raise MemoryError(f"no memory for {size} bytes of simulation state")
    return moved


cdef inline int64_t blocks_for(int64_t tokens, int64_t block_size) noexcept nogil:
    return (tokens + block_size - 1) // block_size


cdef struct TrieNode:
    int64_t parent
    int64_t content         # of a vacant one, the next vacant one


cdef class PrefixTrie:
    cdef TrieNode* nodes
    cdef int64_t num_nodes, num_used
    cdef int64_t vacant        # first of the nodes that stand for nothing
    cdef int64_t* slots        # hash table of nodes, at most half full
    cdef int64_t num_slots

    cdef int64_t child(self, int64_t parent, int64_t content) except -1 nogil
    cdef void mark(self, int8_t[::1] is_used, int64_t node) noexcept nogil
    cdef void keep(self, const int8_t[::1] is_used) noexcept nogil
    cdef int64_t* _slot(self, int64_t parent, int64_t content) noexcept nogil
    cdef int _grow(self) except -1 nogil
    cdef void _index(self) noexcept nogil


cdef int64_t pieces_of(int64_t trace_block_tokens, int64_t block_size) noexcept nogil

cdef int intern_chain(
    PrefixTrie trie,
    const int64_t* hash_ids,
    int64_t trace_block_tokens,
    int64_t block_size,
    int64_t num_keys,
    int64_t* keys,
) except -1 nogil


cdef class PrefixKeys:
    cdef readonly int64_t block_size
    cdef int64_t[::1] first_key        # [n + 1] where the keys of a request's full prompt blocks start in `keys`
    cdef int64_t[::1] keys
    cdef int8_t[::1] is_shared         # beside `keys`: another request has the key too
    cdef bint knows_shared             # `is_shared` is filled in
    cdef int64_t[::1] first_own_key    # [n] where the keys of a request's other blocks start
    cdef readonly int64_t num_shared_keys   # keys below this may belong to several requests

    cdef int64_t key(self, int64_t request, int64_t block) noexcept nogil
    cdef int64_t count(self) noexcept nogil
    cdef int64_t key_space(self) noexcept nogil
    cdef int find_shared(self) except -1
    cdef int64_t num_shared(self, int64_t request) noexcept nogil


cdef struct Block:
    int64_t key               # of the published content; NO_KEY while private
    int64_t references        # requests that hold the block
    int64_t next_in_bucket    # same bucket, published later
    int64_t older             # free list of published blocks, or the stack of blank ones
    int64_t newer


cdef struct ResidencyChange:
    int64_t key
    int64_t copies      # +1 published, -1 evicted


cdef class BlockPool:
    cdef readonly int64_t num_blocks    # usable ones
    cdef bint publishes
    cdef Block* blocks
    cdef int64_t blocks_capacity
    cdef int64_t num_touched            # blocks handed out at least once
    cdef int64_t blank                  # top of the stack of returned blocks without content
    cdef int64_t num_blank
    cdef int64_t oldest, newest         # free published blocks, next to be evicted first
    cdef int64_t num_evictable
    cdef int64_t* buckets
    cdef int64_t num_buckets
    cdef bint logs                      # keep `log`, until somebody clears it
    cdef ResidencyChange* log
    cdef int64_t num_logged, log_capacity

    cdef int64_t num_free(self) noexcept nogil
    cdef int64_t find(self, int64_t key) noexcept nogil
    cdef bint is_free(self, int64_t block) noexcept nogil
    cdef void share(self, int64_t block) noexcept nogil
    cdef int64_t take(self) except -1 nogil
    cdef void give_back(self, int64_t block) noexcept nogil
    cdef int publish(self, int64_t block, int64_t key) except -1 nogil
    cdef void _append_to_bucket(self, int64_t block) noexcept nogil
    cdef int _unpublish(self, int64_t block) except -1 nogil
    cdef int _log(self, int64_t key, int64_t copies) except -1 nogil
    cdef void _leave_free_list(self, int64_t block) noexcept nogil
    cdef int _grow(self) except -1 nogil


cdef struct BlockTable:
    int64_t* blocks
    int64_t length
    int64_t capacity
    int64_t num_published


cdef class KvCache:
    cdef readonly BlockPool pool
    cdef readonly int64_t block_size
    cdef PrefixKeys keys               # None when prefix caching is off
    cdef BlockTable* tables            # one a request
    cdef int64_t num_requests
    cdef int64_t* hits                 # cached blocks found by the last lookup
    cdef int64_t num_hits, num_free_hits, hits_capacity

    cdef grow(self, int64_t num_requests)
    cdef _grow_request_tables(self, int64_t num_tables)
    cdef bint can_ever_hold(self, int64_t tokens) noexcept nogil
    cdef int64_t longest_prefix(self, int64_t request, int64_t max_tokens, int64_t num_dropped) noexcept nogil
    cdef int64_t find_prefix(self, int64_t request, int64_t max_tokens, int64_t num_dropped) except -1 nogil
    cdef int64_t blocks_to_admit(self, int64_t tokens) noexcept nogil
    cdef bint can_admit(
        self, int64_t known, int64_t chunk_end, bint reserves_known, int64_t kept_free
    ) except -1 nogil
    cdef int admit(self, int64_t request, int64_t tokens) except -1 nogil
    cdef bint extend(self, int64_t request, int64_t computed, int64_t tokens) except -1 nogil
    cdef int64_t missing_blocks(self, int64_t request, int64_t tokens) noexcept nogil
    cdef int64_t decodes_before_touch(self, int64_t computed) noexcept nogil
    cdef int64_t touch_demand(self, int64_t request, int64_t computed) noexcept nogil
    cdef int touch(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil
    cdef bint join_cohort(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil
    cdef int leave_cohort(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil
    cdef int64_t cohort_demand(self, int64_t cohort_pass) noexcept nogil
    cdef void advance_cohort(self, int64_t cohort_pass) noexcept nogil
    cdef int64_t demand(self, int64_t request, int64_t computed, int64_t tokens) noexcept nogil
    cdef int64_t supply(self) noexcept nogil
    cdef void shrink(self, int64_t request, int64_t tokens) noexcept nogil
    cdef int publish(self, int64_t request, int64_t tokens) except -1 nogil
    cdef void release(self, int64_t request) noexcept nogil
    cdef int64_t active_blocks(self) noexcept nogil
    cdef int64_t free_blocks(self) noexcept nogil
    cdef int64_t published_free_blocks(self) noexcept nogil
    cdef int64_t held_blocks(self, int64_t request) noexcept nogil
    cdef int64_t used_bytes(self) noexcept nogil
    cdef bint counts_bytes(self) noexcept nogil
    cdef int _reserve_table(self, BlockTable* table, int64_t length) except -1 nogil
