"""Prefix keys of requests that come and go: an index stands for one request after the other.

Not the keys of a whole trace, which are in `ext/pages.pyx`; equal chains get equal keys there and here.
Source: engine-and-replay.md 2.4.
"""

from libc.stdint cimport int8_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fpmsdk._ext.pages cimport BlockPool, PrefixKeys, PrefixTrie, intern_chain, pieces_of, resized

import numpy as np

cdef enum:
    NO_KEY = -1

# Keys from here on belong to one request.
cdef int64_t FIRST_OWN_KEY = 2**48


cdef class RollingKeys(PrefixKeys):
    """The keys of `num_requests` indices; what no request and no cached block needs any more is forgotten.

    Parameters
    ----------
    num_requests : int
    trace_block_tokens, block_size : tokens per trace block and per KV block
    few_nodes : int
        So many pieces of prompts are not worth looking through.
    """

    def __init__(
        self, int64_t num_requests, int64_t trace_block_tokens, int64_t block_size, int64_t few_nodes=16384
    ):
        if trace_block_tokens < 1 or block_size < 1:
            raise ValueError(f"expected positive block sizes, found {trace_block_tokens} and {block_size}")
        self.block_size = block_size
        self.trace_block_tokens = trace_block_tokens
        self.few_nodes = few_nodes
        self.pieces = pieces_of(trace_block_tokens, block_size)
        self.num_shared_keys = FIRST_OWN_KEY
        self.next_own_key = FIRST_OWN_KEY
        self.trie = PrefixTrie()
        self.grow(num_requests)

    def __dealloc__(self):
        cdef int64_t request
        for request in range(self.num_requests):
            free(self.chains[request].keys)
        free(self.chains)

    cdef int64_t key(self, int64_t request, int64_t block) noexcept nogil:
        cdef KeyChain* chain = &self.chains[request]
        if block < chain.length:
            return chain.keys[block]
        return chain.first_own + block - chain.length

    cdef int64_t count(self) noexcept nogil:
        return self.num_requests

    cdef int64_t key_space(self) noexcept nogil:
        return self.trie.num_nodes * self.pieces

    cdef int find_shared(self) except -1:
        # Who comes later is not known: the caller sees to it that nobody shares anything where this is asked for.
        return 0

    cdef int64_t num_shared(self, int64_t request) noexcept nogil:
        return 0

    cdef grow(self, int64_t num_requests):
        """Have room for so many requests."""
        self.chains = <KeyChain*>resized(self.chains, max(1, num_requests) * sizeof(KeyChain))
        memset(&self.chains[self.num_requests], 0, (num_requests - self.num_requests) * sizeof(KeyChain))
        self.num_requests = num_requests

    cdef assign(
        self,
        const int64_t[::1] slots,
        const int64_t[::1] prompt_tokens,
        const int64_t[::1] output_tokens,
        const int64_t[::1] hash_offsets,
        const int64_t[::1] hash_ids,
    ):
        """Let indices stand for new requests."""
        cdef int64_t row
        cdef KeyChain* chain
        for row in range(slots.shape[0]):
            chain = &self.chains[slots[row]]
            chain.length = 0
            if hash_offsets[row + 1] > hash_offsets[row]:
                chain.length = prompt_tokens[row] // self.block_size
            if chain.length > 0:
                chain.keys = <int64_t*>resized(chain.keys, chain.length * sizeof(int64_t))
                intern_chain(
                    self.trie,
                    &hash_ids[hash_offsets[row]],
                    self.trace_block_tokens,
                    self.block_size,
                    chain.length,
                    chain.keys,
                )
            chain.first_own = self.next_own_key
            self.next_own_key += (prompt_tokens[row] + output_tokens[row]) // self.block_size

    cdef forget(self, const int64_t[::1] slots, list pools):
        """Some indices stand for nobody any more; now and then look which chains nobody needs."""
        cdef int64_t row
        for row in range(slots.shape[0]):
            free(self.chains[slots[row]].keys)
            memset(&self.chains[slots[row]], 0, sizeof(KeyChain))
        if self.trie.num_used > max(self.few_nodes, 2 * self.num_kept):
            self._sweep(pools)

    cdef _sweep(self, list pools):
        cdef int64_t request, index
        cdef BlockPool pool
        cdef int8_t[::1] is_used = np.zeros(self.trie.num_nodes, np.int8)
        for request in range(self.num_requests):
            for index in range(self.chains[request].length):
                self.trie.mark(is_used, self.chains[request].keys[index] // self.pieces)
        for pool in pools:
            for index in range(pool.num_touched if pool.publishes else 0):
                self._mark_key(is_used, pool.blocks[index].key)
            # Who listens has not heard of these yet.
            for index in range(pool.num_logged):
                self._mark_key(is_used, pool.log[index].key)
        self.trie.keep(is_used)
        self.num_kept = self.trie.num_used

    cdef void _mark_key(self, int8_t[::1] is_used, int64_t key) noexcept nogil:
        if NO_KEY < key < FIRST_OWN_KEY:
            self.trie.mark(is_used, key // self.pieces)
