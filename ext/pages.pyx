"""KV blocks of one scheduler rank: who holds which block, what is cached, what is evicted next.

Not the scheduler: nothing here knows about budgets, queues or preemption. A request is an index, a block is an
index. Source: engine-and-replay.md 2.4 and 2.5, vllm-facts.md 2 and 3.1.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import numpy as np

from fpmsdk.errors import TraceError

cdef enum:
    NO_KEY = -1
    NONE = -1    # no block, end of a list
    VACANT = -2  # parent of a trie node that stands for nothing


cdef inline uint64_t mix(uint64_t value) noexcept nogil:
    # The finaliser of splitmix64: neighbouring keys must not share buckets.
    value = (value ^ (value >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * <uint64_t>0x94D049BB133111EB
    return value ^ (value >> 31)


cdef class PrefixTrie:
    """Interns chains of prompt pieces: equal chains from the root, and only those, get the same node."""

    def __cinit__(self):
        self.vacant = NONE

    def __dealloc__(self):
        free(self.nodes)
        free(self.slots)

    cdef int64_t child(self, int64_t parent, int64_t content) except -1 nogil:
        cdef int64_t* slot
        if 2 * self.num_nodes >= self.num_slots:
            self._grow()
        slot = self._slot(parent, content)
        if slot[0] == NONE:
            if self.vacant == NONE:
                slot[0] = self.num_nodes
                self.num_nodes += 1
            else:
                slot[0] = self.vacant
                self.vacant = self.nodes[self.vacant].content
            self.nodes[slot[0]] = TrieNode(parent, content)
            self.num_used += 1
        return slot[0]

    cdef void mark(self, int8_t[::1] is_used, int64_t node) noexcept nogil:
        """Note that a node is in use, and so all on the way to it."""
        while node != NONE and not is_used[node]:
            is_used[node] = True
            node = self.nodes[node].parent

    cdef void keep(self, const int8_t[::1] is_used) noexcept nogil:
        """Forget all nodes but those marked; their numbers go to later ones."""
        cdef int64_t node
        self.vacant = NONE
        self.num_used = 0
        for node in range(self.num_nodes - 1, -1, -1):
            if is_used[node]:
                self.num_used += 1
            else:
                self.nodes[node] = TrieNode(VACANT, self.vacant)
                self.vacant = node
        self._index()

    cdef int64_t* _slot(self, int64_t parent, int64_t content) noexcept nogil:
        """Where the child is, or where it belongs."""
        cdef uint64_t position = mix(<uint64_t>parent * <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>content)
        cdef int64_t node
        while True:
            position &= <uint64_t>(self.num_slots - 1)
            node = self.slots[position]
            if node == NONE or (self.nodes[node].parent == parent and self.nodes[node].content == content):
                return &self.slots[position]
            position += 1

    cdef int _grow(self) except -1 nogil:
        self.num_slots = max(1024, 2 * self.num_slots)
        self.slots = <int64_t*>resized(self.slots, self.num_slots * sizeof(int64_t))
        self.nodes = <TrieNode*>resized(self.nodes, self.num_slots // 2 * sizeof(TrieNode))
        self._index()
        return 0

    cdef void _index(self) noexcept nogil:
        cdef int64_t node
        memset(self.slots, 0xFF, self.num_slots * sizeof(int64_t))
        for node in range(self.num_nodes):
            if self.nodes[node].parent != VACANT:
                self._slot(self.nodes[node].parent, self.nodes[node].content)[0] = node


cdef int64_t pieces_of(int64_t trace_block_tokens, int64_t block_size) noexcept nogil:
    """How many keys a trie node stands for."""
    # Where no KV block crosses the edge of a trace block, the node of the trace block tells those within apart.
    return trace_block_tokens // block_size if trace_block_tokens % block_size == 0 else 1


cdef int intern_chain(
    PrefixTrie trie,
    const int64_t* hash_ids,
    int64_t trace_block_tokens,
    int64_t block_size,
    int64_t num_keys,
    int64_t* keys,
) except -1 nogil:
    """Find the keys of the first full KV blocks of a prompt."""
    cdef int64_t block, piece, last_piece, node = NONE, pieces = pieces_of(trace_block_tokens, block_size)
    if pieces > 1:
        for block in range(num_keys):
            if block % pieces == 0:
                node = trie.child(node, hash_ids[block // pieces])
            keys[block] = node * pieces + block % pieces
        return 0
    for block in range(num_keys):
        # The tokens of a trace block are alike, so a KV block is the list of trace blocks it overlaps: the cuts lie
        # at the same places in every request.
        piece = block * block_size // trace_block_tokens
        last_piece = ((block + 1) * block_size - 1) // trace_block_tokens
        while piece <= last_piece:
            node = trie.child(node, hash_ids[piece])
            piece += 1
        keys[block] = node
    return 0


cdef class PrefixKeys:
    """The chained content key of every full KV block a request can ever have.

    Two requests share the key of their k-th block exactly when their first k + 1 blocks hold the same tokens. Trace
    hash ids describe prompts in blocks of `trace_block_tokens`; keys describe them in blocks of `block_size`.
    Generated tokens are unique to their request, unless it has more hash ids than its prompt has blocks: then these
    describe what it generates too. Prompts without hash ids are unique as well.

    Parameters
    ----------
    prompt_tokens, output_tokens : int64[n]
    hash_offsets : int64[n + 1], hash_ids : int64[hash_offsets[n]]
        Trace hash ids of request i are `hash_ids[hash_offsets[i]:hash_offsets[i + 1]]`; they cover the prompt, or
        more, or are absent.
    trace_block_tokens, block_size : tokens per trace block and per KV block

    >>> import numpy as np
    >>> keys = PrefixKeys(np.array([8, 8]), np.array([4, 4]), np.array([0, 2, 4]), np.array([7, 8, 7, 9]), 4, 4)
    >>> keys.key_of(0, 0) == keys.key_of(1, 0), keys.key_of(0, 1) == keys.key_of(1, 1)
    (True, False)
    """

    # Not __cinit__, which would get the arguments of the subclass.
    def __init__(
        self,
        const int64_t[::1] prompt_tokens not None,
        const int64_t[::1] output_tokens not None,
        const int64_t[::1] hash_offsets not None,
        const int64_t[::1] hash_ids not None,
        int64_t trace_block_tokens,
        int64_t block_size,
    ):
        cdef int64_t count = prompt_tokens.shape[0]
        cdef int64_t request, num_ids, described, num_keys = 0, num_own = 0
        cdef PrefixTrie trie = PrefixTrie()
        cdef int64_t pieces
        if trace_block_tokens < 1 or block_size < 1:
            raise ValueError(f"expected positive block sizes, found {trace_block_tokens} and {block_size}")
        if output_tokens.shape[0] != count or hash_offsets.shape[0] != count + 1:
            raise ValueError(f"expected {count} output_tokens and {count + 1} hash_offsets")
        if hash_offsets[0] < 0 or hash_offsets[count] > hash_ids.shape[0] or np.any(np.diff(hash_offsets) < 0):
            raise ValueError("expected ascending hash_offsets within hash_ids")
        self.block_size = block_size
        self.first_key = np.zeros(count + 1, np.int64)
        for request in range(count):
            if hash_offsets[request + 1] > hash_offsets[request]:
                if (hash_offsets[request + 1] - hash_offsets[request]) * trace_block_tokens < prompt_tokens[request]:
                    raise TraceError(
                        f"request {request}: prompt of {prompt_tokens[request]} tokens exceeds its "
                        f"{hash_offsets[request + 1] - hash_offsets[request]} hash ids of {trace_block_tokens} tokens; "
                        "give one hash id per started block"
                    )
                described = prompt_tokens[request]
                num_ids = hash_offsets[request + 1] - hash_offsets[request]
                if (num_ids - 1) * trace_block_tokens >= described:
                    described = min(described + output_tokens[request], num_ids * trace_block_tokens)
                num_keys += described // block_size
            self.first_key[request + 1] = num_keys
        self.keys = np.zeros(num_keys, np.int64)
        pieces = pieces_of(trace_block_tokens, block_size)
        with nogil:
            for request in range(count):
                if self.first_key[request + 1] > self.first_key[request]:
                    intern_chain(
                        trie,
                        &hash_ids[hash_offsets[request]],
                        trace_block_tokens,
                        block_size,
                        self.first_key[request + 1] - self.first_key[request],
                        &self.keys[self.first_key[request]],
                    )
        self.num_shared_keys = trie.num_nodes * pieces
        self.first_own_key = np.zeros(count, np.int64)
        for request in range(count):
            self.first_own_key[request] = self.num_shared_keys + num_own
            num_own += (prompt_tokens[request] + output_tokens[request]) // block_size

    cdef int find_shared(self) except -1:
        """Prepare `num_shared`."""
        # A chain that another request starts with too is met at all of its blocks.
        if not self.knows_shared:
            self.knows_shared = True
            self.is_shared = (np.bincount(self.keys, minlength=1) > 1)[self.keys].astype(np.int8)
        return 0

    cdef int64_t key(self, int64_t request, int64_t block) noexcept nogil:
        cdef int64_t first = self.first_key[request]
        cdef int64_t num_prompt_keys = self.first_key[request + 1] - first
        if block < num_prompt_keys:
            return self.keys[first + block]
        return self.first_own_key[request] + block - num_prompt_keys

    cdef int64_t count(self) noexcept nogil:
        return self.first_own_key.shape[0]

    cdef int64_t key_space(self) noexcept nogil:
        """Keys that may belong to several requests lie below this."""
        return self.num_shared_keys

    cdef int64_t num_shared(self, int64_t request) noexcept nogil:
        """Leading prompt blocks that some other request has as well; after `find_shared`."""
        cdef int64_t first = self.first_key[request], block = 0
        while block < self.first_key[request + 1] - first and self.is_shared[first + block]:
            block += 1
        return block

    def key_of(self, int64_t request, int64_t block):
        """Return the content key of one full block of one request."""
        if not 0 <= request < self.count() or block < 0:
            raise IndexError(f"no block {block} of request {request}, there are {self.count()} requests")
        return self.key(request, block)


cdef class BlockPool:
    """A fixed number of KV blocks, some of them published under a content key.

    Blocks without content come back first; published ones wait in the order of their return and lose their key
    when they are taken, oldest first. Memory grows with the blocks in use, not with the size of the pool.
    """

    def __cinit__(self, int64_t num_blocks, bint publishes):
        if num_blocks < 0:
            raise ValueError(f"expected a number of blocks, found {num_blocks}")
        self.num_blocks = num_blocks
        self.publishes = publishes
        self.blank = self.oldest = self.newest = NONE

    def __dealloc__(self):
        free(self.blocks)
        free(self.buckets)
        free(self.log)

    cdef int64_t num_free(self) noexcept nogil:
        return self.num_blocks - self.num_touched + self.num_blank + self.num_evictable

    cdef int64_t find(self, int64_t key) noexcept nogil:
        """The block published first under `key` among those still resident, or NONE."""
        cdef int64_t block
        if self.num_buckets == 0:
            return NONE
        block = self.buckets[mix(<uint64_t>key) & <uint64_t>(self.num_buckets - 1)]
        while block != NONE and self.blocks[block].key != key:
            block = self.blocks[block].next_in_bucket
        return block

    cdef bint is_free(self, int64_t block) noexcept nogil:
        return self.blocks[block].references == 0

    cdef void share(self, int64_t block) noexcept nogil:
        """One more request holds a published block."""
        if self.is_free(block):
            self._leave_free_list(block)
        self.blocks[block].references += 1

    cdef int64_t take(self) except -1 nogil:
        """Hand out a private block; the caller has checked `num_free`."""
        cdef int64_t block
        if self.blank != NONE:
            block = self.blank
            self.blank = self.blocks[block].older
            self.num_blank -= 1
        elif self.num_touched < self.num_blocks:
            if self.num_touched == self.blocks_capacity:
                self._grow()
            block = self.num_touched
            self.num_touched += 1
            self.blocks[block].key = NO_KEY
        else:
            block = self.oldest
            self._leave_free_list(block)
            self._unpublish(block)
        self.blocks[block].references = 1
        return block

    cdef void give_back(self, int64_t block) noexcept nogil:
        self.blocks[block].references -= 1
        if self.blocks[block].references > 0:
            return
        if self.blocks[block].key == NO_KEY:
            self.blocks[block].older = self.blank
            self.blank = block
            self.num_blank += 1
            return
        self.blocks[block].newer = NONE
        self.blocks[block].older = self.newest
        if self.newest == NONE:
            self.oldest = block
        else:
            self.blocks[self.newest].newer = block
        self.newest = block
        self.num_evictable += 1

    cdef int publish(self, int64_t block, int64_t key) except -1 nogil:
        self.blocks[block].key = key
        self._append_to_bucket(block)
        return self._log(key, 1)

    cdef int _log(self, int64_t key, int64_t copies) except -1 nogil:
        if not self.logs:
            return 0
        if self.num_logged == self.log_capacity:
            self.log_capacity = max(256, 2 * self.log_capacity)
            self.log = <ResidencyChange*>resized(self.log, self.log_capacity * sizeof(ResidencyChange))
        self.log[self.num_logged] = ResidencyChange(key, copies)
        self.num_logged += 1
        return 0

    cdef void _append_to_bucket(self, int64_t block) noexcept nogil:
        # At the end: among copies of one content the first published is found first.
        cdef int64_t* link = &self.buckets[mix(<uint64_t>self.blocks[block].key) & <uint64_t>(self.num_buckets - 1)]
        while link[0] != NONE:
            link = &self.blocks[link[0]].next_in_bucket
        link[0] = block
        self.blocks[block].next_in_bucket = NONE

    cdef int _unpublish(self, int64_t block) except -1 nogil:
        cdef int64_t* link = &self.buckets[mix(<uint64_t>self.blocks[block].key) & <uint64_t>(self.num_buckets - 1)]
        while link[0] != block:
            link = &self.blocks[link[0]].next_in_bucket
        link[0] = self.blocks[block].next_in_bucket
        self._log(self.blocks[block].key, -1)
        self.blocks[block].key = NO_KEY
        return 0

    cdef void _leave_free_list(self, int64_t block) noexcept nogil:
        cdef int64_t older = self.blocks[block].older
        cdef int64_t newer = self.blocks[block].newer
        if older == NONE:
            self.oldest = newer
        else:
            self.blocks[older].newer = newer
        if newer == NONE:
            self.newest = older
        else:
            self.blocks[newer].older = older
        self.num_evictable -= 1

    cdef int _grow(self) except -1 nogil:
        cdef int64_t bucket, block, following, num_old_buckets = self.num_buckets
        cdef int64_t capacity = max(256, 2 * self.blocks_capacity)
        cdef int64_t* old_buckets = self.buckets
        self.blocks = <Block*>resized(self.blocks, capacity * sizeof(Block))
        self.blocks_capacity = capacity
        if not self.publishes:
            return 0
        self.buckets = <int64_t*>resized(NULL, capacity * sizeof(int64_t))
        self.num_buckets = capacity
        memset(self.buckets, 0xFF, capacity * sizeof(int64_t))
        for bucket in range(num_old_buckets):
            block = old_buckets[bucket]
            while block != NONE:
                following = self.blocks[block].next_in_bucket
                self._append_to_bucket(block)
                block = following
        free(old_buckets)
        return 0


cdef class KvCache:
    """What one rank's requests hold: a table of blocks each, all of one full-attention group.

    Parameters
    ----------
    num_requests : how many request indices exist
    num_blocks : usable blocks (vLLM reserves one of its `num_gpu_blocks`)
    block_size : tokens per block
    keys : PrefixKeys, or None when prefix caching is off
    """

    # Not __cinit__, which would get the arguments of the subclasses; a scheduler takes no cache without its tables.
    def __init__(self, int64_t num_requests, int64_t num_blocks, int64_t block_size, PrefixKeys keys):
        if num_requests < 0 or block_size < 1:
            raise ValueError(f"expected requests and a positive block_size, found {num_requests} and {block_size}")
        self.pool = BlockPool(num_blocks, keys is not None)
        self.block_size = block_size
        self.keys = keys
        # Untouched pages of calloc cost nothing: of many ranks each sees few of the requests.
        self.tables = <BlockTable*>calloc(max(num_requests, 1), sizeof(BlockTable))
        if self.tables == NULL:
            raise MemoryError(f"no memory for the block tables of {num_requests} requests")
        self.num_requests = num_requests

    def __dealloc__(self):
        cdef int64_t request
        for request in range(self.num_requests):
            free(self.tables[request].blocks)
        free(self.tables)
        free(self.hits)

    cdef grow(self, int64_t num_requests):
        """Have room for so many requests; only between passes."""
        self._grow_request_tables(num_requests)

    cdef _grow_request_tables(self, int64_t num_tables):
        self.tables = <BlockTable*>resized(self.tables, num_tables * sizeof(BlockTable))
        memset(&self.tables[self.num_requests], 0, (num_tables - self.num_requests) * sizeof(BlockTable))
        self.num_requests = num_tables

    cdef bint can_ever_hold(self, int64_t tokens) noexcept nogil:
        return blocks_for(tokens, self.block_size) <= self.pool.num_blocks

    cdef int64_t longest_prefix(self, int64_t request, int64_t max_tokens, int64_t num_dropped) noexcept nogil:
        """Tokens of the longest prefix, as `find_prefix` takes it, that a lookup for a new request can ever find."""
        cdef int64_t num_blocks
        if self.keys is None:
            return 0
        num_blocks = min(self.keys.num_shared(request), max_tokens // self.block_size)
        return max(0, num_blocks - num_dropped) * self.block_size

    cdef int64_t find_prefix(self, int64_t request, int64_t max_tokens, int64_t num_dropped) except -1 nogil:
        """Look up the longest cached prefix of a waiting request, at most `max_tokens`; return its tokens.

        The last `num_dropped` blocks found are not used; the others are remembered for `blocks_to_admit` and `admit`.
        """
        cdef int64_t block, found
        cdef int64_t max_blocks = max_tokens // self.block_size
        self.num_hits = self.num_free_hits = 0
        if self.keys is None:
            return 0
        if max_blocks > self.hits_capacity:
            self.hits = <int64_t*>resized(self.hits, max_blocks * sizeof(int64_t))
            self.hits_capacity = max_blocks
        for block in range(max_blocks):
            found = self.pool.find(self.keys.key(request, block))
            if found == NONE:
                break
            self.hits[block] = found
            self.num_hits += 1
        self.num_hits = max(0, self.num_hits - num_dropped)
        for block in range(self.num_hits):
            self.num_free_hits += self.pool.is_free(self.hits[block])
        return self.num_hits * self.block_size

    cdef int64_t blocks_to_admit(self, int64_t tokens) noexcept nogil:
        """Free blocks that vanish when the request of the last lookup holds `tokens`; a free hit counts too."""
        return max(0, blocks_for(tokens, self.block_size) - self.num_hits) + self.num_free_hits

    cdef bint can_admit(
        self, int64_t known, int64_t chunk_end, bint reserves_known, int64_t kept_free
    ) except -1 nogil:
        """Whether the request of the last lookup fits: its first chunk, or all that it knows.

        `kept_free` blocks stay free.
        """
        return self.blocks_to_admit(known if reserves_known else chunk_end) + kept_free <= self.free_blocks()

    cdef int admit(self, int64_t request, int64_t tokens) except -1 nogil:
        """First allocation: the hits of the last lookup, then new blocks up to `tokens`, which the caller checked."""
        cdef BlockTable* table = &self.tables[request]
        cdef int64_t hit
        if self.keys is None:
            self.extend(request, 0, tokens)
            return 0
        # All hits are taken before any new block: a request must not evict its own prefix.
        self._reserve_table(table, self.num_hits)
        for hit in range(self.num_hits):
            self.pool.share(self.hits[hit])
            table.blocks[hit] = self.hits[hit]
        table.length = table.num_published = self.num_hits
        self.extend(request, 0, tokens)
        return 0

    cdef bint extend(self, int64_t request, int64_t computed, int64_t tokens) except -1 nogil:
        """Let the request, of which `computed` tokens are computed, hold `tokens`. All or nothing."""
        cdef BlockTable* table = &self.tables[request]
        cdef int64_t length = blocks_for(tokens, self.block_size)
        if length <= table.length:
            return True
        if length - table.length > self.pool.num_free():
            return False
        if self.keys is None:
            # Nobody will ask which blocks they are.
            self.pool.num_touched += length - table.length
            table.length = length
            return True
        self._reserve_table(table, length)
        while table.length < length:
            table.blocks[table.length] = self.pool.take()
            table.length += 1
        return True

    cdef int64_t missing_blocks(self, int64_t request, int64_t tokens) noexcept nogil:
        """Blocks that the request would have to take to hold `tokens`."""
        return max(0, blocks_for(tokens, self.block_size) - self.tables[request].length)

    # Requests that decode in step, one token in every pass, form a cohort: the cache need not be told of each of them
    # in each pass.

    cdef int64_t decodes_before_touch(self, int64_t computed) noexcept nogil:
        """In how many passes from now a member of `computed` tokens has to be touched before it decodes."""
        return blocks_for(computed, self.block_size) * self.block_size - computed

    cdef int64_t touch_demand(self, int64_t request, int64_t computed) noexcept nogil:
        """What a touch takes of `supply`."""
        return self.missing_blocks(request, computed + 1)

    cdef int touch(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil:
        """A member decodes; the caller has checked the demand."""
        if self.keys is not None:
            # Blocks that earlier passes have filled get their keys, which nobody else can ask for.
            self.publish(request, computed)
        self.extend(request, computed, computed + 1)
        return 0

    cdef bint join_cohort(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil:
        """A request of `computed` tokens becomes a member before pass `cohort_pass`; False when it cannot yet."""
        return True

    cdef int leave_cohort(self, int64_t request, int64_t computed, int64_t cohort_pass) except -1 nogil:
        """A member of `computed` tokens becomes an ordinary request before pass `cohort_pass`."""
        return self.publish(request, computed)

    cdef int64_t cohort_demand(self, int64_t cohort_pass) noexcept nogil:
        """At most what a pass takes of `supply` for members that are not touched."""
        return 0

    cdef void advance_cohort(self, int64_t cohort_pass) noexcept nogil:
        """All members decode in this pass; those to touch have been touched."""
        pass

    cdef int64_t demand(self, int64_t request, int64_t computed, int64_t tokens) noexcept nogil:
        """At most how much of `supply` an `extend` takes; no more than that is certain to succeed."""
        return self.missing_blocks(request, tokens)

    cdef int64_t supply(self) noexcept nogil:
        return self.free_blocks()

    cdef void shrink(self, int64_t request, int64_t tokens) noexcept nogil:
        """Give back the unpublished blocks at the end that `tokens` do not need."""
        cdef BlockTable* table = &self.tables[request]
        cdef int64_t surplus = table.length - blocks_for(tokens, self.block_size)
        if self.keys is None:
            if surplus > 0:
                self.pool.num_touched -= surplus
                table.length -= surplus
            return
        while table.length > blocks_for(tokens, self.block_size):
            table.length -= 1
            self.pool.give_back(table.blocks[table.length])

    cdef int publish(self, int64_t request, int64_t tokens) except -1 nogil:
        """Make the full blocks among the first `tokens` findable, already for later requests of the same pass."""
        cdef BlockTable* table = &self.tables[request]
        if self.keys is None:
            return 0
        while table.num_published < tokens // self.block_size:
            self.pool.publish(table.blocks[table.num_published], self.keys.key(request, table.num_published))
            table.num_published += 1
        return 0

    cdef void release(self, int64_t request) noexcept nogil:
        """Give everything back, the last block first, so that tails are evicted before heads."""
        cdef BlockTable* table = &self.tables[request]
        if self.keys is None:
            self.pool.num_touched -= table.length
            table.length = 0
            return
        while table.length > 0:
            table.length -= 1
            self.pool.give_back(table.blocks[table.length])
        table.num_published = 0
        free(table.blocks)
        table.blocks = NULL
        table.capacity = 0

    cdef int64_t active_blocks(self) noexcept nogil:
        return self.pool.num_blocks - self.pool.num_free()

    cdef int64_t free_blocks(self) noexcept nogil:
        return self.pool.num_free()

    cdef int64_t published_free_blocks(self) noexcept nogil:
        return self.pool.num_evictable

    cdef int64_t held_blocks(self, int64_t request) noexcept nogil:
        return self.tables[request].length

    cdef int64_t used_bytes(self) noexcept nogil:
        """Of a cache that has a budget of bytes instead of blocks."""
        return 0

    cdef bint counts_bytes(self) noexcept nogil:
        return False

    cdef int _reserve_table(self, BlockTable* table, int64_t length) except -1 nogil:
        if length > table.capacity:
            table.capacity = max(length, 2 * table.capacity)
            table.blocks = <int64_t*>resized(table.blocks, table.capacity * sizeof(int64_t))
        return 0
