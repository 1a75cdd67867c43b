"""Forests that learn from telemetry: the stores of a model and what serves of them."""

from libc.stdint cimport int64_t

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport NUM_KINDS
from fpmsdk._ext.forest cimport Forest
from fpmsdk._ext.forest_features cimport FeatureProgram
from fpmsdk._ext.online cimport OnlineStore


cdef class OnlineLearner:
    cdef readonly str worker_type
    cdef int role
    cdef readonly FeatureProgram program
    cdef readonly bint log_target
    cdef tuple memory                    # stores by workload kind, None where nothing was trained
    cdef void* stores[NUM_KINDS]
    cdef tuple forests                   # as published, by workload kind
    cdef int64_t published_batches[NUM_KINDS]
    cdef int64_t accepted, next_row_id

    cdef int reserve(self, int64_t num_observations) except -1
    # Workload kind of an iteration, and its features where a store for it reads them. Returns a `Fault`.
    cdef int prepare(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind, double* features) noexcept nogil
    cdef void observe(self, int kind, const double* features, double target_ms) noexcept nogil
    # Latency in ms by the trees as they are now; NaN when there is no answer.
    cdef double latency_ms(self, int kind, const double* features) noexcept nogil
    cdef OnlineStore store_of(self, int kind)
    cdef tuple publish(self)


cdef class OnlineView(ServingView):
    cdef int role
    cdef FeatureProgram program
    cdef tuple memory
    cdef void* forests[NUM_KINDS]


cdef class OnlineEstimator(Estimator):
    cdef readonly OnlineLearner learner
