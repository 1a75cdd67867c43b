# The spline store (regression-and-learned.md section 2.5): every observation goes into a linear model and, once knots
# were found, into the spline's statistics; the clock says when knots are searched anew. The spline answers inside the
# box of the retained rows, the linear model elsewhere.

cimport cython
from libc.math cimport INFINITY, NAN, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memcmp, memset

cimport numpy as cnp

from fpmsdk._ext.linear cimport (
    COUNT, DAMAGED, FITTED, MUTATIONS, NUM_MODEL_CLOCKS, LinearFit, LinearModel, check_empty_statistics,
    check_fit_form, check_scatter, predict, recomputed_fit, require_fit,
)
from fpmsdk._ext.monitor cimport ErrorMonitor
from fpmsdk._ext.nnls cimport NNLS_TERMS
from fpmsdk._ext.regression cimport StoreView
from fpmsdk._ext.row_store cimport RowStore
from fpmsdk._ext.spline cimport (
    MAX_KNOTS as KNOTS_PER_AXIS, SPLINE_AXES, Knots, SplineModel, SplineRows, is_ready, num_terms, spline_terms,
    spline_value,
)
from fpmsdk._ext.spline_statistics cimport (
    BASIS_COUNT, BASIS_DAMAGED, BASIS_MUTATIONS, NUM_BASIS_CLOCKS, STATISTICS_SIZE, SplineStatistics,
)

import numpy as np

from fpmsdk._ext.sampler import wrong_state

cnp.import_array()

cdef enum:
    BASIS_CLOCK = NUM_MODEL_CLOCKS                    # those of the spline's statistics
    ACCEPTED_ROWS = BASIS_CLOCK + NUM_BASIS_CLOCKS    # rows ever accepted
    SEARCHES
    LAST_SEARCH                                       # accepted rows at the last search, 0 before the first
    REBUILDS                                          # of the spline's statistics, in all epochs
    BATCH_FALLBACKS                                   # of them, those of statistics that could not decide
    NUM_ERRORS
    NUM_BAD_ERRORS

CLOCK_FIELDS = (
    "count", "mutations", "damaged", "basis_count", "basis_mutations", "basis_damaged", "accepted_rows", "searches",
    "last_search", "rebuilds", "batch_fallbacks", "num_errors", "num_bad_errors",
)
MAX_KNOTS = KNOTS_PER_AXIS
MAX_TERMS = NNLS_TERMS
BASIS_FIELDS = ("basis_mean", "basis_mean_rest", "basis_scatter", "basis_scatter_rest")

cdef enum:
    FEWEST_SEARCHED_ROWS = 32


cdef double answer_ms(const LinearFit* linear, const ServedSpline* spline, const double* features) noexcept nogil:
    cdef double linear_ms = predict(linear, features, SPLINE_AXES), spline_ms
    cdef double point[SPLINE_AXES]
    cdef double terms[NNLS_TERMS]
    cdef int axis
    if not isfinite(linear_ms) or not spline.ready:
        return linear_ms
    for axis in range(SPLINE_AXES):
        if not spline.guard_min[axis] <= features[axis] <= spline.guard_max[axis]:
            return linear_ms
        point[axis] = features[axis] / spline.scale[axis]
    spline_terms(&spline.knots, point, terms)
    spline_ms = spline_value(&spline.model, terms, num_terms(&spline.knots))
    return spline_ms if isfinite(spline_ms) else linear_ms


@cython.final
cdef class SplineView(StoreView):
    """The linear fit that a spline store serves, and the spline in front of it."""

    cdef double predict(self, const double* features) noexcept nogil:
        return answer_ms(&self.linear, &self.spline, features)

    def details(self):
        """Counters of the spline, whether it was initialised and whether it is ready."""
        return {
            "spline": {
                "initialized": self.searches > 0,
                "ready": bool(self.spline.ready),
                "accepted_observations": self.accepted_observations,
                "knot_searches": self.searches,
                "last_search_observation": self.last_search if self.searches > 0 else None,
                "numerical_rebuilds": self.rebuilds,
                "batch_fallbacks": self.batch_fallbacks,
            }
        }


@cython.final
cdef class SplineStore(RowStore):
    """One workload's spline over attention and FFN scores, with its linear model."""

    def __init__(self, layout, settings, tuple bins, max_observations):
        search = settings["search"]
        adaptive = search["kind"] == "adaptive"
        self.search_clock.knots_per_axis = settings["knots_per_axis"]
        self.search_clock.first = min(max(settings["min_observations"], FEWEST_SEARCHED_ROWS), INT64_MAX)
        self.search_clock.step = 0 if adaptive else min(search["step"], INT64_MAX)
        if adaptive:
            self.search_clock.trigger = min(search["trigger"], INT64_MAX)
            self.search_clock.cooldown = min(search["cooldown"], INT64_MAX)
        self.rows = SplineRows()
        self.statistics = SplineStatistics(settings["rebuild_interval"])
        super().__init__(
            layout,
            LinearModel(
                {**settings, "num_axes": SPLINE_AXES, "non_negative": True}, (0, 1), bins, max_observations
            ),
            ErrorMonitor(search if adaptive else None, "tolerance"),
            NUM_ERRORS,
            ("features", "target_ms", "sequence"),
        )
        self.arrays["guard_min"].fill(float("inf"))
        self.arrays["guard_max"].fill(float("-inf"))

    cdef int bind(self) except -1:
        cdef dict arrays = self.arrays
        RowStore.bind(self)
        self.rows.reserve(self.row_capacity)
        self.statistics.bind(arrays, self.clock + BASIS_CLOCK)
        self.sequence = <int64_t*>cnp.PyArray_DATA(arrays["sequence"])
        self.guard_min = <double*>cnp.PyArray_DATA(arrays["guard_min"])
        self.guard_max = <double*>cnp.PyArray_DATA(arrays["guard_max"])
        self.scale = <double*>cnp.PyArray_DATA(arrays["scale"])
        self.knot_count = <int64_t*>cnp.PyArray_DATA(arrays["knot_count"])
        self.knots = <double*>cnp.PyArray_DATA(arrays["knots"])
        self.spline_exists = <int64_t*>cnp.PyArray_DATA(arrays["spline_exists"])
        self.spline_intercept_ms = <double*>cnp.PyArray_DATA(arrays["spline_intercept_ms"])
        self.spline_slope_ms = <double*>cnp.PyArray_DATA(arrays["spline_slope_ms"])
        self.spline_sse = <double*>cnp.PyArray_DATA(arrays["spline_sse"])
        return 0

    cdef StoreView view(self):
        cdef SplineView view = SplineView.__new__(SplineView)
        cdef int64_t* clock = self.clock
        view.linear = self.model.fit()
        view.ready = view.linear.ready
        view.retained_observations = self.model.sampler.total()
        view.spline = self.served()
        view.accepted_observations = clock[ACCEPTED_ROWS]
        view.searches = clock[SEARCHES]
        view.last_search = clock[LAST_SEARCH]
        view.rebuilds = clock[REBUILDS]
        view.batch_fallbacks = clock[BATCH_FALLBACKS]
        return view

    cdef double predict(self, const double* projected) noexcept nogil:
        cdef LinearFit linear = self.model.fit()
        cdef ServedSpline spline = self.served()
        return answer_ms(&linear, &spline, projected)

    cdef ServedSpline served(self) noexcept nogil:
        cdef ServedSpline served
        cdef int axis
        served.knots = self.current_knots()
        served.model = self.spline()
        served.ready = is_ready(&served.model, num_terms(&served.knots))
        for axis in range(SPLINE_AXES):
            served.scale[axis] = self.scale[axis]
            served.guard_min[axis] = self.guard_min[axis]
            served.guard_max[axis] = self.guard_max[axis]
        return served

    cdef Knots current_knots(self) noexcept nogil:
        cdef Knots knots
        cdef int axis, k
        for axis in range(SPLINE_AXES):
            knots.count[axis] = <int>self.knot_count[axis]
            for k in range(KNOTS_PER_AXIS):
                knots.at[axis][k] = self.knots[axis * KNOTS_PER_AXIS + k]
        return knots

    cdef void store_knots(self, const Knots* knots) noexcept nogil:
        cdef int axis, k
        for axis in range(SPLINE_AXES):
            self.knot_count[axis] = knots.count[axis]
            for k in range(KNOTS_PER_AXIS):
                self.knots[axis * KNOTS_PER_AXIS + k] = knots.at[axis][k]
        self.statistics.num_terms = num_terms(knots)

    cdef SplineModel spline(self) noexcept nogil:
        cdef SplineModel model
        cdef int j
        memset(&model, 0, sizeof(SplineModel))
        model.exists = self.spline_exists[0] != 0
        model.intercept = self.spline_intercept_ms[0]
        model.sse = self.spline_sse[0]
        for j in range(NNLS_TERMS):
            model.slope[j] = self.spline_slope_ms[j]
        return model

    cdef void store_spline(self, const SplineModel* model) noexcept nogil:
        cdef int j
        self.spline_exists[0] = model.exists
        self.spline_intercept_ms[0] = model.intercept if model.exists else 0.0
        self.spline_sse[0] = model.sse if model.exists else 0.0
        for j in range(NNLS_TERMS):
            self.spline_slope_ms[j] = model.slope[j] if model.exists else 0.0

    # --- learning -------------------------------------------------------------------------------------------

    cdef void learn(self, const double* projected, double target_ms) noexcept nogil:
        cdef double prior_ms = NAN
        cdef int32_t evicted, slot
        if self.clock[ACCEPTED_ROWS] == MOST_OBSERVATIONS:
            return  # a count that only a tampered state reaches never wraps
        if self.monitor.window > 0:
            prior_ms = self.spline_ms(projected)
        slot = self.model.retain(projected, target_ms, &evicted)
        self.sequence[slot] = self.clock[ACCEPTED_ROWS]
        self.clock[ACCEPTED_ROWS] += 1
        if isfinite(prior_ms):
            self.monitor.judge(prior_ms, target_ms)
        self.move_guard(projected, evicted)
        self.model.refit(True)
        if self.search_is_due():
            self.search()
        elif self.clock[SEARCHES] > 0:
            self.track(projected, target_ms, evicted)

    cdef void scaled_terms(self, const Knots* knots, const double* features, double* terms) noexcept nogil:
        cdef double point[SPLINE_AXES]
        cdef int axis
        for axis in range(SPLINE_AXES):
            point[axis] = features[axis] / self.scale[axis]
        spline_terms(knots, point, terms)

    cdef double spline_ms(self, const double* features) noexcept nogil:
        # The spline's own answer, ready or not, inside the box or outside.
        cdef Knots knots
        cdef SplineModel model
        cdef double terms[NNLS_TERMS]
        if not self.spline_exists[0]:
            return NAN
        knots = self.current_knots()
        model = self.spline()
        self.scaled_terms(&knots, features, terms)
        return spline_value(&model, terms, num_terms(&knots))

    cdef void move_guard(self, const double* features, int32_t evicted) noexcept nogil:
        # The box of the retained rows. Only a row on its rim makes it smaller by leaving.
        cdef const double* gone
        cdef int axis
        cdef bint measure = False
        for axis in range(SPLINE_AXES):
            self.guard_min[axis] = min(self.guard_min[axis], features[axis])
            self.guard_max[axis] = max(self.guard_max[axis], features[axis])
        if evicted >= 0:
            gone = &self.model.features[<int64_t>evicted * SPLINE_AXES]
            for axis in range(SPLINE_AXES):
                measure |= gone[axis] <= self.guard_min[axis] or gone[axis] >= self.guard_max[axis]
        if measure:
            self.measure_guard(self.guard_min, self.guard_max)

    cdef void measure_guard(self, double* low, double* high) noexcept nogil:
        cdef const double* features
        cdef int64_t row
        cdef int axis
        for axis in range(SPLINE_AXES):
            low[axis] = INFINITY
            high[axis] = -INFINITY
        for row in range(self.model.sampler.total()):
            features = &self.model.features[<int64_t>self.model.sampler.order[row] * SPLINE_AXES]
            for axis in range(SPLINE_AXES):
                low[axis] = min(low[axis], features[axis])
                high[axis] = max(high[axis], features[axis])

    cdef bint search_is_due(self) noexcept nogil:
        cdef int64_t accepted = self.clock[ACCEPTED_ROWS]
        if self.clock[SEARCHES] == 0:
            return accepted >= self.search_clock.first
        if self.search_clock.step > 0:
            return accepted % self.search_clock.step == 0
        return (
            accepted - self.clock[LAST_SEARCH] >= self.search_clock.cooldown
            and self.clock[NUM_BAD_ERRORS] >= self.search_clock.trigger
        )

    cdef void search(self) noexcept nogil:
        # Begin an epoch: new scale, new knots, the fit at them, and statistics loaded anew. Knots at which nothing
        # could be fitted in the end are no candidates for the new ones.
        cdef Knots previous = self.current_knots(), knots
        cdef SplineModel model
        cdef double scale
        cdef int axis, k
        for axis in range(SPLINE_AXES):
            scale = max(1.0, self.guard_max[axis])
            for k in range(previous.count[axis]):
                previous.at[axis][k] *= self.scale[axis] / scale
            self.scale[axis] = scale
        self.take_rows()
        self.rows.search(
            self.search_clock.knots_per_axis, &previous if self.spline_exists[0] else NULL, &knots, &model
        )
        self.store_knots(&knots)
        self.rows.fit(&knots, &model)  # the best trial was not the last one: its terms are gone
        self.store_spline(&model)
        self.statistics.load(self.rows)
        self.clock[SEARCHES] += 1
        self.clock[LAST_SEARCH] = self.clock[ACCEPTED_ROWS]
        self.monitor.clear()

    cdef void take_rows(self) noexcept nogil:
        self.rows.take(
            self.model.sampler.total(), self.model.sampler.order, self.sequence, self.model.features,
            self.model.target_ms, self.scale,
        )

    cdef void track(self, const double* features, double target_ms, int32_t evicted) noexcept nogil:
        # One row in and perhaps one out, at standing knots.
        cdef Knots knots = self.current_knots()
        cdef SplineModel model
        cdef double terms[NNLS_TERMS]
        self.scaled_terms(&knots, features, terms)
        self.statistics.add(terms, target_ms)
        if evicted >= 0:
            self.scaled_terms(&knots, &self.model.features[<int64_t>evicted * SPLINE_AXES], terms)
            self.statistics.remove(terms, self.model.target_ms[evicted])
        if self.statistics.rebuild_required():
            self.rebuild(&knots)
        elif self.statistics.fit(&model):
            self.store_spline(&model)
        else:
            self.clock[BATCH_FALLBACKS] += 1
            self.rebuild(&knots)

    cdef void rebuild(self, const Knots* knots) noexcept nogil:
        cdef SplineModel model
        self.take_rows()
        self.rows.fit(knots, &model)
        self.store_spline(&model)
        self.statistics.load(self.rows)
        self.clock[REBUILDS] += 1

    cdef int check_restored(self) except -1:
        check_clock(self)
        check_sequences(self)
        check_guard(self)
        check_scatter(self.model)
        check_linear_fit(self)
        check_unused(self)
        if self.clock[SEARCHES] > 0:
            check_knots(self)
            check_spline(self)
        return 0


# --- restored state (regression-and-learned.md section 6) -----------------------------------------------------


# Further counting has to stay far from where numbers wrap.
cdef int64_t MOST_OBSERVATIONS = 1 << 62


cdef int check_clock(SplineStore store) except -1:
    cdef int64_t* clock = store.clock
    cdef int64_t total = store.model.sampler.total(), first = store.search_clock.first, step = store.search_clock.step
    cdef int64_t accepted = clock[ACCEPTED_ROWS], searches = clock[SEARCHES], last = clock[LAST_SEARCH]
    cdef int64_t interval = store.model.rebuild_interval
    cdef bint searched = accepted >= first
    rules = [
        ("count", clock[COUNT], total, clock[COUNT] == total),
        (
            "mutations, damaged", (clock[MUTATIONS], clock[DAMAGED]), "statistics that need no rebuild",
            clock[DAMAGED] == 0 and not 0 < interval <= clock[MUTATIONS],
        ),
        (
            "accepted_rows", accepted, f"{total} to {MOST_OBSERVATIONS}, 0 without rows",
            total <= accepted <= MOST_OBSERVATIONS and (accepted == 0) == (total == 0),
        ),
        ("searches", searches, f"above 0 from {first} observations on, 0 before", (searches > 0) == searched),
        (
            "last_search", last, f"{first} to {accepted}, 0 before the first search",
            first <= last <= accepted if searched else last == 0,
        ),
        (
            "basis_count", clock[BASIS_CLOCK + BASIS_COUNT], total if searched else 0,
            clock[BASIS_CLOCK + BASIS_COUNT] == (total if searched else 0),
        ),
        (
            "basis_mutations", clock[BASIS_CLOCK + BASIS_MUTATIONS], "at most two for each observation since the search",
            clock[BASIS_CLOCK + BASIS_MUTATIONS] <= 2 * (accepted - last if searched else 0)
            and not 0 < interval <= clock[BASIS_CLOCK + BASIS_MUTATIONS],
        ),
        ("basis_damaged", clock[BASIS_CLOCK + BASIS_DAMAGED], 0, clock[BASIS_CLOCK + BASIS_DAMAGED] == 0),
        (
            "rebuilds", clock[REBUILDS], "at most one for each observation after the first search",
            clock[REBUILDS] <= (accepted - first - searches + 1 if searched else 0),
        ),
        (
            "batch_fallbacks", clock[BATCH_FALLBACKS], f"at most {clock[REBUILDS]}",
            clock[BATCH_FALLBACKS] <= clock[REBUILDS],
        ),
        (
            "num_errors", clock[NUM_ERRORS], "at most one for each observation since the search",
            clock[NUM_ERRORS] <= (accepted - last if searched else 0),
        ),
    ]
    if searched and step > 0:
        expected = (1 + accepted // step - first // step, max(first, accepted // step * step))
        rules.append(("searches, last_search", (searches, last), expected, (searches, last) == expected))
    elif searched:
        rules.append((
            "searches, last_search", (searches, last), f"at least {store.search_clock.cooldown} observations apart",
            (searches == 1) == (last == first) and searches - 1 <= (last - first) // store.search_clock.cooldown,
        ))
        rules.append((
            "last_search, num_bad_errors", (last, clock[NUM_BAD_ERRORS]), "no search that is due",
            not store.search_is_due(),
        ))
    for name, found, wanted, holds in rules:
        if not holds:
            raise wrong_state(f"clock ({name})", wanted, found)
    return store.monitor.check_restored()


cdef int check_sequences(SplineStore store) except -1:
    cdef int64_t total = store.model.sampler.total(), accepted = store.clock[ACCEPTED_ROWS], row
    sequences = sorted(store.sequence[row] for row in range(total))
    for row in range(total):
        if sequences[row] >= accepted:
            raise wrong_state("sequence", f"below {accepted}", sequences[row])
        if row > 0 and sequences[row] == sequences[row - 1]:
            raise wrong_state("sequence", "each number once", f"{sequences[row]} twice")
    return 0


cdef int check_guard(SplineStore store) except -1:
    cdef double low[SPLINE_AXES]
    cdef double high[SPLINE_AXES]
    cdef int axis
    store.measure_guard(low, high)
    for axis in range(SPLINE_AXES):
        if store.guard_min[axis] != low[axis] or store.guard_max[axis] != high[axis]:
            raise wrong_state(
                f"guard_min[{axis}], guard_max[{axis}]", f"{(low[axis], high[axis])}, recomputed",
                (store.guard_min[axis], store.guard_max[axis]),
            )
    return 0


cdef int check_linear_fit(SplineStore store) except -1:
    cdef LinearFit best
    cdef int outcome = FITTED
    memset(&best, 0, sizeof(LinearFit))
    check_fit_form(store.model)
    if store.clock[ACCEPTED_ROWS] == 0:
        if store.clock[MUTATIONS] != 0:
            raise wrong_state("clock (mutations)", "0 without observations", store.clock[MUTATIONS])
        check_empty_statistics(store.model)
    else:
        outcome = recomputed_fit(store.model, &best)
    if outcome != FITTED:
        memset(&best, 0, sizeof(LinearFit))
    return require_fit(store.model, &best)


cdef int check_unused(SplineStore store) except -1:
    # Places that the knots leave free, all of them before the first search, hold zeros.
    cdef int used[SPLINE_AXES]
    cdef int axis, size = 0, i, j
    cdef bint searched = store.clock[SEARCHES] > 0
    for axis in range(SPLINE_AXES):
        if store.knot_count[axis] > (store.search_clock.knots_per_axis if searched else 0):
            raise wrong_state(
                f"knot_count[{axis}]", f"at most {store.search_clock.knots_per_axis if searched else 0}",
                store.knot_count[axis],
            )
        used[axis] = <int>store.knot_count[axis]
    if searched:
        size = used[0] + used[1] + SPLINE_AXES
    places = {
        "scale": [searched] * SPLINE_AXES,
        "knots": [[k < used[axis] for k in range(KNOTS_PER_AXIS)] for axis in range(SPLINE_AXES)],
        "spline_slope_ms": [store.spline_exists[0] and j < size for j in range(NNLS_TERMS)],
        "spline_intercept_ms": [store.spline_exists[0]],
        "spline_sse": [store.spline_exists[0]],
        "spline_exists": [searched],
    }
    for name in ("basis_mean", "basis_mean_rest"):
        places[name] = [searched and i <= size for i in range(STATISTICS_SIZE)]
    for name in ("basis_scatter", "basis_scatter_rest"):
        places[name] = [
            [searched and i <= j <= size for j in range(STATISTICS_SIZE)] for i in range(STATISTICS_SIZE)
        ]
    for name, may_be_used in places.items():
        array = store.arrays[name]
        if array.tobytes() != np.where(may_be_used, array, array.dtype.type(0)).tobytes():
            raise wrong_state(name, "zeros where nothing is kept", array.tolist())
    return 0


cdef int check_knots(SplineStore store) except -1:
    cdef Knots knots = store.current_knots()
    cdef bint fresh = store.clock[LAST_SEARCH] == store.clock[ACCEPTED_ROWS]
    cdef int axis, k
    for axis in range(SPLINE_AXES):
        if not store.scale[axis] >= 1.0 or (fresh and store.scale[axis] != max(1.0, store.guard_max[axis])):
            raise wrong_state(
                f"scale[{axis}]", max(1.0, store.guard_max[axis]) if fresh else "at least 1", store.scale[axis]
            )
        for k in range(knots.count[axis]):
            if not knots.at[axis][k] > (knots.at[axis][k - 1] if k > 0 else 0.0):
                raise wrong_state(f"knots[{axis}]", "ascending from above 0", [knots.at[axis][j] for j in range(k + 1)])
    return 0


cdef int check_spline(SplineStore store) except -1:
    # The spline that serves is that of the statistics; just loaded, both are those of the rows.
    cdef Knots knots = store.current_knots()
    cdef SplineModel kept = store.spline(), expected
    cdef dict saved
    memset(&expected, 0, sizeof(SplineModel))
    store.statistics.num_terms = num_terms(&knots)
    if store.clock[BASIS_CLOCK + BASIS_MUTATIONS] == 0:
        saved = {name: store.arrays[name].copy() for name in BASIS_FIELDS}
        store.take_rows()
        store.rows.fit(&knots, &expected)
        store.statistics.load(store.rows)
        for name, array in saved.items():
            if array.tobytes() != store.arrays[name].tobytes():
                raise wrong_state(name, f"{store.arrays[name].tolist()}, recomputed", array.tolist())
        if not expected.exists:
            memset(&expected, 0, sizeof(SplineModel))
    elif store.statistics.rebuild_required() or not store.statistics.fit(&expected):
        raise wrong_state(
            "clock (basis_mutations)", "0, as the statistics need a rebuild",
            store.clock[BASIS_CLOCK + BASIS_MUTATIONS],
        )
    if not same_spline(&kept, &expected):
        raise wrong_state("spline", f"{described(&expected)}, recomputed", described(&kept))
    return 0


cdef bint same_spline(const SplineModel* one, const SplineModel* other) noexcept nogil:
    return (
        one.exists == other.exists
        and memcmp(&one.intercept, &other.intercept, sizeof(double)) == 0
        and memcmp(one.slope, other.slope, sizeof(one.slope)) == 0
        and memcmp(&one.sse, &other.sse, sizeof(double)) == 0
    )


cdef described(const SplineModel* model):
    return {
        "exists": bool(model.exists),
        "intercept_ms": model.intercept,
        "slope_ms": [model.slope[j] for j in range(NNLS_TERMS)],
        "sse": model.sse,
    }
