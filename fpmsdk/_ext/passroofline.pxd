"""Speed-of-light latency of a whole pass: the sum over its operators, at fractional lengths."""

from libc.stdint cimport int64_t

cdef enum SolKind:
    SOL_UNKNOWN = 0
    SOL_MEMORY               # bytes per token through memory
    SOL_GEMM
    SOL_CONTEXT_ATTENTION
    SOL_GENERATION_ATTENTION
    SOL_MOE
    SOL_COLLECTIVE           # time per token
    SOL_OVERLAP              # the slower of two groups

cdef struct SolPoint:
    double batch
    double seq_len           # new tokens of a request in prefill, KV position in decode
    double prefix            # cached tokens of a request in prefill
    double tokens

cdef struct SolOp:
    SolKind kind
    bint last_token_only     # sees one token a request
    double scale_factor
    double scale_num_tokens
    double seq_split
    double factors[10]       # by kind, see `passroofline.pyx`
    const SolOp* groups[2]
    int64_t group_sizes[2]


cdef class PassRoofline:
    cdef SolOp* ops
    cdef int64_t size
    cdef readonly tuple names        # of the operators without a formula
    cdef tuple parts

    # `latency_ms`: NaN when an operator has no formula.
    cdef set_group(self, Py_ssize_t i, Py_ssize_t j, PassRoofline group)
    cdef double latency_ms(self, const SolPoint* point) noexcept nogil
