# The frozen kind of learned models (regression-and-learned.md section 3.5): the forest of the iteration's workload kind,
# times the factor that native estimates are corrected by.

from libc.math cimport NAN

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport (
    FAULT_NONE, KIND_IDLE, NUM_KINDS, FaultSite, check_role, fault_error, workload_kind,
)
from fpmsdk._ext.forest cimport MAX_FEATURES, Forest
from fpmsdk._ext.forest_features cimport FAULT_OUT_OF_MEMORY, FAULT_REQUEST_LISTS, FeatureProgram
from fpmsdk._ext.native cimport NativeEstimator, NativeView

from fpmsdk._ext.features import ROLES, WORKLOAD_KINDS
from fpmsdk._ext.native import NATIVE_KINDS
from fpmsdk.errors import MetricsError


cdef object learned_error(const FaultSite* site):
    if site.fault == FAULT_OUT_OF_MEMORY:
        return MemoryError("the per-request lists of an iteration do not fit into memory")
    if site.fault != FAULT_REQUEST_LISTS:
        return fault_error(site)
    where = f"iteration {site.iteration}: " if site.iteration >= 0 else ""
    return MetricsError(
        f"invalid forward pass metrics: {where}the learned forest reads per-request features, which need "
        "scheduled_requests.extend_lengths and past_kv_lengths on every rank with work, in agreement with the rank's "
        "sums; record them, or train on aggregates (features v1 or fpm5)"
    )


cdef class ForestSet:
    """The forests of a model. Immutable, shared by any number of threads and models.

    Parameters
    ----------
    worker_type: its role; work of another one is refused.
    features: names of the features that the forests read.
    forests: `Forest` by workload kind.
    """

    def __init__(self, str worker_type not None, features, dict forests not None):
        cdef int kind
        cdef Forest forest
        self.role = ROLES.index(worker_type)
        self.program = FeatureProgram(features)
        self.memory = tuple(forests.get(name) for name in WORKLOAD_KINDS)
        for kind in range(NUM_KINDS):
            forest = self.memory[kind]
            self.forests[kind] = <void*>forest if forest is not None else NULL
            if forest is not None and forest.num_features > self.program.num_features:
                raise ValueError(
                    f"{WORKLOAD_KINDS[kind]}: a node reads feature {forest.num_features - 1} of "
                    f"{self.program.num_features}"
                )

    def trained(self):
        """Workload kinds that have a forest."""
        return tuple(name for name, forest in zip(WORKLOAD_KINDS, self.memory) if forest is not None)

    cdef Forest forest_of(self, int kind):
        return self.memory[kind]

    cdef int prepare(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind, double* features) noexcept nogil:
        cdef int fault = check_role(self.role, ranks, num_ranks)
        if fault != FAULT_NONE:
            return fault
        kind[0] = workload_kind(ranks, num_ranks)
        if kind[0] == KIND_IDLE or self.forests[kind[0]] == NULL:
            return FAULT_NONE
        return self.program.fill(ranks, num_ranks, features)

    cdef int latency_ms(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil:
        cdef double features[MAX_FEATURES]
        cdef int kind
        cdef int fault = self.prepare(ranks, num_ranks, &kind, features)
        if fault != FAULT_NONE:
            return fault
        if kind == KIND_IDLE:
            latency_ms[0] = 0.0
        elif self.forests[kind] == NULL:
            latency_ms[0] = NAN
        else:
            latency_ms[0] = (<Forest>self.forests[kind]).predict_ms(features)
        return FAULT_NONE


cdef class LearnedView(NativeView):
    """Forests with published correction factors."""

    cdef int native_ms(
        self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms, Py_ssize_t* slowest
    ) noexcept nogil:
        slowest[0] = -1
        return self.forests.latency_ms(ranks, num_ranks, latency_ms)

    cdef int counted_ms(
        self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms, Py_ssize_t* slowest
    ) noexcept nogil:
        return self.native_ms(ranks, num_ranks, latency_ms, slowest)

    cdef object error(self, const FaultSite* site, const FpmRank* ranks, Py_ssize_t num_ranks):
        return learned_error(site)


cdef class LearnedEstimator(NativeEstimator):
    """Frozen forests with correction stores.

    Parameters
    ----------
    forests: the forests.
    stores: correction stores by kind (``prefill``, ``decode``, ``mixed``), or None when correction is disabled.
    """

    def __init__(self, ForestSet forests not None, stores):
        self.forests = forests
        if stores is not None:
            self.prefill, self.decode, self.mixed = (stores[kind] for kind in NATIVE_KINDS)
        self.publish()

    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil:
        # Refuses what an estimate would refuse, whatever the iteration took.
        cdef double features[MAX_FEATURES]
        cdef int fault = self.forests.prepare(ranks, num_ranks, kind, features)
        return fault if fault != FAULT_NONE else NativeEstimator.classify(self, ranks, num_ranks, kind)

    cdef int publish(self) except -1:
        cdef LearnedView view = LearnedView.__new__(LearnedView)
        view.forests = self.forests
        self.publish_factors(view)
        self.serving = view
        return 0
