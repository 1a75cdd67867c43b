"""Timing that repeats a recording."""

from libc.stdint cimport int64_t, uint8_t

from fpmsdk._ext.pricing cimport PassPrice, PassShape, TimingModel

cdef enum:
    WORK_FIELDS = 5


cdef class RecordedTiming(TimingModel):
    cdef int64_t[::1] offsets, next_pass
    cdef double[::1] prefill_ms, decode_ms
    cdef uint8_t[::1] composed
    cdef int64_t[:, ::1] work
    cdef bint checks

    cdef bint _matches(self, const PassShape* shape, int64_t index) noexcept nogil
    cdef void _fail(self, const PassShape* shape, PassPrice* price, int64_t index) noexcept nogil
