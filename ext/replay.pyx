"""The replay loop: requests arrive at simulated workers, passes start and end, prompts move to decode workers.

Not the report: metrics are computed from what the recorder holds. Source: engine-and-replay.md 5.3 to 5.5.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.stdlib cimport free

from fpmsdk._ext.pages cimport resized
from fpmsdk._ext.pricing cimport modeled_duration_ms
from fpmsdk._ext.recorder cimport RecordedRequests, Recorder
from fpmsdk._ext.rolling cimport RollingKeys
from fpmsdk._ext.scheduler cimport (
    CANCELED,
    FAILED,
    KV_CAPACITY,
    PENDING,
    REJECTED,
    IndexList,
    Requests,
    append,
    known_tokens,
)
from fpmsdk._ext.workers cimport Rank, Worker, WorkerPool

import numpy as np

from fpmsdk.errors import ReplayError, RequestNeverFitsError

cdef enum:
    SETTLES_BETWEEN_SIGNAL_CHECKS = 4096
    MAX_SAMPLES = 10000000
    GAPS_PER_ENDED = 16


cdef int push(EventQueue* queue, double at_ms, int64_t request) except -1 nogil:
    cdef int64_t child = queue.length, parent
    if queue.length == queue.capacity:
        queue.capacity = max(256, 2 * queue.capacity)
        queue.events = <Event*>resized(queue.events, queue.capacity * sizeof(Event))
    queue.length += 1
    queue.num_pushed += 1
    while child > 0:
        parent = (child - 1) // 2
        if queue.events[parent].at_ms <= at_ms:  # equal times: first in, first out
            break
        queue.events[child] = queue.events[parent]
        child = parent
    queue.events[child] = Event(at_ms, queue.num_pushed, request)
    return 0


cdef Event pop(EventQueue* queue) noexcept nogil:
    cdef Event top = queue.events[0]
    cdef Event last
    cdef int64_t parent = 0, child
    queue.length -= 1
    last = queue.events[queue.length]
    while 2 * parent + 1 < queue.length:
        child = 2 * parent + 1
        if child + 1 < queue.length and comes_first(&queue.events[child + 1], &queue.events[child]):
            child += 1
        if not comes_first(&queue.events[child], &last):
            break
        queue.events[parent] = queue.events[child]
        parent = child
    queue.events[parent] = last
    return top


cdef inline bint comes_first(const Event* one, const Event* other) noexcept nogil:
    if one.at_ms != other.at_ms:
        return one.at_ms < other.at_ms
    return one.order < other.order


cdef inline double first_ms(const EventQueue* queue) noexcept nogil:
    return queue.events[0].at_ms if queue.length > 0 else INFINITY


cdef class Replay:
    """One run: requests of a trace served by one pool of workers, or by a prefill and a decode pool.

    Parameters
    ----------
    requests : Requests
    recorder : Recorder
    workers : WorkerPool
        Aggregated workers, or with `prefill` those that decode.
    prefill : WorkerPool or None
        Workers that compute prompts; `workers` then takes them over.
    transfer_bytes_per_token, transfer_bytes_per_s : float
        With either 0 a transfer takes `handoff_ms`, whatever its size.
    handoff_ms : float
    transfers_missing_only : bool
        Only the prompt blocks that the decode worker has not cached are transferred.
    arrival_ms : float64[n]
        Ascending over first turns; ignored for later turns and in closed loop.
    next_turn : int64[n]
        The request that follows in the same session, -1 for none.
    delay_ms : float64[n]
        Wait of a later turn after the end of the turn before it, or with `followers` of the last one it waits for.
    followers : (int64[n + 1], int64, int64[n], int64[n]), optional
        For sessions that branch, instead of `next_turn`: the requests that wait for each request (offsets and
        values), for how many requests each waits, and the session of each, counted from 0.
    dp_rank, prefill_dp_rank : int64[n], optional
        The attention-DP rank that must serve a request, -1 for any.
    concurrency : int
        0: requests arrive at `arrival_ms`. N: at most N sessions are active, the next one arrives when one ends.
    max_sim_time_ms : float
        No event after this time is processed.
    sample_interval_ms : float
        Gauges are sampled at its multiples and at the end; 0 for no samples.
    request_ids : sequence of str
        Names for error messages.
    supply : object, optional
        Where the requests come from and where they go, so that only those under way need room; the columns then only say
        for how many there is room at first. `supply.next_requests()` returns a mapping of columns, or None after the
        last: `prompt_tokens`, `output_tokens`, `priority`, `delay_ms`, `dp_rank`, `prefill_dp_rank`, `next_turn` (the row
        of the columns, -1 for none), `first_turns` (rows, in order), `arrival_ms` (of those), `hash_offsets`, `hash_ids`
        (int64; what equals is equal). `supply.placed(slots)` tells which index each row got. `supply.ended(slots)` tells
        of requests whose indices will stand for others once it returns; `supply.gaps(rows)` of token gaps. While it is
        told, `interruptible` is false, so that a signal handler can leave what is counted whole; while the replay goes on,
        `supply.counted()` comes after that, and may raise.
    ended_at_once : int
        About so many requests are told of at once.
    """

    def __cinit__(
        self,
        Requests requests not None,
        Recorder recorder not None,
        WorkerPool workers not None,
        WorkerPool prefill=None,
        *,
        double transfer_bytes_per_token=0.0,
        double transfer_bytes_per_s=0.0,
        double handoff_ms=0.0,
        bint transfers_missing_only=False,
        const double[::1] arrival_ms not None,
        next_turn,
        delay_ms,
        followers=None,
        dp_rank=None,
        prefill_dp_rank=None,
        int64_t concurrency=0,
        double max_sim_time_ms=INFINITY,
        double sample_interval_ms=0.0,
        request_ids=None,
        supply=None,
        int64_t ended_at_once=2048,
    ):
        if workers.recorder is not recorder or (prefill is not None and prefill.recorder is not recorder):
            raise ValueError("expected workers that write to the recorder")
        if workers.requests is not requests or (prefill is not None and prefill.requests is not requests):
            raise ValueError("expected workers over the same requests")
        if not len(arrival_ms) == len(next_turn) == len(delay_ms) == requests.count:
            raise ValueError(f"expected columns of {requests.count} requests")
        if np.any(np.asarray(next_turn) >= requests.count):
            raise ValueError("expected next turns among the requests")
        for pool, ranks in ((workers, dp_rank), (prefill, dp_rank if prefill_dp_rank is None else prefill_dp_rank)):
            if pool is None or ranks is None:
                continue
            if len(ranks) != requests.count or np.any(np.asarray(ranks) >= (<WorkerPool>pool).dp_size):
                raise ValueError(f"expected {requests.count} attention-DP ranks below {(<WorkerPool>pool).dp_size}")
        self.requests = requests
        self.recorder = recorder
        self.workers = workers
        self.prefill = prefill
        self.transfer_bytes_per_token = transfer_bytes_per_token
        self.transfer_bytes_per_s = transfer_bytes_per_s
        self.handoff_ms = handoff_ms
        self.transfers_missing_only = transfers_missing_only
        self.next_turn = np.array(next_turn, np.int64)
        self.delay_ms = np.array(delay_ms, np.float64)
        self.dp_rank = np.full(requests.count, -1) if dp_rank is None else np.array(dp_rank, np.int64)
        self.prefill_dp_rank = np.array(self.dp_rank if prefill_dp_rank is None else prefill_dp_rank, np.int64)
        self.output_tokens = requests.column("output_tokens")
        is_first = np.ones(requests.count, bool)
        is_first[np.asarray(next_turn)[np.asarray(next_turn) >= 0]] = False
        self.branches = followers is not None
        if followers is not None:
            offsets, values, awaited, session = (np.array(column, np.int64) for column in followers)
            if not len(offsets) - 1 == len(awaited) == len(session) == requests.count or offsets[-1] != len(values):
                raise ValueError(f"expected followers of {requests.count} requests")
            if not np.array_equal(np.bincount(values, minlength=requests.count), awaited):
                raise ValueError("expected every request to wait for those that it follows")
            self.follower_offsets, self.followers, self.num_awaited, self.session = offsets, values, awaited, session
            self.num_left = np.bincount(session)
            is_first = awaited == 0
        self.supply = supply
        self.ended_at_once = ended_at_once
        self.first_turns = np.flatnonzero(is_first).astype(np.int64) if supply is None else np.empty(0, np.int64)
        self.first_arrival_ms = np.asarray(arrival_ms)[np.asarray(self.first_turns)]
        self.concurrency = concurrency
        self.closed_loop = concurrency > 0
        self.pending_ms = INFINITY
        self.free_slots = np.arange(0 if supply is None else requests.count)[::-1].copy()
        self.num_free_slots = self.free_slots.shape[0]
        self.max_sim_time_ms = max_sim_time_ms
        self.sample_interval_ms = sample_interval_ms
        self.request_ids = request_ids

    def __dealloc__(self):
        free(self.cancels.items)
        free(self.ended.items)
        free(self.arrivals.events)
        free(self.transfers.events)

    def run(self):
        """Serve everything, or everything until `max_sim_time_ms`.

        Raises RequestNeverFitsError when a request can never be scheduled again, and whatever the timing model
        raises.
        """
        try:
            self.interruptible = True
            with nogil:
                self._begin()
                self._run()
        finally:
            self.interruptible = False
            self._sample_end()
            self.workers.leave_cohorts()
            if self.supply is not None:
                self._hand_over_all()

    # Step by step

    def listen(self):
        """Note what happens, for `step`."""
        self.happenings = []

    def submit(self, rows, double at_ms):
        """Take over requests, one in each row of `supply.next_requests` without sessions; return their indices.

        They arrive at a time, or now when it has passed.
        """
        slots = self._place_rows(rows)
        for request in slots.tolist():
            push(&self.arrivals, max(at_ms, self.now_ms), request)
        return slots

    def cancel(self, int64_t request):
        """Take out a request: at once, or when the pass or the transfer that it is in has ended."""
        if self.requests.columns.status[request] == PENDING:
            self.requests.columns.status[request] = CANCELED  # to be noticed when it arrives
            return
        append(&self.cancels, request)
        self._apply_cancels()

    def next_event_ms(self):
        """When something happens next; infinite when nothing does."""
        return self._next_event_ms()

    def step(self):
        """Settle the next moment at which something happens; return that as (kind, request, tokens), in order.

        Requests that ended are handed over, and their indices stand for nobody. Raises RequestNeverFitsError when
        somebody waits for what never happens.
        """
        cdef double following = self._next_event_ms()
        if following == INFINITY:
            self._check_drained()
        else:
            with nogil:
                self.now_ms = following
                if self.prefill is None:
                    self._settle()
                else:
                    while self._settle_disaggregated():
                        pass
        return self.taken_happenings()

    def taken_happenings(self):
        """What has happened since the last time."""
        happenings, self.happenings = self.happenings, []
        self._hand_over()
        return happenings

    cdef int _tell(self, Happening kind, int64_t request, int64_t tokens) except -1 nogil:
        with gil:
            self.happenings.append((kind, request, tokens))
        return 0

    cdef int _apply_cancels(self) except -1 nogil:
        """Take out whom no pass holds; who ended in the meantime needs nothing."""
        cdef int64_t position, kept = 0, request
        for position in range(self.cancels.length):
            request = self.cancels.items[position]
            if self.recorder.requests.end_ms[request] == self.recorder.requests.end_ms[request]:
                continue
            if not self._cancel(request):
                self.cancels.items[kept] = request
                kept += 1
        self.cancels.length = kept
        return 0

    cdef bint _cancel(self, int64_t request) except -1 nogil:
        cdef RecordedRequests* record = &self.recorder.requests
        if self.prefill is not None and record.source_held_ms[request] != record.source_held_ms[request]:
            return self._cancel_in(self.prefill, record.prefill_worker[request], request)
        return self._cancel_in(self.workers, record.worker[request], request)

    cdef bint _cancel_in(self, WorkerPool pool, int64_t rank, int64_t request) except -1 nogil:
        if pool.workers[rank // pool.dp_size].busy:
            return False
        if not (<Rank>pool.rank_pointers[rank]).scheduler.cancel(request):
            return False
        (<Rank>pool.rank_pointers[rank]).observe()
        self.recorder.requests.end_ms[request] = self.now_ms
        pool.placement.ended(request)
        self._request_ended(request)
        return True

    cdef int _begin(self) except -1 nogil:
        """The first arrivals."""
        cdef int64_t started = 0
        if not self.closed_loop:
            return self._find_next_first()
        while started < self.concurrency and self._has_first_turn():
            self._start_next_session()
            started += 1
        return 0

    cdef bint _has_first_turn(self) except -1 nogil:
        """Whether a first turn is left; takes over more requests when none is at hand."""
        while self.num_started == self.first_turns.shape[0] and self.supply is not None:
            with gil:
                if not self._take_requests():
                    self.supply_ended = True
            if self.supply_ended:
                break
        return self.num_started < self.first_turns.shape[0]

    cdef int _find_next_first(self) except -1 nogil:
        """When the next first turn of an open loop arrives."""
        self.pending_ms = INFINITY
        if self._has_first_turn():
            self.pending_ms = self.first_arrival_ms[self.num_started]
        return 0

    cdef double _next_arrival_ms(self) noexcept nogil:
        return min(self.pending_ms, first_ms(&self.arrivals))

    cdef int64_t _pop_arrival(self) except -1 nogil:
        """The next request to arrive; at equal times first turns come before later ones."""
        cdef int64_t request
        if self.pending_ms > first_ms(&self.arrivals):
            return pop(&self.arrivals).request
        request = self.first_turns[self.num_started]
        self.num_started += 1
        self._find_next_first()
        return request

    cdef bint _take_requests(self) except -1:
        """Take over the next requests of the supply; False after the last."""
        if self.supply_ended:
            return False
        rows = self.supply.next_requests()
        if rows is None:
            return False
        slots = self._place_rows(rows)
        self.supply.placed(slots)
        self.first_turns = slots[rows["first_turns"]]
        self.first_arrival_ms = np.array(rows["arrival_ms"], np.float64)
        self.num_started = 0
        return True

    cdef _place_rows(self, rows):
        """Let free indices stand for the requests of some columns; return the indices."""
        count = len(rows["prompt_tokens"])
        if self.num_free_slots < count:
            self._grow(max(2 * self.requests.count, self.requests.count + count))
        slots = np.array(self.free_slots[self.num_free_slots - count : self.num_free_slots])
        self.num_free_slots -= count
        self.requests.assign(slots, rows["prompt_tokens"], rows["output_tokens"], rows["priority"])
        following = np.asarray(rows["next_turn"])
        np.asarray(self.next_turn)[slots] = np.where(following < 0, -1, slots[following])
        for column, name in (
            (self.delay_ms, "delay_ms"),
            (self.output_tokens, "output_tokens"),
            (self.dp_rank, "dp_rank"),
            (self.prefill_dp_rank, "prefill_dp_rank"),
        ):
            np.asarray(column)[slots] = rows[name]
        for pool in self._pools():
            (<WorkerPool>pool).assign(slots, rows)
        return slots

    cdef list _pools(self):
        return [self.workers] if self.prefill is None else [self.prefill, self.workers]

    cdef _grow(self, int64_t count):
        old_count = self.requests.count
        more = count - old_count
        self.requests.grow(count)
        self.recorder.grow(count)
        for pool in self._pools():
            (<WorkerPool>pool).grow(count)
        self.next_turn = np.concatenate([self.next_turn, np.full(more, -1)])
        self.delay_ms = np.concatenate([self.delay_ms, np.zeros(more)])
        self.output_tokens = np.concatenate([self.output_tokens, np.zeros(more, np.int64)])
        self.dp_rank = np.concatenate([self.dp_rank, np.full(more, -1)])
        self.prefill_dp_rank = np.concatenate([self.prefill_dp_rank, np.full(more, -1)])
        slots = np.empty(count, np.int64)
        slots[: self.num_free_slots] = self.free_slots[: self.num_free_slots]
        slots[self.num_free_slots : self.num_free_slots + more] = np.arange(count - 1, old_count - 1, -1)
        self.free_slots = slots
        self.num_free_slots += more

    cdef _hand_over(self):
        """Tell the supply who ended, and let others have the indices."""
        slots = np.array([self.ended.items[position] for position in range(self.ended.length)], np.int64)
        self.ended.length = 0
        self._give_up(slots)
        self.supply.gaps(self.recorder.taken_gaps())

    cdef _hand_over_under_way(self):
        self.interruptible = False
        self._hand_over()
        self.interruptible = True
        self.supply.counted()

    cdef _give_up(self, slots):
        self.supply.ended(slots)
        self.recorder.clear(slots)
        for pool in self._pools():
            (<WorkerPool>pool).forget(slots)
        np.asarray(self.free_slots)[self.num_free_slots : self.num_free_slots + len(slots)] = slots
        self.num_free_slots += len(slots)

    cdef _hand_over_all(self):
        """At the end of a run: those who ended, then those who arrived and are still here."""
        self._hand_over()
        self._give_up(np.flatnonzero(~np.isnan(self.recorder.column("arrival_ms"))))

    cdef int _run(self) except -1 nogil:
        cdef int64_t settled = 0
        cdef double following = self._next_event_ms()
        while following < INFINITY and following <= self.max_sim_time_ms:
            if self.sample_interval_ms > 0.0:
                self._sample_before(following)
            self.now_ms = following
            if self.prefill is None:
                self._settle()
            else:
                while self._settle_disaggregated():
                    pass
            if self.supply is not None and (
                self.ended.length >= self.ended_at_once
                or self.recorder.gaps.length >= GAPS_PER_ENDED * self.ended_at_once
            ):
                with gil:
                    self._hand_over_under_way()
            settled += 1
            if settled % SETTLES_BETWEEN_SIGNAL_CHECKS == 0:
                with gil:
                    PyErr_CheckSignals()
            following = self._next_event_ms()
        if following == INFINITY:
            with gil:
                self._check_drained()
        return 0

    cdef int _sample_before(self, double at_ms) except -1 nogil:
        """Take the samples that fall due before a time; nothing happens until then."""
        cdef double due_ms = self.num_samples * self.sample_interval_ms
        while due_ms < at_ms:
            self._sample(due_ms)
            due_ms = self.num_samples * self.sample_interval_ms
        return 0

    cdef int _sample(self, double at_ms) except -1 nogil:
        if self.num_samples == MAX_SAMPLES:
            with gil:
                raise ReplayError(
                    f"sample_interval_ms {self.sample_interval_ms} makes more than {MAX_SAMPLES} samples; give a "
                    "longer interval"
                )
        if self.prefill is not None:
            self.prefill.sample(self.num_samples, at_ms)
        self.workers.sample(self.num_samples, at_ms)
        self.num_samples += 1
        self.last_sample_ms = at_ms
        return 0

    def _sample_end(self):
        """The samples due until the end, and one more when the end is none of them."""
        if self.sample_interval_ms == 0.0:
            return
        self._sample_before(np.nextafter(self.now_ms, np.inf))
        if self.last_sample_ms < self.now_ms:
            self._sample(self.now_ms)

    cdef double _next_event_ms(self) noexcept nogil:
        cdef double earliest = min(
            min(self._next_arrival_ms(), first_ms(&self.transfers)), self.workers.next_event_ms()
        )
        return earliest if self.prefill is None else min(earliest, self.prefill.next_event_ms())

    cdef int _settle(self) except -1 nogil:
        """Everything that happens at `now_ms`: passes end, requests arrive, passes start."""
        cdef int64_t worker
        cdef Worker* workers = self.workers.workers
        for worker in range(self.workers.num_workers):
            if workers[worker].busy and workers[worker].end_ms <= self.now_ms:
                self._complete_pass(worker)
        while self._next_arrival_ms() <= self.now_ms:
            self._place(self.workers, self._pop_arrival())
        if self.cancels.length > 0:
            self._apply_cancels()
        for worker in range(self.workers.num_workers):
            # Passes without duration follow one another before what they let in arrives: the loop comes back to
            # this instant for it.
            while (
                not workers[worker].busy
                and self.workers.has_work(worker)
                and self.workers.start_pass(worker, self.now_ms)
            ):
                if workers[worker].end_ms <= self.now_ms:
                    self._complete_pass(worker)
        return 0

    cdef int64_t _settle_disaggregated(self) except -1 nogil:
        """One round of what happens at `now_ms`, decode before prefill; return how much did."""
        cdef int64_t worker, settled = 0
        for worker in range(self.workers.num_workers):
            settled += self._announce_ended(worker)
            if self.workers.is_due(worker, self.now_ms):
                self._complete_pass(worker)
                settled += 1
        for worker in range(self.prefill.num_workers):
            settled += self._announce_prompts(worker)
            if self.prefill.is_due(worker, self.now_ms):
                self._complete_prefill_pass(worker)
                settled += 1
        while first_ms(&self.transfers) <= self.now_ms:
            self._transferred(pop(&self.transfers).request)
            settled += 1
        if self.cancels.length > 0:
            self._apply_cancels()
        for worker in range(self.prefill.num_workers):
            while self.prefill.can_start(worker) and self.prefill.start_pass(worker, self.now_ms):
                settled += 1
                if self.prefill.is_followed_at_once(worker, self.now_ms):
                    # What it has brought comes in the next round, to decode workers that have started by then.
                    self._complete_ranks(self.prefill, worker)
        for worker in range(self.workers.num_workers):
            while self.workers.can_start(worker):
                if not self.workers.start_pass(worker, self.now_ms):
                    # A pass without effect ends like any other: prompts that wait for blocks get their chance.
                    settled += self._reserve_destinations(worker) > 0
                    break
                settled += 1
                if self.workers.is_followed_at_once(worker, self.now_ms):
                    self._complete_ranks(self.workers, worker)
                    self._reserve_destinations(worker)
        while self._next_arrival_ms() <= self.now_ms:
            self._place(self.prefill, self._pop_arrival())
            settled += 1
        return settled

    cdef int _place(self, WorkerPool pool, int64_t request) except -1 nogil:
        cdef bint is_prefill = self.prefill is not None
        cdef int64_t rank
        if self.requests.columns.status[request] == CANCELED:
            self.recorder.requests.arrival_ms[request] = self.recorder.requests.end_ms[request] = self.now_ms
            return self._request_ended(request)
        rank = pool.placement.choose(
            request, self.prefill_dp_rank[request] if is_prefill else self.dp_rank[request]
        )
        self.recorder.requests.arrival_ms[request] = self.now_ms
        if self.happenings is not None:
            self._tell(ARRIVED, request, 0)
        if is_prefill:
            # Its token is hidden; it only takes the place of the first one in the scheduler.
            self.requests.columns.output_tokens[request] = min(1, self.output_tokens[request])
        if not (<Rank>pool.rank_pointers[rank]).submit(request, self.now_ms):
            pool.placement.ended(request)
            self._request_ended(request)
        return 0

    cdef int _request_ended(self, int64_t request) except -1 nogil:
        cdef int64_t following = self.next_turn[request]
        if self.happenings is not None:
            self._tell(ENDED, request, 0)
        if self.supply is not None and self._is_let_go(request):
            append(&self.ended, request)
        if self.branches:
            return self._branch_ended(request)
        if following >= 0:
            return push(&self.arrivals, self.now_ms + self.delay_ms[following], following)
        if self.closed_loop:
            return self._start_next_session()
        return 0

    cdef int _branch_ended(self, int64_t request) except -1 nogil:
        """Who waited for this request alone, or last, comes next; the session ends with its last request."""
        cdef int64_t position, following, session = self.session[request]
        for position in range(self.follower_offsets[request], self.follower_offsets[request + 1]):
            following = self.followers[position]
            self.num_awaited[following] -= 1
            if self.num_awaited[following] == 0:
                push(&self.arrivals, self.now_ms + self.delay_ms[following], following)
        self.num_left[session] -= 1
        if self.closed_loop and self.num_left[session] == 0:
            return self._start_next_session()
        return 0

    cdef bint _is_let_go(self, int64_t request) noexcept nogil:
        """Whether no worker has anything to do with an ended request any more."""
        cdef RecordedRequests* record = &self.recorder.requests
        return (
            self.prefill is None
            or self.requests.columns.status[request] == FAILED
            or record.source_held_ms[request] != record.source_held_ms[request]
            or record.source_released_ms[request] == record.source_released_ms[request]
        )

    cdef int _start_next_session(self) except -1 nogil:
        if self._has_first_turn():
            push(&self.arrivals, self.now_ms, self.first_turns[self.num_started])
            self.num_started += 1
        return 0

    cdef int _complete_pass(self, int64_t worker) except -1 nogil:
        """The pass of an aggregated or decode worker ends."""
        cdef int64_t position
        self._complete_ranks(self.workers, worker)
        self._announce_ended(worker)
        if self.prefill is not None:
            self._reserve_destinations(worker)
            for position in range(self.workers.workers[worker].deferred.length):
                self._activate(self.workers.workers[worker].deferred.items[position])
            self.workers.workers[worker].deferred.length = 0
        return self.workers.pass_over(worker)

    cdef int _complete_ranks(self, WorkerPool pool, int64_t worker) except -1 nogil:
        """The ranks of a worker end their pass; who ended in it is announced later."""
        cdef int64_t index
        pool.workers[worker].busy = False
        for index in range(worker * pool.dp_size, (worker + 1) * pool.dp_size):
            if (<Rank>pool.rank_pointers[index]).is_in_pass():
                pool.complete_rank(index, pool.workers[worker].end_ms)
                self._note_ended(<Rank>pool.rank_pointers[index], &pool.workers[worker].ended)
                if pool is self.workers:
                    self._tell_tokens(<Rank>pool.rank_pointers[index])
        return 0

    cdef int _note_ended(self, Rank rank, IndexList* ended) except -1 nogil:
        cdef int64_t position
        for position in range(rank.num_ended()):
            append(ended, rank.ended(position))
        return 0

    cdef int _tell_tokens(self, Rank rank) except -1 nogil:
        """Tell the placement what a pass has brought."""
        cdef int64_t position, request
        for position in range(rank.scheduler.emitted.length):
            request = rank.scheduler.emitted.items[position]
            if self.happenings is not None:
                self._tell(EMITTED, request, rank.scheduler.burst_tokens.items[position])
            if self.requests.columns.generated_tokens[request] == 1:
                self.workers.placement.prompt_done(request)
        return 0

    cdef int64_t _announce_ended(self, int64_t worker) except -1 nogil:
        """Tell the placement and the sessions who ended at a worker; return how many."""
        cdef IndexList* ended = &self.workers.workers[worker].ended
        cdef int64_t position, count = ended.length
        for position in range(count):
            self.workers.placement.ended(ended.items[position])
            self._request_ended(ended.items[position])
        ended.length = 0
        return count

    cdef int _complete_prefill_pass(self, int64_t worker) except -1 nogil:
        """The pass of a prefill worker ends."""
        cdef int64_t position
        self._complete_ranks(self.prefill, worker)
        self._announce_prompts(worker)
        for position in range(self.prefill.workers[worker].deferred.length):
            self._release_source(self.prefill.workers[worker].deferred.items[position])
        self.prefill.workers[worker].deferred.length = 0
        return self.prefill.pass_over(worker)

    cdef int64_t _announce_prompts(self, int64_t worker) except -1 nogil:
        """Finished prompts ask for blocks of a decode worker, rejected ones are over; return how many."""
        cdef IndexList* ended = &self.prefill.workers[worker].ended
        cdef int64_t position, request, destination, count = ended.length
        for position in range(count):
            request = ended.items[position]
            self.prefill.placement.ended(request)
            if self.requests.columns.status[request] == REJECTED:
                self._request_ended(request)
                continue
            if self.happenings is not None:
                self._tell(SOURCE_HELD, request, 0)
            destination = self.workers.placement.choose(request, self.dp_rank[request])
            self.recorder.requests.worker[request] = destination
            self._request_destination(request, <Rank>self.workers.rank_pointers[destination])
        ended.length = 0
        return count

    cdef int _request_destination(self, int64_t request, Rank rank) except -1 nogil:
        self.requests.columns.output_tokens[request] = self.output_tokens[request]
        if not rank.scheduler.kv.can_ever_hold(self.requests.columns.prompt_tokens[request]):
            return self._fail(request)
        rank.scheduler.add_destination(request)
        rank.observe()
        if not self.workers.workers[rank.index // self.workers.dp_size].busy:
            self._reserve_next(rank)
        return 0

    cdef int _fail(self, int64_t request) except -1 nogil:
        """No decode worker can ever take the prompt: the request is over, and its blocks are free."""
        cdef RecordedRequests* record = &self.recorder.requests
        cdef int64_t source = record.prefill_worker[request]
        self.requests.columns.status[request] = FAILED
        self.requests.columns.refusal[request] = KV_CAPACITY
        record.worker[request] = -1
        record.end_ms[request] = self.now_ms
        (<Rank>self.prefill.rank_pointers[source]).scheduler.release_source(request)
        (<Rank>self.prefill.rank_pointers[source]).observe()
        return self._request_ended(request)

    cdef int64_t _reserve_destinations(self, int64_t worker) except -1 nogil:
        """One attempt for each rank of a decode worker; return how many succeeded."""
        cdef int64_t index, reserved = 0
        for index in range(worker * self.workers.dp_size, (worker + 1) * self.workers.dp_size):
            reserved += self._reserve_next(<Rank>self.workers.rank_pointers[index])
        return reserved

    cdef bint _reserve_next(self, Rank rank) except -1 nogil:
        cdef int64_t request, tokens, block_size
        if rank.scheduler.pending.length == 0:
            return False
        request = rank.scheduler.reserve_next()
        if request < 0:
            return False
        rank.observe()
        tokens = self.requests.columns.prompt_tokens[request]
        self.recorder.requests.destination_reserved_ms[request] = self.now_ms
        if self.transfers_missing_only:
            # Whole blocks move.
            block_size = rank.scheduler.kv.block_size
            tokens = ((tokens + block_size - 1) // block_size - rank.scheduler.kv.num_hits) * block_size
        if self.happenings is not None:
            self._tell(DESTINATION_RESERVED, request, tokens)
        push(&self.transfers, self.now_ms + self._transfer_ms(tokens), request)
        return True

    cdef double _transfer_ms(self, int64_t tokens) noexcept nogil:
        if self.transfer_bytes_per_token == 0.0 or self.transfer_bytes_per_s == 0.0:
            return modeled_duration_ms(self.handoff_ms, 0.0)
        return <double>tokens * self.transfer_bytes_per_token / self.transfer_bytes_per_s * 1000.0

    cdef int _transferred(self, int64_t request) except -1 nogil:
        cdef int64_t worker = self.recorder.requests.worker[request] // self.workers.dp_size
        if self.workers.workers[worker].busy:
            return self.workers.defer(worker, request)
        return self._activate(request)

    cdef int _activate(self, int64_t request) except -1 nogil:
        """The decode worker goes on with a prompt, and the prefill worker may free its blocks."""
        cdef int64_t destination = self.recorder.requests.worker[request]
        cdef int64_t source = self.recorder.requests.prefill_worker[request] // self.prefill.dp_size
        (<Rank>self.workers.rank_pointers[destination]).scheduler.activate(request)
        (<Rank>self.workers.rank_pointers[destination]).observe()
        self.recorder.requests.destination_activated_ms[request] = self.now_ms
        if self.happenings is not None:
            self._tell(DESTINATION_ACTIVATED, request, 0)
        self._reserve_next(<Rank>self.workers.rank_pointers[destination])
        if self.prefill.workers[source].busy:
            return self.prefill.defer(source, request)
        return self._release_source(request)

    cdef int _release_source(self, int64_t request) except -1 nogil:
        cdef int64_t source = self.recorder.requests.prefill_worker[request]
        (<Rank>self.prefill.rank_pointers[source]).scheduler.release_source(request)
        (<Rank>self.prefill.rank_pointers[source]).observe()
        self.recorder.requests.source_released_ms[request] = self.now_ms
        if self.happenings is not None:
            self._tell(SOURCE_RELEASED, request, 0)
        if self.supply is not None and self.recorder.requests.end_ms[request] == self.recorder.requests.end_ms[request]:
            append(&self.ended, request)
        return 0

    def _check_drained(self):
        """Nothing will ever happen again: whoever still waits fits in no pass."""
        cdef WorkerPool pool
        cdef Rank rank
        for pool in (self.prefill, self.workers):
            if pool is None:
                continue
            for rank in pool.ranks:
                if rank.scheduler.waiting.length > 0:
                    self._raise_never_fits(rank, rank.scheduler.waiting.items[rank.scheduler.waiting.head])
                if rank.scheduler.pending.length > 0:
                    self._raise_never_fits(rank, rank.scheduler.pending.items[rank.scheduler.pending.head])

    cdef _raise_never_fits(self, Rank rank, int64_t request):
        cdef int64_t tokens = known_tokens(&self.requests.columns, request)
        cdef int64_t block_size = rank.scheduler.kv.block_size
        name = request if self.request_ids is None else self.request_ids[request]
        if not rank.scheduler.kv.can_ever_hold(tokens):
            reason = (
                f"needs {(tokens + block_size - 1) // block_size} KV blocks of {block_size} tokens, "
                f"the cache has {rank.scheduler.kv.pool.num_blocks}"
            )
            remedy = "increase num_gpu_blocks, or set max_model_len so that generation stops earlier"
        else:
            reason = f"exceeds max_num_batched_tokens = {rank.scheduler.max_num_batched_tokens} without chunked prefill"
            remedy = "increase max_num_batched_tokens or enable chunked prefill"
        raise RequestNeverFitsError(
            f"request {name!r} can never be scheduled again at {self.now_ms} ms: its sequence of {tokens} tokens {reason}; "
            + remedy
        )
