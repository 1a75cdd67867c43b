"""Regression over stores of one protocol: a store per workload kind learns, its frozen view answers."""

from libc.stdint cimport int64_t

from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport FeatureSpec


cdef class StoreView:
    cdef readonly bint ready             # it has a usable fit
    cdef readonly int64_t retained_observations

    # Raw answer in ms to the features of the fit axes; not finite when there is none.
    cdef double predict(self, const double* features) noexcept nogil
    cdef object expected_error(self, const double* features)


cdef class RegressionStore:
    cdef readonly object layout          # declaration of `arrays`
    cdef readonly dict arrays            # everything that learning changes

    # Make room for so many further observations; `learn` allocates nothing.
    cdef int reserve(self, Py_ssize_t num_observations) except -1
    # Take one observation: finite features, none negative, of fit and sampling axes, and a positive target.
    cdef void learn(self, const double* projected, double target_ms) noexcept nogil
    # What the view of this moment would answer.
    cdef double predict(self, const double* projected) noexcept nogil
    cdef StoreView view(self)


cdef class RegressionView(ServingView):
    cdef FeatureSpec spec                # the fit axes: a prediction needs no sampling axis
    # None where the worker type has no such store.
    cdef StoreView pure_decode
    cdef StoreView contains_locally_mixed
    cdef StoreView cross_rank_aggregated
    cdef StoreView pure_prefill
    cdef readonly bint ready             # some store has a usable fit
    cdef readonly int64_t retained_observations


cdef class Regression(Estimator):
    cdef FeatureSpec spec                # fit axes, then the sampling axes that are not among them
    cdef FeatureSpec fit_spec
    # None where the worker type has no such store.
    cdef readonly RegressionStore pure_decode
    cdef readonly RegressionStore contains_locally_mixed
    cdef readonly RegressionStore cross_rank_aggregated
    cdef readonly RegressionStore pure_prefill
    cdef int learned_kinds               # bit of each kind that has learned since the last view was published
