"""Rules that read one iteration: validation, workload kind, tuning target, feature projection."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fpmsdk._ext.declarations cimport FpmRank

cdef enum:
    MAX_AXES = 12          # fit axes and sampling axes together
    NUM_KINDS = 4

cdef enum Role:
    ROLE_PREFILL = 0
    ROLE_DECODE = 1
    ROLE_AGGREGATED = 2

# Order of the stores in diagnostics and snapshots (regression-and-learned.md section 0.1).
cdef enum WorkloadKind:
    KIND_IDLE = -1
    KIND_PURE_DECODE = 0
    KIND_CONTAINS_LOCALLY_MIXED = 1
    KIND_CROSS_RANK_AGGREGATED = 2
    KIND_PURE_PREFILL = 3

# Why an iteration is refused. Zero is "accepted"; messages are in `fault_error`.
cdef enum Fault:
    FAULT_NONE = 0
    FAULT_VERSION
    FAULT_NO_RANKS
    FAULT_PREFILL_TOKENS_WITHOUT_REQUESTS
    FAULT_PREFILL_KV_WITHOUT_REQUESTS
    FAULT_DECODE_KV_WITHOUT_REQUESTS
    FAULT_LENGTHS_COUNT
    FAULT_DECODE_WORK_ON_PREFILL_WORKER
    FAULT_PREFILL_WORK_ON_DECODE_WORKER
    FAULT_LENGTHS_MISSING
    FAULT_NO_REQUESTS
    FAULT_SQUARED_VARIATION
    FAULT_FEATURE

# Why an iteration teaches nothing.
cdef enum Skip:
    SKIP_NONE = 0
    SKIP_IDLE = 1
    SKIP_ZERO_WALL_TIME = 2
    SKIP_NEGATIVE_WALL_TIME = 3
    SKIP_NON_FINITE_WALL_TIME = 4
    SKIP_NON_FINITE_TARGET = 5
    NUM_SKIPS = 6

cdef struct FeatureSpec:
    int role
    double attention_kv_weight
    double prefill_attention_pair_weight
    double ffn_token_weight
    int num_axes                 # fit axes first, then the sampling axes that are not among them
    int axes[MAX_AXES]
    bint needs_lengths           # some axis reads the per-request lists
    bint needs_requests          # some axis divides by or counts requests

cdef struct FaultSite:
    int fault
    Py_ssize_t iteration         # -1: the call has only one
    Py_ssize_t rank              # -1: the iteration as a whole


cdef inline double prefill_attention_pairs(double requests, double tokens, double kv_tokens) noexcept nogil:
    # (new token, token it reads) of a prefill batch, from its sums alone; 0 without new tokens.
    if tokens <= 0.0:
        return 0.0
    return kv_tokens * tokens / requests + tokens * tokens / (2.0 * requests) + tokens / 2.0


cdef int check_ranks(const FpmRank* ranks, Py_ssize_t num_ranks, Py_ssize_t* faulty_rank) noexcept nogil
cdef int check_role(int role, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil
cdef int workload_kind(const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil
cdef int tuning_target_ms(const FpmRank* ranks, Py_ssize_t num_ranks, double* target_ms) noexcept nogil
cdef int project(
    const FeatureSpec* spec, const FpmRank* ranks, Py_ssize_t num_ranks, double* features
) noexcept nogil
cdef FeatureSpec make_feature_spec(str role, tuple weights, tuple axes) except *
cdef object fault_error(const FaultSite* site)
