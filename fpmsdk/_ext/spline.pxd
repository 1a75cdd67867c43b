"""Additive piecewise-linear splines over two axes: basis, fit at fixed knots, search for knots."""

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t

from fpmsdk._ext.nnls cimport NNLS_TERMS
from fpmsdk._ext.sampler cimport KeyedSlot

cdef enum:
    SPLINE_AXES = 2
    MAX_KNOTS = 3                        # per axis; one term more than knots, for both axes: NNLS_TERMS

cdef struct Knots:
    int count[SPLINE_AXES]
    double at[SPLINE_AXES][MAX_KNOTS]    # ascending, in scaled units

cdef struct SplineModel:
    bint exists                          # finite, with no negative slope
    double intercept
    double slope[NNLS_TERMS]             # axis 0 first, ms per scaled unit
    double sse


cdef inline int num_terms(const Knots* knots) noexcept nogil:
    return knots.count[0] + knots.count[1] + 2


cdef inline double segment(double x, double low, double high) noexcept nogil:
    # How much of the segment from `low` to `high` lies below x.
    return min(max(x - low, 0.0), high - low)


cdef inline void spline_terms(const Knots* knots, const double* x, double* terms) noexcept nogil:
    # Values of the basis at a point in scaled units: per axis, the part of each segment between knots that x covers.
    cdef int axis, k, term = 0
    cdef double low
    for axis in range(SPLINE_AXES):
        low = 0.0
        for k in range(knots.count[axis]):
            terms[term] = segment(x[axis], low, knots.at[axis][k])
            term += 1
            low = knots.at[axis][k]
        terms[term] = segment(x[axis], low, INFINITY)
        term += 1


cdef inline double spline_value(const SplineModel* model, const double* terms, int size) noexcept nogil:
    cdef double total = model.intercept
    cdef int j
    for j in range(size):
        total += model.slope[j] * terms[j]
    return total


cdef inline bint is_ready(const SplineModel* model, int size) noexcept nogil:
    # Whether some axis explains something.
    cdef int j
    for j in range(size):
        if model.exists and model.slope[j] > 0.0:
            return True
    return False


cdef bint finish_model(
    SplineModel* model, const double* coefficient, const double* norm, const bint* active, const double* mean,
    double target_mean, int size
) noexcept nogil


cdef class SplineRows:
    cdef int64_t capacity
    cdef int64_t count                   # rows, in chronological order
    cdef double* points                  # [rows, 2], scaled
    cdef double* target_ms               # [rows]
    cdef double* terms                   # [rows, NNLS_TERMS], basis values
    # Columns of the last fit: those of segments that did not move are not computed again.
    cdef double* normalized              # [rows, NNLS_TERMS], centred, of unit length
    cdef double low[NNLS_TERMS]
    cdef double high[NNLS_TERMS]
    cdef int axis_of[NNLS_TERMS]
    cdef int num_columns
    cdef double mean[NNLS_TERMS]
    cdef double norm[NNLS_TERMS]
    cdef bint active[NNLS_TERMS]
    cdef double gram[NNLS_TERMS * NNLS_TERMS]
    cdef double rhs[NNLS_TERMS]
    cdef double target_mean
    cdef double* values[SPLINE_AXES]     # distinct coordinates, ascending
    cdef int64_t num_values[SPLINE_AXES]

    cdef KeyedSlot* chronology

    cdef int reserve(self, int64_t rows) except -1
    # Take the rows of these slots, oldest first; features are [slots, 2] and are divided by the scale.
    cdef void take(
        self, int64_t count, const int32_t* slots, const int64_t* sequence, const double* features,
        const double* target_ms, const double* scale,
    ) noexcept nogil
    cdef void fit(self, const Knots* knots, SplineModel* model) noexcept nogil
    cdef void set_column(self, int column, int axis, double low, double high) noexcept nogil
    # The best knots found, and the fit there; the starting knots and no model when those cannot be fitted.
    cdef void search(
        self, int knots_per_axis, const Knots* previous, Knots* knots, SplineModel* model
    ) noexcept nogil
