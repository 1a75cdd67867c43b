# The frozen kind of learned models (regression-and-learned.md section 3.5): the forest of the iteration's workload kind,
# times the factor that native estimates are corrected by.

from libc.math cimport NAN
from libc.stdlib cimport free, malloc

cimport numpy as cnp

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport (
    FAULT_NONE, KIND_IDLE, NUM_KINDS, FaultSite, check_ranks, check_role, fault_error, workload_kind,
)
from fpmsdk._ext.forest cimport MAX_FEATURES, Forest
from fpmsdk._ext.forest_features cimport FAULT_OUT_OF_MEMORY, FAULT_REQUEST_LISTS, FeatureProgram
from fpmsdk._ext.forest_index cimport LeafIndex, index_of
from fpmsdk._ext.frames cimport Columns, new_scratch
from fpmsdk._ext.native cimport NativeEstimator, NativeView

import numpy as np

from fpmsdk._ext.features import ROLES, WORKLOAD_KINDS
from fpmsdk._ext.native import NATIVE_KINDS
from fpmsdk.errors import MetricsError

cnp.import_array()

# Tables of one forest beyond this do not stay in any cache; the forest is walked then.
INDEX_LIMIT_BYTES = 32 * 1024**2


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
        cdef LeafIndex index
        names, read = tuple(features), set()
        self.role = ROLES.index(worker_type)
        self.memory = ()
        for kind in range(NUM_KINDS):
            forest = forests.get(WORKLOAD_KINDS[kind])
            if forest is None:
                continue
            if forest.num_features > len(names):
                raise ValueError(
                    f"{WORKLOAD_KINDS[kind]}: a node reads feature {forest.num_features - 1} of {len(names)}"
                )
            read.update(names[feature] for feature in forest.features_read())
            index = index_of(forest, INDEX_LIMIT_BYTES)
            self.memory += (forest, index)
            self.forests[kind] = <void*>forest
            self.indexes[kind] = <void*>index if index is not None else NULL
        self.program = FeatureProgram(names, read)

    cdef void predict(self, int kind, const double* features, Py_ssize_t num_rows, double* latency_ms) noexcept nogil:
        cdef Py_ssize_t width = self.program.num_features, row
        if self.indexes[kind] == NULL:
            for row in range(num_rows):
                latency_ms[row] = (<Forest>self.forests[kind]).predict_ms(features + row * width)
            return
        (<LeafIndex>self.indexes[kind]).raw_rows(features, width, num_rows, latency_ms)
        for row in range(num_rows):
            latency_ms[row] = (<Forest>self.forests[kind]).latency_ms(latency_ms[row])

    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil:
        kind[0] = workload_kind(ranks, num_ranks)
        return check_role(self.role, ranks, num_ranks)

    cdef int prepare(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind, double* features) noexcept nogil:
        cdef int fault = self.classify(ranks, num_ranks, kind)
        if fault != FAULT_NONE or kind[0] == KIND_IDLE or self.forests[kind[0]] == NULL:
            return fault
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
            self.predict(kind, features, 1, latency_ms)
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

    cdef void answer_block(self, int kind, Block* block, double* latency_ms) noexcept nogil:
        cdef double answers[BLOCK]
        cdef Py_ssize_t i
        self.forests.predict(kind, block.features, block.size, answers)
        for i in range(block.size):
            latency_ms[block.at[i]] = answers[i] * block.factor[i]
        block.size = 0

    def estimate_columns(self, Columns source not None):
        """Latencies in ms of every iteration, as float64[n]; NaN where not ready."""
        # As `evaluate` for each, but rows of one kind are answered several at a time.
        cdef cnp.ndarray latencies = np.empty(source.num_iterations)
        cdef double* latency_ms = <double*>cnp.PyArray_DATA(latencies)
        cdef Py_ssize_t width = self.forests.program.num_features, num_ranks, i
        cdef FpmRank* scratch = new_scratch(source)
        cdef double* features = <double*>malloc(NUM_KINDS * BLOCK * width * sizeof(double))
        cdef const FpmRank* ranks
        cdef Block blocks[NUM_KINDS]
        cdef Block* block
        cdef FaultSite site
        cdef int kind
        if features == NULL:
            free(scratch)
            raise MemoryError
        for kind in range(NUM_KINDS):
            blocks[kind].size = 0
            blocks[kind].features = features + kind * BLOCK * width
        site.fault = FAULT_NONE
        with nogil:
            for i in range(source.num_iterations):
                site.iteration = i
                ranks = source.ranks_of(i, scratch, &num_ranks)
                site.fault = check_ranks(ranks, num_ranks, &site.rank)
                if site.fault == FAULT_NONE:
                    site.fault = self.forests.classify(ranks, num_ranks, &kind)
                if site.fault != FAULT_NONE:
                    break
                if kind == KIND_IDLE or self.forests.forests[kind] == NULL:
                    latency_ms[i] = 0.0 if kind == KIND_IDLE else NAN
                    continue
                block = &blocks[kind]
                site.fault = self.forests.program.fill(ranks, num_ranks, block.features + block.size * width)
                if site.fault != FAULT_NONE:
                    break
                block.at[block.size] = i
                block.factor[block.size] = self.correction(ranks, num_ranks)
                block.size += 1
                if block.size == BLOCK:
                    self.answer_block(kind, block, latency_ms)
            if site.fault == FAULT_NONE:
                for kind in range(NUM_KINDS):
                    if blocks[kind].size:
                        self.answer_block(kind, &blocks[kind], latency_ms)
        free(scratch)
        free(features)
        if site.fault != FAULT_NONE:
            raise learned_error(&site)
        return latencies


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
