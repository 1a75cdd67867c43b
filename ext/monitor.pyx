# The bounded window of verdicts behind two clocks: when a linear fit is due and when knots are searched anew
# (regression-and-learned.md sections 1.6 and 2.5).

cimport cython
from libc.math cimport fabs
from libc.stdint cimport INT64_MAX, int64_t, uint8_t
from libc.string cimport memmove

from fpmsdk._ext.sampler import wrong_state

cdef enum:
    NUM_ERRORS = 0
    NUM_BAD = 1


@cython.final
cdef class ErrorMonitor:
    """Counts the bad ones among the last predictions; without settings it has no window and judges nothing."""

    def __cinit__(self, settings, tolerance):
        if settings is not None:
            self.relative_tolerance = settings[tolerance]
            self.absolute_tolerance_ms = settings["absolute_tolerance_ms"]
            self.window = min(settings["window"], INT64_MAX)

    cdef void bind(self, uint8_t* errors, int64_t* counts) noexcept:
        self.errors = errors
        self.counts = counts

    cdef void judge(self, double prior_ms, double target_ms) noexcept nogil:
        cdef uint8_t bad = fabs(prior_ms - target_ms) > max(
            self.absolute_tolerance_ms, self.relative_tolerance * target_ms
        )
        if self.counts[NUM_ERRORS] == self.window:
            self.counts[NUM_BAD] -= self.errors[0]
            memmove(self.errors, self.errors + 1, self.window - 1)
            self.counts[NUM_ERRORS] -= 1
        self.errors[self.counts[NUM_ERRORS]] = bad
        self.counts[NUM_ERRORS] += 1
        self.counts[NUM_BAD] += bad

    cdef void clear(self) noexcept nogil:
        self.counts[NUM_ERRORS] = 0
        self.counts[NUM_BAD] = 0

    cdef int check_restored(self) except -1:
        cdef int64_t bad = 0, i
        for i in range(self.counts[NUM_ERRORS]):
            bad += self.errors[i]
        if self.counts[NUM_BAD] != bad:
            raise wrong_state("clock (num_bad_errors)", bad, self.counts[NUM_BAD])
        return 0
