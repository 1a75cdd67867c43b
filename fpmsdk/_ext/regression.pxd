"""Linear regression over bucketed samples, with sufficient statistics kept up to date."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport NUM_KINDS, FeatureSpec
from fpmsdk._ext.sampler cimport BucketSampler

cdef enum:
    MAX_FIT_AXES = 6
    MAX_TERMS = 7                # intercept and slopes; also features and target

cdef struct LinearFit:
    bint ready
    double intercept
    double slope[MAX_FIT_AXES]   # per standardised axis, 0 where inactive
    double mean[MAX_FIT_AXES]
    double scale[MAX_FIT_AXES]
    int active                   # bit per axis

cdef struct FitSettings:
    int num_axes
    int64_t min_observations
    double singular_ridge_scale
    int64_t rebuild_interval     # 0: never
    bint non_negative
    bint on_error                # update policy error_threshold
    double relative_tolerance
    double absolute_tolerance_ms
    int64_t window
    int64_t trigger
    int64_t cooldown
    int64_t startup_observations

cdef class LinearStore:
    cdef FitSettings settings
    cdef BucketSampler sampler
    cdef readonly dict arrays
    cdef object layout
    cdef int num_sampling_axes
    cdef int sampling_axis[MAX_FIT_AXES]  # position of each sampling axis among the projected features
    cdef int64_t row_capacity, error_capacity
    # State, owned by `arrays`.
    cdef double* features                # [rows, num_axes]
    cdef double* target_ms               # [rows]
    cdef double* mean                    # [num_axes + 1], the target last
    cdef double* scatter                 # [num_axes + 1, num_axes + 1], symmetric
    cdef int64_t* clock
    cdef uint8_t* errors                 # verdicts of the update policy, oldest first
    cdef double* fit_intercept_ms
    cdef double* fit_slope_ms            # [num_axes]
    cdef double* fit_mean                # [num_axes]
    cdef double* fit_scale               # [num_axes]
    cdef int64_t* fit_flags              # ready, active axes

    cdef int reserve(self, Py_ssize_t num_observations) except -1
    cdef int bind(self) except -1
    cdef void learn(self, const double* projected, double target_ms) noexcept nogil
    cdef LinearFit fit(self) noexcept nogil
    # Sufficient statistics.
    cdef void add(self, const double* features, double target_ms) noexcept nogil
    cdef void remove(self, const double* features, double target_ms) noexcept nogil
    cdef bint rebuild_required(self) noexcept nogil
    cdef void rebuild_statistics(self) noexcept nogil
    # Fits.
    cdef int refit(self) noexcept nogil
    cdef int fit_statistics(self, LinearFit* best) noexcept nogil
    cdef bint well_conditioned(self, const double* scale, const int* active, int num_active) noexcept nogil
    cdef int fit_rows(self, LinearFit* best) noexcept nogil
    cdef void store_fit(self, const LinearFit* fit) noexcept nogil
    cdef bint fit_is_due(self, bint has_prior) noexcept nogil
    cdef void judge_prior(self, double prior_ms, double target_ms) noexcept nogil


cdef class LinearView(ServingView):
    cdef FeatureSpec spec                # the fit axes: a prediction needs no sampling axis
    cdef LinearFit fits[NUM_KINDS]
    cdef int64_t totals[NUM_KINDS]       # retained observations; -1: the worker type has no such store
    cdef readonly bint ready             # some store has a usable fit
    cdef readonly int64_t retained_observations


cdef class LinearRegression(Estimator):
    cdef FeatureSpec spec                # fit axes, then the sampling axes that are not among them
    cdef FeatureSpec fit_spec
    # None where the worker type has no such store.
    cdef readonly LinearStore pure_decode
    cdef readonly LinearStore contains_locally_mixed
    cdef readonly LinearStore cross_rank_aggregated
    cdef readonly LinearStore pure_prefill
    cdef bint has_learned[NUM_KINDS]     # since the last view was published

    cdef LinearStore store_of(self, int kind)
