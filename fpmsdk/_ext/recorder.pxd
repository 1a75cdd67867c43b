"""Tables that a run records."""

from libc.stdint cimport int64_t

from fpmsdk._ext.scheduler cimport PassRecord, Preemption


cdef struct PassRow:
    double start_ms
    double end_ms
    double prefill_ms
    double decode_ms
    int64_t role          # of the pool that the worker belongs to
    int64_t worker        # counts ranks of its pool
    int64_t iteration     # of the worker, from 1; its ranks pass together
    int64_t composed
    int64_t emitted_tokens
    # What was priced, the fields of PassShape.
    int64_t priced_num_prefill
    int64_t priced_sum_prefill_end_tokens
    int64_t priced_sum_prefill_past_tokens
    int64_t priced_num_decode
    int64_t priced_sum_decode_tokens
    PassRecord record


cdef struct GapRow:
    double gap_ms
    int64_t count


cdef struct AdmissionRow:
    int64_t request
    double at_ms
    int64_t reused_tokens
    int64_t role


cdef struct PreemptionRow:
    double at_ms
    int64_t role
    int64_t worker
    Preemption preemption


cdef struct Gauges:
    # The state of a rank after its last command or the end of its last pass, and counts since the start.
    int64_t active_blocks
    int64_t free_blocks                 # published ones included
    int64_t published_free_blocks
    int64_t kv_cache_used_bytes
    int64_t running_requests
    int64_t waiting_requests
    int64_t cache_hit_tokens            # prompt tokens reused at admission
    int64_t cache_total_tokens          # prompt tokens of the requests admitted
    int64_t preemptions
    int64_t decode_steps                # of a request, one per pass in which it emits after its first token
    int64_t decode_tokens               # emitted in them


cdef struct SampleRow:
    int64_t sample
    double sampled_at_ms
    int64_t role
    int64_t worker
    Gauges gauges


cdef class Rows:
    cdef object dtype
    cdef char* memory
    cdef size_t row_bytes
    cdef int64_t length, capacity, num_exports

    cdef void* append(self) except NULL nogil


cdef struct RecordedRequests:
    double* arrival_ms
    double* first_admit_ms
    double* first_token_ms
    double* second_token_ms
    double* last_token_ms
    double* end_ms
    int64_t* reused_tokens
    int64_t* first_reused_tokens
    int64_t* num_admissions
    int64_t* worker                     # aggregated or decode
    int64_t* prefill_worker
    int64_t* decode_reused_tokens
    double* source_held_ms
    double* destination_reserved_ms
    double* destination_activated_ms
    double* decode_admit_ms
    double* source_released_ms


cdef class Recorder:
    cdef dict columns
    cdef RecordedRequests requests
    cdef readonly Rows passes, gaps, admissions, preemptions, samples
    cdef bint keeps_passes, keeps_samples, keeps_events
    cdef int64_t num_requests
    cdef readonly int64_t committed_prefill_tokens

    cdef _point(self)
    cdef grow(self, int64_t num_requests)
    cdef int count_gaps(self, double gap_ms, int64_t tokens) except -1 nogil
    cdef int count_gap(self, double gap_ms, int64_t first_entry) except -1 nogil
