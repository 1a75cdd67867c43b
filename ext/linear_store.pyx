# The linear store (regression-and-learned.md section 1.6): after which rows its model is fitted anew, and which saved
# states tuning can have left behind.

cimport cython
from libc.math cimport NAN, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memset

from fpmsdk._ext.linear cimport (
    ALL_ZERO, COUNT, DAMAGED, FITTED, MUTATIONS, NUM_MODEL_CLOCKS, UNFIT, LinearFit, LinearModel,
    check_empty_statistics, check_fit_form, check_scatter, predict, recomputed_fit, require_fit,
)
from fpmsdk._ext.monitor cimport ErrorMonitor
from fpmsdk._ext.regression cimport StoreView
from fpmsdk._ext.row_store cimport RowStore

from fpmsdk._ext.sampler import wrong_state

cdef enum:
    ACCEPTED_ROWS = NUM_MODEL_CLOCKS  # rows ever accepted
    AGE                               # rows accepted since the last successful fit
    NUM_ERRORS                        # verdicts in `errors`
    NUM_BAD_ERRORS

CLOCK_FIELDS = (
    "count", "mutations", "damaged", "accepted_rows", "age", "num_errors", "num_bad_errors",
)


@cython.final
cdef class LinearView(StoreView):
    """The fit that a linear store serves."""

    cdef double predict(self, const double* features) noexcept nogil:
        return predict(&self.fit, features, self.num_axes)


@cython.final
cdef class LinearStore(RowStore):
    """One workload's linear model, fitted after every row or when its errors say so."""

    def __init__(self, layout, settings, tuple sampling_axes, tuple bins, max_observations):
        policy = settings["update_policy"]
        self.policy.on_error = policy["kind"] == "error_threshold"
        if self.policy.on_error:
            self.policy.trigger = min(policy["trigger"], INT64_MAX)
            self.policy.cooldown = min(policy["cooldown"], INT64_MAX)
            self.policy.startup_observations = min(policy["startup_observations"], INT64_MAX)
        super().__init__(
            layout,
            LinearModel(settings, sampling_axes, bins, max_observations),
            ErrorMonitor(policy if self.policy.on_error else None, "relative_tolerance"),
            NUM_ERRORS,
            ("features", "target_ms"),
        )

    cdef double predict(self, const double* projected) noexcept nogil:
        cdef LinearFit serving = self.model.fit()
        return predict(&serving, projected, self.model.num_axes)

    cdef StoreView view(self):
        cdef LinearView view = LinearView.__new__(LinearView)
        view.fit = self.model.fit()
        view.num_axes = self.model.num_axes
        view.ready = view.fit.ready
        view.retained_observations = self.model.sampler.total()
        return view

    # --- learning -------------------------------------------------------------------------------------------

    cdef void learn(self, const double* projected, double target_ms) noexcept nogil:
        cdef int32_t evicted
        cdef double prior_ms = NAN
        if self.clock[ACCEPTED_ROWS] == MOST_OBSERVATIONS:
            return  # a count that only a tampered state reaches never wraps
        if self.policy.on_error:
            prior_ms = self.predict(projected)
        self.model.retain(projected, target_ms, &evicted)
        self.clock[ACCEPTED_ROWS] += 1
        self.clock[AGE] += 1
        if self.policy.on_error and isfinite(prior_ms):
            self.monitor.judge(prior_ms, target_ms)
        if not self.policy.on_error or self.fit_is_due(isfinite(prior_ms)):
            if self.model.refit(False) == FITTED:
                self.clock[AGE] = 0
                self.monitor.clear()

    cdef bint fit_is_due(self, bint has_prior) noexcept nogil:
        return (
            self.model.rebuild_required()
            or not self.model.fit_flags[0]
            or not has_prior
            or self.clock[ACCEPTED_ROWS] <= self.policy.startup_observations
            or (
                self.clock[NUM_BAD_ERRORS] >= self.policy.trigger
                and self.clock[AGE] >= self.policy.cooldown
            )
        )

    cdef int check_restored(self) except -1:
        check_clock(self)
        check_scatter(self.model)
        return check_fit(self)


# --- restored state (regression-and-learned.md section 6) -----------------------------------------------------


# Further counting has to stay far from where numbers wrap.
cdef int64_t MOST_OBSERVATIONS = 1 << 62


cdef int check_clock(LinearStore store) except -1:
    cdef int64_t* clock = store.clock
    cdef int64_t total = store.model.sampler.total()
    cdef bint at_rest = clock[DAMAGED] == 0 and not 0 < store.model.rebuild_interval <= clock[MUTATIONS]
    rules = (
        ("count", clock[COUNT], total, clock[COUNT] == total),
        ("mutations, damaged", (clock[MUTATIONS], clock[DAMAGED]), "statistics that need no rebuild", at_rest),
        (
            "accepted_rows", clock[ACCEPTED_ROWS], f"{total} to {MOST_OBSERVATIONS}, 0 without rows",
            total <= clock[ACCEPTED_ROWS] <= MOST_OBSERVATIONS and (clock[ACCEPTED_ROWS] == 0) == (total == 0),
        ),
        ("age", clock[AGE], f"at most {clock[ACCEPTED_ROWS]}", clock[AGE] <= clock[ACCEPTED_ROWS]),
        ("num_errors", clock[NUM_ERRORS], f"at most the age {clock[AGE]}", clock[NUM_ERRORS] <= clock[AGE]),
    )
    for name, found, expected, holds in rules:
        if not holds:
            raise wrong_state(f"clock ({name})", expected, found)
    return store.monitor.check_restored()


cdef int check_fit(LinearStore store) except -1:
    # The fit that serves is that of the statistics, or an older one where those say nothing.
    cdef LinearFit best
    cdef int64_t accepted = store.clock[ACCEPTED_ROWS], age = store.clock[AGE]
    cdef int outcome = UNFIT
    check_fit_form(store.model)
    if accepted == 0:
        if store.clock[MUTATIONS] != 0:
            raise wrong_state("clock (mutations)", "0 without observations", store.clock[MUTATIONS])
        check_empty_statistics(store.model)
    elif store.policy.on_error and age > 0:
        return 0  # made of rows that may have left
    else:
        outcome = recomputed_fit(store.model, &best)
        if (outcome == FITTED) != (age == 0):
            raise wrong_state("clock (age)", "0" if outcome == FITTED else "above 0 without a fit", age)
        if outcome == ALL_ZERO:
            return 0
    if outcome == UNFIT:
        memset(&best, 0, sizeof(LinearFit))
    require_fit(store.model, &best)
    return 0
