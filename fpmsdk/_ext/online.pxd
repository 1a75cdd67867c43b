"""One store of the online learner: recent and pending rows in a ring, and when they become a batch."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from fpmsdk._ext.forest cimport Forest
from fpmsdk._ext.online_trees cimport OnlineTrees


cdef class OnlineStore:
    cdef readonly OnlineTrees forest
    cdef dict constants              # arrays that no batch changes, as saved
    cdef int num_features
    cdef int64_t num_trees
    cdef const double* thresholds
    cdef const int64_t* threshold_start
    # Controls.
    cdef int64_t window, max_age, update_every, refresh_interval
    cdef bint always_eager
    cdef double weight               # of the past; negative: every row weighs 1
    cdef int64_t ramp
    # The ring: recent rows from `head`, then pending ones.
    cdef int64_t capacity, head
    cdef list ring
    cdef uint8_t* codes              # [slot, feature]
    cdef double* targets
    cdef int64_t* row_ids
    cdef int64_t* stamps
    cdef double* gradients           # [slot, tree]
    cdef int32_t* listed             # slots of the ring in order
    cdef int64_t* clock              # COUNTERS of `online.pyx`
    cdef object clock_array

    cdef int make_ring(self, int64_t capacity) except -1
    cdef int bind(self) except -1
    cdef int reserve(self, int64_t num_observations) except -1
    cdef void observe(self, const double* features, double target, int64_t row_id, int64_t now) noexcept nogil
    cdef double raw(self, const double* features) noexcept nogil
    cdef int64_t batches(self) noexcept nogil
    cdef bint is_due(self, int64_t now) noexcept nogil
    cdef void weigh(self, int64_t recent, double* history_weight, double* recent_weight) noexcept nogil
    cdef void run_batch(self, int64_t now) noexcept nogil
    cdef Forest published(self, bint log_target, Forest before)
    cdef Forest published_like(self, Forest before)
    cdef Forest published_anew(self, bint log_target)
