"""Online correction of native estimates: factors per workload cell."""

from libc.stdint cimport int32_t, int64_t

from fpmsdk._ext.sampler cimport BucketSampler

cdef enum:
    MAX_CORRECTION_AXES = 2

cdef struct Cells:
    # Factors of the populated cells of a grid, ascending in key; not ready: nothing to say.
    bint ready
    double low[MAX_CORRECTION_AXES]
    double high[MAX_CORRECTION_AXES]
    int64_t bins[MAX_CORRECTION_AXES]
    int64_t num_cells
    const int64_t* keys
    const double* factors


cdef class CorrectionTable:
    cdef int num_axes
    cdef bint has_fixed, has_dynamic
    cdef Cells fixed                     # over raw coordinates
    cdef Cells local                     # over log1p coordinates
    cdef bint global_ready
    cdef double global_factor
    cdef readonly int64_t retained
    cdef tuple memory                    # arrays behind the cells

    cdef double factor_at(self, const double* coordinates) noexcept nogil


cdef class FixedStore:
    cdef BucketSampler sampler
    cdef readonly dict arrays
    cdef object layout
    cdef int64_t min_observations
    cdef int64_t row_capacity
    cdef double* ratio                   # [rows], by slot
    cdef double* cell_factor             # [rows], beside the sampler's bucket keys
    cdef double* scratch

    cdef int bind(self) except -1
    cdef int reserve(self, Py_ssize_t num_observations) except -1
    cdef bint add(self, const double* coordinates, double ratio) noexcept nogil


cdef class DynamicLocalStore:
    cdef int num_axes
    cdef int64_t bins[MAX_CORRECTION_AXES]
    cdef int64_t min_observations, recent_limit, row_limit, age_limit
    cdef readonly dict arrays
    cdef object layout
    cdef int64_t recent_capacity, row_capacity
    cdef double* axis_min                # log1p coordinates
    cdef double* axis_max
    cdef double* recent                  # newest last
    cdef double* coordinates             # [rows, axes], log1p, chronological
    cdef double* ratio                   # [rows]
    cdef int64_t* sequence               # [rows]
    cdef int64_t* extent                 # recent, rows, cells, next sequence number
    cdef int64_t* cell_key               # [rows]
    cdef double* cell_factor             # [rows]
    cdef double* global_factor
    cdef double* scratch
    cdef int64_t* row_key                # scratch, [rows]

    cdef int bind(self) except -1
    cdef int reserve(self, Py_ssize_t num_observations) except -1
    cdef bint add(self, const double* coordinates, double ratio) noexcept nogil
    cdef void remove_row(self, int64_t row) noexcept nogil
    cdef int64_t row_to_evict(self) noexcept nogil
    cdef void group_rows(self) noexcept nogil
    cdef void refresh_factors(self) noexcept nogil


cdef class CorrectionStore:
    cdef readonly FixedStore fixed
    cdef readonly DynamicLocalStore dynamic
    cdef int num_axes
    cdef double min_factor, max_factor
    cdef readonly CorrectionTable table
    cdef CorrectionTable live            # points into the parts

    cdef void describe(self, CorrectionTable table) noexcept nogil
    cdef double factor_now(self, const double* coordinates) noexcept nogil
    cdef int reserve(self, Py_ssize_t num_observations) except -1
    cdef bint add(self, const double* coordinates, double observed_ms, double native_ms) noexcept nogil
    cdef int publish(self) except -1
