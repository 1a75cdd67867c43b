"""Operators of a forward pass: each prices itself for a batch, from tables and the roofline of its hardware."""

from libc.stdint cimport int64_t

from fpmsdk._ext.grid cimport GridTable, Measurement
from fpmsdk._ext.sites cimport GemmSite

cdef struct OpQuery:
    int64_t batch
    int64_t seq_len      # new tokens per request in prefill, KV position in decode
    int64_t prefix       # cached tokens per request in prefill
    int64_t tokens       # tokens that pass through the token-wise operators

# Where an answer comes from; several bits: mixed.
cdef enum:
    FROM_SILICON = 1
    FROM_FORMULA = 2
    FROM_SOL = 4
    FROM_ESTIMATE = 8

cdef enum OpStatus:
    OP_OK = 0
    OP_MISS              # no measurement to answer from
    OP_NO_FLOPS          # the system has no rate for the compute dtype
    OP_UNEVEN_BATCH      # the batch does not divide by scale_num_tokens
    OP_NOT_FINITE        # the answer overflows

cdef struct OpAnswer:
    double latency_ms
    double energy_wms
    int sources

cdef struct OpSol:
    double latency_ms
    double math_ms
    double memory_ms

cdef struct Hardware:
    double mem_bw_bytes_per_s
    double mem_bw_scaling_factor
    double mem_latency_s
    double inter_node_bw_bytes_per_s
    double p2p_latency_s


cdef class Operator:
    cdef readonly str name
    cdef readonly double scale_factor
    cdef Hardware hardware

    cdef tuple parameters    # all that answers before `scale_factor` depend on

    # Before `scale_factor`.
    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil
    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil
    # With it: the silicon latency, or that of the speed of light.
    cdef int price(self, const OpQuery* query, bint at_sol, OpAnswer* answer) noexcept nogil


cdef class OpList:
    cdef readonly tuple operators
    cdef void** pointers
    cdef Py_ssize_t size

    cdef int sum_prices(self, const OpQuery* query, OpAnswer* total) noexcept nogil
    cdef int sum_sols(self, const OpQuery* query, OpSol* total) noexcept nogil
