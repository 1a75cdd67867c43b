"""Binary search in ascending numbers, inlined where it is called and without a branch that depends on them."""

from libc.stdint cimport int64_t


cdef inline int64_t first_not_below(const double* values, int64_t low, int64_t high, double x) noexcept nogil:
    # First position in [low, high) whose value is not smaller than x, else `high`.
    cdef const double* base = values + low
    cdef int64_t size = high - low, half
    if size <= 0:
        return low
    while size > 1:
        half = size >> 1
        base = base + half if base[half - 1] < x else base
        size -= half
    return (base - values) + (base[0] < x)
