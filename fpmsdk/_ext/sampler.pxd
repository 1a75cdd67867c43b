"""The bucketed sample store: which rows are kept, and in which order they are read."""

from libc.stdint cimport int32_t, int64_t


cdef struct KeyedSlot:
    int64_t key
    int32_t position
    int32_t slot


cdef int64_t cell_of(
    int num_axes, const double* coordinates, const double* low, const double* high, const int64_t* bins
) noexcept nogil
cdef int64_t find_key(const int64_t* keys, int64_t count, int64_t key) noexcept nogil


cdef class BucketSampler:
    cdef int num_axes
    cdef int64_t max_observations
    cdef bint fixed_bounds
    cdef int64_t bins[6]
    # State, owned by the arrays of the store (see `perfmodel.layouts`).
    cdef double* axis_min
    cdef double* axis_max
    cdef double* coordinates         # [rows, num_axes]
    cdef int32_t* order              # slots in key order, oldest first inside a bucket
    cdef int64_t* bucket_key         # occupied buckets, ascending
    cdef int32_t* bucket_start       # first position in `order`; one more entry closes the last bucket
    cdef int64_t* extent             # total rows, occupied buckets, slot that the next row takes

    cdef KeyedSlot* scratch          # room for every row

    cdef int bind(self, dict arrays) except -1
    cdef int64_t total(self) noexcept nogil
    cdef int32_t insert(self, const double* coordinates, int32_t* evicted) noexcept nogil
    cdef int64_t bucket_of(self, const double* coordinates) noexcept nogil
    cdef void append(self, int32_t slot, int64_t key) noexcept nogil
    cdef int32_t evict(self) noexcept nogil
    cdef void rebucket(self) noexcept nogil
