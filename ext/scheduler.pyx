"""The vLLM scheduler of one rank: which requests compute how many tokens in the next pass.

It decides and keeps the books; it knows no time and no price. Two rule sets: `vllm`, the decisions of the real
scheduler, and `simulator`, those of the peer simulator. Where a line does not name one, both agree.
Source: engine-and-replay.md 2, vllm-facts.md 1 to 3.
"""

cimport numpy as np
from libc.stdint cimport int8_t, int64_t
from libc.stdlib cimport free
from libc.string cimport memmove, memset

from fpmsdk._ext.pages cimport KvCache, PrefixKeys, resized
from fpmsdk._ext.rolling cimport RollingKeys
from fpmsdk._ext.speculation cimport DraftAcceptance

import numpy as np

np.import_array()

cdef int64_t UNLIMITED = 2**62

cdef enum:
    NONE = -1
    CALENDAR_SLOTS = 256  # a power of two; who is due later is looked at once a round
    FEW_FINISHED = 4
    COHORT_PAUSE = 8      # a cohort that had to dissolve is likely to have to again


cdef int64_t remove_at(IndexList* entries, int64_t position) noexcept nogil:
    cdef int64_t value = entries.items[position]
    entries.length -= 1
    memmove(
        &entries.items[position], &entries.items[position + 1], (entries.length - position) * sizeof(int64_t)
    )
    return value


cdef inline int64_t* slot(IndexQueue* queue, int64_t position) noexcept nogil:
    position += queue.head
    return &queue.items[position if position < queue.capacity else position - queue.capacity]


cdef int make_room(IndexQueue* queue) except -1 nogil:
    """Grow the ring so that one more item fits."""
    cdef int64_t old_capacity = queue.capacity
    if queue.length < old_capacity:
        return 0
    queue.capacity = max(16, 2 * old_capacity)
    queue.items = <int64_t*>resized(queue.items, queue.capacity * sizeof(int64_t))
    # What stands before the head is the end of the queue.
    memmove(&queue.items[old_capacity], queue.items, queue.head * sizeof(int64_t))
    return 0


cdef inline void pop_front(IndexQueue* queue) noexcept nogil:
    queue.head = queue.head + 1 if queue.head + 1 < queue.capacity else 0
    queue.length -= 1


cdef inline void count(LengthSums* sums, int64_t length, int sign) noexcept nogil:
    sums.count += sign
    sums.total += sign * length
    sums.squares += sign * length * length


cdef inline double variance(const LengthSums* sums) noexcept nogil:
    """Population variance of the counted lengths; 0.0 for none."""
    if sums.count == 0:
        return 0.0
    return max(
        0.0,
        (<double>sums.squares - <double>sums.total * (<double>sums.total / <double>sums.count)) / <double>sums.count,
    )


cdef int64_t limit_or_none(value) except -1:
    return UNLIMITED if value is None else min(value, UNLIMITED)


cdef class Requests:
    """Everything a scheduler knows about its requests, as one array per property; a request is an index.

    Parameters
    ----------
    prompt_tokens, output_tokens : int64[n]
    priority : int64[n], optional
        Read under the priority policy only: smaller is served first.
    """

    def __cinit__(self, prompt_tokens, output_tokens, priority=None):
        count = len(prompt_tokens)
        if len(output_tokens) != count or (priority is not None and len(priority) != count):
            raise ValueError(f"expected {count} output_tokens and priorities, one per prompt")
        self.count = count
        self.arrays = {
            "prompt_tokens": np.array(prompt_tokens, np.int64),
            "output_tokens": np.array(output_tokens, np.int64),
            "priority": np.zeros(count, np.int64) if priority is None else np.array(priority, np.int64),
            "arrival_order": np.zeros(count, np.int64),
            "generated_tokens": np.zeros(count, np.int64),
            "computed_tokens": np.zeros(count, np.int64),
            "num_preemptions": np.zeros(count, np.int64),
            "has_drafts": np.zeros(count, np.int8),
            "status": np.zeros(count, np.int8),
            "refusal": np.zeros(count, np.int8),
            "cohort_key": np.zeros(count, np.int64),
            "next_due": np.zeros(count, np.int64),
        }
        self._point()

    cdef _point(self):
        """Take the addresses of the arrays."""
        self.columns.prompt_tokens = <int64_t*>np.PyArray_DATA(self.arrays["prompt_tokens"])
        self.columns.output_tokens = <int64_t*>np.PyArray_DATA(self.arrays["output_tokens"])
        self.columns.priority = <int64_t*>np.PyArray_DATA(self.arrays["priority"])
        self.columns.arrival_order = <int64_t*>np.PyArray_DATA(self.arrays["arrival_order"])
        self.columns.generated_tokens = <int64_t*>np.PyArray_DATA(self.arrays["generated_tokens"])
        self.columns.computed_tokens = <int64_t*>np.PyArray_DATA(self.arrays["computed_tokens"])
        self.columns.num_preemptions = <int64_t*>np.PyArray_DATA(self.arrays["num_preemptions"])
        self.columns.has_drafts = <int8_t*>np.PyArray_DATA(self.arrays["has_drafts"])
        self.columns.status = <int8_t*>np.PyArray_DATA(self.arrays["status"])
        self.columns.refusal = <int8_t*>np.PyArray_DATA(self.arrays["refusal"])
        self.columns.cohort_key = <int64_t*>np.PyArray_DATA(self.arrays["cohort_key"])
        self.columns.next_due = <int64_t*>np.PyArray_DATA(self.arrays["next_due"])

    def column(self, str name):
        """Return a copy of one property, e.g. `generated_tokens`, as a numpy array."""
        return self.arrays[name].copy()

    def of(self, str name, slots):
        """Return one property of some requests."""
        return self.arrays[name][slots]

    cdef grow(self, int64_t count):
        """Have room for so many requests; only between passes."""
        for name, column in self.arrays.items():
            self.arrays[name] = np.concatenate([column, np.zeros(count - len(column), column.dtype)])
        self.count = count
        self._point()

    cdef assign(self, slots, prompt_tokens, output_tokens, priority):
        """Let indices stand for new requests."""
        for column in self.arrays.values():
            column[slots] = 0
        self.arrays["prompt_tokens"][slots] = prompt_tokens
        self.arrays["output_tokens"][slots] = output_tokens
        self.arrays["priority"][slots] = priority


cdef class Scheduler:
    """One rank: a waiting queue, a running list and a KV cache.

    Parameters
    ----------
    requests : Requests
        Shared by all ranks of a replay; each request is submitted to one of them.
    scheduler_rules : "vllm" or "simulator"
    num_gpu_blocks, block_size : int
        KV capacity; under vLLM rules one block is reserved.
    max_num_seqs, max_num_batched_tokens, max_model_len : int or None
        None is unlimited.
    enable_chunked_prefill : bool
    preemption_mode : "lifo" or "fifo"
    scheduling_policy : "fcfs" or "priority"
    keys : PrefixKeys or None
        None turns prefix caching off.
    kv_cache : KvCache or None
        None: one full-attention group of `num_gpu_blocks` blocks.
    drafts : DraftAcceptance or None
        Multi-token prediction: after its first token a request emits bursts.
    role : Role
        Of the worker; a decode worker computes no prompts of its own.
    never_evicts : bool
        TensorRT-LLM's guaranteed_no_evict: a request is admitted when its whole prompt and output have room.
    logs_residency : bool
        Keep what is published and evicted for a placement that knows the caches.
    prefill_schedule_interval : int
        Attention-DP cadence; 1 schedules prefill in every pass.
    long_prefill_token_threshold, long_prefill_token_threshold_adaptive, vllm_version
        vLLM rules only: chunks are cut to the threshold (0 is off); from 0.31 on a lone request is spared.
    watermark : float
        Share of the blocks that stay free when a request is admitted while others run.
    scheduler_reserve_full_isl : bool
        False admits on the first chunk instead of the whole known sequence.

    >>> scheduler = Scheduler(Requests([20], [3]), "simulator", num_gpu_blocks=64, block_size=4,
    ...                       max_num_batched_tokens=8)
    >>> scheduler.enqueue(0)
    True
    >>> tokens = []
    >>> while scheduler.has_unfinished():
    ...     tokens.append(scheduler.schedule_pass()["tokens"][0])
    ...     _ = scheduler.complete_pass()
    >>> tokens
    [8, 8, 4, 1, 1]
    """

    def __cinit__(
        self,
        Requests requests not None,
        str scheduler_rules,
        *,
        num_gpu_blocks,
        block_size,
        max_num_seqs=None,
        max_num_batched_tokens=None,
        max_model_len=None,
        enable_chunked_prefill=True,
        preemption_mode="lifo",
        scheduling_policy="fcfs",
        PrefixKeys keys=None,
        KvCache kv_cache=None,
        DraftAcceptance drafts=None,
        Role role=Role.AGGREGATED,
        never_evicts=False,
        logs_residency=False,
        prefill_schedule_interval=1,
        long_prefill_token_threshold=0,
        long_prefill_token_threshold_adaptive=False,
        vllm_version=(0, 32),
        watermark=0.0,
        scheduler_reserve_full_isl=True,
    ):
        if prefill_schedule_interval < 1 or long_prefill_token_threshold < 0:
            raise ValueError("expected a prefill_schedule_interval of at least 1 and a threshold of at least 0")
        if max(num_gpu_blocks, 1) * max(block_size, 1) > UNLIMITED:
            raise ValueError(f"expected a KV cache of at most {UNLIMITED} tokens")
        if keys is not None and (keys.block_size != block_size or keys.count() < requests.count):
            raise ValueError(f"expected prefix keys of {requests.count} requests in blocks of {block_size} tokens")
        if kv_cache is not None and (kv_cache.pool is None or kv_cache.num_requests < requests.count):
            raise ValueError(f"expected a KV cache of {requests.count} requests")
        self.requests = requests
        self.vllm_rules = scheduler_rules == "vllm"
        self.num_gpu_blocks = num_gpu_blocks
        self.kv = kv_cache
        if kv_cache is None:
            self.kv = KvCache(requests.count, num_gpu_blocks - self.vllm_rules, block_size, keys)
        if self.vllm_rules and self.kv.keys is not None and not enable_chunked_prefill:
            self.kv.keys.find_shared()
        self.drafts = drafts
        self.role = role
        self.never_evicts = never_evicts
        self.kv.pool.logs = logs_residency
        self.failed_generation = -1
        self.max_num_seqs = limit_or_none(max_num_seqs)
        self.max_num_batched_tokens = limit_or_none(max_num_batched_tokens)
        self.max_model_len = limit_or_none(max_model_len)
        self.chunked_prefill = enable_chunked_prefill
        self.preempts_oldest = preemption_mode == "fifo"
        self.by_priority = scheduling_policy == "priority"
        self.prefill_schedule_interval = limit_or_none(prefill_schedule_interval)
        self.long_prefill_token_threshold = limit_or_none(long_prefill_token_threshold)
        self.threshold_is_adaptive = long_prefill_token_threshold_adaptive
        # 0.29 and 0.30 were not recorded and count as older (vllm-facts.md 1.5).
        self.threshold_spares_lone_request = tuple(vllm_version) >= (0, 31)
        self.describes_passes = True
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.reserves_whole_sequence = scheduler_reserve_full_isl

    def __dealloc__(self):
        free(self.running.items)
        free(self.waiting.items)
        free(self.pending.items)
        free(self.scheduled)
        free(self.preemptions)
        free(self.calendar)
        free(self.ending.items)
        free(self.left_cohort.items)
        free(self.preempted.items)
        free(self.rejected.items)
        free(self.emitted.items)
        free(self.burst_tokens.items)
        free(self.finished.items)

    cdef void _cut_output(self, int64_t request) noexcept nogil:
        """No request generates more than the model's length, or the cache of an engine without eviction, allows."""
        cdef RequestColumns* requests = &self.requests.columns
        requests.output_tokens[request] = min(
            requests.output_tokens[request], max(0, self.max_model_len - requests.prompt_tokens[request])
        )
        if self.never_evicts:
            requests.output_tokens[request] = min(
                requests.output_tokens[request],
                max(0, self.num_gpu_blocks * self.kv.block_size - requests.prompt_tokens[request]),
            )

    cdef bint submit(self, int64_t request) except -1 nogil:
        """A request arrives. False: the engine refuses it, with the reason in `requests.refusal`."""
        cdef RequestColumns* requests = &self.requests.columns
        self._cut_output(request)
        requests.arrival_order[request] = self.num_submitted
        self.num_submitted += 1
        # The simulator finds out when the request reaches the head of the queue. Real vLLM refuses a prompt of
        # max_model_len when it is added, but lets one larger than the cache block the queue for ever: refused here.
        if self.vllm_rules:
            requests.refusal[request] = self._refusal(request)
            if requests.refusal[request] != ACCEPTED:
                requests.status[request] = REJECTED
                return False
        requests.status[request] = WAITING
        self._enqueue(request)
        return True

    cdef int add_destination(self, int64_t request) except -1 nogil:
        """A prompt that a prefill worker holds is to come here: it queues for blocks."""
        cdef RequestColumns* requests = &self.requests.columns
        requests.output_tokens[request] = min(
            requests.output_tokens[request], max(0, self.max_model_len - requests.prompt_tokens[request])
        )
        requests.generated_tokens[request] = requests.computed_tokens[request] = 0
        requests.has_drafts[request] = False
        requests.arrival_order[request] = self.num_submitted
        self.num_submitted += 1
        make_room(&self.pending)
        self.pending.length += 1
        slot(&self.pending, self.pending.length - 1)[0] = request
        self._count_queued(request, 1)
        return 0

    cdef int64_t reserve_next(self) except -2 nogil:
        """Reserve blocks for the first pending prompt if it fits; return the request, or -1.

        Its hits are those of the last lookup, `kv.num_hits`. Who did not fit is tried again when more may fit.
        """
        cdef int64_t request, prompt
        if self.pending.length == 0 or self.failed_generation == self.capacity_generation:
            return -1
        request = slot(&self.pending, 0)[0]
        prompt = self.requests.columns.prompt_tokens[request]
        # Nothing is computed here, so the whole prompt may be reused.
        self.kv.find_prefix(request, prompt, 0)
        if (
            self.running.length >= self.max_num_seqs
            or self.kv.blocks_to_admit(prompt) + self._promised_blocks() > self.kv.free_blocks()
        ):
            self.failed_generation = self.capacity_generation
            return -1
        self.kv.admit(request, prompt)
        self.requests.columns.status[request] = RESERVED
        pop_front(&self.pending)
        self.failed_generation = -1
        self.head_waits = False
        return request

    cdef int activate(self, int64_t request) except -1 nogil:
        """The transfer is done: the prompt counts as computed and waits in the order in which it was announced."""
        cdef IndexQueue* queue = &self.waiting
        cdef int64_t position
        self.head_waits = False
        self.requests.columns.computed_tokens[request] = self.requests.columns.prompt_tokens[request]
        self.requests.columns.status[request] = WAITING
        self.kv.publish(request, self.requests.columns.prompt_tokens[request])
        make_room(queue)
        queue.length += 1
        position = queue.length - 1
        if self.by_priority:
            slot(queue, position)[0] = request
            self._sift_up(position)
            return 0
        while position > 0 and (
            self.requests.columns.arrival_order[request]
            < self.requests.columns.arrival_order[slot(queue, position - 1)[0]]
        ):
            slot(queue, position)[0] = slot(queue, position - 1)[0]
            position -= 1
        slot(queue, position)[0] = request
        return 0

    cdef int release_source(self, int64_t request) except -1 nogil:
        """The prompt is elsewhere: the blocks held for the transfer are free."""
        self.kv.release(request)
        self.head_waits = False
        return 0

    cdef bint cancel(self, int64_t request) except -1 nogil:
        """Take a waiting or running request out, between passes and without a cohort; False when it is neither."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t position
        if requests.status[request] == RUNNING:
            for position in range(self.running.length):
                if self.running.items[position] == request:
                    remove_at(&self.running, position)
                    break
        elif requests.status[request] == WAITING or requests.status[request] == PREEMPTED:
            for position in range(self.waiting.length):
                if slot(&self.waiting, position)[0] == request:
                    self._dequeue(position)
                    break
        else:
            return False
        self.kv.release(request)
        requests.status[request] = CANCELED
        self.capacity_generation += 1
        self.head_waits = False
        return True

    cdef int _join_cohort(self) except -1 nogil:
        """Who emitted in the last pass and follows the members in `running` goes on with them."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t request, position = 0
        if not self.forms_cohort:
            return 0
        if self.cohort_pause > 0:
            self.cohort_pause -= 1
            return 0
        if self.calendar == NULL:
            self.calendar = <int64_t*>resized(NULL, 2 * CALENDAR_SLOTS * sizeof(int64_t))
            memset(self.calendar, 0xFF, 2 * CALENDAR_SLOTS * sizeof(int64_t))
        while self.num_in_cohort < self.running.length and position < self.emitted.length:
            request = self.running.items[self.num_in_cohort]
            # Emitters stand in running order; those that are done have left `running`.
            while position < self.emitted.length and self.emitted.items[position] != request:
                position += 1
            # The time of its second token is recorded one by one.
            if position == self.emitted.length or requests.generated_tokens[request] < 2:
                return 0
            if not self.kv.join_cohort(request, requests.computed_tokens[request], self.cohort_pass):
                return 0
            count(&self.cohort_lengths, known_tokens(requests, request), 1)
            requests.generated_tokens[request] -= self.cohort_pass
            requests.computed_tokens[request] -= self.cohort_pass
            requests.cohort_key[request] = self.num_joined
            self.num_joined += 1
            self.num_in_cohort += 1
            self._await(request)
        return 0

    cdef int64_t _due(self, int64_t request) noexcept nogil:
        """The pass in which a member must be touched: its blocks change, or it emits its last token."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t untouched = self.kv.decodes_before_touch(requests.computed_tokens[request] + self.cohort_pass)
        return min(
            self.cohort_pass + untouched, requests.output_tokens[request] - requests.generated_tokens[request] - 1
        )

    cdef void _await(self, int64_t request) noexcept nogil:
        """Write a member into the calendar."""
        cdef int64_t due = min(self._due(request), self.cohort_pass + CALENDAR_SLOTS - 1)
        cdef int64_t* slot_ends = &self.calendar[2 * (due & (CALENDAR_SLOTS - 1))]
        self.requests.columns.next_due[request] = NONE
        if slot_ends[0] == NONE:
            slot_ends[0] = request
        else:
            self.requests.columns.next_due[slot_ends[1]] = request
        slot_ends[1] = request

    cdef bint _cohort_surely_fits(self) noexcept nogil:
        """Whether the running phase can preempt nobody: every member gets its token, and all others their chunk."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t position, request, computed, demand = self.kv.cohort_demand(self.cohort_pass)
        if self.num_in_cohort > self.max_num_batched_tokens:
            return False
        request = self.calendar[2 * (self.cohort_pass & (CALENDAR_SLOTS - 1))]
        while request != NONE:
            demand += self.kv.touch_demand(request, requests.computed_tokens[request] + self.cohort_pass)
            request = requests.next_due[request]
        for position in range(self.num_in_cohort, self.running.length):
            request = self.running.items[position]
            computed = requests.computed_tokens[request]
            demand += self.kv.demand(
                request, computed, min(known_tokens(requests, request), computed + self.max_num_batched_tokens)
            )
        return demand <= self.kv.supply()

    cdef int _advance_cohort(self) except -1 nogil:
        """The members compute one token each; only those in today's slot of the calendar are touched."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t* slot_ends
        cdef int64_t request, following, position
        self.ending.length = 0
        self.cohort_emitted = self.num_in_cohort
        if self.num_in_cohort == 0:
            return 0
        self.budget -= self.num_in_cohort
        slot_ends = &self.calendar[2 * (self.cohort_pass & (CALENDAR_SLOTS - 1))]
        request = slot_ends[0]
        slot_ends[0] = slot_ends[1] = NONE
        while request != NONE:
            following = requests.next_due[request]
            self.kv.touch(request, requests.computed_tokens[request] + self.cohort_pass, self.cohort_pass)
            if requests.generated_tokens[request] + self.cohort_pass + 1 == requests.output_tokens[request]:
                append(&self.ending, request)
                position = self.ending.length - 1
                while position > 0 and (
                    requests.cohort_key[self.ending.items[position - 1]] > requests.cohort_key[request]
                ):
                    self.ending.items[position] = self.ending.items[position - 1]
                    position -= 1
                self.ending.items[position] = request
            else:
                # Not in this pass again: what it needed for it, it has.
                self.cohort_pass += 1
                self._await(request)
                self.cohort_pass -= 1
            request = following
        self.kv.advance_cohort(self.cohort_pass)
        return 0

    cdef int _end_members(self) except -1 nogil:
        """The pass ends, and with it the members that have emitted their last token."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t position, request
        self.cohort_lengths.squares += 2 * self.cohort_lengths.total + self.cohort_lengths.count
        self.cohort_lengths.total += self.cohort_lengths.count
        self.cohort_pass += 1
        for position in range(self.ending.length):
            request = self.ending.items[position]
            requests.generated_tokens[request] += self.cohort_pass
            requests.computed_tokens[request] += self.cohort_pass
            self.kv.leave_cohort(request, requests.computed_tokens[request], self.cohort_pass)
            count(&self.cohort_lengths, known_tokens(requests, request), -1)
            append(&self.finished, request)
        self.num_in_cohort -= self.ending.length
        return 0

    cdef int leave_cohort(self, bint in_pass) except -1 nogil:
        """Let every member show what it has computed and emitted; `in_pass`: a pass is under way."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t position, request
        if self.num_in_cohort == 0:
            return 0
        for position in range(self.num_in_cohort):
            request = self.running.items[position]
            requests.generated_tokens[request] += self.cohort_pass
            requests.computed_tokens[request] += self.cohort_pass + in_pass
            self.kv.leave_cohort(request, requests.computed_tokens[request], self.cohort_pass + in_pass)
            append(&self.left_cohort, request)
        self.num_in_cohort = 0
        memset(&self.cohort_lengths, 0, sizeof(LengthSums))
        memset(self.calendar, 0xFF, 2 * CALENDAR_SLOTS * sizeof(int64_t))
        return 0

    cdef int schedule(self, int64_t wave_step) except -1 nogil:
        """Decide one pass: running requests first, then, if nobody had to be preempted, the waiting ones."""
        self.left_cohort.length = 0
        self._join_cohort()
        if self.num_in_cohort > 0 and not self._cohort_surely_fits():
            self.leave_cohort(False)
            self.cohort_pause = COHORT_PAUSE
        self.budget = self.max_num_batched_tokens
        self.num_scheduled = self.num_admitted = 0
        self.preempted.length = self.rejected.length = self.num_preemptions = 0
        self._set_chunk_limit()
        self.defer_prefills = self._defers_prefills(wave_step)
        self._advance_cohort()
        self._schedule_running()
        if self.preempted.length == 0:
            self._schedule_waiting()
            if not self.defer_prefills:
                self.prefill_capacity_bound = self.waiting.length > 0
        if self.drafts is not None:
            self._reserve_bursts()
        self._describe()
        return 0

    cdef int _schedule_running(self) except -1 nogil:
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t request, computed, tokens, position, victim, cursor = self.num_in_cohort
        while cursor < self.running.length and self.budget > 0:
            request = self.running.items[cursor]
            computed = requests.computed_tokens[request]
            if self.defer_prefills and computed < requests.prompt_tokens[request]:
                cursor += 1
                continue
            # vLLM asks only at admission: what runs goes on with the budget that is left.
            if not self.vllm_rules and self._prompt_must_wait(request, computed):
                return 0
            tokens = self._chunk(request, computed)
            victim = -1
            while victim != request and not self.kv.extend(request, computed, computed + tokens):
                position = self._victim()
                victim = self.running.items[position]
                self._withdraw(victim)
                self._preempt(position)
                # The simulator leaves its cursor where it was: whoever moved up before it computes nothing now.
                if position < cursor and self.vllm_rules:
                    cursor -= 1
            if victim != request:
                self._commit(request, tokens, computed)
                cursor += 1
            elif self.vllm_rules:
                return 0
        return 0

    cdef int _schedule_waiting(self) except -1 nogil:
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t request, known, cached, tokens, position
        cdef bint is_here
        if self.head_waits and self.pending.length == 0:
            return 0
        while self.waiting.length > 0 and self.running.length < self.max_num_seqs:
            if self.vllm_rules and self.budget == 0:
                return 0
            position = self._next_waiting()
            if position < 0:
                return 0
            request = slot(&self.waiting, position)[0]
            is_here = requests.computed_tokens[request] > 0  # a prompt that was transferred
            if requests.status[request] == WAITING and not self.vllm_rules and not is_here:
                requests.refusal[request] = self._refusal(request)
                if requests.refusal[request] != ACCEPTED:
                    append(&self.rejected, self._dequeue(position))
                    continue
            known = known_tokens(requests, request)
            if is_here:
                cached = requests.computed_tokens[request]
            else:
                cached = self.kv.find_prefix(
                    request, known if self._may_reuse_all(request) else known - 1, self._num_dropped(request)
                )
            tokens = self._chunk(request, cached)
            # No bypass: while the head cannot run, no smaller follower overtakes it.
            if tokens == 0 and known > cached:
                return 0
            if self.defer_prefills and known - cached > 1:
                return 0
            if self._prompt_must_wait(request, cached):
                return 0
            if not is_here:
                if not self._fits(request, known, cached + tokens):
                    # Its own chunk depends on the budget that is left, its whole sequence does not.
                    self.head_waits = (
                        self.forms_cohort
                        and self.pending.length == 0
                        and self.reserves_whole_sequence
                        and not self.kv.counts_bytes()
                    )
                    return 0
                self.kv.admit(request, cached + tokens)
            self._dequeue(position)
            requests.status[request] = RUNNING
            append(&self.running, request)
            self._commit(request, tokens, cached)
            self.num_admitted += 1
            if tokens == 0 and self.budget == 0:
                return 0
        return 0

    cdef int64_t _next_waiting(self) noexcept nogil:
        """Position in the queue of the request to admit next, -1 for none."""
        cdef int64_t position = 0, best = -1
        if self.pending.length == 0:
            return 0
        # Blocks that are free now belong to the pending prompt; only who has blocks may go on.
        if self.by_priority:
            for position in range(self.waiting.length):
                if self.requests.columns.computed_tokens[slot(&self.waiting, position)[0]] > 0 and (
                    best < 0 or self._is_served_before(slot(&self.waiting, position)[0], slot(&self.waiting, best)[0])
                ):
                    best = position
            return best
        while self.requests.columns.computed_tokens[slot(&self.waiting, position)[0]] == 0:
            position += 1
            if position == self.waiting.length:
                return -1
        return position

    cdef void _set_chunk_limit(self) noexcept nogil:
        """The long-prefill threshold in force for this pass."""
        cdef int64_t unfinished = self.running.length + self.waiting.length
        self.chunk_limit = UNLIMITED
        if self.long_prefill_token_threshold == 0:
            return
        if self.threshold_spares_lone_request and unfinished == 1:
            return
        self.chunk_limit = self.long_prefill_token_threshold
        if self.threshold_is_adaptive and unfinished > 0:
            self.chunk_limit = max(self.chunk_limit, self.max_num_batched_tokens // unfinished)

    cdef bint _defers_prefills(self, int64_t wave_step) noexcept nogil:
        """Attention-DP cadence: between two prefill steps of a busy group only decode continues."""
        cdef int64_t position, request
        if wave_step % self.prefill_schedule_interval == 0 or self.prefill_capacity_bound:
            return False
        if self.num_in_cohort > 0:
            return True
        for position in range(self.running.length):
            request = self.running.items[position]
            if self.requests.columns.computed_tokens[request] >= self.requests.columns.prompt_tokens[request]:
                return True
        return False

    cdef int64_t _chunk(self, int64_t request, int64_t computed) noexcept nogil:
        """How many tokens the request may compute now. A resumed one recomputes its generated tokens too."""
        # max_model_len needs no limit here: an unfinished sequence is always shorter.
        return min(min(known_tokens(&self.requests.columns, request) - computed, self.chunk_limit), self.budget)

    cdef bint _prompt_must_wait(self, int64_t request, int64_t computed) noexcept nogil:
        """Without chunked prefill a prompt that exceeds the remaining budget waits."""
        cdef int64_t end
        if self.chunked_prefill:
            return False
        # vLLM counts the generated tokens of a resumed request too, the simulator only its prompt.
        end = self.requests.columns.prompt_tokens[request]
        if self.vllm_rules or self.kv.counts_bytes():
            end = known_tokens(&self.requests.columns, request)
        return min(end - computed, self.chunk_limit) > self.budget

    cdef bint _fits(self, int64_t request, int64_t known, int64_t chunk_end) except -1 nogil:
        """Whether the waiting request of the last lookup may be admitted, the watermark respected."""
        cdef int64_t watermark = self.watermark_blocks if self.running.length > 0 else 0
        if self.never_evicts:
            known = self.requests.columns.prompt_tokens[request] + self.requests.columns.output_tokens[request]
        return self.kv.can_admit(
            known, chunk_end, self.reserves_whole_sequence, watermark + self._promised_blocks()
        )

    cdef int64_t _promised_blocks(self) noexcept nogil:
        """Free blocks that running requests will still need, where nobody may be evicted."""
        cdef int64_t position, request, promised = 0
        if not self.never_evicts:
            return 0
        for position in range(self.running.length):
            request = self.running.items[position]
            promised += self.kv.missing_blocks(
                request, self.requests.columns.prompt_tokens[request] + self.requests.columns.output_tokens[request]
            )
        return promised

    cdef int64_t _victim(self) noexcept nogil:
        """Position in `running` of the request to preempt."""
        cdef int64_t position, worst = 0
        if not self.by_priority:
            return 0 if self.preempts_oldest else self.running.length - 1
        for position in range(1, self.running.length):
            if self._is_served_before(self.running.items[worst], self.running.items[position]):
                worst = position
        return worst

    cdef int _preempt(self, int64_t position) except -1 nogil:
        """Take a running request out of the cache; it keeps its generated tokens."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t request = self.running.items[position]
        cdef Preemption* preemption
        if self.num_preemptions == self.preemptions_capacity:
            self.preemptions_capacity = max(16, 2 * self.preemptions_capacity)
            self.preemptions = <Preemption*>resized(self.preemptions, self.preemptions_capacity * sizeof(Preemption))
        preemption = &self.preemptions[self.num_preemptions]
        self.num_preemptions += 1
        preemption.request = request
        preemption.resident_blocks = self.kv.held_blocks(request)
        preemption.running_before = self.running.length
        preemption.waiting_before = self.waiting.length
        preemption.active_blocks_before = self.kv.active_blocks()
        remove_at(&self.running, position)
        self.kv.release(request)
        preemption.active_blocks_after = self.kv.active_blocks()
        requests.computed_tokens[request] = 0
        requests.has_drafts[request] = False
        requests.num_preemptions[request] += 1
        requests.status[request] = PREEMPTED
        self.capacity_generation += 1
        self.head_waits = False
        self._enqueue(request)
        append(&self.preempted, request)
        return 0

    cdef void _withdraw(self, int64_t request) noexcept nogil:
        """A victim that was already scheduled in this pass gives its tokens back."""
        cdef int64_t item
        for item in range(self.num_scheduled):
            if self.scheduled[item].request == request:
                self.budget += self.scheduled[item].width
                self.num_scheduled -= 1
                memmove(
                    &self.scheduled[item],
                    &self.scheduled[item + 1],
                    (self.num_scheduled - item) * sizeof(ScheduledItem),
                )
                return

    cdef int _commit(self, int64_t request, int64_t tokens, int64_t computed_before) except -1 nogil:
        """The request computes `tokens` in this pass; its full blocks can be found from now on."""
        if self.num_scheduled == self.scheduled_capacity:
            self.scheduled_capacity = max(16, 2 * self.scheduled_capacity)
            self.scheduled = <ScheduledItem*>resized(self.scheduled, self.scheduled_capacity * sizeof(ScheduledItem))
        self.scheduled[self.num_scheduled] = ScheduledItem(
            request, tokens, computed_before, self._width(request, tokens)
        )
        self.budget -= self.scheduled[self.num_scheduled].width
        self.num_scheduled += 1
        self.requests.columns.computed_tokens[request] = computed_before + tokens
        self.kv.publish(request, computed_before + tokens)
        if self.kv.keys is not None:
            self.head_waits = False  # it may find more of its prompt now
        return 0

    cdef int64_t _width(self, int64_t request, int64_t tokens) noexcept nogil:
        """Positions of the forward: a request with drafts has them verified beside its one token."""
        if not self.requests.columns.has_drafts[request] or self.never_evicts:
            return tokens
        # Not bounded by the tokens that it still has to emit.
        return min(
            min(self.drafts.draft_tokens + 1, self.max_model_len - known_tokens(&self.requests.columns, request)),
            self.budget,
        )

    cdef bint _is_ready(self, int64_t request) noexcept nogil:
        """Whether a scheduled request has nothing left to compute; a victim of the same pass has everything."""
        return self.requests.columns.computed_tokens[request] == known_tokens(&self.requests.columns, request)

    cdef int64_t _burst_width(self, const ScheduledItem* item) noexcept nogil:
        """Tokens that a ready request emits if all its drafts are accepted."""
        if self.never_evicts:  # every token comes in a burst, and its drafts take nothing from the budget
            return self.drafts.draft_tokens + 1
        return item.width if self.requests.columns.has_drafts[item.request] else 1

    cdef int64_t _burst_end(self, const ScheduledItem* item) noexcept nogil:
        """Known tokens of a ready request if all its drafts are accepted."""
        cdef RequestColumns* requests = &self.requests.columns
        return known_tokens(requests, item.request) + min(
            self._burst_width(item), requests.output_tokens[item.request] - requests.generated_tokens[item.request]
        )

    cdef int _reserve_bursts(self) except -1 nogil:
        """Blocks for every token that may be emitted; on shortage victims lose their place, but not their price."""
        cdef int64_t position, missing
        self._release_done()
        while True:
            missing = 0
            for position in range(self.num_scheduled):
                if self._emits(self.scheduled[position].request):
                    missing += self.kv.missing_blocks(
                        self.scheduled[position].request, self._burst_end(&self.scheduled[position])
                    )
            if missing <= self.kv.free_blocks():
                break
            self._preempt(self._victim())
        for position in range(self.num_scheduled):
            if self._emits(self.scheduled[position].request):
                self.kv.extend(
                    self.scheduled[position].request,
                    self.scheduled[position].computed_before,
                    self._burst_end(&self.scheduled[position]),
                )
        return 0

    cdef bint _emits(self, int64_t request) noexcept nogil:
        return self.requests.columns.output_tokens[request] > 0 and self._is_ready(request)

    cdef void _release_done(self) noexcept nogil:
        """Who is done in this pass without a token makes room for the bursts of the others."""
        cdef int64_t position, request, kept = 0
        for position in range(self.running.length):
            request = self.running.items[position]
            if self.requests.columns.output_tokens[request] == 0 and self._is_ready(request):
                self.kv.release(request)
                continue
            self.running.items[kept] = request
            kept += 1
        self.num_released = self.running.length - kept
        self.running.length = kept

    cdef void _describe(self) noexcept nogil:
        """Tell the pass: what there is to price, and what telemetry reports."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef ScheduledItem* item
        cdef int64_t position, prompt, generated, computed, known, prompt_before, prompt_done
        cdef bint computes_prompt, drafts_with_prompt = self.never_evicts and self.drafts is not None
        cdef LengthSums prefill_prompts, decode_kv
        cdef PassShape* shape = &self.shape
        cdef PassRecord* record = &self.record
        memset(&prefill_prompts, 0, sizeof(LengthSums))
        memset(&decode_kv, 0, sizeof(LengthSums))
        memset(shape, 0, sizeof(PassShape))
        memset(record, 0, sizeof(PassRecord))
        for position in range(self.num_scheduled):
            item = &self.scheduled[position]
            prompt = requests.prompt_tokens[item.request]
            generated = requests.generated_tokens[item.request]
            known = prompt + generated
            computed = item.computed_before + item.tokens
            prompt_before = min(item.computed_before, prompt)
            prompt_done = min(computed, prompt)
            computes_prompt = prompt_done > prompt_before
            if computes_prompt:
                record.committed_prefill_tokens += item.tokens
            if computes_prompt and self.role != DECODE:
                shape.num_prefill += 1
                shape.sum_prefill_end_tokens += prompt_done
                shape.sum_prefill_past_tokens += prompt_before
            # The first token comes with the prompt and costs no decode, unless no prompt is computed here.
            if (
                computed == known
                and (generated > 0 or self.role == DECODE or not computes_prompt or drafts_with_prompt)
                and self._emits(item.request)
            ):
                shape.num_decode += 1
                shape.sum_decode_tokens += known
            # A real engine labels everything after the first token decode, the recompute of a resumed request
            # too, and counts the tokens already computed.
            if generated == 0 if self.vllm_rules else computes_prompt:
                count(&prefill_prompts, prompt, 1)
                record.sum_prefill_tokens += item.tokens
                record.sum_prefill_kv_tokens += item.computed_before if self.vllm_rules else prompt_before
            elif generated < requests.output_tokens[item.request]:
                count(&decode_kv, item.computed_before if self.vllm_rules else known, 1)
        if self.num_in_cohort > 0:
            shape.num_decode += self.cohort_lengths.count
            shape.sum_decode_tokens += self.cohort_lengths.total
            decode_kv.count += self.cohort_lengths.count
            decode_kv.total += self.cohort_lengths.total
            decode_kv.squares += self.cohort_lengths.squares
            if self.vllm_rules:  # one token less of each: (x - 1)^2 = x^2 - 2 x + 1
                decode_kv.squares += self.cohort_lengths.count - 2 * self.cohort_lengths.total
                decode_kv.total -= self.cohort_lengths.count
        # A budget of bytes holds no fixed number of tokens: it never limits the price.
        shape.kv_capacity_tokens = (
            shape.sum_decode_tokens if self.kv.counts_bytes() else self.num_gpu_blocks * self.kv.block_size
        )
        if not self.describes_passes:
            return
        record.num_prefill_requests = prefill_prompts.count
        record.var_prefill_length = variance(&prefill_prompts)
        record.num_decode_requests = decode_kv.count
        record.sum_decode_kv_tokens = decode_kv.total
        record.var_decode_kv_tokens = variance(&decode_kv)
        self._describe_rank()

    cdef void _describe_rank(self) noexcept nogil:
        """The state of the rank in the record."""
        cdef PassRecord* record = &self.record
        record.num_queued_prefill = self.queued_prefill.count
        record.sum_queued_prefill_tokens = self.queued_prefill.total
        record.var_queued_prefill_length = variance(&self.queued_prefill)
        record.num_queued_decode = self.queued_decode.count
        record.sum_queued_decode_kv_tokens = self.queued_decode.total
        record.var_queued_decode_kv_tokens = variance(&self.queued_decode)
        record.num_preempted = self.preempted.length
        record.num_running = self.running.length + self.num_released
        record.num_waiting = self.waiting.length
        record.active_blocks = self.kv.active_blocks()
        record.free_blocks = self.kv.free_blocks()
        record.published_free_blocks = self.kv.published_free_blocks()
        record.kv_cache_used_bytes = self.kv.used_bytes()

    cdef int complete(self) except -1 nogil:
        """The pass ends: every request with nothing left to compute emits a token, or finishes without one."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t position, request
        self.emitted.length = self.burst_tokens.length = self.finished.length = 0
        # Who has no token to emit leaves first, so its blocks are evicted first.
        for position in range(self.num_scheduled):
            request = self.scheduled[position].request
            if requests.output_tokens[request] == 0 and self._is_ready(request):
                append(&self.finished, request)
        self._end_members()
        for position in range(self.num_scheduled):
            request = self.scheduled[position].request
            if not self._emits(request):
                continue
            append(&self.emitted, request)
            append(&self.burst_tokens, self._emit(&self.scheduled[position]))
            if requests.generated_tokens[request] == requests.output_tokens[request]:
                append(&self.finished, request)
        for position in range(self.rejected.length):
            requests.status[self.rejected.items[position]] = REJECTED
        if self.finished.length == 0:
            return 0
        for position in range(self.finished.length):
            if self.role == PREFILL:
                requests.status[self.finished.items[position]] = HELD
                continue
            self.kv.release(self.finished.items[position])
            requests.status[self.finished.items[position]] = COMPLETED
        self.capacity_generation += 1
        self.head_waits = False
        self._remove_finished()
        return 0

    cdef void _remove_finished(self) noexcept nogil:
        """Who finished leaves `running`, if it is still there."""
        cdef int64_t position, found, kept = 0
        if self.finished.length <= FEW_FINISHED:
            # To look for a few is faster than to look at all.
            for position in range(self.finished.length):
                found = 0
                while found < self.running.length and self.running.items[found] != self.finished.items[position]:
                    found += 1
                if found < self.running.length:
                    remove_at(&self.running, found)
            return
        for position in range(self.running.length):
            if self.requests.columns.status[self.running.items[position]] == RUNNING:
                self.running.items[kept] = self.running.items[position]
                kept += 1
        self.running.length = kept

    cdef int64_t _emit(self, const ScheduledItem* item) except -1 nogil:
        """A ready request gets its next token, or with drafts a burst; return how many."""
        cdef RequestColumns* requests = &self.requests.columns
        cdef int64_t request = item.request, tokens = 1
        if self.drafts is None:
            requests.generated_tokens[request] += 1
            return 1
        tokens = min(
            self.drafts.burst(self._burst_width(item)),
            requests.output_tokens[request] - requests.generated_tokens[request],
        )
        requests.has_drafts[request] = True
        requests.generated_tokens[request] += tokens
        # The newest token has its slot already, but is computed in the next pass.
        requests.computed_tokens[request] = known_tokens(requests, request) - 1
        self.kv.publish(request, requests.computed_tokens[request])
        self.kv.shrink(request, known_tokens(requests, request))
        return tokens

    cdef bint has_work(self) noexcept nogil:
        """Whether a pass may do something; a prompt that waits for blocks needs none."""
        return self.running.length > 0 or self.waiting.length > 0

    cdef bint pass_had_effect(self) noexcept nogil:
        """False: the rank can make no progress by itself, now or ever."""
        return (
            self.num_scheduled > 0
            or self.preempted.length > 0
            or self.rejected.length > 0
            or self.num_in_cohort > 0
        )

    cdef Refusal _refusal(self, int64_t request) noexcept nogil:
        cdef int64_t prompt = self.requests.columns.prompt_tokens[request]
        if prompt >= self.max_model_len:
            return MODEL_LENGTH
        if not self.kv.can_ever_hold(prompt):
            return KV_CAPACITY
        if not self.vllm_rules:
            return ACCEPTED
        if not self.kv.can_ever_hold(self._longest_sequence(request)):
            return KV_GROWTH
        if self.chunked_prefill:
            return ACCEPTED
        return UNCHUNKED_PROMPT if self._least_first_chunk(request) > self.max_num_batched_tokens else ACCEPTED

    cdef bint _may_reuse_all(self, int64_t request) noexcept nogil:
        """Whether no token has to be computed for the first logits; under vLLM rules one always is."""
        # TensorRT-LLM decodes from a prompt that is cached as a whole.
        return not self.vllm_rules and (self.never_evicts or self.requests.columns.output_tokens[request] == 0)

    cdef int64_t _longest_sequence(self, int64_t request) noexcept nogil:
        """Tokens that a request has blocks for in its last pass; the last token needs none, except with drafts."""
        cdef int64_t output = self.requests.columns.output_tokens[request]
        if output > 0 and self.drafts is None:
            output -= 1
        return self.requests.columns.prompt_tokens[request] + output

    cdef int64_t _num_dropped(self, int64_t request) noexcept nogil:
        """Cached blocks that are computed again: the drafting layers need the tokens before a draft, too."""
        if self.drafts is None or self.never_evicts or self.requests.columns.output_tokens[request] == 0:
            return 0
        return 1

    cdef int64_t _least_first_chunk(self, int64_t request) noexcept nogil:
        """The fewest tokens that the first pass of a request may have to hold, all prefix hits granted."""
        cdef int64_t prompt = self.requests.columns.prompt_tokens[request]
        cdef int64_t tokens = prompt - self.kv.longest_prefix(request, prompt - 1, self._num_dropped(request))
        if self.long_prefill_token_threshold == 0:
            return tokens
        return min(tokens, self.long_prefill_token_threshold)

    cdef int _enqueue(self, int64_t request) except -1 nogil:
        """Queue a request: by key under the priority policy, else a preempted one first and a new one last.

        Under the priority policy the queue is a binary heap, so that only its first place is that of the order.
        """
        cdef IndexQueue* queue = &self.waiting
        make_room(queue)
        self._count_queued(request, 1)
        queue.length += 1
        if self.by_priority:
            self.head_waits = False
            slot(queue, queue.length - 1)[0] = request
            self._sift_up(queue.length - 1)
        elif self.requests.columns.status[request] == PREEMPTED:
            queue.head = (queue.head if queue.head > 0 else queue.capacity) - 1
            slot(queue, 0)[0] = request
        else:
            slot(queue, queue.length - 1)[0] = request
        return 0

    cdef int64_t _dequeue(self, int64_t position) noexcept nogil:
        cdef int64_t request = slot(&self.waiting, position)[0]
        self._count_queued(request, -1)
        if self.by_priority:
            self.waiting.length -= 1
            slot(&self.waiting, position)[0] = slot(&self.waiting, self.waiting.length)[0]
            if position < self.waiting.length:
                self._sift_up(position)
                self._sift_down(position)
            return request
        while position > 0:
            slot(&self.waiting, position)[0] = slot(&self.waiting, position - 1)[0]
            position -= 1
        pop_front(&self.waiting)
        return request

    cdef void _sift_up(self, int64_t position) noexcept nogil:
        cdef IndexQueue* queue = &self.waiting
        cdef int64_t request = slot(queue, position)[0]
        while position > 0 and self._is_served_before(request, slot(queue, (position - 1) // 2)[0]):
            slot(queue, position)[0] = slot(queue, (position - 1) // 2)[0]
            position = (position - 1) // 2
        slot(queue, position)[0] = request

    cdef void _sift_down(self, int64_t position) noexcept nogil:
        cdef IndexQueue* queue = &self.waiting
        cdef int64_t request = slot(queue, position)[0], child
        while 2 * position + 1 < queue.length:
            child = 2 * position + 1
            if child + 1 < queue.length and self._is_served_before(
                slot(queue, child + 1)[0], slot(queue, child)[0]
            ):
                child += 1
            if not self._is_served_before(slot(queue, child)[0], request):
                break
            slot(queue, position)[0] = slot(queue, child)[0]
            position = child
        slot(queue, position)[0] = request

    cdef bint _is_served_before(self, int64_t request, int64_t other) noexcept nogil:
        if self.requests.columns.priority[request] != self.requests.columns.priority[other]:
            return self.requests.columns.priority[request] < self.requests.columns.priority[other]
        return self.requests.columns.arrival_order[request] < self.requests.columns.arrival_order[other]

    cdef void _count_queued(self, int64_t request, int sign) noexcept nogil:
        if self.role == DECODE:
            count(&self.queued_decode, self.requests.columns.prompt_tokens[request], sign)
        elif self.requests.columns.num_preemptions[request] > 0:
            # A real engine reports the tokens it has computed for a preempted request: none.
            count(&self.queued_decode, 0 if self.vllm_rules else known_tokens(&self.requests.columns, request), sign)
        else:
            count(&self.queued_prefill, self.requests.columns.prompt_tokens[request], sign)

    def enqueue(self, int64_t request):
        """Submit a request; False when the engine refuses it at once."""
        if not 0 <= request < self.requests.count:
            raise IndexError(f"request {request} is none of {self.requests.count}")
        if self.requests.columns.status[request] != PENDING:
            raise ValueError(f"request {request} was submitted before")
        return self.submit(request)

    def take_over(self, slots, rows, int64_t count):
        """Let indices, of `count` that there are from now on, stand for the requests of columns.

        For a rank that is alone with its requests and has `RollingKeys` or none; between passes.
        """
        cdef PrefixKeys keys = self.kv.keys
        if count > self.requests.count:
            if keys is not None:
                (<RollingKeys?>keys).grow(count)
            self.requests.grow(count)
            self.kv.grow(count)
        self.requests.assign(slots, rows["prompt_tokens"], rows["output_tokens"], rows["priority"])
        if keys is not None:
            (<RollingKeys?>keys).assign(
                slots, rows["prompt_tokens"], rows["output_tokens"], rows["hash_offsets"], rows["hash_ids"]
            )

    def give_up(self, slots):
        """Indices stand for nobody any more."""
        if self.kv.keys is not None:
            (<RollingKeys?>self.kv.keys).forget(slots, [self.kv.pool])

    def withdraw(self, int64_t request):
        """Take a waiting or running request out, between passes; False when it is neither."""
        return self.cancel(request)

    def taken_kv_events(self):
        """Return the (key, change) of blocks that were published (+1) and evicted (-1) since the last time."""
        cdef int64_t index
        events = [
            (self.kv.pool.log[index].key, self.kv.pool.log[index].copies) for index in range(self.kv.pool.num_logged)
        ]
        self.kv.pool.num_logged = 0
        return events

    def refusals(self):
        """Return what the engine says to each request that comes alone: int8[n] of `Refusal`.

        For requests that are not served: their output is cut as on arrival.
        """
        cdef int64_t request
        refusals = np.zeros(self.requests.count, np.int8)
        cdef int8_t[::1] said = refusals
        for request in range(self.requests.count):
            self._cut_output(request)
            said[request] = self._refusal(request)
        return refusals

    def warm_prefix_cache(self):
        """Cache every prefix that several requests share, in their order, as if it had been served before.

        The least recently used ones go when not all have room; one that is larger than the cache stays out.
        """
        cdef int64_t request, tokens
        if self.kv.keys is not None:
            self.kv.keys.find_shared()
        for request in range(self.requests.count):
            tokens = self.kv.longest_prefix(request, self.requests.columns.prompt_tokens[request], 0)
            if tokens == 0:
                continue
            self.kv.find_prefix(request, tokens, 0)
            if self.kv.blocks_to_admit(tokens) <= self.kv.free_blocks():
                self.kv.admit(request, tokens)
                self.kv.publish(request, tokens)
                self.kv.release(request)

    def has_unfinished(self):
        """Return whether any request is running or waiting."""
        return self.has_work()

    def running_requests(self):
        """Return the running requests in list order."""
        return indices(&self.running)

    def schedule_pass(self, int64_t wave_step=0):
        """Decide one pass and return it as a dict.

        Keys: `tokens` {request: scheduled tokens} in running order, `reused` {admitted request: reused tokens},
        `preempted`, `rejected`, `work` {what there is to price, the fields of `PassShape`}, and the fields of the pass
        record, as `num_running` and `free_blocks`.
        """
        self.schedule(wave_step)
        items = [self.scheduled[position] for position in range(self.num_scheduled)]
        return {
            "tokens": {item["request"]: item["tokens"] for item in items},
            "reused": {item["request"]: item["computed_before"] for item in items[len(items) - self.num_admitted :]},
            "preempted": indices(&self.preempted),
            "rejected": indices(&self.rejected),
            "work": self.shape,
            **self.record,
        }

    def complete_pass(self):
        """End the pass; return the requests that emitted a token and those that finished."""
        self.complete()
        return indices(&self.emitted), indices(&self.finished)


cdef list indices(const IndexList* entries):
    return [entries.items[position] for position in range(entries.length)]
