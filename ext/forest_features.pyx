# The 135 features that a learned forest may name (regression-and-learned.md section 3.2). Sums run in rank order; those
# over requests in the order of the slots: longest past first, then longest extension.

from libc.math cimport NAN, log1p
from libc.stdint cimport int16_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, qsort

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport FAULT_NONE, FaultSite, check_ranks, fault_error, prefill_attention_pairs
from fpmsdk._ext.frames cimport Columns, new_scratch

cimport numpy as cnp

import numpy as np

cnp.import_array()

AGGREGATES = (
    "num_active_ranks",
    "num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens", "var_prefill_length",
    "num_decode_requests", "sum_decode_kv_tokens", "var_decode_kv_tokens",
    "max_rank_prefill_tokens", "max_rank_decode_kv_tokens", "max_rank_num_decode_requests",
    "mean_prefill_chunk", "mean_prefill_kv", "prefill_attention_pairs",
    "mean_decode_kv", "sum_decode_kv_squared",
    "log1p_sum_prefill_tokens", "log1p_sum_prefill_kv_tokens", "log1p_sum_decode_kv_tokens",
    "log1p_prefill_attention_pairs", "log1p_sum_decode_kv_squared",
)
REQUESTS = (
    "req_batch_size",
    "req_sum_extend", "req_max_extend", "req_min_extend",
    "req_sum_past", "req_max_past", "req_min_past",
    "req_sum_extend_x_past", "req_sum_extend_squared", "req_sum_past_squared",
    "req_sum_attn_flops", "req_sum_extend_x_max_past", "req_log1p_sum_past", "req_log1p_sum_attn_flops",
    "req_batch_size_x_sum_extend", "req_max_past_minus_min_past", "req_is_decode", "req_is_prefill",
)
SLOTS = tuple(f"slot{i}_{part}" for i in range(32) for part in ("present", "past", "extend"))

# Positions here are the codes of a program.
NAMES = AGGREGATES + REQUESTS + SLOTS

cdef enum:
    FIRST_LOG = 16
    FIRST_REQUEST = 21
    FIRST_SLOT = 39
    NUM_NAMES = 135
    REQUESTS_ON_STACK = 256

# Up to here sums of integers and halves have the same bits in every order.
cdef double EXACT_SUMS = 4503599627370496.0

assert len(NAMES) == NUM_NAMES and NAMES[FIRST_LOG] == "log1p_sum_prefill_tokens"
assert NAMES[FIRST_REQUEST] == "req_batch_size" and NAMES[FIRST_SLOT] == "slot0_present"


cdef int longest_first(const void* left, const void* right) noexcept nogil:
    cdef const RequestLengths* a = <const RequestLengths*>left
    cdef const RequestLengths* b = <const RequestLengths*>right
    if a.past != b.past:
        return -1 if a.past > b.past else 1
    return (b.extend > a.extend) - (b.extend < a.extend)


cdef inline bint is_active(const FpmRank* rank) noexcept nogil:
    return rank.sum_prefill_tokens > 0 or rank.num_decode_requests > 0


cdef bint lists_usable(const FpmRank* rank) noexcept nogil:
    # Engines may count the tokens of this step to a request's past or not; more than that is another iteration's list.
    cdef uint64_t most = (
        <uint64_t>rank.sum_prefill_kv_tokens + <uint64_t>rank.sum_decode_kv_tokens
        + <uint64_t>rank.sum_prefill_tokens + <uint64_t>rank.num_decode_requests
    )
    cdef int64_t i
    if rank.num_lengths <= 0:
        return False
    for i in range(rank.num_lengths):
        if rank.past_kv_lengths[i] > most:
            return False
        most -= rank.past_kv_lengths[i]
    return True


cdef void fill_aggregates(const FpmRank* ranks, Py_ssize_t num_ranks, bint logs, double* values) noexcept nogil:
    cdef double active = 0.0, n = 0.0, p = 0.0, h = 0.0, var_p = 0.0, b = 0.0, k = 0.0, var_k = 0.0
    cdef double most_p = 0.0, most_k = 0.0, most_b = 0.0, pairs = 0.0, squared = 0.0, mean
    cdef double rank_n, rank_p, rank_h, rank_b, rank_k
    cdef Py_ssize_t r
    for r in range(num_ranks):
        if not is_active(&ranks[r]):
            continue
        rank_n = ranks[r].num_prefill_requests
        rank_p = ranks[r].sum_prefill_tokens
        rank_h = ranks[r].sum_prefill_kv_tokens
        rank_b = ranks[r].num_decode_requests
        rank_k = ranks[r].sum_decode_kv_tokens
        active += 1.0
        n += rank_n
        p += rank_p
        h += rank_h
        b += rank_b
        k += rank_k
        var_p = max(var_p, ranks[r].var_prefill_length)
        var_k = max(var_k, ranks[r].var_decode_kv_tokens)
        most_p = max(most_p, rank_p)
        most_k = max(most_k, rank_k)
        most_b = max(most_b, rank_b)
        if rank_n > 0.0:
            pairs += prefill_attention_pairs(rank_n, rank_p, rank_h)
        if rank_b > 0.0:
            mean = rank_k / rank_b
            squared += rank_b * max(ranks[r].var_decode_kv_tokens, 0.0) + rank_b * mean * mean
    values[0] = active
    values[1] = n
    values[2] = p
    values[3] = h
    values[4] = var_p
    values[5] = b
    values[6] = k
    values[7] = var_k
    values[8] = most_p
    values[9] = most_k
    values[10] = most_b
    values[11] = p / n if n > 0.0 else 0.0
    values[12] = h / n if n > 0.0 else 0.0
    values[13] = pairs
    values[14] = k / b if b > 0.0 else 0.0
    values[15] = squared
    for r in range(FIRST_LOG, FIRST_REQUEST):
        values[r] = 0.0
    if logs:
        values[16] = log1p(p)
        values[17] = log1p(h)
        values[18] = log1p(k)
        values[19] = log1p(pairs)
        values[20] = log1p(squared)


cdef void fill_requests(const RequestLengths* requests, int64_t count, double* values) noexcept nogil:
    # In the order of the list. `values` are those of the request features.
    cdef double n = <double>count, sum_e = 0.0, max_e = 0.0, min_e, sum_p = 0.0, max_p = 0.0, min_p
    cdef double cross = 0.0, e2 = 0.0, p2 = 0.0, flops = 0.0, e, p
    cdef int64_t i
    min_e = <double>requests[0].extend
    min_p = <double>requests[0].past
    for i in range(count):
        e = <double>requests[i].extend
        p = <double>requests[i].past
        sum_e += e
        sum_p += p
        cross += e * p
        e2 += e * e
        p2 += p * p
        flops += e * (p + e / 2.0)
        max_e = max(max_e, e)
        min_e = min(min_e, e)
        max_p = max(max_p, p)
        min_p = min(min_p, p)
    values[0] = n
    values[1] = sum_e
    values[2] = max_e
    values[3] = min_e
    values[4] = sum_p
    values[5] = max_p
    values[6] = min_p
    values[7] = cross
    values[8] = e2
    values[9] = p2
    values[10] = flops
    values[11] = sum_e * max_p
    values[12] = log1p(sum_p)
    values[13] = log1p(flops)
    values[14] = n * sum_e
    values[15] = max_p - min_p
    values[16] = 1.0 if max_e <= 1.0 else 0.0
    values[17] = 1.0 if max_e > 1.0 else 0.0


cdef void fill_slots(const RequestLengths* requests, int64_t count, double* values) noexcept nogil:
    cdef int64_t i
    for i in range(32):
        values[3 * i] = 1.0 if i < count else 0.0
        values[3 * i + 1] = <double>requests[i].past if i < count else 0.0
        values[3 * i + 2] = <double>requests[i].extend if i < count else 0.0


cdef class FeatureProgram:
    """Computes named features of iterations.

    Parameters
    ----------
    names: some of `NAMES`; the order of the values.
    read: those of them that anybody reads, None for all; logarithms that nobody reads are left 0.

    Source: regression-and-learned.md section 3.2. Example: `fpmsdk.learned.features.feature_matrix`.
    """

    def __cinit__(self, names, read=None):
        cdef Py_ssize_t i
        self.names = tuple(names)
        self.num_features = len(self.names)
        self.codes = <int16_t*>malloc((self.num_features + 1) * sizeof(int16_t))
        if self.codes == NULL:
            raise MemoryError
        for i, name in enumerate(self.names):
            self.codes[i] = NAMES.index(name)
            self.needs_requests |= self.codes[i] >= FIRST_REQUEST
            self.needs_order |= self.codes[i] >= FIRST_SLOT
            self.needs_logs |= FIRST_LOG <= self.codes[i] < FIRST_REQUEST and (read is None or name in read)

    def __dealloc__(self):
        free(self.codes)

    cdef int fill(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* features) noexcept nogil:
        cdef double values[NUM_NAMES]
        cdef Py_ssize_t i
        cdef int fault = FAULT_NONE
        fill_aggregates(ranks, num_ranks, self.needs_logs, values)
        if self.needs_requests:
            fault = self.fill_lists(ranks, num_ranks, values)
        for i in range(self.num_features):
            features[i] = values[self.codes[i]]
        return fault

    cdef int fill_lists(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* values) noexcept nogil:
        cdef RequestLengths few[REQUESTS_ON_STACK]
        cdef RequestLengths* requests = few
        cdef double* sums = &values[FIRST_REQUEST]
        cdef int64_t count = 0, at = 0, i
        cdef Py_ssize_t r
        cdef bint usable = True
        for r in range(num_ranks):
            if is_active(&ranks[r]):
                usable = usable and lists_usable(&ranks[r])
                count += max(ranks[r].num_lengths, 0)
        if not usable or count == 0:
            for i in range(FIRST_REQUEST, FIRST_SLOT):
                values[i] = NAN
            for i in range(FIRST_SLOT, NUM_NAMES):
                values[i] = 0.0
            return FAULT_REQUEST_LISTS
        if count > REQUESTS_ON_STACK:
            requests = <RequestLengths*>malloc(count * sizeof(RequestLengths))
            if requests == NULL:
                return FAULT_OUT_OF_MEMORY
        for r in range(num_ranks):
            if not is_active(&ranks[r]):
                continue
            for i in range(ranks[r].num_lengths):
                requests[at] = RequestLengths(ranks[r].past_kv_lengths[i], ranks[r].extend_lengths[i])
                at += 1
        fill_requests(requests, count, sums)
        # Sums of squares bound all others; while they are exact, only slots need the order.
        if self.needs_order or sums[8] + sums[9] > EXACT_SUMS:
            qsort(requests, count, sizeof(RequestLengths), longest_first)
            fill_requests(requests, count, sums)
            fill_slots(requests, count, &values[FIRST_SLOT])
        if requests != few:
            free(requests)
        return FAULT_NONE

    def matrix(self, Columns source not None):
        """The features of every iteration, float64[n, features], and whether its request features are there, bool[n].

        An iteration that breaks a rule between fields raises.
        """
        cdef cnp.ndarray rows = np.empty((source.num_iterations, self.num_features))
        cdef cnp.ndarray complete = np.empty(source.num_iterations, np.bool_)
        cdef double* row = <double*>cnp.PyArray_DATA(rows)
        cdef unsigned char* is_complete = <unsigned char*>cnp.PyArray_DATA(complete)
        cdef FpmRank* scratch = new_scratch(source)
        cdef const FpmRank* ranks
        cdef Py_ssize_t num_ranks, i
        cdef FaultSite site
        site.fault = FAULT_NONE
        with nogil:
            for i in range(source.num_iterations):
                site.iteration = i
                ranks = source.ranks_of(i, scratch, &num_ranks)
                site.fault = check_ranks(ranks, num_ranks, &site.rank)
                if site.fault != FAULT_NONE:
                    break
                site.fault = self.fill(ranks, num_ranks, row + i * self.num_features)
                if site.fault == FAULT_OUT_OF_MEMORY:
                    break
                is_complete[i] = site.fault == FAULT_NONE
                site.fault = FAULT_NONE
        free(scratch)
        if site.fault != FAULT_NONE:
            raise MemoryError if site.fault == FAULT_OUT_OF_MEMORY else fault_error(&site)
        return rows, complete
