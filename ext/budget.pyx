"""Grouped KV caches of one rank under one budget of bytes: full attention, sliding windows, convolution states.

The peer's model, for `scheduler_rules: simulator`: every group has blocks and pages of its own size, and no prefix is
cached. Not vLLM's pool, which is in `ext/hybrid.pyx`. Source: engine-and-replay.md 3.2 and 3.3.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from fpmsdk._ext.pages cimport KvCache, blocks_for

from fpmsdk.errors import KvForwardTooLargeError

cdef int64_t MAX_BYTES = 2**53


cdef class ByteBudgetCache(KvCache):
    """What one rank's requests hold, in bytes.

    Parameters
    ----------
    num_requests : how many request indices exist
    capacity_bytes : the budget
    groups : sequence of (block_size_tokens, page_size_bytes, sliding_window or None)
        A page is one block across all layers of the group.
    block_size : logical unit of the rank, in tokens; nothing is allocated by it

    >>> cache = ByteBudgetCache(1, 42, [(4, 8, None), (2, 6, 3)], 4)
    >>> cache.allocate(0, 0, 4), cache.allocate(0, 4, 8), cache.state()
    (True, True, (34, 5))
    """

    def __init__(self, int64_t num_requests, int64_t capacity_bytes, groups, int64_t block_size):
        super().__init__(num_requests, 0, block_size, None)
        self.capacity_bytes = capacity_bytes
        self.num_groups = len(groups)
        self.groups = <ByteGroup*>calloc(max(self.num_groups, 1), sizeof(ByteGroup))
        self.lease_bytes = <int64_t*>calloc(max(num_requests, 1), sizeof(int64_t))
        self.lease_blocks = <int64_t*>calloc(max(num_requests, 1), sizeof(int64_t))
        if self.groups == NULL or self.lease_bytes == NULL or self.lease_blocks == NULL:
            raise MemoryError(f"no memory for the leases of {num_requests} requests")
        for index, (block_tokens, page_bytes, window) in enumerate(groups):
            self.groups[index] = ByteGroup(block_tokens, page_bytes, window or 0)

    def __dealloc__(self):
        free(self.groups)
        free(self.lease_bytes)
        free(self.lease_blocks)

    cdef int64_t _blocks(self, const ByteGroup* group, int64_t computed, int64_t tokens) noexcept nogil:
        """Live blocks while the tokens after `computed` are computed: the whole chunk, and the window before it."""
        cdef int64_t first = 0
        if group.window > 0:
            first = max(0, computed - (group.window - 1)) // group.block_tokens
        return blocks_for(tokens, group.block_tokens) - first

    cdef int64_t bytes_for(self, int64_t computed, int64_t tokens) noexcept nogil:
        """Bytes of one request over all groups; more than any budget when they exceed 2^53."""
        cdef int64_t group, blocks, total = 0
        for group in range(self.num_groups):
            blocks = self._blocks(&self.groups[group], computed, tokens)
            if blocks > (MAX_BYTES - total) // self.groups[group].page_bytes:
                return MAX_BYTES + 1
            total += blocks * self.groups[group].page_bytes
        return total

    cdef bint can_ever_hold(self, int64_t tokens) noexcept nogil:
        return self.bytes_for(tokens - 1, tokens) <= self.capacity_bytes

    cdef int64_t find_prefix(self, int64_t request, int64_t max_tokens, int64_t num_dropped) except -1 nogil:
        return 0

    cdef bint can_admit(
        self, int64_t known, int64_t chunk_end, bint reserves_known, int64_t kept_free
    ) except -1 nogil:
        cdef int64_t needed = self.bytes_for(0, chunk_end)
        # Who needs more than everything is admitted, so that the forward reports it.
        return needed > self.capacity_bytes or needed <= self.capacity_bytes - self.used

    cdef int admit(self, int64_t request, int64_t tokens) except -1 nogil:
        self.extend(request, 0, tokens)
        return 0

    cdef bint extend(self, int64_t request, int64_t computed, int64_t tokens) except -1 nogil:
        """Hold what the forward from `computed` to `tokens` needs, and give back what left the windows."""
        cdef int64_t group
        cdef int64_t needed = self.bytes_for(computed, tokens)
        self._check_forward(request, computed, tokens)
        if needed > self.capacity_bytes - (self.used - self.lease_bytes[request]):
            return False
        self.used += needed - self.lease_bytes[request]
        self.lease_bytes[request] = needed
        self.active -= self.lease_blocks[request]
        self.lease_blocks[request] = 0
        for group in range(self.num_groups):
            self.lease_blocks[request] += self._blocks(&self.groups[group], computed, tokens)
        self.active += self.lease_blocks[request]
        return True

    cdef int _check_forward(self, int64_t request, int64_t computed, int64_t tokens) except -1 nogil:
        cdef int64_t needed = self.bytes_for(computed, tokens)
        if needed <= self.capacity_bytes:
            return 0
        with gil:
            raise KvForwardTooLargeError(request, needed, tokens - computed, computed, self.capacity_bytes)

    cdef int publish(self, int64_t request, int64_t tokens) except -1 nogil:
        return 0

    cdef void release(self, int64_t request) noexcept nogil:
        self.used -= self.lease_bytes[request]
        self.active -= self.lease_blocks[request]
        self.lease_bytes[request] = self.lease_blocks[request] = 0

    cdef int64_t active_blocks(self) noexcept nogil:
        return self.active

    cdef int64_t free_blocks(self) noexcept nogil:
        return 0

    cdef int64_t published_free_blocks(self) noexcept nogil:
        return 0

    cdef int64_t held_blocks(self, int64_t request) noexcept nogil:
        return self.lease_blocks[request]

    cdef int64_t used_bytes(self) noexcept nogil:
        return self.used

    cdef bint counts_bytes(self) noexcept nogil:
        return True

    def allocate(self, int64_t request, int64_t computed, int64_t tokens):
        """Let the request hold one forward; False, and nothing changed, when others hold too much."""
        return self.extend(request, computed, tokens)

    def free(self, int64_t request):
        """Give back everything; a second time does nothing."""
        self.release(request)

    def state(self):
        """Return used bytes and active blocks."""
        return self.used, self.active

    def bytes_of(self, int64_t computed, int64_t tokens):
        """Return the bytes of one request's forward."""
        return self.bytes_for(computed, tokens)

    def ranges(self, int64_t computed, int64_t tokens):
        """Return the live block range [first, end) of every group."""
        ends = [blocks_for(tokens, self.groups[group].block_tokens) for group in range(self.num_groups)]
        return [(end - self._blocks(&self.groups[group], computed, tokens), end) for group, end in enumerate(ends)]
