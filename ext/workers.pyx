"""Identical workers: ranks that schedule, price and record their passes, in groups that end together.

Not the event loop: when a pass starts and what follows from its end is decided by the caller.
Source: engine-and-replay.md 4.2, 4.4, 5.4, 5.5.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memset

from fpmsdk._ext.budget cimport ByteBudgetCache
from fpmsdk._ext.pages cimport KvCache, resized
from fpmsdk._ext.placement cimport Placement
from fpmsdk._ext.pricing cimport PassPricer
from fpmsdk._ext.recorder cimport AdmissionRow, PassRow, PreemptionRow, RecordedRequests, Recorder, SampleRow
from fpmsdk._ext.rolling cimport RollingKeys
from fpmsdk._ext.scheduler cimport DECODE, PREFILL, RequestColumns, ScheduledItem, Scheduler, append


cdef class Rank:
    """One scheduler rank of a worker, its pricer and its hand in the record."""

    def __cinit__(
        self,
        Scheduler scheduler not None,
        PassPricer pricer not None,
        Recorder recorder not None,
        int64_t index,
        bint pass_by_pass=False,
    ):
        # A cohort needs one token a pass, and a cache in which it does not matter who takes a block first.
        scheduler.forms_cohort = not pass_by_pass and scheduler.drafts is None and (
            type(scheduler.kv) is KvCache
            or type(scheduler.kv) is ByteBudgetCache and (<ByteBudgetCache>scheduler.kv).counts_members
        )
        scheduler.describes_passes = recorder.keeps_passes
        self.scheduler = scheduler
        self.pricer = pricer
        self.recorder = recorder
        self.index = index
        self.observe()

    cdef bint has_work(self) noexcept nogil:
        return self.scheduler.has_work()

    cdef int leave_cohort(self) except -1 nogil:
        """Let every request show what it has got, also within a pass."""
        self.scheduler.left_cohort.length = 0
        self.scheduler.leave_cohort(self.in_pass)
        return self._clear_left()

    cdef int _clear_left(self) except -1 nogil:
        cdef int64_t position
        for position in range(self.scheduler.left_cohort.length):
            self.recorder.requests.last_token_ms[self.scheduler.left_cohort.items[position]] = self.last_token_ms
        return 0

    cdef bint submit(self, int64_t request, double now) except -1 nogil:
        if self.scheduler.role == PREFILL:
            self.recorder.requests.prefill_worker[request] = self.index
        else:
            self.recorder.requests.worker[request] = self.index
        if self.scheduler.submit(request):
            self.observe()
            return True
        self.recorder.requests.end_ms[request] = now
        return False

    cdef double start_pass(self, double now, int64_t wave_step) except? -1.0 nogil:
        """Schedule and price one pass; return when this rank alone would be done."""
        cdef int64_t position
        cdef PreemptionRow* preemption
        self.scheduler.schedule(wave_step)
        self._clear_left()
        self.scheduler.shape.rank = self.index
        self.in_pass = True  # also for a run that is interrupted while its pass is priced
        self.pricer.price(&self.scheduler.shape, &self.price)
        self.start_ms = now
        for position in range(self.scheduler.num_scheduled - self.scheduler.num_admitted, self.scheduler.num_scheduled):
            self._record_admission(
                self.scheduler.scheduled[position].request, self.scheduler.scheduled[position].computed_before, now
            )
        for position in range(self.scheduler.num_preemptions if self.recorder.keeps_events else 0):
            preemption = <PreemptionRow*>self.recorder.preemptions.append()
            preemption.at_ms = now
            preemption.role = self.scheduler.role
            preemption.worker = self.index
            preemption.preemption = self.scheduler.preemptions[position]
        # In this order: ties between workers depend on the last bit.
        return (now + self.price.prefill_ms) + self.price.decode_ms

    cdef int _record_admission(self, int64_t request, int64_t reused, double now) except -1 nogil:
        cdef RecordedRequests* record = &self.recorder.requests
        cdef AdmissionRow* admission
        record.num_admissions[request] += 1
        if self.scheduler.role == DECODE:
            if record.decode_admit_ms[request] != record.decode_admit_ms[request]:
                # The prompt is here already: it was transferred or was cached, and nothing of it is computed.
                record.decode_admit_ms[request] = now
                reused = 0
            record.decode_reused_tokens[request] = max(record.decode_reused_tokens[request], reused)
        else:
            if record.first_admit_ms[request] != record.first_admit_ms[request]:
                record.first_admit_ms[request] = now
                record.first_reused_tokens[request] = reused
            record.reused_tokens[request] = max(record.reused_tokens[request], reused)
        if not self.recorder.keeps_events:
            return 0
        admission = <AdmissionRow*>self.recorder.admissions.append()
        admission.request = request
        admission.at_ms = now
        admission.reused_tokens = reused
        admission.role = self.scheduler.role
        return 0

    cdef bint pass_had_effect(self) noexcept nogil:
        return self.scheduler.pass_had_effect()

    cdef bint is_in_pass(self) noexcept nogil:
        return self.in_pass

    cdef int complete_pass(self, double end_ms, int64_t iteration) except -1 nogil:
        """Emit the tokens of the pass at `end_ms`, the end of the whole attention-DP group."""
        cdef int64_t position
        self.in_pass = False
        self.scheduler.complete()
        self.recorder.committed_prefill_tokens += self.scheduler.record.committed_prefill_tokens
        if self.scheduler.role == PREFILL:
            for position in range(self.scheduler.finished.length):
                self.recorder.requests.source_held_ms[self.scheduler.finished.items[position]] = end_ms
            for position in range(self.scheduler.rejected.length):
                self.recorder.requests.end_ms[self.scheduler.rejected.items[position]] = end_ms
        else:
            # The token of a prefill worker is hidden: its decode worker emits the first one.
            self._record_token_times(end_ms)
            for position in range(self.num_ended()):
                self.recorder.requests.end_ms[self.ended(position)] = end_ms
        if self.recorder.keeps_passes:
            self._record_pass(end_ms, iteration)
        if self.recorder.keeps_samples:
            self._count_pass()
            self.observe()
        return 0

    cdef void _count_pass(self) noexcept nogil:
        """Counts become visible at the end of the pass."""
        cdef RequestColumns* requests = &self.scheduler.requests.columns
        cdef ScheduledItem* item
        cdef int64_t position, emitted = 0
        self.gauges.preemptions += self.scheduler.num_preemptions
        self.gauges.decode_steps += self.scheduler.cohort_emitted
        self.gauges.decode_tokens += self.scheduler.cohort_emitted
        for position in range(self.scheduler.num_scheduled):
            item = &self.scheduler.scheduled[position]
            if position >= self.scheduler.num_scheduled - self.scheduler.num_admitted:
                self.gauges.cache_hit_tokens += item.computed_before
                self.gauges.cache_total_tokens += requests.prompt_tokens[item.request]
            # Both lists are in running order.
            if emitted == self.scheduler.emitted.length or self.scheduler.emitted.items[emitted] != item.request:
                continue
            # The first token belongs to the prompt, and so does one that ends a recompute.
            if item.tokens <= 1 and item.computed_before >= requests.prompt_tokens[item.request]:
                self.gauges.decode_steps += 1
                self.gauges.decode_tokens += self.scheduler.burst_tokens.items[emitted]
            emitted += 1

    cdef void observe(self) noexcept nogil:
        """Note the state that samples show until the next command or the next end of a pass."""
        cdef Gauges* gauges = &self.gauges
        if not self.recorder.keeps_samples:
            return
        gauges.active_blocks = self.scheduler.kv.active_blocks()
        gauges.free_blocks = self.scheduler.kv.free_blocks()
        gauges.published_free_blocks = self.scheduler.kv.published_free_blocks()
        gauges.kv_cache_used_bytes = self.scheduler.kv.used_bytes()
        gauges.running_requests = self.scheduler.running.length
        # Prompts on their way to a decode rank wait, too.
        gauges.waiting_requests = self.scheduler.queued_prefill.count + self.scheduler.queued_decode.count

    cdef int sample(self, int64_t sample, double at_ms) except -1 nogil:
        """Record the gauges as they were last noted."""
        cdef SampleRow* row = <SampleRow*>self.recorder.samples.append()
        row.sample = sample
        row.sampled_at_ms = at_ms
        row.role = self.scheduler.role
        row.worker = self.index
        row.gauges = self.gauges
        return 0

    cdef int64_t num_ended(self) noexcept nogil:
        return self.scheduler.finished.length + self.scheduler.rejected.length

    cdef int64_t ended(self, int64_t position) noexcept nogil:
        """The requests that finished in the last pass, then those rejected in it."""
        if position < self.scheduler.finished.length:
            return self.scheduler.finished.items[position]
        return self.scheduler.rejected.items[position - self.scheduler.finished.length]

    cdef int _record_token_times(self, double now) except -1 nogil:
        cdef RecordedRequests* record = &self.recorder.requests
        cdef int64_t position, request, generated, before, extra, first_gap = self.recorder.gaps.length
        if self.scheduler.cohort_emitted > 0:
            # Its members emitted in the pass before, too.
            self.recorder.count_gaps(now - self.last_token_ms, self.scheduler.cohort_emitted)
            for position in range(self.scheduler.ending.length):
                record.last_token_ms[self.scheduler.ending.items[position]] = now
        self.last_token_ms = now
        for position in range(self.scheduler.emitted.length):
            request = self.scheduler.emitted.items[position]
            generated = self.scheduler.requests.columns.generated_tokens[request]
            before = generated - self.scheduler.burst_tokens.items[position]
            if before == 0:
                record.first_token_ms[request] = now
            else:
                self.recorder.count_gap(now - record.last_token_ms[request], first_gap)
            if before <= 1 < generated:
                record.second_token_ms[request] = now
            for extra in range(before + 1, generated):  # the other tokens of a burst come with the first
                self.recorder.count_gap(0.0, first_gap)
            record.last_token_ms[request] = now
        return 0

    cdef int _record_pass(self, double end_ms, int64_t iteration) except -1 nogil:
        cdef int64_t position
        cdef PassRow* row = <PassRow*>self.recorder.passes.append()
        row.start_ms = self.start_ms
        row.end_ms = end_ms
        row.prefill_ms = self.price.prefill_ms
        row.decode_ms = self.price.decode_ms
        row.role = self.scheduler.role
        row.worker = self.index
        row.iteration = iteration
        row.composed = self.price.composed
        row.emitted_tokens = self.scheduler.cohort_emitted
        for position in range(self.scheduler.burst_tokens.length):
            row.emitted_tokens += self.scheduler.burst_tokens.items[position]
        row.priced_num_prefill = self.scheduler.shape.num_prefill
        row.priced_sum_prefill_end_tokens = self.scheduler.shape.sum_prefill_end_tokens
        row.priced_sum_prefill_past_tokens = self.scheduler.shape.sum_prefill_past_tokens
        row.priced_num_decode = self.scheduler.shape.num_decode
        row.priced_sum_decode_tokens = self.scheduler.shape.sum_decode_tokens
        row.record = self.scheduler.record
        return 0


cdef class WorkerPool:
    """Identical workers behind one placement; ranks of a worker pass together.

    Parameters
    ----------
    schedulers : list of Scheduler
        One per rank, ranks of a worker together; all over the same `Requests` and of one role.
    pricer : PassPricer
    placement : Placement
    recorder : Recorder
    pass_by_pass : bool
        Touch every request in every pass, also where many passes differ only in the length of the sequences.
    rolling_keys : RollingKeys or None
        The prefix keys of the schedulers and the placement, where the requests come and go.
    """

    def __cinit__(
        self,
        list schedulers not None,
        PassPricer pricer not None,
        Placement placement not None,
        Recorder recorder not None,
        bint pass_by_pass=False,
        RollingKeys rolling_keys=None,
    ):
        cdef int64_t index
        cdef Scheduler first
        if not schedulers or len(schedulers) != placement.num_workers * placement.dp_size:
            raise ValueError(
                f"expected schedulers for {placement.num_workers} workers of {placement.dp_size} ranks, "
                f"found {len(schedulers)}"
            )
        first = schedulers[0]
        if any((<Scheduler?>scheduler).requests is not first.requests for scheduler in schedulers):
            raise ValueError("expected schedulers over the same requests")
        if any((<Scheduler?>scheduler).role != first.role for scheduler in schedulers):
            raise ValueError("expected schedulers of one role")
        if recorder.num_requests < first.requests.count:
            raise ValueError(f"expected a recorder of {first.requests.count} requests, found {recorder.num_requests}")
        self.requests = first.requests
        self.recorder = recorder
        self.ranks = [Rank(scheduler, pricer, recorder, i, pass_by_pass) for i, scheduler in enumerate(schedulers)]
        self.rank_pointers = <void**>resized(NULL, len(self.ranks) * sizeof(void*))
        for index in range(len(self.ranks)):
            self.rank_pointers[index] = <void*>self.ranks[index]
        self.placement = placement
        self.rolling_keys = rolling_keys
        self.dp_size = placement.dp_size
        self.num_workers = placement.num_workers
        self.workers = <Worker*>resized(NULL, self.num_workers * sizeof(Worker))
        memset(self.workers, 0, self.num_workers * sizeof(Worker))

    def __dealloc__(self):
        cdef int64_t worker
        if self.workers != NULL:
            for worker in range(self.num_workers):
                free(self.workers[worker].ended.items)
                free(self.workers[worker].deferred.items)
        free(self.rank_pointers)
        free(self.workers)

    def warm_prefix_caches(self):
        """Let every rank cache the prefixes that several requests share, and the placement know."""
        cdef Rank rank
        for rank in self.ranks:
            rank.scheduler.warm_prefix_cache()
            self.placement.pass_ended(rank.index, rank.scheduler.kv.pool)
            rank.observe()

    cdef int leave_cohorts(self) except -1 nogil:
        """At the end of a run every request shows what it got."""
        cdef int64_t rank
        for rank in range(self.num_workers * self.dp_size):
            (<Rank>self.rank_pointers[rank]).leave_cohort()
        return 0

    cdef int sample(self, int64_t sample, double at_ms) except -1 nogil:
        """Record the gauges of every rank."""
        cdef int64_t rank
        for rank in range(self.num_workers * self.dp_size):
            (<Rank>self.rank_pointers[rank]).sample(sample, at_ms)
        return 0

    cdef bint has_work(self, int64_t worker) noexcept nogil:
        cdef int64_t rank
        for rank in range(worker * self.dp_size, (worker + 1) * self.dp_size):
            if (<Rank>self.rank_pointers[rank]).has_work():
                return True
        return False

    cdef grow(self, int64_t num_requests):
        """Have room for so many requests; only between passes."""
        cdef Rank rank
        for rank in self.ranks:
            rank.scheduler.kv.grow(num_requests)
        if self.rolling_keys is not None:
            self.rolling_keys.grow(num_requests)
        self.placement.grow(num_requests)

    cdef assign(self, slots, rows):
        """Let indices stand for the requests of columns."""
        if self.rolling_keys is None:
            return
        self.rolling_keys.assign(
            slots, rows["prompt_tokens"], rows["output_tokens"], rows["hash_offsets"], rows["hash_ids"]
        )
        self.placement.grow(self.requests.count)

    cdef forget(self, slots):
        """Some indices stand for nobody any more."""
        if self.rolling_keys is not None:
            self.rolling_keys.forget(slots, [(<Rank>rank).scheduler.kv.pool for rank in self.ranks])

    cdef bint has_pending(self) noexcept nogil:
        """Whether a prompt waits for blocks of a decode worker."""
        cdef int64_t rank
        for rank in range(self.num_workers * self.dp_size):
            if (<Rank>self.rank_pointers[rank]).scheduler.pending.length > 0:
                return True
        return False

    cdef bint is_due(self, int64_t worker, double now) noexcept nogil:
        """Whether the pass of a worker ends now."""
        return self.workers[worker].busy and self.workers[worker].end_ms <= now

    cdef bint is_followed_at_once(self, int64_t worker, double now) noexcept nogil:
        """Whether a pass takes no time and somebody waits for the next one, which does not wait for what it brought."""
        cdef int64_t rank
        if not self.is_due(worker, now):
            return False
        for rank in range(worker * self.dp_size, (worker + 1) * self.dp_size):
            if (<Rank>self.rank_pointers[rank]).scheduler.waiting.length > 0:
                return True
        return False

    cdef bint can_start(self, int64_t worker) noexcept nogil:
        return not self.workers[worker].busy and self.has_work(worker)

    cdef double next_event_ms(self) noexcept nogil:
        """When the next pass ends."""
        cdef double earliest = INFINITY
        cdef int64_t worker
        for worker in range(self.num_workers):
            if self.workers[worker].busy:
                earliest = min(earliest, self.workers[worker].end_ms)
        return earliest

    cdef bint start_pass(self, int64_t worker, double now) except -1 nogil:
        """Every rank with work starts a pass of its own; the group ends with the slowest one.

        False: no rank could do anything, so that the worker can only wait.
        """
        cdef double end_ms = now
        cdef bint had_effect = False
        cdef int64_t rank
        for rank in range(worker * self.dp_size, (worker + 1) * self.dp_size):
            if (<Rank>self.rank_pointers[rank]).has_work():
                end_ms = max(
                    end_ms, (<Rank>self.rank_pointers[rank]).start_pass(now, self.workers[worker].wave_step)
                )
                had_effect = had_effect or (<Rank>self.rank_pointers[rank]).pass_had_effect()
        if not had_effect:
            return False
        self.workers[worker].busy = True
        self.workers[worker].end_ms = end_ms
        self.workers[worker].wave_step += 1
        self.workers[worker].iterations += 1
        return True

    cdef int complete_rank(self, int64_t rank, double end_ms) except -1 nogil:
        """The pass of one rank ends; what came of it is read from the rank."""
        (<Rank>self.rank_pointers[rank]).complete_pass(end_ms, self.workers[rank // self.dp_size].iterations)
        return self.placement.pass_ended(rank, (<Rank>self.rank_pointers[rank]).scheduler.kv.pool)

    cdef int pass_over(self, int64_t worker) except -1 nogil:
        # The cadence counts the passes of one busy period.
        if not self.has_work(worker):
            self.workers[worker].wave_step = 0
        return 0

    cdef int defer(self, int64_t worker, int64_t request) except -1 nogil:
        """Keep a command for a worker with a pass in flight until that pass ends."""
        return append(&self.workers[worker].deferred, request)
