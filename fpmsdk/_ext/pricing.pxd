"""The compiled TimingModel protocol and the procedure that turns its answer into the price of a pass."""

from libc.stdint cimport int64_t

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport ServingView


cdef struct PassShape:
    # The work of one pass on one rank. A readmitted request stands in both parts.
    int64_t num_prefill              # requests with prompt tokens in this pass
    int64_t sum_prefill_end_tokens   # their prompt tokens computed after it, reused ones included
    int64_t sum_prefill_past_tokens  # and before it
    int64_t num_decode               # requests that emit a token which is not their first
    int64_t sum_decode_tokens        # their known tokens, prompt and generated, when scheduled
    int64_t kv_capacity_tokens
    int64_t rank                     # of its pool


cdef enum PriceStatus:
    PRICED
    NOT_READY      # the model has not learned this kind of pass
    OUT_OF_RANGE   # the sums exceed what the model can be asked
    RAISED         # `TimingModel.raised` holds the exception: Python code raised, or the model names what it lacks


cdef struct PassPrice:
    double prefill_ms
    double decode_ms
    bint composed        # the parts are those of one mixed forward
    PriceStatus status


cdef class TimingModel:
    cdef readonly bint composes
    cdef object raised

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil


cdef class FixedTiming(TimingModel):
    cdef readonly double prefill_ms
    cdef readonly double decode_ms


cdef class PolynomialTiming(TimingModel):
    pass


cdef class FpmTiming(TimingModel):
    cdef ServingView view

    cdef bint ask(self, const FpmRank* rank, double* latency_ms, PassPrice* price) noexcept nogil


cdef class PythonTiming(TimingModel):
    cdef str provider_name
    cdef object predict_prefill_ms, predict_decode_ms, predict_mixed_pass_ms
    cdef dict memo

    cdef _price(self, const PassShape* shape, PassPrice* price)
    cdef _ask(self, method, tuple coordinates, dict keywords)


cdef class PassPricer:
    cdef TimingModel timing
    cdef bint compose
    cdef double prefill_speedup, decode_speedup
    cdef readonly int64_t num_composed, num_fallback

    cdef int price(self, const PassShape* shape, PassPrice* price) except -1 nogil
    cdef int _part(self, const PassShape* shape, PassPrice* price) except -1 nogil
    cdef double _duration(self, double raw_ms, double speedup) except -1.0 nogil


cdef double modeled_duration_ms(double raw_ms, double speedup) noexcept nogil
