"""C structures that the compiled modules exchange; the bottom of the cimport order."""

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef struct FpmRank:
    # One iteration on one attention-DP rank (fpm-model.md section 5.1). Predictions read the first part.
    double wall_time_s
    uint32_t version
    uint32_t num_prefill_requests
    uint32_t sum_prefill_tokens       # computed in this iteration
    uint32_t sum_prefill_kv_tokens    # read from the KV cache by prefill
    uint32_t num_decode_requests
    uint32_t sum_decode_kv_tokens     # read from the KV cache by decode
    int64_t num_lengths               # entries of each list below; -1: not given, -2: lists that do not match
    const uint64_t* extend_lengths    # new tokens per scheduled request
    const uint64_t* past_kv_lengths   # tokens in the KV cache per scheduled request
    # Telemetry. Learned forests read the two variances of scheduled requests; no prediction reads the rest.
    uint32_t dp_rank
    uint64_t counter_id
    double var_prefill_length
    double var_decode_kv_tokens
    uint32_t queued_num_prefill_requests
    uint32_t queued_sum_prefill_tokens
    uint32_t queued_num_decode_requests
    uint32_t queued_sum_decode_kv_tokens
    double queued_var_prefill_length
    double queued_var_decode_kv_tokens
