"""KV cache groups over one block pool, as real vLLM has them: full attention, sliding windows and states.

All groups share the blocks; a block belongs to one group at a time. Tables keep their length, blocks that leave a
window go back to the pool. Not the byte budget of `ext/budget.pyx`. Source: vllm-facts.md 2 and 3.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fpmsdk._ext.pages cimport BlockTable, KvCache, PrefixKeys, blocks_for, resized

import math

cdef enum:
    NO_BLOCK = -1


cdef class HybridCache(KvCache):
    """What one rank's requests hold in every group.

    Parameters
    ----------
    prompt_tokens : int64[n] of all requests
    num_blocks : usable blocks
    groups : sequence of (block_size, sliding_window or None), in vLLM's group order
        A state that is kept once per sequence has the block size max_model_len.
    keys : PrefixKeys, or None when prefix caching is off
        Its block size divides that of every group.
    max_num_batched_tokens, max_model_len : int
        They bound what a sliding group can hold.
    keeps_every_block : bool
        Sliding groups publish every full block, as before vLLM 0.31; else those in front of a replay boundary.
    """

    def __init__(
        self,
        const int64_t[::1] prompt_tokens not None,
        int64_t num_blocks,
        groups,
        PrefixKeys keys,
        *,
        int64_t max_num_batched_tokens,
        int64_t max_model_len,
        bint keeps_every_block=False,
    ):
        cdef int64_t num_requests = prompt_tokens.shape[0]
        self.num_groups = len(groups)
        self.alignment = 1 if keys is None else math.lcm(*(block_size for block_size, _ in groups))
        super().__init__(
            num_requests * self.num_groups, num_blocks, min(block_size for block_size, _ in groups), keys
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len
        self.keeps_every_block = keeps_every_block
        self.groups = <PoolGroup*>calloc(self.num_groups, sizeof(PoolGroup))
        self.first_live = <int64_t*>calloc(max(num_requests * self.num_groups, 1), sizeof(int64_t))
        self.junction = <int64_t*>calloc(max(num_requests, 1), sizeof(int64_t))
        if self.groups == NULL or self.first_live == NULL or self.junction == NULL:
            raise MemoryError(f"no memory for the block tables of {num_requests} requests")
        for index, (block_size, window) in enumerate(groups):
            cap = blocks_for(max_model_len, block_size)
            if window:
                cap = blocks_for(min(window - 1 + max_num_batched_tokens, max_model_len), block_size) + 1
            self.groups[index] = PoolGroup(
                block_size, window or 0, cap, blocks_for(window - 1, block_size) if window else 0
            )

    def __dealloc__(self):
        free(self.groups)
        free(self.first_live)
        free(self.junction)
        free(self.group_hits)

    cdef grow(self, int64_t num_requests):
        cdef int64_t old_count = self.num_requests // self.num_groups
        if self.keys is not None:
            raise ValueError("expected a cache without prefix keys, which know the prompts of all requests")
        self.first_live = <int64_t*>resized(self.first_live, num_requests * self.num_groups * sizeof(int64_t))
        memset(&self.first_live[self.num_requests], 0, (num_requests - old_count) * self.num_groups * sizeof(int64_t))
        self.junction = <int64_t*>resized(self.junction, num_requests * sizeof(int64_t))
        memset(&self.junction[old_count], 0, (num_requests - old_count) * sizeof(int64_t))
        self._grow_request_tables(num_requests * self.num_groups)

    cdef bint can_ever_hold(self, int64_t tokens) noexcept nogil:
        self.hit_tokens = self.num_free_hits = 0
        return self._needed(tokens, True) <= self.pool.num_blocks

    # Prefix hits

    cdef int64_t find_prefix(self, int64_t request, int64_t max_tokens, int64_t num_dropped) except -1 nogil:
        """The longest prefix that every group has cached as far as it needs it; full attention is asked first."""
        cdef int64_t group, found, before, longest = 0, limit = max_tokens
        self.hit_tokens = self.num_hits = self.num_free_hits = 0
        if self.keys is None:
            return 0
        while True:
            before = limit
            for group in range(self.num_groups):
                if self.groups[group].window == 0:
                    found = self._longest_hit(request, group, limit)
                    longest = max(longest, found)
                    limit = min(limit, found)
            for group in range(self.num_groups):
                if self.groups[group].window > 0:
                    found = self._longest_hit(request, group, limit)
                    longest = max(longest, found)
                    limit = min(limit, found)
            limit -= limit % self.alignment
            if limit == before:
                break
        self.hit_tokens = max(0, limit - num_dropped * self.alignment)
        self.junction[request] = longest if longest > self.hit_tokens else 0
        self._collect_hits(request)
        return self.hit_tokens

    cdef int64_t longest_prefix(self, int64_t request, int64_t max_tokens, int64_t num_dropped) noexcept nogil:
        cdef int64_t tokens
        if self.keys is None:
            return 0
        tokens = min(self.keys.num_shared(request) * self.keys.block_size, max_tokens)
        return max(0, tokens - tokens % self.alignment - num_dropped * self.alignment)

    cdef int64_t _group_key(self, int64_t request, int64_t group, int64_t block) noexcept nogil:
        cdef int64_t last = (block + 1) * self.groups[group].block_size // self.keys.block_size - 1
        return self.keys.key(request, last) * self.num_groups + group

    cdef bint _same_spec(self, int64_t one, int64_t other) noexcept nogil:
        return (
            self.groups[one].window == self.groups[other].window
            and self.groups[one].block_size == self.groups[other].block_size
        )

    cdef bint _all_have(self, int64_t request, int64_t spec, int64_t block) noexcept nogil:
        """Groups of one kind are looked up together: a block counts if all of them have it."""
        cdef int64_t group
        for group in range(self.num_groups):
            if self._same_spec(spec, group) and self.pool.find(self._group_key(request, group, block)) == NO_BLOCK:
                return False
        return True

    cdef int64_t _longest_hit(self, int64_t request, int64_t spec, int64_t max_tokens) noexcept nogil:
        """Tokens that the groups like `spec` have cached, looked up without the others."""
        cdef int64_t block_size = self.groups[spec].block_size, tail = self.groups[spec].tail
        cdef int64_t block, length = 0
        if self.groups[spec].window == 0:
            while (length + 1) * block_size <= max_tokens and self._all_have(request, spec, length):
                length += 1
            return length * block_size
        # From right to left: the first run that fills the window, else the run that reaches the start.
        for block in range(max_tokens // block_size - 1, -1, -1):
            length = length + 1 if self._all_have(request, spec, block) else 0
            if length == tail:
                return (block + length) * block_size
        return length * block_size

    cdef int _collect_hits(self, int64_t request) except -1 nogil:
        cdef int64_t group, block, length, found
        cdef int64_t width = self.hit_tokens // self.keys.block_size
        cdef int64_t* hits
        if width * self.num_groups > self.group_hits_capacity:
            self.group_hits_capacity = width * self.num_groups
            self.group_hits = <int64_t*>resized(self.group_hits, self.group_hits_capacity * sizeof(int64_t))
        for group in range(self.num_groups):
            hits = &self.group_hits[group * width]
            length = self.hit_tokens // self.groups[group].block_size
            for block in range(length):
                hits[block] = NO_BLOCK
            for block in range(length - 1, -1, -1):
                if self.groups[group].window > 0 and length - block > self.groups[group].tail:
                    break
                found = self.pool.find(self._group_key(request, group, block))
                hits[block] = found
                self.num_free_hits += found != NO_BLOCK and self.pool.is_free(found)
        return 0

    # Admission

    cdef int64_t _needed(self, int64_t tokens, bint capped) noexcept nogil:
        """Free blocks that vanish when the request of the last lookup holds `tokens`."""
        cdef int64_t group, wanted, skipped, total = self.num_free_hits
        for group in range(self.num_groups):
            wanted = blocks_for(min(tokens, self.max_model_len), self.groups[group].block_size)
            if capped:
                wanted = min(wanted, self.groups[group].cap)
            skipped = 0
            if self.groups[group].window > 0:
                skipped = max(0, self.hit_tokens - self.groups[group].window + 1) // self.groups[group].block_size
            total += max(0, wanted - max(skipped, self.hit_tokens // self.groups[group].block_size))
        return total

    cdef int64_t blocks_to_admit(self, int64_t tokens) noexcept nogil:
        return self._needed(tokens, True)

    cdef bint can_admit(
        self, int64_t known, int64_t chunk_end, bint reserves_known, int64_t kept_free
    ) except -1 nogil:
        if reserves_known and self._needed(known, True) + kept_free > self.pool.num_free():
            return False
        return self._needed(chunk_end, False) + kept_free <= self.pool.num_free()

    cdef int admit(self, int64_t request, int64_t tokens) except -1 nogil:
        cdef int64_t group, block, length
        cdef int64_t width = self.hit_tokens // self.keys.block_size if self.keys is not None else 0
        cdef BlockTable* table
        # The hits of all groups are taken before any new block: none may evict those of another.
        for group in range(self.num_groups):
            table = &self.tables[request * self.num_groups + group]
            length = self.hit_tokens // self.groups[group].block_size
            self._reserve_table(table, length)
            table.length = table.num_published = length
            self.first_live[request * self.num_groups + group] = length
            for block in range(length):
                table.blocks[block] = self.group_hits[group * width + block]
                if table.blocks[block] != NO_BLOCK:
                    self.pool.share(table.blocks[block])
                    self.first_live[request * self.num_groups + group] = min(
                        self.first_live[request * self.num_groups + group], block
                    )
        return self._grow_tables(request, tokens)

    # Running

    cdef bint extend(self, int64_t request, int64_t computed, int64_t tokens) except -1 nogil:
        # What left the window goes back even when the rest is refused.
        self._leave_window(request, computed)
        if self.missing_blocks(request, tokens) > self.pool.num_free():
            return False
        self._grow_tables(request, tokens)
        return True

    cdef int64_t missing_blocks(self, int64_t request, int64_t tokens) noexcept nogil:
        cdef int64_t group, missing = 0
        for group in range(self.num_groups):
            missing += max(
                0,
                blocks_for(tokens, self.groups[group].block_size)
                - self.tables[request * self.num_groups + group].length,
            )
        return missing

    cdef int _grow_tables(self, int64_t request, int64_t tokens) except -1 nogil:
        cdef int64_t group, length
        cdef BlockTable* table
        for group in range(self.num_groups):
            table = &self.tables[request * self.num_groups + group]
            length = blocks_for(tokens, self.groups[group].block_size)
            self._reserve_table(table, length)
            while table.length < length:
                table.blocks[table.length] = self.pool.take()
                table.length += 1
        return 0

    cdef void _leave_window(self, int64_t request, int64_t computed) noexcept nogil:
        cdef int64_t group, end, block
        cdef BlockTable* table
        cdef int64_t* first_live
        for group in range(self.num_groups):
            if self.groups[group].window == 0:
                continue
            table = &self.tables[request * self.num_groups + group]
            first_live = &self.first_live[request * self.num_groups + group]
            end = min(
                table.length, max(0, computed - self.groups[group].window + 1) // self.groups[group].block_size
            )
            for block in range(end - 1, first_live[0] - 1, -1):
                self.pool.give_back(table.blocks[block])
                table.blocks[block] = NO_BLOCK
            first_live[0] = max(first_live[0], end)

    cdef void shrink(self, int64_t request, int64_t tokens) noexcept nogil:
        cdef int64_t group
        cdef BlockTable* table
        for group in range(self.num_groups):
            table = &self.tables[request * self.num_groups + group]
            while table.length > blocks_for(tokens, self.groups[group].block_size):
                table.length -= 1
                self.pool.give_back(table.blocks[table.length])

    cdef bint _is_kept(self, int64_t request, int64_t group, int64_t block) noexcept nogil:
        """Whether a sliding group publishes the block: it lies in the window of somebody who comes back there."""
        cdef int64_t end
        if self.groups[group].window == 0 or self.keeps_every_block:
            return True
        end = (self.prompt_tokens[request] - 1) // self.groups[group].block_size
        if end - self.groups[group].tail <= block < end:
            return True
        end = self.junction[request] // self.groups[group].block_size
        return end - self.groups[group].tail <= block < end

    cdef int publish(self, int64_t request, int64_t tokens) except -1 nogil:
        cdef int64_t group, block
        cdef BlockTable* table
        if self.keys is None:
            return 0
        for group in range(self.num_groups):
            table = &self.tables[request * self.num_groups + group]
            while table.num_published < tokens // self.groups[group].block_size:
                block = table.num_published
                if table.blocks[block] != NO_BLOCK and self._is_kept(request, group, block):
                    self.pool.publish(table.blocks[block], self._group_key(request, group, block))
                table.num_published += 1
        return 0

    cdef void release(self, int64_t request) noexcept nogil:
        """Group by group, each from its last block to its first."""
        cdef int64_t group
        cdef BlockTable* table
        for group in range(self.num_groups):
            table = &self.tables[request * self.num_groups + group]
            while table.length > 0:
                table.length -= 1
                if table.blocks[table.length] != NO_BLOCK:
                    self.pool.give_back(table.blocks[table.length])
            table.num_published = 0
            self.first_live[request * self.num_groups + group] = 0
            free(table.blocks)
            table.blocks = NULL
            table.capacity = 0

    cdef int64_t held_blocks(self, int64_t request) noexcept nogil:
        cdef int64_t group, held = 0
        for group in range(self.num_groups):
            held += (
                self.tables[request * self.num_groups + group].length
                - self.first_live[request * self.num_groups + group]
            )
        return held

    def can_hold(self, int64_t tokens):
        """Return whether the empty cache has room for a request of so many tokens."""
        return self.can_ever_hold(tokens)

    def holdings(self, int64_t request):
        """Return [table length, real blocks] of every group."""
        cdef int64_t first = request * self.num_groups, group
        return [
            [self.tables[first + group].length, self.tables[first + group].length - self.first_live[first + group]]
            for group in range(self.num_groups)
        ]
