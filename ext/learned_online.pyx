# Models whose forests learn online (regression-and-learned.md section 4): one store per trained workload kind, with the
# clocks that they share. Estimates read published trees only; a tuning call publishes once, at its end.

from libc.math cimport NAN, exp, isfinite, log
from libc.stdint cimport int64_t, uint8_t

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport FAULT_NONE, KIND_IDLE, NUM_KINDS, FaultSite, check_role, workload_kind
from fpmsdk._ext.forest cimport MAX_FEATURES, Forest
from fpmsdk._ext.forest_features cimport FeatureProgram
from fpmsdk._ext.learned cimport learned_error
from fpmsdk._ext.online cimport OnlineStore

from fpmsdk._ext.features import ROLES, WORKLOAD_KINDS
from fpmsdk._ext.forest_features import FeatureProgram as _FeatureProgram

cdef double FLOOR_MS = 1e-6

# Shared by the stores of a model: accepted observations, and the id of the next row.
LEARNER_CLOCKS = ("accepted_observations", "next_row_id")


cdef class OnlineLearner:
    """The stores of a model with their common clocks. One thread at a time.

    Parameters
    ----------
    worker_type: its role; work of another one is refused.
    features: names of the features that the trees read.
    log_target: whether targets are natural logarithms of ms.
    stores: `OnlineStore` by workload kind.
    clocks: values of `LEARNER_CLOCKS`.
    """

    def __init__(self, str worker_type not None, features, bint log_target, dict stores not None, clocks):
        cdef int kind
        self.worker_type = worker_type
        self.role = ROLES.index(worker_type)
        self.program = _FeatureProgram(features)
        self.log_target = log_target
        self.memory = tuple(stores.get(name) for name in WORKLOAD_KINDS)
        self.forests = (None,) * NUM_KINDS
        self.accepted, self.next_row_id = clocks
        for kind in range(NUM_KINDS):
            self.stores[kind] = <void*>self.memory[kind] if self.memory[kind] is not None else NULL
            self.published_batches[kind] = -1

    cdef OnlineStore store_of(self, int kind):
        return self.memory[kind]

    def trained(self):
        """Stores by workload kind, in the order of workload kinds."""
        return {name: store for name, store in zip(WORKLOAD_KINDS, self.memory) if store is not None}

    def clocks(self):
        """Values of `LEARNER_CLOCKS`."""
        return self.accepted, self.next_row_id

    cdef int reserve(self, int64_t num_observations) except -1:
        for store in self.memory:
            if store is not None:
                (<OnlineStore>store).reserve(num_observations)
        return 0

    cdef int prepare(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind, double* features) noexcept nogil:
        cdef int fault = check_role(self.role, ranks, num_ranks)
        if fault != FAULT_NONE:
            return fault
        kind[0] = workload_kind(ranks, num_ranks)
        if kind[0] == KIND_IDLE or self.stores[kind[0]] == NULL:
            return FAULT_NONE
        return self.program.fill(ranks, num_ranks, features)

    cdef void observe(self, int kind, const double* features, double target_ms) noexcept nogil:
        if self.stores[kind] == NULL:
            return
        self.accepted += 1
        self.next_row_id += 1
        (<OnlineStore>self.stores[kind]).observe(
            features, log(target_ms) if self.log_target else target_ms, self.next_row_id - 1, self.accepted
        )

    cdef double latency_ms(self, int kind, const double* features) noexcept nogil:
        cdef double raw = (<OnlineStore>self.stores[kind]).raw(features)
        cdef double latency_ms = exp(raw) if self.log_target else raw
        return max(latency_ms, FLOOR_MS) if isfinite(latency_ms) else NAN

    def flush(self):
        """Run a batch in every store with rows that wait or have grown too old."""
        for store in self.memory:
            if store is not None:
                store.flush(self.accepted)

    cdef tuple publish(self):
        # Forests by workload kind; those of stores without a batch since are the ones from before.
        cdef int kind
        cdef OnlineStore store
        cdef list forests = list(self.forests)
        for kind in range(NUM_KINDS):
            store = self.memory[kind]
            if store is not None and store.batches() != self.published_batches[kind]:
                forests[kind] = store.published(self.log_target, forests[kind])
                self.published_batches[kind] = store.batches()
        self.forests = tuple(forests)
        return self.forests


cdef class OnlineView(ServingView):
    """The published trees of every store."""

    cdef int evaluate(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil:
        cdef double features[MAX_FEATURES]
        cdef int kind, fault = check_role(self.role, ranks, num_ranks)
        if fault != FAULT_NONE:
            return fault
        kind = workload_kind(ranks, num_ranks)
        if kind == KIND_IDLE:
            latency_ms[0] = 0.0
            return FAULT_NONE
        latency_ms[0] = NAN
        if self.forests[kind] == NULL:
            return FAULT_NONE
        fault = self.program.fill(ranks, num_ranks, features)
        if fault == FAULT_NONE:
            latency_ms[0] = (<Forest>self.forests[kind]).predict_ms(features)
        return fault

    cdef object error(self, const FaultSite* site, const FpmRank* ranks, Py_ssize_t num_ranks):
        return learned_error(site)


cdef class OnlineEstimator(Estimator):
    """Forests that learn.

    Parameters
    ----------
    learner: the stores; belongs to the estimator from then on.
    """

    def __init__(self, OnlineLearner learner not None):
        self.learner = learner
        self.publish()

    cdef int reserve(self, Py_ssize_t num_iterations) except -1:
        return self.learner.reserve(num_iterations)

    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil:
        # Refuses what an estimate would refuse, whatever the iteration took.
        cdef double features[MAX_FEATURES]
        return self.learner.prepare(ranks, num_ranks, kind, features)

    cdef int learn(self, const FpmRank* ranks, Py_ssize_t num_ranks, int kind, double target_ms) noexcept nogil:
        cdef double features[MAX_FEATURES]
        cdef int fault = self.learner.prepare(ranks, num_ranks, &kind, features)
        if fault == FAULT_NONE:
            self.learner.observe(kind, features, target_ms)
        return fault

    def flush(self):
        """Run a batch in every store with rows that wait or have grown too old, and publish."""
        self.learner.flush()
        self.publish()

    cdef int publish(self) except -1:
        cdef OnlineView view = OnlineView.__new__(OnlineView)
        cdef int kind
        view.role = self.learner.role
        view.program = self.learner.program
        view.memory = self.learner.publish()
        for kind in range(NUM_KINDS):
            view.forests[kind] = <void*>view.memory[kind] if view.memory[kind] is not None else NULL
        self.serving = view
        return 0
