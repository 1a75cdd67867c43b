"""The vLLM scheduler of one rank: requests as a structure of arrays, the queues, and one pass at a time."""

from libc.stdint cimport int8_t, int64_t

from fpmsdk._ext.pages cimport KvCache, resized
from fpmsdk._ext.pricing cimport PassShape
from fpmsdk._ext.speculation cimport DraftAcceptance


cpdef enum Status:
    PENDING = 0      # not submitted yet
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3    # waiting again, generated tokens kept
    COMPLETED = 4
    REJECTED = 5
    HELD = 6         # its prompt is computed on a prefill worker, which keeps the blocks for the transfer
    RESERVED = 7     # a decode worker has blocks for its prompt, the transfer is under way
    CANCELED = 8
    FAILED = 9       # its prompt is computed, but no decode worker can ever take it


cpdef enum Role:
    AGGREGATED = 0
    PREFILL = 1      # computes prompts and hands their blocks over
    DECODE = 2       # takes prompts over and generates


cpdef enum Refusal:
    ACCEPTED = 0
    MODEL_LENGTH = 1        # the prompt reaches max_model_len
    KV_CAPACITY = 2         # the prompt needs more blocks than there are
    UNCHUNKED_PROMPT = 3    # chunked prefill is off and the prompt exceeds max_num_batched_tokens
    KV_GROWTH = 4           # the prompt fits, but not together with what is to be generated


cdef struct RequestColumns:
    int64_t* prompt_tokens
    int64_t* output_tokens      # to generate, cut so that the sequence stays within max_model_len
    int64_t* priority           # smaller is served first
    int64_t* arrival_order
    int64_t* generated_tokens
    int64_t* computed_tokens    # tokens whose KV exists
    int64_t* num_preemptions
    int8_t* has_drafts          # emitted a token in its last pass and was not preempted since
    int8_t* status
    int8_t* refusal
    int64_t* cohort_key         # of a cohort member: ascends in running order
    int64_t* next_due           # of a cohort member: the one after it in its calendar slot


cdef inline int64_t known_tokens(RequestColumns* requests, int64_t request) noexcept nogil:
    return requests.prompt_tokens[request] + requests.generated_tokens[request]


cdef class Requests:
    cdef readonly int64_t count
    cdef dict arrays
    cdef RequestColumns columns

    cdef _point(self)
    cdef grow(self, int64_t count)
    cdef assign(self, slots, prompt_tokens, output_tokens, priority)


cdef struct IndexList:
    int64_t* items
    int64_t length
    int64_t capacity


cdef inline int append(IndexList* entries, int64_t value) except -1 nogil:
    if entries.length == entries.capacity:
        entries.capacity = max(16, 2 * entries.capacity)
        entries.items = <int64_t*>resized(entries.items, entries.capacity * sizeof(int64_t))
    entries.items[entries.length] = value
    entries.length += 1
    return 0


cdef struct IndexQueue:
    int64_t* items      # a ring that starts at head
    int64_t head
    int64_t length
    int64_t capacity


cdef struct LengthSums:
    int64_t count
    int64_t total
    int64_t squares


cdef struct ScheduledItem:
    int64_t request
    int64_t tokens              # computed in this pass
    int64_t computed_before     # reused prefix included
    int64_t width               # positions of the forward: `tokens`, and drafts after them


cdef struct PassRecord:
    # What the engine's telemetry says about a pass (engine-and-replay.md 2.7), and the state it leaves. Eight bytes
    # a field: replay rows are read as numpy records.
    int64_t num_prefill_requests
    int64_t sum_prefill_tokens
    int64_t sum_prefill_kv_tokens
    double var_prefill_length
    int64_t num_decode_requests
    int64_t sum_decode_kv_tokens
    double var_decode_kv_tokens
    int64_t num_queued_prefill
    int64_t sum_queued_prefill_tokens
    double var_queued_prefill_length
    int64_t num_queued_decode
    int64_t sum_queued_decode_kv_tokens
    double var_queued_decode_kv_tokens
    int64_t committed_prefill_tokens    # scheduled tokens of every request that still computed prompt
    int64_t num_preempted
    int64_t num_running
    int64_t num_waiting
    int64_t active_blocks
    int64_t free_blocks                 # published ones included
    int64_t published_free_blocks
    int64_t kv_cache_used_bytes         # of a byte budget


cdef struct Preemption:
    # What a victim gave up, and the state of its rank.
    int64_t request
    int64_t resident_blocks             # really held, whatever its logical length
    int64_t running_before
    int64_t waiting_before
    int64_t active_blocks_before
    int64_t active_blocks_after


cdef class Scheduler:
    cdef readonly Requests requests
    cdef readonly KvCache kv
    cdef DraftAcceptance drafts         # None without multi-token prediction
    cdef bint vllm_rules, by_priority, preempts_oldest, chunked_prefill, reserves_whole_sequence
    cdef Role role
    cdef bint never_evicts
    cdef bint describes_passes          # fill in all of `record`; else only what is counted
    cdef bint threshold_spares_lone_request, threshold_is_adaptive
    cdef int64_t num_gpu_blocks, max_model_len, max_num_seqs, max_num_batched_tokens
    cdef int64_t long_prefill_token_threshold, watermark_blocks, prefill_schedule_interval

    cdef IndexList running
    cdef IndexQueue waiting
    cdef LengthSums queued_prefill, queued_decode
    cdef int64_t num_submitted
    cdef bint prefill_capacity_bound
    cdef IndexQueue pending             # destinations that have no blocks yet
    cdef int64_t capacity_generation    # counts the events after which more may fit
    cdef int64_t failed_generation      # in which the first pending one did not fit; -1: not tried

    cdef bint head_waits                # the first waiting request did not fit, and nothing happened that may let it

    # The cohort: the first of `running`, as long as each computes and emits exactly one token in every pass. Its
    # members are touched when their blocks change and when they are done; in between their columns hold
    # `generated_tokens` and `computed_tokens` less `cohort_pass`.
    cdef bint forms_cohort              # the owner calls `leave_cohort` before it looks at a request
    cdef int64_t num_in_cohort
    cdef int64_t cohort_pass            # passes completed
    cdef int64_t cohort_pause           # passes before a new cohort may form
    cdef int64_t num_joined             # ever
    cdef LengthSums cohort_lengths      # their known tokens
    cdef int64_t* calendar              # first and last member of every slot, by the pass in which it is touched
    cdef IndexList ending               # members that are done when the pass at hand ends
    cdef int64_t cohort_emitted         # members that emit in the pass at hand
    cdef IndexList left_cohort          # who left before the pass at hand, for the owner to clear
    # The pass at hand; valid until the next one is scheduled.
    cdef int64_t budget, chunk_limit
    cdef bint defer_prefills
    cdef ScheduledItem* scheduled       # running requests first, then the admitted ones
    cdef int64_t num_scheduled, scheduled_capacity, num_admitted
    cdef IndexList preempted, rejected, emitted, finished
    cdef IndexList burst_tokens         # how many each of `emitted` got
    cdef Preemption* preemptions
    cdef int64_t num_preemptions, preemptions_capacity
    cdef int64_t num_released           # of the running ones: done without a token, and out of the cache already
    cdef PassRecord record
    cdef PassShape shape

    cdef int leave_cohort(self, bint in_pass) except -1 nogil
    cdef int _join_cohort(self) except -1 nogil
    cdef int64_t _due(self, int64_t request) noexcept nogil
    cdef void _await(self, int64_t request) noexcept nogil
    cdef bint _cohort_surely_fits(self) noexcept nogil
    cdef int _advance_cohort(self) except -1 nogil
    cdef int _end_members(self) except -1 nogil
    cdef void _describe_rank(self) noexcept nogil
    cdef int add_destination(self, int64_t request) except -1 nogil
    cdef int64_t reserve_next(self) except -2 nogil
    cdef int activate(self, int64_t request) except -1 nogil
    cdef int release_source(self, int64_t request) except -1 nogil
    cdef bint cancel(self, int64_t request) except -1 nogil
    cdef bint submit(self, int64_t request) except -1 nogil
    cdef int schedule(self, int64_t wave_step) except -1 nogil
    cdef int complete(self) except -1 nogil
    cdef void _remove_finished(self) noexcept nogil
    cdef bint has_work(self) noexcept nogil
    cdef bint pass_had_effect(self) noexcept nogil

    cdef int _schedule_running(self) except -1 nogil
    cdef int _schedule_waiting(self) except -1 nogil
    cdef void _set_chunk_limit(self) noexcept nogil
    cdef bint _defers_prefills(self, int64_t wave_step) noexcept nogil
    cdef int64_t _chunk(self, int64_t request, int64_t computed) noexcept nogil
    cdef bint _prompt_must_wait(self, int64_t request, int64_t computed) noexcept nogil
    cdef bint _fits(self, int64_t request, int64_t known, int64_t chunk_end) except -1 nogil
    cdef int64_t _victim(self) noexcept nogil
    cdef int _preempt(self, int64_t position) except -1 nogil
    cdef int64_t _next_waiting(self) noexcept nogil
    cdef int64_t _promised_blocks(self) noexcept nogil
    cdef void _withdraw(self, int64_t request) noexcept nogil
    cdef int _commit(self, int64_t request, int64_t tokens, int64_t computed_before) except -1 nogil
    cdef int64_t _width(self, int64_t request, int64_t tokens) noexcept nogil
    cdef bint _is_ready(self, int64_t request) noexcept nogil
    cdef int64_t _burst_width(self, const ScheduledItem* item) noexcept nogil
    cdef int64_t _burst_end(self, const ScheduledItem* item) noexcept nogil
    cdef int _reserve_bursts(self) except -1 nogil
    cdef bint _emits(self, int64_t request) noexcept nogil
    cdef void _release_done(self) noexcept nogil
    cdef int64_t _emit(self, const ScheduledItem* item) except -1 nogil
    cdef void _describe(self) noexcept nogil
    cdef Refusal _refusal(self, int64_t request) noexcept nogil
    cdef bint _may_reuse_all(self, int64_t request) noexcept nogil
    cdef int64_t _longest_sequence(self, int64_t request) noexcept nogil
    cdef void _cut_output(self, int64_t request) noexcept nogil
    cdef int64_t _num_dropped(self, int64_t request) noexcept nogil
    cdef int64_t _least_first_chunk(self, int64_t request) noexcept nogil
    cdef int _enqueue(self, int64_t request) except -1 nogil
    cdef int64_t _dequeue(self, int64_t position) noexcept nogil
    cdef bint _is_served_before(self, int64_t request, int64_t other) noexcept nogil
    cdef void _sift_up(self, int64_t position) noexcept nogil
    cdef void _sift_down(self, int64_t position) noexcept nogil
    cdef void _count_queued(self, int64_t request, int sign) noexcept nogil
