"""C structures that the compiled modules exchange; the bottom of the cimport order."""

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef struct FpmRank:
    # One iteration on one attention-DP rank: what a prediction reads (fpm-model.md section 5.1).
    double wall_time_s
    uint32_t num_prefill_requests
    uint32_t sum_prefill_tokens       # computed in this iteration
    uint32_t sum_prefill_kv_tokens    # read from the KV cache by prefill
    uint32_t num_decode_requests
    uint32_t sum_decode_kv_tokens     # read from the KV cache by decode
    int64_t num_lengths               # entries of the two lists below; -1 when they were not given
    const uint64_t* extend_lengths    # new tokens per scheduled request
    const uint64_t* past_kv_lengths   # tokens in the KV cache per scheduled request
