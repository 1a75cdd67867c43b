# The causal selector (regression-and-learned.md section 5). Every observation is predicted by both experts before either
# sees it; smoothed relative errors, one pair per forest and type of query, decide which expert answers. The stable
# expert is the frozen forest times a correction of its own per key.

from libc.math cimport NAN, fabs, isfinite
from libc.stdint cimport INT64_MAX, int64_t, uint8_t

cimport numpy as cnp

from fpmsdk._ext.correction cimport CorrectionStore, CorrectionTable
from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport FAULT_NONE, KIND_IDLE, FaultSite
from fpmsdk._ext.forest cimport MAX_FEATURES
from fpmsdk._ext.learned cimport ForestSet, learned_error
from fpmsdk._ext.learned_online cimport OnlineLearner, OnlineView
from fpmsdk._ext.native cimport NUM_NATIVE_KINDS, iteration_kind

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.native import NATIVE_KINDS
from fpmsdk._ext.sampler import wrong_state
from fpmsdk.errors import LearnedModelError

cnp.import_array()

# What an iteration's prediction or its error is no finite number of; nothing was learned from it.
cdef enum:
    FAULT_NOT_FINITE = 3000

# (workload kind, type of query) of each key, in order.
KEYS = tuple((workload, query) for workload in WORKLOAD_KINDS for query in NATIVE_KINDS)

# Further counting has to stay far from where numbers wrap.
cdef int64_t MOST_OBSERVATIONS = 1 << 62


cdef object selector_error(const FaultSite* site):
    if site.fault != FAULT_NOT_FINITE:
        return learned_error(site)
    where = f"iteration {site.iteration}: " if site.iteration >= 0 else ""
    return LearnedModelError(
        f"learned forward-pass model: {where}expected finite predictions above 0 of both experts, and finite errors; "
        "found others: the forests do not fit the observation"
    )


cdef int key_of(int kind, const FpmRank* ranks, Py_ssize_t num_ranks, double* coordinates) noexcept nogil:
    # Forest store, and workload of the rank that correction looks at.
    return kind * NUM_NATIVE_KINDS + iteration_kind(ranks, num_ranks, coordinates)


cdef class CausalView(ServingView):
    """Published experts and selections."""

    cdef int evaluate(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil:
        cdef double coordinates[2]
        cdef double features[MAX_FEATURES]
        cdef int kind, key, fault = self.stable.prepare(ranks, num_ranks, &kind, features)
        if fault != FAULT_NONE:
            return fault
        latency_ms[0] = 0.0 if kind == KIND_IDLE else NAN
        if kind == KIND_IDLE or self.stable.forests[kind] == NULL:
            return FAULT_NONE
        key = key_of(kind, ranks, num_ranks, coordinates)
        if self.online_selected[key]:
            return self.online.evaluate(ranks, num_ranks, latency_ms)
        fault = self.stable.latency_ms(ranks, num_ranks, latency_ms)
        latency_ms[0] *= (<CorrectionTable>self.tables[key]).factor_at(coordinates)
        return fault

    cdef object error(self, const FaultSite* site, const FpmRank* ranks, Py_ssize_t num_ranks):
        return selector_error(site)

    def calibrations(self):
        """Published calibration tables by (workload kind, type of query)."""
        return {key: table for key, table in zip(KEYS, self.memory) if table is not None}


cdef class CausalEstimator(Estimator):
    """Both experts with the evidence for either.

    Parameters
    ----------
    stable: frozen forests.
    learner: forests that learn, of the same stores.
    calibrations: `CorrectionStore` by (workload kind, type of query), for every trained workload kind.
    selector: `estimator_config.selector`.
    arrays: of the layout `causal_selector`, changed in place.
    """

    def __init__(
        self, ForestSet stable not None, OnlineLearner learner not None, dict calibrations not None, selector,
        dict arrays not None,
    ):
        cdef int key
        self.stable = stable
        self.learner = learner
        self.memory = tuple(calibrations.get(name) for name in KEYS)
        for key in range(NUM_KEYS):
            self.calibrations[key] = <void*>self.memory[key] if self.memory[key] is not None else NULL
            self.has_learned[key] = True
        self.alpha = selector["alpha"]
        self.margin = selector["margin"]
        self.warmup = min(selector["warmup"], INT64_MAX)
        self.persistence = min(selector["persistence"], INT64_MAX)
        self.arrays = arrays
        self.bind()
        self.publish()

    cdef int bind(self) except -1:
        self.observations = <int64_t*>cnp.PyArray_DATA(self.arrays["observations"])
        self.stable_ewma = <double*>cnp.PyArray_DATA(self.arrays["stable_ewma"])
        self.online_ewma = <double*>cnp.PyArray_DATA(self.arrays["online_ewma"])
        self.online_selected = <uint8_t*>cnp.PyArray_DATA(self.arrays["online_selected"])
        self.streak = <int64_t*>cnp.PyArray_DATA(self.arrays["streak"])
        self.switches = <int64_t*>cnp.PyArray_DATA(self.arrays["switches"])
        return 0

    def stores(self):
        """Calibration stores by (workload kind, type of query), in order."""
        return {key: store for key, store in zip(KEYS, self.memory) if store is not None}

    cdef int reserve(self, Py_ssize_t num_iterations) except -1:
        for store in self.memory:
            if store is not None:
                (<CorrectionStore>store).reserve(num_iterations)
        return self.learner.reserve(num_iterations)

    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil:
        cdef double features[MAX_FEATURES]
        return self.learner.prepare(ranks, num_ranks, kind, features)

    cdef int learn(self, const FpmRank* ranks, Py_ssize_t num_ranks, int kind, double target_ms) noexcept nogil:
        cdef double features[MAX_FEATURES]
        cdef double coordinates[2]
        cdef double native_ms, online_ms
        cdef int key, fault
        if self.stable.forests[kind] == NULL:
            return FAULT_NONE
        # The frozen forests compute the features that they read alone; the learner may come to read any of its own.
        fault = self.learner.prepare(ranks, num_ranks, &kind, features)
        if fault == FAULT_NONE:
            fault = self.stable.latency_ms(ranks, num_ranks, &native_ms)
        if fault != FAULT_NONE:
            return fault
        key = key_of(kind, ranks, num_ranks, coordinates)
        online_ms = self.learner.latency_ms(kind, features)
        if not self.judge(
            key, native_ms * (<CorrectionStore>self.calibrations[key]).factor_now(coordinates), online_ms, target_ms
        ):
            return FAULT_NOT_FINITE
        self.has_learned[key] = True
        (<CorrectionStore>self.calibrations[key]).add(coordinates, target_ms, native_ms)
        self.learner.observe(kind, features, target_ms)
        return FAULT_NONE

    cdef bint judge(self, int key, double stable_ms, double online_ms, double target_ms) noexcept nogil:
        # Take one pair of predictions as evidence; false, with nothing changed, when something is no finite number.
        cdef double stable_error = fabs(stable_ms - target_ms) / target_ms
        cdef double online_error = fabs(online_ms - target_ms) / target_ms
        cdef double selected, other
        if self.observations[key] > 0:
            stable_error = self.alpha * stable_error + (1.0 - self.alpha) * self.stable_ewma[key]
            online_error = self.alpha * online_error + (1.0 - self.alpha) * self.online_ewma[key]
        if not (stable_ms > 0.0 and online_ms > 0.0 and isfinite(stable_error) and isfinite(online_error)):
            return False
        self.stable_ewma[key] = stable_error
        self.online_ewma[key] = online_error
        self.observations[key] += 1
        if self.observations[key] < self.warmup:
            return True
        selected, other = stable_error, online_error
        if self.online_selected[key]:
            selected, other = online_error, stable_error
        self.streak[key] = self.streak[key] + 1 if other < (1.0 - self.margin) * selected else 0
        if self.streak[key] >= self.persistence:
            self.online_selected[key] = not self.online_selected[key]
            self.streak[key] = 0
            self.switches[key] += 1
        return True

    def flush(self):
        """Flush the learner and publish."""
        self.learner.flush()
        self.publish()

    cdef int publish(self) except -1:
        cdef CausalView view = CausalView.__new__(CausalView)
        cdef OnlineView online = OnlineView.__new__(OnlineView)
        cdef CorrectionStore store
        cdef int key, kind
        online.role = self.learner.role
        online.program = self.learner.program
        online.memory = self.learner.publish()
        for kind in range(NUM_KEYS // NUM_NATIVE_KINDS):
            online.forests[kind] = <void*>online.memory[kind] if online.memory[kind] is not None else NULL
        view.stable = self.stable
        view.online = online
        tables = []
        for key in range(NUM_KEYS):
            store = self.memory[key]
            if store is not None and self.has_learned[key]:
                store.publish()
            self.has_learned[key] = False
            tables.append(None if store is None else store.table)
            view.tables[key] = <void*>tables[key] if store is not None else NULL
            view.online_selected[key] = self.online_selected[key]
        view.memory = tuple(tables)
        self.serving = view
        return 0

    def states(self):
        """Evidence by key: observations, errors (None at first), the selected expert, streak, switches, warm-up."""
        found = []
        for key, (workload, query) in enumerate(KEYS):
            seen = self.observations[<int>key] > 0
            found.append({
                "store": workload, "query_type": query, "observations": self.observations[<int>key],
                "stable_ewma": self.stable_ewma[<int>key] if seen else None,
                "online_ewma": self.online_ewma[<int>key] if seen else None,
                "selected": "online" if self.online_selected[<int>key] else "stable",
                "streak": self.streak[<int>key], "switches": self.switches[<int>key],
                "warmup_complete": self.observations[<int>key] >= self.warmup,
            })
        return found

    def saved(self):
        """Copies of the arrays of the layout `causal_selector`."""
        return {name: array.copy() for name, array in self.arrays.items()}

    def restore(self, dict saved):
        """Take over saved arrays of the declared types.

        Raises
        ------
        StateSnapshotError: they are no evidence that observing under these settings leaves behind.
        """
        cdef int key
        for key, name in enumerate(KEYS):
            place = f"of {name[0]}, {name[1]}"
            observations, streak, switches = (int(saved[field][key]) for field in ("observations", "streak", "switches"))
            online = bool(saved["online_selected"][key])
            if observations > MOST_OBSERVATIONS:
                raise wrong_state(f"observations {place}", f"at most {MOST_OBSERVATIONS}", observations)
            if observations and self.memory[key] is None:
                raise wrong_state(f"observations {place}", "0, as nothing was trained", observations)
            if not observations and (saved["stable_ewma"][key] != 0.0 or saved["online_ewma"][key] != 0.0):
                raise wrong_state(f"stable_ewma, online_ewma {place}", "0.0 without observations", "others")
            if streak >= self.persistence or (streak and observations < self.warmup):
                raise wrong_state(f"streak {place}", f"below {self.persistence}, 0 before the warm-up", streak)
            # The first decision is that of the last observation of the warm-up; each takes as many as must persist.
            most = max(0, observations - self.warmup + 1) // self.persistence
            if switches > most:
                raise wrong_state(f"switches {place}", f"at most {most}", switches)
            if online != switches % 2:
                raise wrong_state(f"online_selected {place}", switches % 2, int(online))
            self.has_learned[key] = True
        self.arrays = saved
        self.bind()
