# The rules that read one iteration, each written once: validation (fpm-model.md section 5.1), workload kind
# and role (5.2), tuning target (5.4) and the feature axes of the regression (regression-and-learned.md
# sections 0.2 and 1.9). Reading Python objects is `frames`, learning is `regression`.

from libc.math cimport INFINITY, fabs, isfinite, isnan, log1p
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fpmsdk.errors import MetricsError

ROLES = ("prefill", "decode", "aggregated")
WORKLOAD_KINDS = ("pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill")
SKIP_REASONS = (
    "idle", "zero_wall_time", "negative_wall_time", "non_finite_wall_time", "non_finite_target",
)

# Positions in this tuple are the axis codes of FeatureSpec.axes.
AXES = (
    "attention", "moe",
    "prefill_tokens", "prefill_attention_pairs", "decode_requests", "decode_kv_tokens",
    "n", "logN", "n2",
    "E", "P", "maxE", "maxP", "minP", "P2", "F", "nE", "logF", "logP", "meanE", "meanP", "cvE2", "cvP2",
)
cdef enum Axis:
    AXIS_ATTENTION = 0
    AXIS_MOE
    AXIS_PREFILL_TOKENS   # the work itself: tokens and requests of all ranks, attention of the rank with most of it
    AXIS_PREFILL_ATTENTION_PAIRS
    AXIS_DECODE_REQUESTS
    AXIS_DECODE_KV_TOKENS
    AXIS_N
    AXIS_LOG_N
    AXIS_N2
    AXIS_E                # from here on the axis reads the per-request lists
    AXIS_P
    AXIS_MAX_E
    AXIS_MAX_P
    AXIS_MIN_P
    AXIS_P2
    AXIS_F
    AXIS_NE
    AXIS_LOG_F
    AXIS_LOG_P
    AXIS_MEAN_E
    AXIS_MEAN_P
    AXIS_CV_E2
    AXIS_CV_P2

_MESSAGES = {
    FAULT_VERSION: "version is not supported; expected 1",
    FAULT_NO_RANKS: "an iteration needs at least one rank, found an empty list",
    FAULT_PREFILL_TOKENS_WITHOUT_REQUESTS:
        "scheduled_requests.sum_prefill_tokens is positive but num_prefill_requests is 0",
    FAULT_PREFILL_KV_WITHOUT_REQUESTS:
        "scheduled_requests.sum_prefill_kv_tokens is positive but num_prefill_requests is 0",
    FAULT_DECODE_KV_WITHOUT_REQUESTS:
        "scheduled_requests.sum_decode_kv_tokens is positive but num_decode_requests is 0",
    FAULT_LENGTHS_COUNT:
        "scheduled_requests.extend_lengths and past_kv_lengths must be given together and have exactly "
        "num_prefill_requests + num_decode_requests entries each",
    FAULT_DECODE_WORK_ON_PREFILL_WORKER: "prefill regression worker received scheduled decode work",
    FAULT_PREFILL_WORK_ON_DECODE_WORKER: "decode regression worker received scheduled prefill work",
    FAULT_LENGTHS_MISSING:
        "the configured feature axes need scheduled_requests.extend_lengths and past_kv_lengths on every "
        "rank with scheduled requests",
    FAULT_NO_REQUESTS: "the configured feature axes need at least one scheduled request",
    FAULT_SQUARED_VARIATION: "the squared coefficient of variation of the request lengths is not usable",
    FAULT_FEATURE: "a regression feature is negative or not finite; check estimator_config.features",
}


cdef object fault_error(const FaultSite* site):
    where = f"iteration {site.iteration}: " if site.iteration >= 0 else ""
    if site.rank >= 0:
        where += f"rank {site.rank}: "
    return MetricsError(f"invalid forward pass metrics: {where}{_MESSAGES[site.fault]}")


cdef int check_rank(const FpmRank* rank) noexcept nogil:
    if rank.version != 1:
        return FAULT_VERSION
    if rank.num_prefill_requests == 0:
        if rank.sum_prefill_tokens > 0:
            return FAULT_PREFILL_TOKENS_WITHOUT_REQUESTS
        if rank.sum_prefill_kv_tokens > 0:
            return FAULT_PREFILL_KV_WITHOUT_REQUESTS
    if rank.num_decode_requests == 0 and rank.sum_decode_kv_tokens > 0:
        return FAULT_DECODE_KV_WITHOUT_REQUESTS
    if rank.num_lengths != -1 and rank.num_lengths != (
        <int64_t>rank.num_prefill_requests + <int64_t>rank.num_decode_requests
    ):
        return FAULT_LENGTHS_COUNT
    return FAULT_NONE


cdef int check_ranks(const FpmRank* ranks, Py_ssize_t num_ranks, Py_ssize_t* faulty_rank) noexcept nogil:
    cdef Py_ssize_t r
    cdef int fault
    faulty_rank[0] = -1
    if num_ranks == 0:
        return FAULT_NO_RANKS
    for r in range(num_ranks):
        fault = check_rank(&ranks[r])
        if fault != FAULT_NONE:
            faulty_rank[0] = r
            return fault
    return FAULT_NONE


cdef int check_role(int role, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil:
    cdef Py_ssize_t r
    if role == ROLE_AGGREGATED:
        return FAULT_NONE
    for r in range(num_ranks):
        if role == ROLE_PREFILL and ranks[r].num_decode_requests > 0:
            return FAULT_DECODE_WORK_ON_PREFILL_WORKER
        if role == ROLE_DECODE and ranks[r].sum_prefill_tokens > 0:
            return FAULT_PREFILL_WORK_ON_DECODE_WORKER
    return FAULT_NONE


cdef int workload_kind(const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil:
    cdef Py_ssize_t r
    cdef bint prefill, decode
    cdef bint any_prefill = False, any_decode = False, any_both = False
    for r in range(num_ranks):
        # Cached prefill KV without fresh tokens is not prefill work.
        prefill = ranks[r].sum_prefill_tokens > 0
        decode = ranks[r].num_decode_requests > 0
        any_prefill |= prefill
        any_decode |= decode
        any_both |= prefill and decode
    if any_both:
        return KIND_CONTAINS_LOCALLY_MIXED
    if any_prefill and any_decode:
        return KIND_CROSS_RANK_AGGREGATED
    if any_decode:
        return KIND_PURE_DECODE
    if any_prefill:
        return KIND_PURE_PREFILL
    return KIND_IDLE


cdef int tuning_target_ms(const FpmRank* ranks, Py_ssize_t num_ranks, double* target_ms) noexcept nogil:
    # The slowest rank ends the iteration; idle ranks count too. The maximum is taken in seconds.
    cdef Py_ssize_t r
    cdef double slowest_s = 0.0
    cdef int reason = SKIP_ZERO_WALL_TIME
    for r in range(num_ranks):
        if not isfinite(ranks[r].wall_time_s):
            reason = SKIP_NON_FINITE_WALL_TIME
        elif ranks[r].wall_time_s > slowest_s:
            slowest_s = ranks[r].wall_time_s
        elif ranks[r].wall_time_s < 0.0 and reason == SKIP_ZERO_WALL_TIME:
            reason = SKIP_NEGATIVE_WALL_TIME
    if slowest_s == 0.0:
        return reason
    target_ms[0] = slowest_s * 1000.0
    return SKIP_NONE if isfinite(target_ms[0]) else SKIP_NON_FINITE_TARGET


cdef struct RequestSums:
    # Sums over the per-request lists in rank order, list order (e = extend length, p = past KV length).
    double e, p, e2, p2, f, max_e, max_p, min_p


cdef int sum_requests(const FpmRank* ranks, Py_ssize_t num_ranks, RequestSums* sums) noexcept nogil:
    cdef Py_ssize_t r
    cdef int64_t i
    cdef double e, p
    sums[0] = RequestSums(e=0.0, p=0.0, e2=0.0, p2=0.0, f=0.0, max_e=0.0, max_p=0.0, min_p=INFINITY)
    for r in range(num_ranks):
        if ranks[r].num_lengths < 0:
            if ranks[r].num_prefill_requests > 0 or ranks[r].num_decode_requests > 0:
                return FAULT_LENGTHS_MISSING
            continue
        for i in range(ranks[r].num_lengths):
            e = <double>ranks[r].extend_lengths[i]
            p = <double>ranks[r].past_kv_lengths[i]
            sums.e += e
            sums.p += p
            sums.e2 += e * e
            sums.p2 += p * p
            sums.f += e * p + e * e / 2.0
            sums.max_e = max(sums.max_e, e)
            sums.max_p = max(sums.max_p, p)
            sums.min_p = min(sums.min_p, p)
    return FAULT_NONE


cdef double squared_variation(double n, double total, double squares) noexcept nogil:
    # n * sum(v^2) / sum(v)^2 - 1; NaN marks a ratio that rounding cannot explain.
    cdef double ratio, value
    if total == 0.0:
        return 0.0
    ratio = n * squares / (total * total)
    value = ratio - 1.0
    if not isfinite(value) or value < -1e-10 * max(fabs(ratio), 1.0):
        return -1.0
    return max(value, 0.0)


cdef int project(
    const FeatureSpec* spec, const FpmRank* ranks, Py_ssize_t num_ranks, double* features
) noexcept nogil:
    cdef Py_ssize_t r
    cdef int i, axis, fault
    cdef double p, n, kv, past, pairs, score
    cdef double attention = 0.0, tokens = 0.0, requests = 0.0, value
    cdef double prefill_tokens = 0.0, most_pairs = 0.0, decode_requests = 0.0, most_decode_kv = 0.0
    cdef RequestSums sums
    for r in range(num_ranks):
        p = <double>ranks[r].sum_prefill_tokens
        n = <double>ranks[r].num_prefill_requests
        kv = <double>ranks[r].sum_prefill_kv_tokens
        past = 0.0
        pairs = 0.0
        if p > 0.0:
            past = kv
            pairs = prefill_attention_pairs(n, p, kv)
        if spec.role == ROLE_PREFILL:
            score = spec.attention_kv_weight * past + spec.prefill_attention_pair_weight * pairs
            tokens += p
        elif spec.role == ROLE_DECODE:
            score = spec.attention_kv_weight * <double>ranks[r].sum_decode_kv_tokens
            tokens += <double>ranks[r].num_decode_requests
        else:
            score = (
                spec.attention_kv_weight * (past + <double>ranks[r].sum_decode_kv_tokens)
                + spec.prefill_attention_pair_weight * pairs
            )
            tokens += p + <double>ranks[r].num_decode_requests
        if score > attention or isnan(score):
            attention = score
        requests += <double>ranks[r].num_prefill_requests + <double>ranks[r].num_decode_requests
        prefill_tokens += p
        most_pairs = max(most_pairs, pairs)
        decode_requests += <double>ranks[r].num_decode_requests
        most_decode_kv = max(most_decode_kv, <double>ranks[r].sum_decode_kv_tokens)
    if spec.needs_requests and requests == 0.0:
        return FAULT_NO_REQUESTS
    if spec.needs_lengths:
        fault = sum_requests(ranks, num_ranks, &sums)
        if fault != FAULT_NONE:
            return fault
    for i in range(spec.num_axes):
        axis = spec.axes[i]
        if axis == AXIS_ATTENTION:
            value = attention
        elif axis == AXIS_MOE:
            value = spec.ffn_token_weight * tokens
        elif axis == AXIS_PREFILL_TOKENS:
            value = prefill_tokens
        elif axis == AXIS_PREFILL_ATTENTION_PAIRS:
            value = most_pairs
        elif axis == AXIS_DECODE_REQUESTS:
            value = decode_requests
        elif axis == AXIS_DECODE_KV_TOKENS:
            value = most_decode_kv
        elif axis == AXIS_N:
            value = requests
        elif axis == AXIS_LOG_N:
            value = log1p(requests)
        elif axis == AXIS_N2:
            value = requests * requests
        elif axis == AXIS_E:
            value = sums.e
        elif axis == AXIS_P:
            value = sums.p
        elif axis == AXIS_MAX_E:
            value = sums.max_e
        elif axis == AXIS_MAX_P:
            value = sums.max_p
        elif axis == AXIS_MIN_P:
            value = sums.min_p
        elif axis == AXIS_P2:
            value = sums.p2
        elif axis == AXIS_F:
            value = sums.f
        elif axis == AXIS_NE:
            value = requests * sums.e
        elif axis == AXIS_LOG_F:
            value = log1p(sums.f)
        elif axis == AXIS_LOG_P:
            value = log1p(sums.p)
        elif axis == AXIS_MEAN_E:
            value = sums.e / requests
        elif axis == AXIS_MEAN_P:
            value = sums.p / requests
        else:
            if axis == AXIS_CV_E2:
                value = squared_variation(requests, sums.e, sums.e2)
            else:
                value = squared_variation(requests, sums.p, sums.p2)
            if value < 0.0:
                return FAULT_SQUARED_VARIATION
        if not isfinite(value) or value < 0.0:
            return FAULT_FEATURE
        features[i] = value
    return FAULT_NONE


cdef FeatureSpec make_feature_spec(str role, tuple weights, tuple axes) except *:
    cdef FeatureSpec spec
    cdef int i
    spec.role = ROLES.index(role)
    spec.attention_kv_weight, spec.prefill_attention_pair_weight, spec.ffn_token_weight = weights
    spec.num_axes = len(axes)
    spec.needs_lengths = False
    spec.needs_requests = False
    for i, name in enumerate(axes):
        spec.axes[i] = AXES.index(name)
        spec.needs_lengths |= spec.axes[i] >= AXIS_E
        spec.needs_requests |= spec.axes[i] >= AXIS_N
    return spec
