# The linear store (regression-and-learned.md section 1.6): after which rows its model is fitted anew, and which saved
# states tuning can have left behind.

cimport cython
from libc.math cimport NAN, fabs, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memmove, memset

cimport numpy as cnp

from fpmsdk._ext.linear cimport (
    ALL_ZERO, COUNT, DAMAGED, FITTED, MUTATIONS, NUM_MODEL_CLOCKS, UNFIT, LinearFit, LinearModel,
    check_empty_statistics, check_fit_form, check_rows, check_scatter, predict, recomputed_fit, require_fit,
)
from fpmsdk._ext.regression cimport RegressionStore, StoreView

from fpmsdk._ext.sampler import check_saved_rows, saved_rows, wrong_state

cnp.import_array()

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
cdef class LinearStore(RegressionStore):
    """One workload's linear model, fitted after every row or when its errors say so."""

    def __init__(self, layout, settings, tuple sampling_axes, tuple bins, max_observations):
        self.layout = layout
        self.model = LinearModel(settings, sampling_axes, bins, max_observations)
        policy = settings["update_policy"]
        self.policy.on_error = policy["kind"] == "error_threshold"
        if self.policy.on_error:
            self.policy.relative_tolerance = policy["relative_tolerance"]
            self.policy.absolute_tolerance_ms = policy["absolute_tolerance_ms"]
            self.policy.window = min(policy["window"], INT64_MAX)
            self.policy.trigger = min(policy["trigger"], INT64_MAX)
            self.policy.cooldown = min(policy["cooldown"], INT64_MAX)
            self.policy.startup_observations = min(policy["startup_observations"], INT64_MAX)
        rows = min(max_observations, 63) + 1
        self.arrays = layout.allocate(
            rows=rows, buckets=rows, axes=self.model.num_axes, sampling_axes=len(sampling_axes), errors=0,
        )
        self.arrays["axis_min"].fill(float("inf"))
        self.arrays["axis_max"].fill(float("-inf"))
        self.bind()

    cdef int bind(self) except -1:
        self.model.bind(self.arrays)
        self.row_capacity = len(self.arrays["order"])
        self.error_capacity = len(self.arrays["errors"])
        self.clock = <int64_t*>cnp.PyArray_DATA(self.arrays["clock"])
        self.errors = <uint8_t*>cnp.PyArray_DATA(self.arrays["errors"])
        return 0

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        # One row more than the store may keep, because an insert precedes the eviction.
        cdef int64_t limit = self.model.sampler.max_observations
        cdef int64_t rows = min(self.model.sampler.total() + num_observations, limit) + 1
        cdef int64_t errors = min(self.clock[NUM_ERRORS] + num_observations, self.policy.window)
        if rows <= self.row_capacity and errors <= self.error_capacity:
            return 0
        # Doubling keeps one-by-one tuning from copying the store at every call.
        if rows > self.row_capacity:
            rows = max(rows, min(2 * self.row_capacity, limit + 1))
        if errors > self.error_capacity:
            errors = max(errors, min(2 * self.error_capacity, self.policy.window))
        self.arrays = self.layout.grow(self.arrays, rows=rows, buckets=rows, errors=errors)
        self.bind()
        return 0

    def saved(self):
        """Copies of the arrays as a snapshot holds them: exactly as long as what they hold, rows in bucket order."""
        cdef dict arrays = self.arrays
        slots, sampled = saved_rows(arrays)
        taken = sampled | {
            "features": arrays["features"].take(slots, axis=0),
            "target_ms": arrays["target_ms"].take(slots),
            "errors": arrays["errors"][: self.clock[NUM_ERRORS]].copy(),
        }
        return {name: taken[name] if name in taken else array.copy() for name, array in arrays.items()}

    def restore(self, dict saved):
        """Take over saved arrays of the declared types; they belong to the store from then on.

        Raises
        ------
        StateSnapshotError: they are not what tuning under these settings leaves behind; the store is unusable then.
        """
        cdef int axes = self.model.num_axes
        total = check_saved_rows(saved, self.model.num_sampling_axes, self.model.sampler.max_observations)
        for field, shape in {"mean": (axes + 1,), "features": (total, axes), "target_ms": (total,)}.items():
            if saved[field].shape != shape:
                raise wrong_state(field, f"shape {shape}", saved[field].shape)
        num_errors = len(saved["errors"])
        if num_errors != saved["clock"][NUM_ERRORS] or num_errors > self.policy.window:
            raise wrong_state(
                "errors", f"{saved['clock'][NUM_ERRORS]} verdicts, at most {self.policy.window}", num_errors
            )
        # Full arrays are grown before anything is added to them; empty ones would leave nothing to point at.
        self.arrays = saved if total else self.layout.grow(saved, rows=self.row_capacity, buckets=self.row_capacity)
        self.bind()
        self.model.sampler.check_restored()
        check_rows(self.model)
        check_clock(self)
        check_scatter(self.model)
        check_fit(self)

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
        if self.policy.on_error:
            prior_ms = self.predict(projected)
        self.model.retain(projected, target_ms, &evicted)
        self.clock[ACCEPTED_ROWS] += 1
        self.clock[AGE] += 1
        if self.policy.on_error and isfinite(prior_ms):
            self.judge_prior(prior_ms, target_ms)
        if not self.policy.on_error or self.fit_is_due(isfinite(prior_ms)):
            if self.model.refit(False) == FITTED:
                self.clock[AGE] = 0
                self.clock[NUM_ERRORS] = 0
                self.clock[NUM_BAD_ERRORS] = 0

    cdef void judge_prior(self, double prior_ms, double target_ms) noexcept nogil:
        cdef uint8_t bad = fabs(prior_ms - target_ms) > max(
            self.policy.absolute_tolerance_ms, self.policy.relative_tolerance * target_ms
        )
        if self.clock[NUM_ERRORS] == self.policy.window:
            self.clock[NUM_BAD_ERRORS] -= self.errors[0]
            memmove(self.errors, self.errors + 1, self.policy.window - 1)
            self.clock[NUM_ERRORS] -= 1
        self.errors[self.clock[NUM_ERRORS]] = bad
        self.clock[NUM_ERRORS] += 1
        self.clock[NUM_BAD_ERRORS] += bad

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


# --- restored state (regression-and-learned.md section 6) -----------------------------------------------------


# Further counting has to stay far from where numbers wrap.
cdef int64_t MOST_OBSERVATIONS = 1 << 62


cdef int check_clock(LinearStore store) except -1:
    cdef int64_t* clock = store.clock
    cdef int64_t total = store.model.sampler.total(), bad = 0, i
    cdef bint at_rest = clock[DAMAGED] == 0 and not 0 < store.model.rebuild_interval <= clock[MUTATIONS]
    for i in range(clock[NUM_ERRORS]):
        bad += store.errors[i]
    rules = (
        ("count", clock[COUNT], total, clock[COUNT] == total),
        ("mutations, damaged", (clock[MUTATIONS], clock[DAMAGED]), "statistics that need no rebuild", at_rest),
        (
            "accepted_rows", clock[ACCEPTED_ROWS], f"{total} to {MOST_OBSERVATIONS}, 0 without rows",
            total <= clock[ACCEPTED_ROWS] <= MOST_OBSERVATIONS and (clock[ACCEPTED_ROWS] == 0) == (total == 0),
        ),
        ("age", clock[AGE], f"at most {clock[ACCEPTED_ROWS]}", clock[AGE] <= clock[ACCEPTED_ROWS]),
        ("num_errors", clock[NUM_ERRORS], f"at most the age {clock[AGE]}", clock[NUM_ERRORS] <= clock[AGE]),
        ("num_bad_errors", clock[NUM_BAD_ERRORS], bad, clock[NUM_BAD_ERRORS] == bad),
    )
    for name, found, expected, holds in rules:
        if not holds:
            raise wrong_state(f"clock ({name})", expected, found)
    return 0


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
