"""The linear model of a store: rows kept in buckets, sufficient statistics kept up to date, fits from either."""

from libc.math cimport NAN
from libc.stdint cimport int32_t, int64_t

from fpmsdk._ext.sampler cimport BucketSampler

cdef enum:
    MAX_FIT_AXES = 6
    MAX_TERMS = 7                # intercept and slopes; also features and target

# Entries of `clock` that belong to the model; stores append their own.
cdef enum:
    COUNT = 0                    # rows in the statistics
    MUTATIONS                    # additions and removals since the last rebuild
    DAMAGED                      # a removal cancelled too many digits
    NUM_MODEL_CLOCKS

cdef enum FitOutcome:
    FITTED                       # use the candidate
    ALL_ZERO                     # identifiable, but no axis explains anything
    UNFIT                        # too few rows, no axis that varies, or no solution
    AMBIGUOUS                    # the statistics cannot decide; ask the rows

cdef struct LinearFit:
    bint ready
    double intercept
    double slope[MAX_FIT_AXES]   # per standardised axis, 0 where inactive
    double mean[MAX_FIT_AXES]
    double scale[MAX_FIT_AXES]
    int active                   # bit per axis


cdef inline double predict(const LinearFit* fit, const double* features, int num_axes) noexcept nogil:
    # Raw prediction in ms, without the floor; NaN when there is no usable fit.
    cdef double slopes = 0.0
    cdef int a
    if not fit.ready:
        return NAN
    for a in range(num_axes):
        if fit.active >> a & 1:
            slopes += fit.slope[a] * ((features[a] - fit.mean[a]) / fit.scale[a])
    return fit.intercept + slopes


cdef class LinearModel:
    cdef int num_axes
    cdef int64_t min_observations
    cdef double singular_ridge_scale
    cdef int64_t rebuild_interval        # 0: never
    cdef bint non_negative
    cdef BucketSampler sampler
    cdef int num_sampling_axes
    cdef int sampling_axis[MAX_FIT_AXES] # position of each sampling axis among the projected features
    cdef dict arrays
    # State, owned by `arrays`.
    cdef double* features                # [rows, num_axes]
    cdef double* target_ms               # [rows]
    cdef double* mean                    # [num_axes + 1], the target last
    cdef double* scatter                 # [num_axes + 1, num_axes + 1], symmetric
    cdef int64_t* clock
    cdef double* fit_intercept_ms
    cdef double* fit_slope_ms            # [num_axes]
    cdef double* fit_mean                # [num_axes]
    cdef double* fit_scale               # [num_axes]
    cdef int64_t* fit_flags              # ready, active axes

    cdef int bind(self, dict arrays) except -1
    cdef int32_t retain(self, const double* projected, double target_ms, int32_t* evicted) noexcept nogil
    cdef int refit(self, bint clears_all_zero) noexcept nogil
    cdef LinearFit fit(self) noexcept nogil
    cdef void store_fit(self, const LinearFit* fit) noexcept nogil
    # Sufficient statistics.
    cdef void add(self, const double* features, double target_ms) noexcept nogil
    cdef void remove(self, const double* features, double target_ms) noexcept nogil
    cdef bint rebuild_required(self) noexcept nogil
    cdef void rebuild_statistics(self) noexcept nogil
    # Fits.
    cdef int fit_statistics(self, LinearFit* best) noexcept nogil
    cdef bint well_conditioned(self, const double* scale, const int* active, int num_active) noexcept nogil
    cdef int fit_rows(self, LinearFit* best) noexcept nogil


# Rules that a restored model keeps; each raises for the first that is broken.
cdef int check_rows(LinearModel model) except -1
cdef int check_scatter(LinearModel model) except -1
cdef int check_empty_statistics(LinearModel model) except -1
cdef int check_fit_form(LinearModel model) except -1
cdef int recomputed_fit(LinearModel model, LinearFit* best) except -1
cdef int require_fit(LinearModel model, const LinearFit* expected) except -1
