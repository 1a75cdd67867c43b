# Linear regression on bucketed samples (regression-and-learned.md section 1). Each store keeps sufficient
# statistics of its retained rows, so that a refit costs the same whatever their number; whenever rounding could
# decide between two answers it falls back to a batch fit of the rows themselves. The order of every sum is part
# of the contract: it decides faces and active sets on nearly collinear data.

from libc.math cimport INFINITY, NAN, fabs, isfinite, isnan, log1p, sqrt
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memcmp, memcpy, memmove, memset

cimport numpy as cnp

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport (
    FAULT_NONE, KIND_CONTAINS_LOCALLY_MIXED, KIND_CROSS_RANK_AGGREGATED, KIND_IDLE, KIND_PURE_DECODE,
    KIND_PURE_PREFILL, MAX_AXES, NUM_KINDS, check_role, make_feature_spec, project, workload_kind,
)
from fpmsdk._ext.sampler cimport BucketSampler

import numpy as np

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.sampler import check_saved_rows, saved_rows, wrong_state

cnp.import_array()

cdef enum:
    COUNT = 0             # rows in the statistics
    MUTATIONS             # additions and removals since the last rebuild
    DAMAGED               # a removal cancelled too many digits
    ACCEPTED_ROWS         # rows ever accepted
    AGE                   # rows accepted since the last successful fit
    NUM_ERRORS            # verdicts in `errors`
    NUM_BAD_ERRORS
    NUM_CLOCKS

CLOCK_FIELDS = (
    "count", "mutations", "damaged", "accepted_rows", "age", "num_errors", "num_bad_errors",
)

cdef enum:
    FITTED                # use the candidate
    ALL_ZERO              # identifiable, but no axis explains anything
    UNFIT                 # too few rows, no axis that varies, or no solution
    AMBIGUOUS             # the statistics cannot decide; ask the rows

cdef enum:
    LINEAR_SYSTEM = 7     # intercept and up to six slopes

cdef double EPSILON = 2.220446049250313e-16


cdef bint solve(double* matrix, double* rhs, int size) noexcept nogil:
    # Gauss-Jordan with partial pivoting, in place; false when singular.
    cdef int column, row, pivot, k
    cdef double largest, factor, swap
    for column in range(size):
        pivot = column
        largest = -1.0
        for row in range(column, size):
            if fabs(matrix[row * LINEAR_SYSTEM + column]) >= largest:  # the last one wins ties
                largest = fabs(matrix[row * LINEAR_SYSTEM + column])
                pivot = row
        if not largest >= 1e-12:
            return False
        if pivot != column:
            for k in range(size):
                swap = matrix[pivot * LINEAR_SYSTEM + k]
                matrix[pivot * LINEAR_SYSTEM + k] = matrix[column * LINEAR_SYSTEM + k]
                matrix[column * LINEAR_SYSTEM + k] = swap
            swap = rhs[pivot]
            rhs[pivot] = rhs[column]
            rhs[column] = swap
        factor = matrix[column * LINEAR_SYSTEM + column]
        for k in range(column, size):
            matrix[column * LINEAR_SYSTEM + k] /= factor
        rhs[column] /= factor
        for row in range(size):
            factor = matrix[row * LINEAR_SYSTEM + column]
            if row == column or factor == 0.0:
                continue
            for k in range(column, size):
                matrix[row * LINEAR_SYSTEM + k] -= factor * matrix[column * LINEAR_SYSTEM + k]
            rhs[row] -= factor * rhs[column]
    return True


cdef bint solve_or_ridge(
    const double* matrix, const double* rhs, int size, double ridge_scale, double* solution
) noexcept nogil:
    # Solve; when singular, once more with a ridge on every diagonal but the intercept's.
    cdef double work[LINEAR_SYSTEM * LINEAR_SYSTEM]
    cdef double trace = 0.0, ridge
    cdef int k
    memcpy(work, matrix, sizeof(work))
    memcpy(solution, rhs, size * sizeof(double))
    if solve(work, solution, size):
        return True
    for k in range(size):
        trace += fabs(matrix[k * LINEAR_SYSTEM + k])
    ridge = ridge_scale * max(trace, 1.0)
    memcpy(work, matrix, sizeof(work))
    memcpy(solution, rhs, size * sizeof(double))
    for k in range(1, size):
        work[k * LINEAR_SYSTEM + k] += ridge
    return solve(work, solution, size)


cdef bint all_finite(const double* values, int size) noexcept nogil:
    cdef int k
    for k in range(size):
        if not isfinite(values[k]):
            return False
    return True


cdef double predict(const LinearFit* fit, const double* features, int num_axes) noexcept nogil:
    # Raw prediction in ms, without the floor; NaN when there is no usable fit.
    cdef double slopes = 0.0
    cdef int a
    if not fit.ready:
        return NAN
    for a in range(num_axes):
        if fit.active >> a & 1:
            slopes += fit.slope[a] * ((features[a] - fit.mean[a]) / fit.scale[a])
    return fit.intercept + slopes


cdef class LinearStore:
    """One workload's samples, statistics and fit, over arrays described by `layout`."""

    def __init__(self, layout, settings, tuple sampling_axes, tuple bins, max_observations):
        cdef int i
        self.layout = layout
        self.settings.num_axes = settings["num_axes"]
        self.settings.min_observations = min(settings["min_observations"], INT64_MAX)
        self.settings.singular_ridge_scale = settings["singular_ridge_scale"]
        self.settings.rebuild_interval = min(settings["rebuild_interval"] or 0, INT64_MAX)
        self.settings.non_negative = settings["non_negative"]
        policy = settings["update_policy"]
        self.settings.on_error = policy["kind"] == "error_threshold"
        if self.settings.on_error:
            self.settings.relative_tolerance = policy["relative_tolerance"]
            self.settings.absolute_tolerance_ms = policy["absolute_tolerance_ms"]
            self.settings.window = min(policy["window"], INT64_MAX)
            self.settings.trigger = min(policy["trigger"], INT64_MAX)
            self.settings.cooldown = min(policy["cooldown"], INT64_MAX)
            self.settings.startup_observations = min(policy["startup_observations"], INT64_MAX)
        self.sampler = BucketSampler(bins, max_observations, False)
        self.num_sampling_axes = len(sampling_axes)
        for i in range(self.num_sampling_axes):
            self.sampling_axis[i] = sampling_axes[i]
        rows = min(max_observations, 63) + 1
        self.arrays = layout.allocate(
            rows=rows, buckets=rows, axes=self.settings.num_axes, sampling_axes=self.num_sampling_axes, errors=0,
        )
        self.arrays["axis_min"].fill(float("inf"))
        self.arrays["axis_max"].fill(float("-inf"))
        self.bind()

    cdef int bind(self) except -1:
        self.sampler.bind(self.arrays)
        self.row_capacity = len(self.arrays["order"])
        self.error_capacity = len(self.arrays["errors"])
        self.features = <double*>cnp.PyArray_DATA(self.arrays["features"])
        self.target_ms = <double*>cnp.PyArray_DATA(self.arrays["target_ms"])
        self.mean = <double*>cnp.PyArray_DATA(self.arrays["mean"])
        self.scatter = <double*>cnp.PyArray_DATA(self.arrays["scatter"])
        self.clock = <int64_t*>cnp.PyArray_DATA(self.arrays["clock"])
        self.errors = <uint8_t*>cnp.PyArray_DATA(self.arrays["errors"])
        self.fit_intercept_ms = <double*>cnp.PyArray_DATA(self.arrays["fit_intercept_ms"])
        self.fit_slope_ms = <double*>cnp.PyArray_DATA(self.arrays["fit_slope_ms"])
        self.fit_mean = <double*>cnp.PyArray_DATA(self.arrays["fit_mean"])
        self.fit_scale = <double*>cnp.PyArray_DATA(self.arrays["fit_scale"])
        self.fit_flags = <int64_t*>cnp.PyArray_DATA(self.arrays["fit_flags"])
        return 0

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        # One row more than the store may keep, because an insert precedes the eviction.
        cdef int64_t limit = self.sampler.max_observations
        cdef int64_t rows = min(self.sampler.total() + num_observations, limit) + 1
        cdef int64_t errors = min(self.clock[NUM_ERRORS] + num_observations, self.settings.window)
        if rows <= self.row_capacity and errors <= self.error_capacity:
            return 0
        # Doubling keeps one-by-one tuning from copying the store at every call.
        if rows > self.row_capacity:
            rows = max(rows, min(2 * self.row_capacity, limit + 1))
        if errors > self.error_capacity:
            errors = max(errors, min(2 * self.error_capacity, self.settings.window))
        self.arrays = self.layout.grow(self.arrays, rows=rows, buckets=rows, errors=errors)
        self.bind()
        return 0

    def saved(self):
        """What a snapshot holds: the arrays, exactly as long as what they hold, rows in bucket order.

        The next observation changes it: encode it before.
        """
        return self.arrays | saved_rows(self.arrays, "features", "target_ms") | {
            "errors": self.arrays["errors"][: self.clock[NUM_ERRORS]],
        }

    def restore(self, dict saved):
        """Take over saved arrays of the declared types; they belong to the store from then on.

        Raises
        ------
        StateSnapshotError: they are not what tuning under these settings leaves behind; the store is unusable then.
        """
        cdef int axes = self.settings.num_axes
        total = check_saved_rows(saved, self.num_sampling_axes, self.sampler.max_observations)
        for field, shape in {"mean": (axes + 1,), "features": (total, axes), "target_ms": (total,)}.items():
            if saved[field].shape != shape:
                raise wrong_state(field, f"shape {shape}", saved[field].shape)
        num_errors = len(saved["errors"])
        if num_errors != saved["clock"][NUM_ERRORS] or num_errors > self.settings.window:
            raise wrong_state(
                "errors", f"{saved['clock'][NUM_ERRORS]} verdicts, at most {self.settings.window}", num_errors
            )
        # Full arrays are grown before anything is added to them; empty ones would leave nothing to point at.
        self.arrays = saved if total else self.layout.grow(saved, rows=self.row_capacity, buckets=self.row_capacity)
        self.bind()
        self.sampler.check_restored()
        check_rows(self)
        check_clock(self)
        check_scatter(self)
        check_fit(self)

    cdef LinearFit fit(self) noexcept nogil:
        cdef LinearFit fit
        cdef int a, axes = self.settings.num_axes
        memset(&fit, 0, sizeof(LinearFit))
        fit.ready = self.fit_flags[0] != 0
        fit.active = <int>self.fit_flags[1]
        fit.intercept = self.fit_intercept_ms[0]
        for a in range(axes):
            fit.slope[a] = self.fit_slope_ms[a]
            fit.mean[a] = self.fit_mean[a]
            fit.scale[a] = self.fit_scale[a]
        return fit

    cdef void store_fit(self, const LinearFit* fit) noexcept nogil:
        cdef int a, axes = self.settings.num_axes
        self.fit_flags[0] = fit.ready
        self.fit_flags[1] = fit.active
        self.fit_intercept_ms[0] = fit.intercept
        for a in range(axes):
            self.fit_slope_ms[a] = fit.slope[a]
            self.fit_mean[a] = fit.mean[a]
            self.fit_scale[a] = fit.scale[a]

    # --- learning -------------------------------------------------------------------------------------------

    cdef void learn(self, const double* projected, double target_ms) noexcept nogil:
        cdef double coordinates[MAX_FIT_AXES]
        cdef int i, axes = self.settings.num_axes
        cdef int32_t slot, evicted
        cdef double prior_ms = NAN
        cdef LinearFit serving
        if self.settings.on_error:
            serving = self.fit()
            prior_ms = predict(&serving, projected, axes)
        for i in range(self.num_sampling_axes):
            coordinates[i] = log1p(projected[self.sampling_axis[i]])
        slot = self.sampler.insert(coordinates, &evicted)
        memcpy(&self.features[<int64_t>slot * axes], projected, axes * sizeof(double))
        self.target_ms[slot] = target_ms
        self.add(projected, target_ms)
        if evicted >= 0:
            self.remove(&self.features[<int64_t>evicted * axes], self.target_ms[evicted])
        self.clock[ACCEPTED_ROWS] += 1
        self.clock[AGE] += 1
        if self.settings.on_error and isfinite(prior_ms):
            self.judge_prior(prior_ms, target_ms)
        if not self.settings.on_error or self.fit_is_due(isfinite(prior_ms)):
            if self.refit() == FITTED:
                self.clock[AGE] = 0
                self.clock[NUM_ERRORS] = 0
                self.clock[NUM_BAD_ERRORS] = 0

    cdef void judge_prior(self, double prior_ms, double target_ms) noexcept nogil:
        cdef uint8_t bad = fabs(prior_ms - target_ms) > max(
            self.settings.absolute_tolerance_ms, self.settings.relative_tolerance * target_ms
        )
        if self.clock[NUM_ERRORS] == self.settings.window:
            self.clock[NUM_BAD_ERRORS] -= self.errors[0]
            memmove(self.errors, self.errors + 1, self.settings.window - 1)
            self.clock[NUM_ERRORS] -= 1
        self.errors[self.clock[NUM_ERRORS]] = bad
        self.clock[NUM_ERRORS] += 1
        self.clock[NUM_BAD_ERRORS] += bad

    cdef bint fit_is_due(self, bint has_prior) noexcept nogil:
        return (
            self.rebuild_required()
            or not self.fit_flags[0]
            or not has_prior
            or self.clock[ACCEPTED_ROWS] <= self.settings.startup_observations
            or (
                self.clock[NUM_BAD_ERRORS] >= self.settings.trigger
                and self.clock[AGE] >= self.settings.cooldown
            )
        )

    cdef int refit(self) noexcept nogil:
        cdef LinearFit best
        cdef int outcome = AMBIGUOUS
        if not self.rebuild_required():
            outcome = self.fit_statistics(&best)
        if outcome == AMBIGUOUS:
            self.rebuild_statistics()
            outcome = self.fit_rows(&best)
        if outcome == FITTED:
            self.store_fit(&best)
        elif outcome == UNFIT:
            memset(&best, 0, sizeof(LinearFit))
            self.store_fit(&best)
        return outcome  # ALL_ZERO keeps the fit that serves

    # --- sufficient statistics (section 1.3) ----------------------------------------------------------------

    cdef void add(self, const double* features, double target_ms) noexcept nogil:
        cdef int i, j, axes = self.settings.num_axes, size = axes + 1
        cdef double before[MAX_TERMS]
        cdef double after[MAX_TERMS]
        cdef double value, increment
        if self.clock[MUTATIONS] < INT64_MAX:
            self.clock[MUTATIONS] += 1
        self.clock[COUNT] += 1
        if self.clock[COUNT] == 1:
            for i in range(size):
                self.mean[i] = features[i] if i < axes else target_ms
            memset(self.scatter, 0, size * size * sizeof(double))
            return
        for i in range(size):
            value = features[i] if i < axes else target_ms
            before[i] = value - self.mean[i]
            self.mean[i] += before[i] / <double>self.clock[COUNT]
            after[i] = value - self.mean[i]
        for i in range(size):
            for j in range(i, size):
                if i == j:
                    increment = before[i] * after[i]
                else:
                    increment = 0.5 * before[i] * after[j] + 0.5 * before[j] * after[i]
                self.scatter[i * size + j] += increment
                self.scatter[j * size + i] = self.scatter[i * size + j]

    cdef void remove(self, const double* features, double target_ms) noexcept nogil:
        cdef int i, j, axes = self.settings.num_axes, size = axes + 1
        cdef double before[MAX_TERMS]
        cdef double after[MAX_TERMS]
        cdef double value, decrement, previous
        if self.clock[MUTATIONS] < INT64_MAX:
            self.clock[MUTATIONS] += 1
        self.clock[COUNT] -= 1
        if self.clock[COUNT] == 0:
            memset(self.mean, 0, size * sizeof(double))
            memset(self.scatter, 0, size * size * sizeof(double))
            return
        for i in range(size):
            value = features[i] if i < axes else target_ms
            before[i] = value - self.mean[i]
            self.mean[i] -= before[i] / <double>self.clock[COUNT]
            after[i] = value - self.mean[i]
        for i in range(size):
            for j in range(i, size):
                if i == j:
                    decrement = before[i] * after[i]
                else:
                    decrement = 0.5 * before[i] * after[j] + 0.5 * before[j] * after[i]
                previous = self.scatter[i * size + j]
                self.scatter[i * size + j] = previous - decrement
                self.scatter[j * size + i] = self.scatter[i * size + j]
                if i == j and (
                    self.scatter[i * size + i] < 0.0
                    or (previous > 0.0 and self.scatter[i * size + i] < previous * 1e-8)
                ):
                    self.clock[DAMAGED] = 1

    cdef bint rebuild_required(self) noexcept nogil:
        cdef int i, size = self.settings.num_axes + 1
        if self.clock[DAMAGED]:
            return True
        if not all_finite(self.mean, size) or not all_finite(self.scatter, size * size):
            return True
        for i in range(size):
            if self.scatter[i * size + i] < 0.0:
                return True
        return 0 < self.settings.rebuild_interval <= self.clock[MUTATIONS]

    cdef void rebuild_statistics(self) noexcept nogil:
        cdef int64_t i, slot, total = self.sampler.total()
        self.clock[COUNT] = 0
        self.clock[DAMAGED] = 0
        for i in range(total):
            slot = self.sampler.order[i]
            self.add(&self.features[slot * self.settings.num_axes], self.target_ms[slot])
        self.clock[MUTATIONS] = 0

    # --- fits -----------------------------------------------------------------------------------------------

    cdef int fit_statistics(self, LinearFit* best) noexcept nogil:
        # Section 1.4: the incremental fit.
        cdef int axes = self.settings.num_axes, size = axes + 1
        cdef double count = <double>self.clock[COUNT]
        cdef double mean_y = self.mean[axes], scatter_yy = self.scatter[axes * size + axes]
        cdef int active[MAX_FIT_AXES]
        cdef int members[LINEAR_SYSTEM]      # axis of each term of the face
        cdef double matrix[LINEAR_SYSTEM * LINEAR_SYSTEM]
        cdef double rhs[LINEAR_SYSTEM]
        cdef double solution[LINEAR_SYSTEM]
        cdef double sse[1 << MAX_FIT_AXES]
        cdef double tolerance[1 << MAX_FIT_AXES]
        cdef int num_active = 0, a, i, j, face, first_face, num_faces, best_face = -1, terms
        cdef double threshold, slope_tolerance, total, magnitude, term
        cdef bint infeasible
        if self.clock[COUNT] < self.settings.min_observations or self.clock[COUNT] == 0:
            return UNFIT
        memset(best, 0, sizeof(LinearFit))
        for a in range(axes):
            best.mean[a] = self.mean[a]
            best.scale[a] = sqrt(max(self.scatter[a * size + a] / count, 0.0))
            threshold = 1e-12 * max(fabs(self.mean[a]), 1.0)
            if 0.0 < best.scale[a] <= threshold * 1e4:
                return AMBIGUOUS
            if isfinite(best.scale[a]) and best.scale[a] > threshold:
                active[num_active] = a
                num_active += 1
                best.active |= 1 << a
        if num_active == 0:
            return UNFIT
        if not self.well_conditioned(best.scale, active, num_active):
            return AMBIGUOUS
        slope_tolerance = sqrt(scatter_yy / count) * 1e-10 + fabs(mean_y) * EPSILON * 32.0
        num_faces = 1 << num_active
        first_face = 0 if self.settings.non_negative else num_faces - 1
        for face in range(first_face, num_faces):
            sse[face] = NAN
            terms = 1
            memset(matrix, 0, sizeof(matrix))
            matrix[0] = count
            rhs[0] = count * mean_y
            for i in range(num_active):
                if face >> i & 1:
                    members[terms] = active[i]
                    terms += 1
            for i in range(1, terms):
                a = members[i]
                rhs[i] = self.scatter[a * size + axes] / best.scale[a]
                for j in range(1, terms):  # dividing by one scale after the other is not symmetric in its last bit
                    matrix[i * LINEAR_SYSTEM + j] = (
                        (self.scatter[a * size + members[j]] / best.scale[a]) / best.scale[members[j]]
                    )
            if not solve_or_ridge(matrix, rhs, terms, self.settings.singular_ridge_scale, solution):
                return AMBIGUOUS
            if not all_finite(solution, terms):
                return AMBIGUOUS
            infeasible = False
            for i in range(1, terms):
                if fabs(solution[i]) <= slope_tolerance:
                    return AMBIGUOUS
                infeasible |= solution[i] < 0.0
            if infeasible and self.settings.non_negative:
                continue
            total = scatter_yy
            magnitude = fabs(scatter_yy)
            for i in range(1, terms):
                term = 2.0 * solution[i] * rhs[i]
                total -= term
                magnitude += fabs(term)
            for i in range(1, terms):
                for j in range(1, terms):
                    term = solution[i] * matrix[i * LINEAR_SYSTEM + j] * solution[j]
                    total += term
                    magnitude += fabs(term)
            term = count * ((solution[0] - mean_y) * (solution[0] - mean_y))
            total += term
            magnitude += fabs(term)
            tolerance[face] = 1e-10 * max(magnitude, 1e-24)
            if not isfinite(total) or total < -tolerance[face]:
                return AMBIGUOUS
            sse[face] = total
            if best_face < 0 or total < sse[best_face]:
                best_face = face
                take_solution(best, solution, members, terms)
        if best_face < 0:
            return UNFIT
        for face in range(first_face, num_faces):
            if face == best_face or isnan(sse[face]):
                continue
            if fabs(sse[face] - sse[best_face]) <= tolerance[face] + tolerance[best_face]:
                return AMBIGUOUS
        return judge_candidate(best, num_active, self.clock[COUNT], self.settings.non_negative)

    cdef bint well_conditioned(self, const double* scale, const int* active, int num_active) noexcept nogil:
        # Section 1.4 step 5: correlations far enough from one, in every pair and all together.
        cdef int axes = self.settings.num_axes, size = axes + 1
        cdef double count = <double>self.clock[COUNT]
        cdef double correlation[MAX_FIT_AXES][MAX_FIT_AXES]
        cdef bint eliminated[MAX_FIT_AXES]
        cdef double rho, largest
        cdef int i, j, k, pivot
        for i in range(num_active):
            eliminated[i] = False
            for j in range(num_active):
                rho = (self.scatter[active[i] * size + active[j]] / scale[active[i]]) / scale[active[j]] / count
                correlation[i][j] = rho
                if i < j and (not isfinite(rho) or 1.0 - rho * rho <= 1e-8):
                    return False
        if num_active <= 2:
            return True
        for k in range(num_active):
            pivot = -1
            largest = 0.0
            for i in range(num_active):
                if not eliminated[i] and (pivot < 0 or correlation[i][i] >= largest):  # the last one wins ties
                    pivot = i
                    largest = correlation[i][i]
            if not largest > 1e-8:
                return False
            eliminated[pivot] = True
            for i in range(num_active):
                if eliminated[i]:
                    continue
                for j in range(num_active):
                    if eliminated[j]:
                        continue
                    correlation[i][j] -= correlation[i][pivot] * correlation[pivot][j] / largest
                    if not isfinite(correlation[i][j]):
                        return False
        return True

    cdef int fit_rows(self, LinearFit* best) noexcept nogil:
        # Section 1.5: the batch fit, row by row in sampler order.
        cdef int axes = self.settings.num_axes
        cdef int64_t n = self.sampler.total(), row, slot
        cdef const double* x
        cdef double* matrix
        cdef double normal[LINEAR_SYSTEM * LINEAR_SYSTEM]
        cdef double rhs[LINEAR_SYSTEM]
        cdef double solution[LINEAR_SYSTEM]
        cdef double terms_of_row[LINEAR_SYSTEM]
        cdef double m2[MAX_FIT_AXES]
        cdef int active[MAX_FIT_AXES]
        cdef int members[LINEAR_SYSTEM]
        cdef int num_active = 0, a, i, j, face, first_face, num_faces, terms
        cdef double difference, threshold, sse, slopes, residual, best_sse = INFINITY
        cdef bint infeasible
        if n < self.settings.min_observations or n == 0:
            return UNFIT
        memset(best, 0, sizeof(LinearFit))
        memset(m2, 0, sizeof(m2))
        for row in range(n):
            x = &self.features[<int64_t>self.sampler.order[row] * axes]
            for a in range(axes):
                difference = x[a] - best.mean[a]
                best.mean[a] += difference / <double>(row + 1)
                m2[a] += difference * (x[a] - best.mean[a])
        for a in range(axes):
            best.scale[a] = sqrt(m2[a] / <double>n)
            threshold = 1e-12 * max(fabs(best.mean[a]), 1.0)
            if isfinite(best.scale[a]) and best.scale[a] > threshold:
                active[num_active] = a
                num_active += 1
                best.active |= 1 << a
        if num_active == 0:
            return UNFIT
        num_faces = 1 << num_active
        first_face = 0 if self.settings.non_negative else num_faces - 1
        for face in range(first_face, num_faces):
            terms = 1
            for i in range(num_active):
                if face >> i & 1:
                    members[terms] = active[i]
                    terms += 1
            memset(normal, 0, sizeof(normal))
            memset(rhs, 0, sizeof(rhs))
            terms_of_row[0] = 1.0
            for row in range(n):
                slot = self.sampler.order[row]
                x = &self.features[slot * axes]
                for i in range(1, terms):
                    a = members[i]
                    terms_of_row[i] = (x[a] - best.mean[a]) / best.scale[a]
                if not all_finite(terms_of_row, terms):
                    return UNFIT
                for i in range(terms):
                    for j in range(terms):
                        normal[i * LINEAR_SYSTEM + j] += terms_of_row[i] * terms_of_row[j]
                    rhs[i] += terms_of_row[i] * self.target_ms[slot]
            if not solve_or_ridge(normal, rhs, terms, self.settings.singular_ridge_scale, solution):
                continue
            if not all_finite(solution, terms):
                continue
            infeasible = False
            for i in range(1, terms):
                infeasible |= solution[i] < 0.0
            if infeasible and self.settings.non_negative:
                continue
            sse = 0.0
            for row in range(n):
                slot = self.sampler.order[row]
                x = &self.features[slot * axes]
                slopes = 0.0
                for i in range(1, terms):
                    a = members[i]
                    slopes += solution[i] * ((x[a] - best.mean[a]) / best.scale[a])
                residual = (solution[0] + slopes) - self.target_ms[slot]
                sse += residual * residual
            if sse < best_sse:
                best_sse = sse
                take_solution(best, solution, members, terms)
        if best_sse == INFINITY:
            return UNFIT
        return judge_candidate(best, num_active, n, self.settings.non_negative)


# --- restored state (regression-and-learned.md section 6) -----------------------------------------------------


# Beyond so many rows, recomputing a logarithm for each would take longer than reading them does.
cdef int64_t MOST_RECOMPUTED_ROWS = 1 << 16


cdef int check_rows(LinearStore store) except -1:
    cdef int64_t row, total = store.sampler.total()
    cdef int i, axes = store.settings.num_axes
    cdef double expected, found
    for row in range(total):
        if not store.target_ms[row] > 0.0:
            raise wrong_state(f"target_ms[{row}]", "above 0", store.target_ms[row])
    if total > MOST_RECOMPUTED_ROWS:
        return 0
    # Retention coordinates follow from features where the fit has that axis.
    for row in range(total):
        for i in range(store.num_sampling_axes):
            if store.sampling_axis[i] < axes:
                expected = log1p(store.features[row * axes + store.sampling_axis[i]])
                found = store.sampler.coordinates[row * store.num_sampling_axes + i]
                if expected != found:
                    raise wrong_state(f"coordinates[{row}, {i}]", f"{expected!r}, recomputed", repr(found))
    return 0


# Further counting has to stay far from where numbers wrap.
cdef int64_t MOST_OBSERVATIONS = 1 << 62


cdef int check_clock(LinearStore store) except -1:
    cdef int64_t* clock = store.clock
    cdef int64_t total = store.sampler.total(), bad = 0, i
    cdef bint at_rest = clock[DAMAGED] == 0 and not 0 < store.settings.rebuild_interval <= clock[MUTATIONS]
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


cdef int check_scatter(LinearStore store) except -1:
    cdef int size = store.settings.num_axes + 1, i, j
    for i in range(size):
        for j in range(i):
            if memcmp(&store.scatter[i * size + j], &store.scatter[j * size + i], sizeof(double)):
                raise wrong_state(
                    f"scatter[{i}, {j}]", f"{store.scatter[j * size + i]!r}, as scatter[{j}, {i}]",
                    repr(store.scatter[i * size + j]),
                )
    return 0


cdef int check_rebuilt(LinearStore store) except -1:
    # Without a mutation since, statistics are those of the rows in their order.
    cdef int size = store.settings.num_axes + 1
    saved = {name: store.arrays[name].copy() for name in ("mean", "scatter")}
    store.rebuild_statistics()
    for name, array in saved.items():
        if array.tobytes() != store.arrays[name].tobytes():
            raise wrong_state(name, f"{store.arrays[name].tolist()}, recomputed", array.tolist())
    return 0


cdef int check_fit(LinearStore store) except -1:
    # The fit that serves is that of the statistics, or an older one where those say nothing.
    cdef LinearFit kept = store.fit(), best, blank
    cdef int64_t accepted = store.clock[ACCEPTED_ROWS], age = store.clock[AGE]
    cdef int axes = store.settings.num_axes, outcome = UNFIT, a
    memset(&blank, 0, sizeof(LinearFit))
    if store.fit_flags[0] > 1:
        raise wrong_state("fit_flags[0]", "0 or 1", store.fit_flags[0])
    if store.fit_flags[1] >= 1 << axes:
        raise wrong_state("fit_flags[1]", f"bits of {axes} axes", store.fit_flags[1])
    for a in range(axes):
        if kept.active >> a & 1 and not kept.scale[a] > 0.0:
            raise wrong_state(f"fit_scale[{a}]", "above 0 on an active axis", kept.scale[a])
    if accepted == 0:
        best = blank
        if store.clock[MUTATIONS] != 0:
            raise wrong_state("clock (mutations)", "0 without observations", store.clock[MUTATIONS])
        check_rebuilt_empty(store)
    elif store.settings.on_error and age > 0:
        return 0  # made of rows that may have left
    else:
        if store.clock[MUTATIONS] == 0:
            check_rebuilt(store)
            outcome = store.fit_rows(&best)
        else:
            outcome = store.fit_statistics(&best)
            if outcome == AMBIGUOUS:
                raise wrong_state("clock (mutations)", "0, as the statistics need a rebuild", store.clock[MUTATIONS])
        if (outcome == FITTED) != (age == 0):
            raise wrong_state("clock (age)", "0" if outcome == FITTED else "above 0 without a fit", age)
        if outcome == ALL_ZERO:
            return 0
        if outcome == UNFIT:
            best = blank
    if not same_fit(&kept, &best, axes):
        raise wrong_state("fit", f"{described_fit(&best, axes)}, recomputed", described_fit(&kept, axes))
    return 0


cdef int check_rebuilt_empty(LinearStore store) except -1:
    for name in ("mean", "scatter"):
        if store.arrays[name].tobytes().strip(b"\0"):
            raise wrong_state(name, "zeros without observations", store.arrays[name].tolist())
    return 0


cdef bint same_fit(const LinearFit* one, const LinearFit* other, int axes) noexcept nogil:
    return (
        one.ready == other.ready
        and one.active == other.active
        and memcmp(&one.intercept, &other.intercept, sizeof(double)) == 0
        and memcmp(one.slope, other.slope, axes * sizeof(double)) == 0
        and memcmp(one.mean, other.mean, axes * sizeof(double)) == 0
        and memcmp(one.scale, other.scale, axes * sizeof(double)) == 0
    )


cdef described_fit(const LinearFit* fit, int axes):
    return {
        "ready": bool(fit.ready),
        "active": fit.active,
        "intercept_ms": fit.intercept,
        "slope_ms": [fit.slope[a] for a in range(axes)],
        "mean": [fit.mean[a] for a in range(axes)],
        "scale": [fit.scale[a] for a in range(axes)],
    }


cdef void take_solution(LinearFit* fit, const double* solution, const int* members, int terms) noexcept nogil:
    cdef int i
    memset(fit.slope, 0, sizeof(fit.slope))
    fit.ready = True
    fit.intercept = solution[0]
    for i in range(1, terms):
        fit.slope[members[i]] = solution[i]


cdef int judge_candidate(const LinearFit* fit, int num_active, int64_t count, bint non_negative) noexcept nogil:
    # Section 1.4 step 10: an underdetermined fit is taken as it is, otherwise some axis has to matter.
    cdef int a
    if count <= num_active:
        return FITTED
    for a in range(MAX_FIT_AXES):
        if fit.slope[a] > 0.0 or (not non_negative and fit.slope[a] != 0.0):
            return FITTED
    return ALL_ZERO


cdef class LinearView(ServingView):
    """The published fits of a linear regression."""

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
        raw_ms = predict(&self.fits[kind], features, self.spec.num_axes)
        latency_ms[0] = max(raw_ms, 1e-6) if isfinite(raw_ms) else NAN
        return FAULT_NONE

    def stores(self):
        """(workload kind, ready, retained observations) of every store of the worker type, in order."""
        return [
            (WORKLOAD_KINDS[kind], bool(self.fits[kind].ready), self.totals[kind])
            for kind in range(NUM_KINDS) if self.totals[kind] >= 0
        ]


cdef class LinearRegression(Estimator):
    """One linear store per workload kind of the worker type."""

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
        pairs = zip(
            WORKLOAD_KINDS,
            (self.pure_decode, self.contains_locally_mixed, self.cross_rank_aggregated, self.pure_prefill),
        )
        return {kind: store for kind, store in pairs if store is not None}

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
        self.has_learned[kind] = True
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
        cdef LinearView view = LinearView.__new__(LinearView)
        cdef LinearView before = <LinearView>self.serving
        cdef LinearStore store
        cdef int kind
        view.spec = self.fit_spec
        if before is not None:  # one iteration a call is common, and it changes one store
            view.fits = before.fits
            view.totals = before.totals
        for kind in range(NUM_KINDS):
            if before is None or self.has_learned[kind]:
                self.has_learned[kind] = False
                store = self.store_of(kind)
                if store is None:
                    view.totals[kind] = -1
                else:
                    view.fits[kind] = store.fit()
                    view.totals[kind] = store.sampler.total()
            if view.totals[kind] >= 0:
                view.ready |= view.fits[kind].ready
                view.retained_observations += view.totals[kind]
        self.serving = view
        return 0

    cdef LinearStore store_of(self, int kind):
        if kind == KIND_PURE_DECODE:
            return self.pure_decode
        if kind == KIND_CONTAINS_LOCALLY_MIXED:
            return self.contains_locally_mixed
        if kind == KIND_CROSS_RANK_AGGREGATED:
            return self.cross_rank_aggregated
        return self.pure_prefill
