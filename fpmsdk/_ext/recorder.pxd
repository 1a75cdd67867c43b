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
    int64_t composed
    int64_t emitted_tokens
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
    cdef readonly Rows passes, gaps, admissions, preemptions
    cdef bint keeps_passes
    cdef int64_t num_requests
    cdef readonly int64_t committed_prefill_tokens

    cdef int count_gaps(self, double gap_ms, int64_t tokens) except -1 nogil
    cdef int count_gap(self, double gap_ms, int64_t first_entry) except -1 nogil
