"""Grouped KV caches of one rank under one budget of bytes: full attention, sliding windows, convolution states.

The peer's model, for `scheduler_rules: simulator`: every group has blocks and pages of its own size, and no prefix is
cached. Not vLLM's pool, which is in `ext/hybrid.pyx`. Source: engine-and-replay.md 3.2 and 3.3.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fpmsdk._ext.pages cimport KvCache, blocks_for, resized

from fpmsdk.errors import KvForwardTooLargeError

cdef int64_t MAX_BYTES = 2**53

cdef enum:
    MAX_COUNTED_TOKENS = 65536


cdef inline int64_t place(int64_t number, int64_t size) noexcept nogil:
    """`number` modulo `size`, in [0, size) for negative ones too."""
    cdef int64_t rest = number % size
    return rest + size if rest < 0 else rest


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
        self.counts_members = sum(block_tokens for block_tokens, _, _ in groups) <= MAX_COUNTED_TOKENS
        for index, (block_tokens, page_bytes, window) in enumerate(groups):
            self.groups[index] = ByteGroup(block_tokens, page_bytes, window or 0, NULL, NULL)
            if self.counts_members:
                self.groups[index].growing = <int64_t*>calloc(block_tokens, sizeof(int64_t))
                self.groups[index].dropping = <int64_t*>calloc(block_tokens, sizeof(int64_t))
                if self.groups[index].growing == NULL or self.groups[index].dropping == NULL:
                    raise MemoryError(f"no memory to count requests in blocks of {block_tokens} tokens")

    def __dealloc__(self):
        cdef int64_t group
        for group in range(self.num_groups if self.groups != NULL else 0):
            free(self.groups[group].growing)
            free(self.groups[group].dropping)
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

    cdef int64_t _blocks_for(self, int64_t computed, int64_t tokens) noexcept nogil:
        cdef int64_t group, total = 0
        for group in range(self.num_groups):
            total += self._blocks(&self.groups[group], computed, tokens)
        return total

    cdef grow(self, int64_t num_requests):
        cdef int64_t old_count = self.num_requests
        self.lease_bytes = <int64_t*>resized(self.lease_bytes, num_requests * sizeof(int64_t))
        self.lease_blocks = <int64_t*>resized(self.lease_blocks, num_requests * sizeof(int64_t))
        memset(&self.lease_bytes[old_count], 0, (num_requests - old_count) * sizeof(int64_t))
        memset(&self.lease_blocks[old_count], 0, (num_requests - old_count) * sizeof(int64_t))
        self._grow_request_tables(num_requests)

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
        cdef int64_t needed = self.bytes_for(computed, tokens)
        self._check_forward(request, computed, tokens)
        if needed > self.capacity_bytes - (self.used - self.lease_bytes[request]):
            return False
        self.used += needed - self.lease_bytes[request]
        self.lease_bytes[request] = needed
        self.active -= self.lease_blocks[request]
        self.lease_blocks[request] = self._blocks_for(computed, tokens)
        self.active += self.lease_blocks[request]
        return True

    # What a decoding request holds depends on its length alone, so that the members of a cohort need only be counted
    # by the pass in which they start or drop a block.

    cdef int64_t decodes_before_touch(self, int64_t computed) noexcept nogil:
        """A member is touched when its first block leaves a window."""
        cdef int64_t group, first_drop, passes = MAX_BYTES
        for group in range(self.num_groups):
            first_drop = self._first_drop(&self.groups[group])
            if self.groups[group].window > 0 and first_drop >= computed:
                passes = min(passes, first_drop - computed)
        return passes

    cdef int64_t touch_demand(self, int64_t request, int64_t computed) noexcept nogil:
        return 0

    cdef int touch(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil:
        cdef int64_t group
        for group in range(self.num_groups):
            if self.groups[group].window > 0 and computed == self._first_drop(&self.groups[group]):
                self._count_drops(&self.groups[group], computed, cohort_pass, 1)
        return 0

    cdef int64_t _first_drop(self, const ByteGroup* group) noexcept nogil:
        """Computed tokens with which a request drops its first block."""
        return group.window - 1 + group.block_tokens

    cdef void _count_drops(self, ByteGroup* group, int64_t computed, int64_t cohort_pass, int change) noexcept nogil:
        group.dropping[place(computed - (group.window - 1) - cohort_pass, group.block_tokens)] += change

    cdef void _count_member(self, int64_t computed, int64_t cohort_pass, int change) noexcept nogil:
        cdef int64_t index
        cdef ByteGroup* group
        for index in range(self.num_groups):
            group = &self.groups[index]
            group.growing[place(computed - cohort_pass, group.block_tokens)] += change
            if group.window > 0 and computed > self._first_drop(group):
                self._count_drops(group, computed, cohort_pass, change)

    cdef bint join_cohort(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil:
        # After a longer chunk it holds more than a decode does.
        if (
            self.lease_bytes[request] != self.bytes_for(computed - 1, computed)
            or self.lease_blocks[request] != self._blocks_for(computed - 1, computed)
        ):
            return False
        self._count_member(computed, cohort_pass, 1)
        return True

    cdef int leave_cohort(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil:
        self._count_member(computed, cohort_pass, -1)
        self.lease_bytes[request] = self.bytes_for(computed - 1, computed)
        self.lease_blocks[request] = self._blocks_for(computed - 1, computed)
        return 0

    cdef int64_t cohort_demand(self, int64_t cohort_pass) noexcept nogil:
        cdef int64_t group, demand = 0
        for group in range(self.num_groups):
            demand += self.groups[group].page_bytes * (
                self.groups[group].growing[place(-cohort_pass, self.groups[group].block_tokens)]
            )
        return demand

    cdef void advance_cohort(self, int64_t cohort_pass) noexcept nogil:
        cdef int64_t group, now, blocks
        for group in range(self.num_groups):
            now = place(-cohort_pass, self.groups[group].block_tokens)
            blocks = self.groups[group].growing[now]
            if self.groups[group].window > 0:
                blocks -= self.groups[group].dropping[now]
            self.used += blocks * self.groups[group].page_bytes
            self.active += blocks

    cdef int64_t demand(self, int64_t request, int64_t computed, int64_t tokens) noexcept nogil:
        return max(0, self.bytes_for(computed, tokens) - self.lease_bytes[request])

    cdef int64_t supply(self) noexcept nogil:
        return self.capacity_bytes - self.used

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
