# The estimator over regression stores (regression-and-learned.md section 0): it projects an iteration on the feature
# axes and hands it to the store of its workload kind. What a store learns, and from what it answers, is its own.

from libc.math cimport NAN, isfinite, isnan
from libc.stdint cimport int64_t

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport (
    FAULT_NONE, KIND_CONTAINS_LOCALLY_MIXED, KIND_CROSS_RANK_AGGREGATED, KIND_IDLE, KIND_PURE_DECODE,
    KIND_PURE_PREFILL, MAX_AXES, FaultSite, check_ranks, check_role, make_feature_spec, project, workload_kind,
)
from fpmsdk._ext.frames cimport Records, is_rank

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.frames import read_iterations


cdef class StoreView:
    """What one store has learned, as of one moment; it never changes."""

    cdef double predict(self, const double* features) noexcept nogil:
        return NAN

    def details(self):
        """What `regression_store_diagnostics()` reports beyond readiness and retained observations."""
        return {}

    cdef object expected_error(self, const double* features):
        # (expected relative error of the answer, whether what was learned determines it); None when that is not known.
        return None


cdef class RegressionStore:
    """What is learned from one workload kind, over arrays described by `layout`."""

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        return 0

    cdef void learn(self, const double* projected, double target_ms) noexcept nogil:
        pass

    cdef double predict(self, const double* projected) noexcept nogil:
        return NAN

    cdef StoreView view(self):
        return StoreView()

    def parts(self):
        """The stores that are saved, this one or those it consists of."""
        return (self,)


cdef class RegressionView(ServingView):
    """The published views of all stores."""

    cdef int evaluate(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil:
        cdef double features[MAX_AXES]
        cdef double raw_ms
        cdef int kind, fault
        fault = check_role(self.spec.role, ranks, num_ranks)
        if fault != FAULT_NONE:
            return fault
        kind = workload_kind(ranks, num_ranks)
        if kind == KIND_IDLE:
            latency_ms[0] = 0.0
            return FAULT_NONE
        fault = project(&self.spec, ranks, num_ranks, features)
        if fault != FAULT_NONE:
            return fault
        if kind == KIND_PURE_DECODE:
            raw_ms = self.pure_decode.predict(features)
        elif kind == KIND_CONTAINS_LOCALLY_MIXED:
            raw_ms = self.contains_locally_mixed.predict(features)
        elif kind == KIND_CROSS_RANK_AGGREGATED:
            raw_ms = self.cross_rank_aggregated.predict(features)
        else:
            raw_ms = self.pure_prefill.predict(features)
        latency_ms[0] = max(raw_ms, 1e-6) if isfinite(raw_ms) else NAN
        return FAULT_NONE

    def stores(self):
        """Mapping from workload kind to the view of its store, in the order of diagnostics."""
        return by_kind(
            self.pure_decode, self.contains_locally_mixed, self.cross_rank_aggregated, self.pure_prefill
        )

    def explain_iteration(self, metrics, decode_frame):
        """(latency in ms or None, workload kind, expectation of the error) of one iteration.

        The kind is None without work, the expectation where the store has none: (relative error, whether what was
        learned determines the answer).
        """
        cdef Records records = read_iterations([metrics] if not is_rank(metrics) else metrics, decode_frame)
        cdef double features[MAX_AXES]
        cdef double latency_ms
        cdef StoreView store
        cdef FaultSite site
        site.iteration = -1
        site.fault = check_ranks(records.ranks, records.num_ranks, &site.rank)
        if site.fault == FAULT_NONE:
            site.fault = self.evaluate(records.ranks, records.num_ranks, &latency_ms)
        if site.fault != FAULT_NONE:
            raise self.error(&site, records.ranks, records.num_ranks)
        kind = workload_kind(records.ranks, records.num_ranks)
        if kind == KIND_IDLE:
            return latency_ms, None, None
        project(&self.spec, records.ranks, records.num_ranks, features)
        store = self.stores()[WORKLOAD_KINDS[kind]]
        return (
            None if isnan(latency_ms) else latency_ms,
            WORKLOAD_KINDS[kind],
            store.expected_error(features) if store.ready else None,
        )


cdef class Regression(Estimator):
    """One store per workload kind of the worker type."""

    def __init__(self, str role, tuple weights, tuple axes, int num_fit_axes, new_store):
        self.spec = make_feature_spec(role, weights, axes)
        self.fit_spec = make_feature_spec(role, weights, axes[:num_fit_axes])
        if role != "prefill":
            self.pure_decode = new_store()
        if role != "decode":
            self.pure_prefill = new_store()
        if role == "aggregated":
            self.contains_locally_mixed = new_store()
            self.cross_rank_aggregated = new_store()
        self.publish()

    def stores(self):
        """Mapping from workload kind to its store, in the order of diagnostics."""
        return by_kind(
            self.pure_decode, self.contains_locally_mixed, self.cross_rank_aggregated, self.pure_prefill
        )

    cdef int reserve(self, Py_ssize_t num_iterations) except -1:
        if self.pure_decode is not None:
            self.pure_decode.reserve(num_iterations)
        if self.contains_locally_mixed is not None:
            self.contains_locally_mixed.reserve(num_iterations)
            self.cross_rank_aggregated.reserve(num_iterations)
        if self.pure_prefill is not None:
            self.pure_prefill.reserve(num_iterations)
        return 0

    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil:
        kind[0] = workload_kind(ranks, num_ranks)
        return check_role(self.spec.role, ranks, num_ranks)

    cdef int learn(self, const FpmRank* ranks, Py_ssize_t num_ranks, int kind, double target_ms) noexcept nogil:
        cdef double projected[MAX_AXES]
        cdef int fault = project(&self.spec, ranks, num_ranks, projected)
        if fault != FAULT_NONE:
            return fault
        self.learned_kinds |= 1 << kind
        if kind == KIND_PURE_DECODE:
            self.pure_decode.learn(projected, target_ms)
        elif kind == KIND_CONTAINS_LOCALLY_MIXED:
            self.contains_locally_mixed.learn(projected, target_ms)
        elif kind == KIND_CROSS_RANK_AGGREGATED:
            self.cross_rank_aggregated.learn(projected, target_ms)
        else:
            self.pure_prefill.learn(projected, target_ms)
        return FAULT_NONE

    cdef int publish(self) except -1:
        cdef RegressionView view = RegressionView.__new__(RegressionView)
        cdef RegressionView before = <RegressionView>self.serving
        cdef int stale = self.learned_kinds
        view.spec = self.fit_spec
        if before is None:
            stale = -1
        else:  # one iteration a call is common, and it changes one store
            view.pure_decode = before.pure_decode
            view.contains_locally_mixed = before.contains_locally_mixed
            view.cross_rank_aggregated = before.cross_rank_aggregated
            view.pure_prefill = before.pure_prefill
        if stale >> KIND_PURE_DECODE & 1 and self.pure_decode is not None:
            view.pure_decode = self.pure_decode.view()
        if stale >> KIND_CONTAINS_LOCALLY_MIXED & 1 and self.contains_locally_mixed is not None:
            view.contains_locally_mixed = self.contains_locally_mixed.view()
        if stale >> KIND_CROSS_RANK_AGGREGATED & 1 and self.cross_rank_aggregated is not None:
            view.cross_rank_aggregated = self.cross_rank_aggregated.view()
        if stale >> KIND_PURE_PREFILL & 1 and self.pure_prefill is not None:
            view.pure_prefill = self.pure_prefill.view()
        self.learned_kinds = 0
        count(view, view.pure_decode)
        count(view, view.contains_locally_mixed)
        count(view, view.cross_rank_aggregated)
        count(view, view.pure_prefill)
        self.serving = view
        return 0


cdef void count(RegressionView view, StoreView store):
    if store is not None:
        view.ready |= store.ready
        view.retained_observations += store.retained_observations


cdef dict by_kind(pure_decode, contains_locally_mixed, cross_rank_aggregated, pure_prefill):
    pairs = zip(WORKLOAD_KINDS, (pure_decode, contains_locally_mixed, cross_rank_aggregated, pure_prefill))
    return {kind: value for kind, value in pairs if value is not None}
