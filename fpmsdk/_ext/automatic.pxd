"""A choice among the stores of several estimators, by the error of what each would have answered."""

from libc.stdint cimport int64_t

from fpmsdk._ext.regression cimport RegressionStore, StoreView

cdef enum:
    MAX_CANDIDATES = 3


cdef class AutomaticView(StoreView):
    cdef StoreView serving
    cdef tuple errors


cdef class AutomaticStore(RegressionStore):
    cdef readonly tuple names            # of the candidates, in configured order
    cdef int num_candidates
    # None beyond `num_candidates`. Typed attributes, so that learning calls them without the interpreter.
    cdef readonly RegressionStore first, second, third
    cdef double error_forgetting, margin
    cdef int64_t warmup
    # State, owned by `arrays`.
    cdef double* mean_error              # [candidates], mean absolute relative error of what each would have answered
    cdef int64_t* answers                # [candidates], that were judged
    cdef int64_t* selected

    cdef int bind(self) except -1
    cdef RegressionStore candidate(self, int index)
    cdef int serving_candidate(self)
    cdef void judge(self, int index, double answer_ms, double target_ms) noexcept nogil
    cdef void choose(self) noexcept nogil
