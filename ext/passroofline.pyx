# The roofline that carries a measured whole pass to other coordinates (fpm-interpolation.md section 3.6). Unlike the
# operators of op-level.md it is asked at fractional tokens and lengths per request, and knows no measurement.

from libc.math cimport NAN, ceil, floor, isnan
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

cdef enum:
    # SOL_MEMORY, SOL_COLLECTIVE
    BYTES_PER_TOKEN = 0
    BYTES_PER_S = 1
    PASSES = 2
    SHARE_COUNT = 3          # n - 1 of
    SHARE_OF = 4             # n members
    DIVIDE_FIRST = 5         # the order of the division by n and the product with n - 1
    # SOL_GEMM
    GEMM_N = 0
    GEMM_K = 1
    GEMM_FLOPS = 2
    GEMM_ELEMENT_BYTES = 3
    GEMM_BYTES_PER_S = 4
    # attention
    HEADS = 0
    KV_HEADS = 1
    HEAD_SIZE = 2
    WINDOW = 3
    KV_BYTES = 4
    ATTENTION_FLOPS = 5
    ATTENTION_BYTES_PER_S = 6
    EXTRA_MS = 7
    CONTEXT_PARALLEL = 8
    # SOL_MOE
    MOE_TOPK = 0             # times attention_dp
    MOE_EXPERTS = 1
    MOE_HIDDEN = 2
    MOE_INTER = 3
    MOE_TP = 4
    MOE_EP = 5
    MOE_PROJECTIONS = 6
    MOE_FLOPS = 7
    MOE_ELEMENT_BYTES = 8
    MOE_BYTES_PER_S = 9

_KINDS = {
    "memory": SOL_MEMORY,
    "gemm": SOL_GEMM,
    "context_attention": SOL_CONTEXT_ATTENTION,
    "generation_attention": SOL_GENERATION_ATTENTION,
    "moe": SOL_MOE,
    "collective": SOL_COLLECTIVE,
}


cdef double rows_of(const SolOp* op, const SolPoint* point) noexcept nogil:
    cdef double tokens = point.batch if op.last_token_only else point.tokens
    return ceil(floor(tokens / op.scale_num_tokens) / op.seq_split)


cdef double gemm_ms(const SolOp* op, const SolPoint* point) noexcept nogil:
    cdef const double* f = op.factors
    cdef double m = rows_of(op, point)
    cdef double math = 2.0 * m * f[GEMM_N] * f[GEMM_K] / f[GEMM_FLOPS]
    cdef double memory = (
        f[GEMM_ELEMENT_BYTES] * (m * f[GEMM_N] + m * f[GEMM_K] + f[GEMM_N] * f[GEMM_K]) / f[GEMM_BYTES_PER_S]
    )
    return max(math, memory) * 1000.0


cdef double context_part_ms(const SolOp* op, double b, double s, double prefix) noexcept nogil:
    cdef const double* f = op.factors
    cdef double full = s + prefix, ops, num_bytes
    if 0.0 < f[WINDOW] < full:
        ops = 2.0 * b * s * f[WINDOW] * f[HEADS] * f[HEAD_SIZE] * 2.0
    else:
        ops = 2.0 * b * (full * full - prefix * prefix) * f[HEADS] * f[HEAD_SIZE] * 2.0 / 2.0
    num_bytes = 2.0 * b * (2.0 * f[HEADS] * s * f[HEAD_SIZE]) + f[KV_BYTES] * b * (
        2.0 * f[KV_HEADS] * full * f[HEAD_SIZE]
    )
    return max(ops / f[ATTENTION_FLOPS], num_bytes / f[ATTENTION_BYTES_PER_S]) * 1000.0


cdef double context_attention_ms(const SolOp* op, const SolPoint* point) noexcept nogil:
    cdef double cp = op.factors[CONTEXT_PARALLEL], s = point.seq_len, chunk, total
    if cp > 1.0:
        # Ranks take one chunk from each end of the sequence.
        chunk = max(ceil(s / (2.0 * cp)), 1.0)
        total = context_part_ms(op, point.batch, chunk, point.prefix)
        total += context_part_ms(op, point.batch, chunk, point.prefix + s - chunk)
    else:
        total = context_part_ms(op, point.batch, s, point.prefix)
    return total + op.factors[EXTRA_MS]


cdef double generation_attention_ms(const SolOp* op, const SolPoint* point) noexcept nogil:
    cdef const double* f = op.factors
    cdef double kv_len = point.seq_len - 1.0, ops, num_bytes
    if f[WINDOW] > 0.0:
        kv_len = min(kv_len, f[WINDOW])
    ops = 4.0 * point.batch * f[HEADS] * f[HEAD_SIZE] * kv_len
    num_bytes = point.batch * (
        4.0 * f[HEADS] * f[HEAD_SIZE] + 2.0 * f[KV_HEADS] * kv_len * f[HEAD_SIZE] * f[KV_BYTES]
    )
    return max(ops / f[ATTENTION_FLOPS], num_bytes / f[ATTENTION_BYTES_PER_S]) * 1000.0 + f[EXTRA_MS]


cdef double moe_ms(const SolOp* op, const SolPoint* point) noexcept nogil:
    cdef const double* f = op.factors
    cdef double routed = point.tokens * f[MOE_TOPK]
    cdef double local = floor(routed / f[MOE_EP])
    cdef double ops = floor(
        floor(routed * f[MOE_HIDDEN] * f[MOE_INTER] * f[MOE_PROJECTIONS] * 2.0 / f[MOE_EP]) / f[MOE_TP]
    )
    cdef double num_bytes = f[MOE_ELEMENT_BYTES] * (
        local * f[MOE_HIDDEN] * 2.0
        + floor(local * f[MOE_INTER] * f[MOE_PROJECTIONS] / f[MOE_TP])
        + floor(f[MOE_HIDDEN] * f[MOE_INTER] * f[MOE_PROJECTIONS] / f[MOE_TP])
        * min(floor(f[MOE_EXPERTS] / f[MOE_EP]), local)
    )
    return max(ops / f[MOE_FLOPS], num_bytes / f[MOE_BYTES_PER_S]) * 1000.0


cdef double collective_ms(const SolOp* op, const SolPoint* point) noexcept nogil:
    cdef const double* f = op.factors
    cdef double moved = f[PASSES] * (ceil(point.tokens / op.seq_split) * f[BYTES_PER_TOKEN])
    if f[DIVIDE_FIRST] != 0.0:
        moved = moved / f[SHARE_OF] * f[SHARE_COUNT]
    else:
        moved = moved * f[SHARE_COUNT] / f[SHARE_OF]
    return moved / f[BYTES_PER_S] * 1000.0


cdef double op_ms(const SolOp* op, const SolPoint* point) noexcept nogil:
    cdef double ms, other
    if op.kind == SOL_MEMORY:
        ms = op.factors[BYTES_PER_TOKEN] * rows_of(op, point) / op.factors[BYTES_PER_S] * 1000.0
    elif op.kind == SOL_GEMM:
        ms = gemm_ms(op, point)
    elif op.kind == SOL_CONTEXT_ATTENTION:
        ms = context_attention_ms(op, point)
    elif op.kind == SOL_GENERATION_ATTENTION:
        ms = generation_attention_ms(op, point)
    elif op.kind == SOL_MOE:
        ms = moe_ms(op, point)
    elif op.kind == SOL_COLLECTIVE:
        ms = collective_ms(op, point)
    elif op.kind == SOL_OVERLAP:
        ms = sum_ms(op.groups[0], op.group_sizes[0], point)
        other = sum_ms(op.groups[1], op.group_sizes[1], point)
        ms = NAN if isnan(ms) or isnan(other) else max(ms, other)
    else:
        return NAN
    return ms * op.scale_factor


cdef double sum_ms(const SolOp* ops, int64_t size, const SolPoint* point) noexcept nogil:
    cdef double total = 0.0
    cdef int64_t i
    for i in range(size):
        total += op_ms(&ops[i], point)
    return total


cdef class PassRoofline:
    """Operators of one phase in graph order.

    Parameters
    ----------
    records: `{kind, name, scale_factor, ...}` per operator: a `kind` of `_KINDS` with `factors` and optionally
        `scale_num_tokens`, `seq_split` and `last_token_only`; kind ``overlap`` with two lists of records as `groups`;
        any other kind has no formula, and no latency can be told.
    """

    def __init__(self, records):
        records = list(records)
        self.ops = <SolOp*>calloc(len(records) + 1, sizeof(SolOp))
        if self.ops == NULL:
            raise MemoryError
        self.size = len(records)
        names, parts = [], []
        for i, record in enumerate(records):
            self.ops[i].scale_factor = record.get("scale_factor", 1.0)
            self.ops[i].scale_num_tokens = record.get("scale_num_tokens", 1)
            self.ops[i].seq_split = record.get("seq_split", 1)
            self.ops[i].last_token_only = record.get("last_token_only", False)
            self.ops[i].kind = _KINDS.get(record["kind"], SOL_UNKNOWN)
            for j, factor in enumerate(record.get("factors", ())):
                self.ops[i].factors[j] = factor
            if record["kind"] == "overlap":
                self.ops[i].kind = SOL_OVERLAP
                for j, group in enumerate(map(PassRoofline, record["groups"])):
                    self.set_group(i, j, group)
                    parts.append(group)
                    names.extend(group.names)
            elif self.ops[i].kind == SOL_UNKNOWN:
                names.append(record["name"])
        self.names, self.parts = tuple(names), tuple(parts)

    cdef set_group(self, Py_ssize_t i, Py_ssize_t j, PassRoofline group):
        self.ops[i].groups[j] = group.ops
        self.ops[i].group_sizes[j] = group.size

    def __dealloc__(self):
        free(self.ops)

    cdef double latency_ms(self, const SolPoint* point) noexcept nogil:
        return sum_ms(self.ops, self.size, point)

    def at(self, double batch, double seq_len, double prefix, double tokens):
        """Latency in ms at one point, NaN when an operator has no formula."""
        cdef SolPoint point = SolPoint(batch, seq_len, prefix, tokens)
        return self.latency_ms(&point)
