# A choice among estimators, per workload kind. Each candidate learns from every observation; before it does, what it
# would have answered is compared with what was observed, so the choice never looks ahead.

from libc.math cimport NAN, fabs, isfinite
from libc.stdint cimport INT64_MAX, int64_t

cimport numpy as cnp

from fpmsdk._ext.regression cimport RegressionStore, StoreView

from fpmsdk._ext.sampler import check_shapes, wrong_state

cnp.import_array()


cdef class AutomaticView(StoreView):
    """The view of the candidate that serves, and how all of them have fared."""

    cdef double predict(self, const double* features) noexcept nogil:
        return self.serving.predict(features)

    def details(self):
        """Candidate that serves, and by candidate the mean relative error of late; None before its first answer."""
        return {"selected": self.errors[0], "mean_errors": dict(self.errors[1])}

    cdef object expected_error(self, const double* features):
        return self.serving.expected_error(features)


cdef class AutomaticStore(RegressionStore):
    """One workload's candidates and the choice among them.

    Parameters
    ----------
    layout : StateLayout
        Of the choice; the candidates have their own.
    settings : mapping
        ``error_forgetting``, ``margin``, ``warmup`` of `estimator_config.fpm_regression.fit.automatic`.
    candidates : dict of str to RegressionStore
        Two or three, in configured order; the first serves until another has proved better.
    """

    def __init__(self, layout, settings, dict candidates):
        if not 2 <= len(candidates) <= MAX_CANDIDATES:
            raise ValueError(f"expected 2 to {MAX_CANDIDATES} candidates, found {len(candidates)}")
        self.names = tuple(candidates)
        self.num_candidates = len(candidates)
        stores = [*candidates.values(), None]
        self.first, self.second, self.third = stores[:MAX_CANDIDATES]
        self.error_forgetting = settings["error_forgetting"]
        self.margin = settings["margin"]
        self.warmup = min(settings["warmup"], INT64_MAX)
        self.layout = layout
        self.arrays = layout.allocate(candidates=self.num_candidates)
        self.bind()

    cdef int bind(self) except -1:
        self.mean_error = <double*>cnp.PyArray_DATA(self.arrays["mean_error"])
        self.answers = <int64_t*>cnp.PyArray_DATA(self.arrays["answers"])
        self.selected = <int64_t*>cnp.PyArray_DATA(self.arrays["selected"])
        return 0

    cdef RegressionStore candidate(self, int index):
        return self.first if index == 0 else self.second if index == 1 else self.third

    def parts(self):
        """The candidates in configured order, and the choice itself."""
        return (*(self.candidate(i) for i in range(self.num_candidates)), self)

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        cdef int i
        for i in range(self.num_candidates):
            self.candidate(i).reserve(num_observations)
        return 0

    cdef StoreView view(self):
        cdef AutomaticView view = AutomaticView.__new__(AutomaticView)
        cdef int serving = self.serving_candidate()
        view.serving = self.candidate(serving).view()
        view.ready = view.serving.ready
        view.retained_observations = view.serving.retained_observations
        view.errors = self.names[serving], tuple(
            (name, self.mean_error[i] if self.answers[i] > 0 else None) for i, name in enumerate(self.names)
        )
        return view

    cdef int serving_candidate(self):
        # The selected one, or while it cannot answer the best of those that can.
        cdef int i, best = self.selected[0]
        if self.candidate(best).view().ready:
            return best
        for i in range(self.num_candidates):
            if self.candidate(i).view().ready and (
                best == self.selected[0] or self.mean_error[i] < self.mean_error[best]
            ):
                best = i
        return best

    cdef void learn(self, const double* projected, double target_ms) noexcept nogil:
        self.judge(0, self.first.predict(projected), target_ms)
        self.judge(1, self.second.predict(projected), target_ms)
        if self.num_candidates == 3:
            self.judge(2, self.third.predict(projected), target_ms)
        self.choose()
        self.first.learn(projected, target_ms)
        self.second.learn(projected, target_ms)
        if self.num_candidates == 3:
            self.third.learn(projected, target_ms)

    cdef void judge(self, int index, double answer_ms, double target_ms) noexcept nogil:
        # A candidate that cannot answer is not judged; one stalled iteration counts no more than a wholly wrong answer.
        cdef double error
        if not isfinite(answer_ms):
            return
        error = min(fabs(max(answer_ms, 1e-6) - target_ms) / target_ms, 1.0)
        if self.answers[index] < INT64_MAX:
            self.answers[index] += 1
        self.mean_error[index] += (
            max(1.0 - self.error_forgetting, 1.0 / self.answers[index]) * (error - self.mean_error[index])
        )

    cdef void choose(self) noexcept nogil:
        cdef int64_t best = self.selected[0]
        cdef double limit
        cdef int i
        for i in range(self.num_candidates):
            if i == self.selected[0] or self.answers[i] < self.warmup:
                continue
            # The one that serves is left for one that is clearly better, or when it has no answers to be judged by.
            limit = self.mean_error[best]
            if best == self.selected[0]:
                if self.answers[best] < self.warmup:
                    limit = 2.0
                else:
                    limit *= 1.0 - self.margin
            if self.mean_error[i] < limit:
                best = i
        self.selected[0] = best

    def saved(self):
        """The arrays of the choice; the candidates save their own. The next observation changes them: encode them before."""
        return self.arrays

    def restore(self, dict saved):
        """Take over saved arrays of the declared types; they belong to the store from then on.

        Raises
        ------
        StateSnapshotError: they are not what tuning leaves behind; the store is unusable then.
        """
        check_shapes(saved, self.arrays)
        if not saved["selected"][0] < self.num_candidates:
            raise wrong_state("selected", f"below {self.num_candidates}", saved["selected"][0])
        for error, answers in zip(saved["mean_error"], saved["answers"]):
            if answers == 0 and error != 0.0:
                raise wrong_state("mean_error", "0.0 before the first answer", error)
        self.arrays = saved
        self.bind()
