"""The monitor of recent prediction errors: which of the last ones were too large."""

from libc.stdint cimport int64_t, uint8_t


cdef class ErrorMonitor:
    cdef double relative_tolerance
    cdef double absolute_tolerance_ms
    cdef int64_t window
    # State, owned by the arrays of the store.
    cdef uint8_t* errors         # verdicts, oldest first
    cdef int64_t* counts         # verdicts, bad ones among them

    cdef void bind(self, uint8_t* errors, int64_t* counts) noexcept
    cdef void judge(self, double prior_ms, double target_ms) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef int check_restored(self) except -1
