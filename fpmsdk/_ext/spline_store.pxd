"""The spline store: an additive spline with a linear model behind it, and the clock of its knot searches."""

from libc.stdint cimport int32_t, int64_t

from fpmsdk._ext.linear cimport LinearFit
from fpmsdk._ext.regression cimport StoreView
from fpmsdk._ext.row_store cimport RowStore
from fpmsdk._ext.spline cimport SPLINE_AXES, Knots, SplineModel, SplineRows
from fpmsdk._ext.spline_statistics cimport SplineStatistics

cdef struct ServedSpline:
    SplineModel model
    Knots knots
    double scale[SPLINE_AXES]
    double guard_min[SPLINE_AXES]        # the spline answers inside this box
    double guard_max[SPLINE_AXES]
    bint ready

cdef struct SearchClock:
    int knots_per_axis
    int64_t first                        # observations before the first search
    int64_t step                         # periodic: a search every so many observations; 0: adaptive
    int64_t trigger
    int64_t cooldown


cdef class SplineView(StoreView):
    cdef LinearFit linear
    cdef ServedSpline spline
    cdef int64_t accepted_observations, searches, last_search, rebuilds, batch_fallbacks


cdef class SplineStore(RowStore):
    cdef SearchClock search_clock
    cdef SplineRows rows                 # scratch
    cdef SplineStatistics statistics
    # State, owned by `arrays`.
    cdef int64_t* sequence               # [rows], accepted observations before each row
    cdef double* guard_min               # [2]
    cdef double* guard_max
    cdef double* scale
    cdef int64_t* knot_count             # [2]
    cdef double* knots                   # [2, MAX_KNOTS]
    cdef int64_t* spline_exists
    cdef double* spline_intercept_ms
    cdef double* spline_slope_ms         # [NNLS_TERMS]
    cdef double* spline_sse

    cdef ServedSpline served(self) noexcept nogil
    cdef Knots current_knots(self) noexcept nogil
    cdef void store_knots(self, const Knots* knots) noexcept nogil
    cdef SplineModel spline(self) noexcept nogil
    cdef void store_spline(self, const SplineModel* model) noexcept nogil
    cdef void scaled_terms(self, const Knots* knots, const double* features, double* terms) noexcept nogil
    cdef double spline_ms(self, const double* features) noexcept nogil
    cdef void move_guard(self, const double* features, int32_t evicted) noexcept nogil
    cdef void measure_guard(self, double* low, double* high) noexcept nogil
    cdef bint search_is_due(self) noexcept nogil
    cdef void search(self) noexcept nogil
    cdef void take_rows(self) noexcept nogil
    cdef void track(self, const double* features, double target_ms, int32_t evicted) noexcept nogil
    cdef void rebuild(self, const Knots* knots) noexcept nogil
