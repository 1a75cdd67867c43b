"""Which rank of a pool of workers serves a request: round robin, or where its prompt is cached and little waits.

Not the scheduler: a placed request stays where it is. Source: engine-and-replay.md 5.4.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t

from fpmsdk._ext.pages cimport BlockPool, PrefixKeys
from fpmsdk._ext.scheduler cimport Requests

import numpy as np


cdef class Placement:
    """Round robin over workers, and within a worker over its attention-DP ranks.

    Parameters
    ----------
    num_workers, dp_size : int
    fills_workers : bool
        Take all ranks of worker 0, then those of worker 1, as the pools of a disaggregated system do; otherwise rank 0
        of every worker, then rank 1 of every worker.

    >>> placement = Placement(2, 2)
    >>> [placement.place(request) for request in range(5)]
    [0, 2, 1, 3, 0]
    """

    def __init__(self, int64_t num_workers, int64_t dp_size, bint fills_workers=False):
        if num_workers < 1 or dp_size < 1:
            raise ValueError(f"expected workers of at least one rank, found {num_workers} of {dp_size}")
        self.num_workers = num_workers
        self.dp_size = dp_size
        self.fills_workers = fills_workers
        self.placed_on = np.zeros(num_workers, np.int64)

    cdef grow(self, int64_t num_requests):
        """Have room for so many requests, and for the keys that there are."""

    cdef int64_t choose(self, int64_t request, int64_t dp_rank) except -1 nogil:
        """The rank for a request; `dp_rank` is the rank within the worker that it asks for, or -1."""
        cdef int64_t worker, turn
        if self.fills_workers:
            # The turn counts within the ranks that may serve the request: all, or one of each worker.
            turn = self.next_turn % (self.num_workers * (self.dp_size if dp_rank < 0 else 1))
            self.next_turn = turn + 1
            return turn if dp_rank < 0 else turn * self.dp_size + dp_rank
        worker = self.next_turn % self.num_workers
        self.next_turn += 1
        if dp_rank < 0:
            dp_rank = self.placed_on[worker] % self.dp_size
            self.placed_on[worker] += 1
        return worker * self.dp_size + dp_rank

    cdef int prompt_done(self, int64_t request) except -1 nogil:
        return 0

    cdef int ended(self, int64_t request) except -1 nogil:
        return 0

    cdef int pass_ended(self, int64_t rank, BlockPool pool) except -1 nogil:
        return 0

    def place(self, int64_t request, int64_t dp_rank=-1):
        """Return the rank that serves the request."""
        return self.choose(request, dp_rank)


cdef class KvAwarePlacement(Placement):
    """Where the fewest blocks would have to be computed and held; of equals the first.

    A rank costs its pending prompt tokens and those of the request, in blocks, and the distinct prompt blocks of its
    unfinished requests and this one. What a rank has cached is known as of its last pass end.

    Parameters
    ----------
    num_workers, dp_size : int
    requests : Requests
    keys : PrefixKeys
    """

    def __init__(self, int64_t num_workers, int64_t dp_size, Requests requests not None, PrefixKeys keys not None):
        super().__init__(num_workers, dp_size)
        num_ranks = num_workers * dp_size
        self.requests = requests
        self.keys = keys
        self.resident = np.zeros((num_ranks, keys.key_space()), np.int32)
        self.wanted = np.zeros((num_ranks, keys.key_space()), np.int32)
        self.wanted_blocks = np.zeros(num_ranks, np.int64)
        self.pending_tokens = np.zeros(num_ranks, np.int64)
        self.rank_of = np.full(requests.count, -1, np.int64)
        self.expected_tokens = np.zeros(requests.count, np.int64)

    cdef grow(self, int64_t num_requests):
        more = num_requests - self.rank_of.shape[0]
        if more > 0:
            self.rank_of = np.concatenate([self.rank_of, np.full(more, -1, np.int64)])
            self.expected_tokens = np.concatenate([self.expected_tokens, np.zeros(more, np.int64)])
        more = self.keys.key_space() - self.resident.shape[1]
        if more > 0:
            more = ((0, 0), (0, max(more, self.resident.shape[1])))
            self.resident = np.pad(self.resident, more)
            self.wanted = np.pad(self.wanted, more)

    cdef int64_t choose(self, int64_t request, int64_t dp_rank) except -1 nogil:
        cdef int64_t rank, overlap, best = -1, best_overlap = 0
        cdef int64_t prompt = self.requests.columns.prompt_tokens[request]
        cdef double cost, lowest = INFINITY
        for rank in range(self.num_workers * self.dp_size):
            if 0 <= dp_rank != rank % self.dp_size:
                continue
            overlap = self._overlap(rank, request)
            cost = <double>(self.pending_tokens[rank] + prompt - overlap) / <double>self.keys.block_size
            cost += <double>(self.wanted_blocks[rank] + self._want(rank, request, 0))
            if cost < lowest:
                lowest, best, best_overlap = cost, rank, overlap
        self.rank_of[request] = best
        self.expected_tokens[request] = prompt - best_overlap
        self.pending_tokens[best] += prompt - best_overlap
        self.wanted_blocks[best] += self._want(best, request, 1)
        return best

    cdef int prompt_done(self, int64_t request) except -1 nogil:
        """Its first token is out: nothing of the prompt is pending any more."""
        self.pending_tokens[self.rank_of[request]] -= self.expected_tokens[request]
        self.expected_tokens[request] = 0
        return 0

    cdef int ended(self, int64_t request) except -1 nogil:
        self.prompt_done(request)
        self.wanted_blocks[self.rank_of[request]] -= self._want(self.rank_of[request], request, -1)
        return 0

    cdef int pass_ended(self, int64_t rank, BlockPool pool) except -1 nogil:
        """Learn what the rank has published and evicted since its last pass end."""
        cdef int64_t change
        for change in range(pool.num_logged):
            if pool.log[change].key < self.keys.num_shared_keys:
                self.resident[rank, pool.log[change].key] += <int>pool.log[change].copies
        pool.num_logged = 0
        return 0

    cdef int64_t _overlap(self, int64_t rank, int64_t request) noexcept nogil:
        """Leading prompt tokens in full blocks that the rank has cached."""
        cdef int64_t block = 0, key
        while (block + 1) * self.keys.block_size <= self.requests.columns.prompt_tokens[request]:
            key = self.keys.key(request, block)
            if key >= self.keys.num_shared_keys or self.resident[rank, key] == 0:
                break
            block += 1
        return block * self.keys.block_size

    cdef int64_t _want(self, int64_t rank, int64_t request, int change) noexcept nogil:
        """Count the request's prompt blocks in (1) or out (-1), or just look (0).

        Returns the number of them that no other unfinished request of the rank has.
        """
        cdef int64_t block, key, only_here = 0
        for block in range(self.requests.columns.prompt_tokens[request] // self.keys.block_size):
            key = self.keys.key(request, block)
            if key >= self.keys.num_shared_keys:  # blocks of its own
                only_here += 1
                continue
            if change < 0:
                self.wanted[rank, key] -= 1
            only_here += self.wanted[rank, key] == 0
            if change > 0:
                self.wanted[rank, key] += 1
        return only_here

