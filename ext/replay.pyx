"""The replay loop: requests arrive at simulated workers, passes start and end, and the run is recorded.

Not the report: metrics are computed from the arrays recorded here. Source: engine-and-replay.md 4.2, 4.4, 5.3, 5.4.
"""

cimport numpy as np
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memset

from fpmsdk._ext.pages cimport resized
from fpmsdk._ext.pricing cimport PassPrice, PassPricer
from fpmsdk._ext.scheduler cimport PassRecord, Requests, Scheduler, known_tokens

import numpy as np

from fpmsdk.errors import RequestNeverFitsError

np.import_array()

cdef enum:
    SETTLES_BETWEEN_SIGNAL_CHECKS = 4096

cdef PassRecord _no_pass

# The same fields in the same order as the structures in replay.pxd; every field has eight bytes.
_PASS_ROW = np.dtype(
    [
        ("start_ms", "f8"),
        ("end_ms", "f8"),
        ("prefill_ms", "f8"),
        ("decode_ms", "f8"),
        ("worker", "i8"),
        ("composed", "i8"),
        *((name, "f8" if name.startswith("var_") else "i8") for name in <object>_no_pass),
    ]
)
_GAP_ROW = np.dtype([("gap_ms", "f8"), ("count", "i8")])
_ADMISSION_ROW = np.dtype([("request", "i8"), ("at_ms", "f8"), ("reused_tokens", "i8")])


cdef class Rows:
    """A growing table of C structures, read as a numpy structured array."""

    def __cinit__(self, dtype):
        self.dtype = dtype
        self.row_bytes = dtype.itemsize

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.memory, self.length * self.row_bytes, True, flags)
        self.num_exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.num_exports -= 1

    cdef void* append(self) except NULL nogil:
        """A new uninitialised row."""
        if self.length == self.capacity:
            if self.num_exports > 0:
                with gil:
                    raise BufferError("rows that are being read cannot grow")
            self.capacity = max(1024, 2 * self.capacity)
            self.memory = <char*>resized(self.memory, self.capacity * self.row_bytes)
        self.length += 1
        return &self.memory[(self.length - 1) * self.row_bytes]

    def array(self):
        """Return the rows, not a copy: read-only, and the table cannot grow while it is in use."""
        return np.frombuffer(self, self.dtype) if self.length else np.empty(0, self.dtype)


cdef class Recorder:
    """What a run leaves behind: one entry per request, per pass, per distinct token gap and per admission."""

    def __cinit__(self, int64_t num_requests, bint keeps_passes):
        self.columns = {
            name: np.full(num_requests, np.nan)
            for name in (
                "arrival_ms", "first_admit_ms", "first_token_ms", "second_token_ms", "last_token_ms", "end_ms",
            )
        }
        for name in ("reused_tokens", "first_reused_tokens", "num_admissions"):
            self.columns[name] = np.zeros(num_requests, np.int64)
        self.columns["worker"] = np.full(num_requests, -1, np.int64)
        self.requests.arrival_ms = <double*>np.PyArray_DATA(self.columns["arrival_ms"])
        self.requests.first_admit_ms = <double*>np.PyArray_DATA(self.columns["first_admit_ms"])
        self.requests.first_token_ms = <double*>np.PyArray_DATA(self.columns["first_token_ms"])
        self.requests.second_token_ms = <double*>np.PyArray_DATA(self.columns["second_token_ms"])
        self.requests.last_token_ms = <double*>np.PyArray_DATA(self.columns["last_token_ms"])
        self.requests.end_ms = <double*>np.PyArray_DATA(self.columns["end_ms"])
        self.requests.reused_tokens = <int64_t*>np.PyArray_DATA(self.columns["reused_tokens"])
        self.requests.first_reused_tokens = <int64_t*>np.PyArray_DATA(self.columns["first_reused_tokens"])
        self.requests.num_admissions = <int64_t*>np.PyArray_DATA(self.columns["num_admissions"])
        self.requests.worker = <int64_t*>np.PyArray_DATA(self.columns["worker"])
        assert _PASS_ROW.itemsize == sizeof(PassRow)
        self.passes = Rows(_PASS_ROW)
        self.gaps = Rows(_GAP_ROW)
        self.admissions = Rows(_ADMISSION_ROW)
        self.keeps_passes = keeps_passes

    cdef int count_gap(self, double gap_ms, int64_t first_entry) except -1 nogil:
        """Count one token gap of the pass whose entries start at `first_entry`."""
        # Continuing requests share their gap, so the search from the back ends at once but for the rare mixture.
        cdef GapRow* rows = <GapRow*>self.gaps.memory
        cdef int64_t entry = self.gaps.length - 1
        while entry >= first_entry and rows[entry].gap_ms != gap_ms:
            entry -= 1
        if entry >= first_entry:
            rows[entry].count += 1
            return 0
        rows = <GapRow*>self.gaps.append()
        rows.gap_ms = gap_ms
        rows.count = 1
        return 0

    def column(self, str name):
        """Return one array of the requests, e.g. `first_token_ms`; NaN and -1 mean it never happened."""
        return self.columns[name]


cdef class Rank:
    """One scheduler rank of a worker, its pricer and its hand in the record."""

    def __cinit__(
        self, Scheduler scheduler not None, PassPricer pricer not None, Recorder recorder not None, int64_t index
    ):
        self.scheduler = scheduler
        self.pricer = pricer
        self.recorder = recorder
        self.index = index

    cdef bint has_work(self) noexcept nogil:
        return self.scheduler.has_work()

    cdef bint submit(self, int64_t request, double now) except -1 nogil:
        self.recorder.requests.worker[request] = self.index
        if self.scheduler.submit(request):
            return True
        self.recorder.requests.end_ms[request] = now
        return False

    cdef double start_pass(self, double now, int64_t wave_step) except? -1.0 nogil:
        """Schedule and price one pass; return when this rank alone would be done."""
        cdef RecordedRequests* record = &self.recorder.requests
        cdef AdmissionRow* admission
        cdef int64_t position, request, reused
        self.scheduler.schedule(wave_step)
        self.pricer.price(&self.scheduler.shape, &self.price)
        self.in_pass = True
        self.start_ms = now
        for position in range(self.scheduler.num_scheduled - self.scheduler.num_admitted, self.scheduler.num_scheduled):
            request = self.scheduler.scheduled[position].request
            reused = self.scheduler.scheduled[position].computed_before
            if record.num_admissions[request] == 0:
                record.first_admit_ms[request] = now
                record.first_reused_tokens[request] = reused
            record.num_admissions[request] += 1
            record.reused_tokens[request] = max(record.reused_tokens[request], reused)
            admission = <AdmissionRow*>self.recorder.admissions.append()
            admission.request = request
            admission.at_ms = now
            admission.reused_tokens = reused
        # In this order: ties between workers depend on the last bit.
        return (now + self.price.prefill_ms) + self.price.decode_ms

    cdef bint pass_had_effect(self) noexcept nogil:
        return self.scheduler.pass_had_effect()

    cdef bint is_in_pass(self) noexcept nogil:
        return self.in_pass

    cdef int complete_pass(self, double end_ms) except -1 nogil:
        """Emit the tokens of the pass at `end_ms`, the end of the whole attention-DP group."""
        cdef int64_t position
        self.in_pass = False
        self.scheduler.complete()
        self.recorder.committed_prefill_tokens += self.scheduler.record.committed_prefill_tokens
        self._record_token_times(end_ms)
        for position in range(self.num_ended()):
            self.recorder.requests.end_ms[self.ended(position)] = end_ms
        if self.recorder.keeps_passes:
            self._record_pass(end_ms)
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
        cdef int64_t position, request, generated, first_gap = self.recorder.gaps.length
        for position in range(self.scheduler.emitted.length):
            request = self.scheduler.emitted.items[position]
            generated = self.scheduler.requests.columns.generated_tokens[request]
            if generated == 1:
                record.first_token_ms[request] = now
                record.last_token_ms[request] = now
                continue
            if generated == 2:
                record.second_token_ms[request] = now
            self.recorder.count_gap(now - record.last_token_ms[request], first_gap)
            record.last_token_ms[request] = now
        return 0

    cdef int _record_pass(self, double end_ms) except -1 nogil:
        cdef PassRow* row = <PassRow*>self.recorder.passes.append()
        row.start_ms = self.start_ms
        row.end_ms = end_ms
        row.prefill_ms = self.price.prefill_ms
        row.decode_ms = self.price.decode_ms
        row.worker = self.index
        row.composed = self.price.composed
        row.record = self.scheduler.record
        return 0


cdef class Replay:
    """One run: requests of a trace served by identical workers.

    Parameters
    ----------
    schedulers : list of Scheduler
        One per rank, ranks of a worker together; all over the same `Requests`.
    pricer : PassPricer
    dp_size : int
        Attention-DP ranks per worker.
    arrival_ms : float64[n]
        Ascending over first turns; ignored for later turns and in closed loop.
    next_turn : int64[n]
        The request that follows in the same session, -1 for none.
    delay_ms : float64[n]
        Wait of a later turn after the end of the turn before it.
    concurrency : int
        0: requests arrive at `arrival_ms`. N: at most N sessions are active, the next one arrives when one ends.
    max_sim_time_ms : float
        No event after this time is processed.
    record_passes : bool
    request_ids : sequence of str
        Names for error messages.
    """

    def __cinit__(
        self,
        list schedulers not None,
        PassPricer pricer not None,
        *,
        int64_t dp_size,
        const double[::1] arrival_ms not None,
        next_turn,
        delay_ms,
        int64_t concurrency=0,
        double max_sim_time_ms=INFINITY,
        bint record_passes=True,
        request_ids=None,
    ):
        cdef int64_t index, request
        cdef Scheduler first
        if not schedulers or dp_size < 1 or len(schedulers) % dp_size:
            raise ValueError(f"expected schedulers for whole workers of {dp_size} ranks, found {len(schedulers)}")
        first = schedulers[0]
        if any((<Scheduler?>scheduler).requests is not first.requests for scheduler in schedulers):
            raise ValueError("expected schedulers over the same requests")
        if not len(arrival_ms) == len(next_turn) == len(delay_ms) == first.requests.count:
            raise ValueError(f"expected columns of {first.requests.count} requests")
        if np.any(np.asarray(next_turn) >= first.requests.count):
            raise ValueError("expected next turns among the requests")
        self.requests = first.requests
        self.recorder = Recorder(self.requests.count, record_passes)
        self.ranks = [Rank(scheduler, pricer, self.recorder, i) for i, scheduler in enumerate(schedulers)]
        self.rank_pointers = <void**>resized(NULL, len(self.ranks) * sizeof(void*))
        for index in range(len(self.ranks)):
            self.rank_pointers[index] = <void*>self.ranks[index]
        self.dp_size = dp_size
        self.num_workers = len(self.ranks) // dp_size
        self.workers = <Worker*>resized(NULL, self.num_workers * sizeof(Worker))
        memset(self.workers, 0, self.num_workers * sizeof(Worker))
        self.next_turn = np.array(next_turn, np.int64)
        self.delay_ms = np.array(delay_ms, np.float64)
        is_first = np.ones(self.requests.count, bool)
        is_first[np.asarray(next_turn)[np.asarray(next_turn) >= 0]] = False
        self.first_turns = np.flatnonzero(is_first).astype(np.int64)
        self.closed_loop = concurrency > 0
        self.max_sim_time_ms = max_sim_time_ms
        self.request_ids = request_ids
        if self.closed_loop:
            for index in range(min(concurrency, self.first_turns.shape[0])):
                self._start_next_session()
        else:
            for index in range(self.first_turns.shape[0]):
                request = self.first_turns[index]
                self._schedule_arrival(arrival_ms[request], request)

    def __dealloc__(self):
        free(self.rank_pointers)
        free(self.workers)
        free(self.arrivals)

    def run(self):
        """Serve everything, or everything until `max_sim_time_ms`.

        Raises RequestNeverFitsError when a request can never be scheduled again, and whatever the timing model
        raises.
        """
        with nogil:
            self._run()

    cdef int _run(self) except -1 nogil:
        cdef int64_t worker, settled = 0
        cdef double following = self._next_event_ms()
        while following < INFINITY and following <= self.max_sim_time_ms:
            self.now_ms = following
            self._settle()
            settled += 1
            if settled % SETTLES_BETWEEN_SIGNAL_CHECKS == 0:
                with gil:
                    PyErr_CheckSignals()
            following = self._next_event_ms()
        if following == INFINITY:
            for worker in range(self.num_workers):
                if self._has_work(worker):
                    with gil:
                        self._raise_never_fits(worker)
        return 0

    cdef double _next_event_ms(self) noexcept nogil:
        cdef double earliest = INFINITY
        cdef int64_t worker
        if self.num_arrivals > 0:
            earliest = self.arrivals[0].at_ms
        for worker in range(self.num_workers):
            if self.workers[worker].busy:
                earliest = min(earliest, self.workers[worker].end_ms)
        return earliest

    cdef int _settle(self) except -1 nogil:
        """Everything that happens at `now_ms`: passes end, requests arrive, passes start."""
        cdef int64_t worker
        for worker in range(self.num_workers):
            if self.workers[worker].busy and self.workers[worker].end_ms <= self.now_ms:
                self._complete_pass(worker)
        while self.num_arrivals > 0 and self.arrivals[0].at_ms <= self.now_ms:
            self._place(self._pop_arrival().request)
        for worker in range(self.num_workers):
            # Passes without duration follow one another before what they let in arrives: the loop comes back to
            # this instant for it.
            while not self.workers[worker].busy and self._has_work(worker) and self._start_pass(worker):
                if self.workers[worker].end_ms <= self.now_ms:
                    self._complete_pass(worker)
        return 0

    cdef bint _has_work(self, int64_t worker) noexcept nogil:
        cdef int64_t rank
        for rank in range(worker * self.dp_size, (worker + 1) * self.dp_size):
            if (<Rank>self.rank_pointers[rank]).has_work():
                return True
        return False

    cdef int _place(self, int64_t request) except -1 nogil:
        """Round robin: rank 0 of every worker, then rank 1 of every worker, and so on."""
        cdef int64_t turn = self.num_placed % (self.num_workers * self.dp_size)
        cdef int64_t rank = turn % self.num_workers * self.dp_size + turn // self.num_workers
        self.num_placed += 1
        self.recorder.requests.arrival_ms[request] = self.now_ms
        if not (<Rank>self.rank_pointers[rank]).submit(request, self.now_ms):
            self._request_ended(request)
        return 0

    cdef int _request_ended(self, int64_t request) except -1 nogil:
        cdef int64_t following = self.next_turn[request]
        if following >= 0:
            return self._schedule_arrival(self.now_ms + self.delay_ms[following], following)
        if self.closed_loop:
            return self._start_next_session()
        return 0

    cdef int _start_next_session(self) except -1 nogil:
        if self.num_started < self.first_turns.shape[0]:
            self._schedule_arrival(self.now_ms, self.first_turns[self.num_started])
            self.num_started += 1
        return 0

    cdef bint _start_pass(self, int64_t worker) except -1 nogil:
        """Every rank with work starts a pass of its own; the group ends with the slowest one.

        False: no rank could do anything, so that the worker can only wait.
        """
        cdef double end_ms = self.now_ms
        cdef bint had_effect = False
        cdef int64_t rank
        for rank in range(worker * self.dp_size, (worker + 1) * self.dp_size):
            if (<Rank>self.rank_pointers[rank]).has_work():
                end_ms = max(
                    end_ms, (<Rank>self.rank_pointers[rank]).start_pass(self.now_ms, self.workers[worker].wave_step)
                )
                had_effect = had_effect or (<Rank>self.rank_pointers[rank]).pass_had_effect()
        if not had_effect:
            return False
        self.workers[worker].busy = True
        self.workers[worker].end_ms = end_ms
        self.workers[worker].wave_step += 1
        return True

    cdef int _complete_pass(self, int64_t worker) except -1 nogil:
        cdef int64_t rank, position
        self.workers[worker].busy = False
        for rank in range(worker * self.dp_size, (worker + 1) * self.dp_size):
            if not (<Rank>self.rank_pointers[rank]).is_in_pass():
                continue
            (<Rank>self.rank_pointers[rank]).complete_pass(self.workers[worker].end_ms)
            for position in range((<Rank>self.rank_pointers[rank]).num_ended()):
                self._request_ended((<Rank>self.rank_pointers[rank]).ended(position))
        # The cadence counts the passes of one busy period.
        if not self._has_work(worker):
            self.workers[worker].wave_step = 0
        return 0

    cdef int _schedule_arrival(self, double at_ms, int64_t request) except -1 nogil:
        cdef int64_t child, parent
        if self.num_arrivals == self.arrivals_capacity:
            self.arrivals_capacity = max(256, 2 * self.arrivals_capacity)
            self.arrivals = <Arrival*>resized(self.arrivals, self.arrivals_capacity * sizeof(Arrival))
        child = self.num_arrivals
        self.num_arrivals += 1
        self.num_scheduled_arrivals += 1
        while child > 0:
            parent = (child - 1) // 2
            if self.arrivals[parent].at_ms <= at_ms:  # equal times: first scheduled, first placed
                break
            self.arrivals[child] = self.arrivals[parent]
            child = parent
        self.arrivals[child] = Arrival(at_ms, self.num_scheduled_arrivals, request)
        return 0

    cdef Arrival _pop_arrival(self) noexcept nogil:
        cdef Arrival top = self.arrivals[0]
        cdef Arrival last
        cdef int64_t parent = 0, child
        self.num_arrivals -= 1
        last = self.arrivals[self.num_arrivals]
        while 2 * parent + 1 < self.num_arrivals:
            child = 2 * parent + 1
            if child + 1 < self.num_arrivals and comes_first(&self.arrivals[child + 1], &self.arrivals[child]):
                child += 1
            if not comes_first(&self.arrivals[child], &last):
                break
            self.arrivals[parent] = self.arrivals[child]
            parent = child
        self.arrivals[parent] = last
        return top

    def _raise_never_fits(self, int64_t worker):
        # Nothing will ever happen again, but this worker has work: the head of a queue fits in no pass.
        cdef Rank rank = next(
            rank for rank in self.ranks[worker * self.dp_size : (worker + 1) * self.dp_size] if (<Rank>rank).has_work()
        )
        cdef int64_t request = rank.scheduler.waiting.items[rank.scheduler.waiting.head]
        cdef int64_t tokens = known_tokens(&self.requests.columns, request)
        cdef int64_t block_size = rank.scheduler.kv.block_size
        cdef int64_t needed = (tokens + block_size - 1) // block_size
        cdef int64_t num_blocks = rank.scheduler.kv.pool.num_blocks
        name = request if self.request_ids is None else self.request_ids[request]
        if needed > num_blocks:
            reason = f"needs {needed} KV blocks of {block_size} tokens, the cache has {num_blocks}"
            remedy = "increase num_gpu_blocks, or set max_model_len so that generation stops earlier"
        else:
            reason = f"exceeds max_num_batched_tokens = {rank.scheduler.max_num_batched_tokens} without chunked prefill"
            remedy = "increase max_num_batched_tokens or enable chunked prefill"
        raise RequestNeverFitsError(
            f"request {name!r} can never be scheduled again at {self.now_ms} ms: its sequence of {tokens} tokens {reason}; "
            + remedy
        )


cdef inline bint comes_first(const Arrival* one, const Arrival* other) noexcept nogil:
    if one.at_ms != other.at_ms:
        return one.at_ms < other.at_ms
    return one.order < other.order
