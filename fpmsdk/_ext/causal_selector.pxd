"""The causal selector: of a stable and of a learning expert, the one that has been closer by now."""

from libc.stdint cimport int64_t, uint8_t

from fpmsdk._ext.correction cimport CorrectionStore, CorrectionTable
from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport NUM_KINDS
from fpmsdk._ext.learned cimport ForestSet
from fpmsdk._ext.learned_online cimport OnlineLearner, OnlineView
from fpmsdk._ext.native cimport NUM_NATIVE_KINDS

cdef enum:
    NUM_KEYS = 12                        # workload kinds times native kinds


cdef class CausalView(ServingView):
    cdef readonly ForestSet stable
    cdef readonly OnlineView online
    cdef tuple memory                    # calibration tables by key, None where nothing was trained
    cdef void* tables[NUM_KEYS]
    cdef bint online_selected[NUM_KEYS]


cdef class CausalEstimator(Estimator):
    cdef readonly OnlineLearner learner
    cdef readonly ForestSet stable
    cdef tuple memory                    # calibration stores by key, None where nothing was trained
    cdef void* calibrations[NUM_KEYS]
    cdef double alpha, margin
    cdef int64_t warmup, persistence
    cdef dict arrays                     # of the layout `causal_selector`
    cdef int64_t* observations           # [key]
    cdef double* stable_ewma
    cdef double* online_ewma
    cdef uint8_t* online_selected
    cdef int64_t* streak
    cdef int64_t* switches
    cdef bint has_learned[NUM_KEYS]

    cdef int bind(self) except -1
    cdef bint judge(self, int key, double stable_ms, double online_ms, double target_ms) noexcept nogil
