# The linear model of a store (regression-and-learned.md section 1). It keeps sufficient statistics of its retained
# rows, so that a refit costs the same whatever their number; whenever rounding could decide between two answers it
# falls back to a batch fit of the rows themselves. The order of every sum is part of the contract: it decides faces and
# active sets on nearly collinear data.

cimport cython
from libc.math cimport INFINITY, NAN, fabs, isfinite, isnan, log1p, sqrt
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memcmp, memcpy, memset

cimport numpy as cnp

from fpmsdk._ext.sampler cimport BucketSampler
from fpmsdk._ext.solver cimport LINEAR_SYSTEM, all_finite, solve_or_ridge

from fpmsdk._ext.sampler import wrong_state

cnp.import_array()

cdef double EPSILON = 2.220446049250313e-16


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


@cython.final
cdef class LinearModel:
    """Retained rows, their sufficient statistics and the fit that serves, over arrays that the store owns."""

    def __cinit__(self, settings, tuple sampling_axes, tuple bins, max_observations):
        cdef int i
        self.num_axes = settings["num_axes"]
        self.min_observations = min(settings["min_observations"], INT64_MAX)
        self.singular_ridge_scale = settings["singular_ridge_scale"]
        self.rebuild_interval = min(settings["rebuild_interval"] or 0, INT64_MAX)
        self.non_negative = settings["non_negative"]
        self.sampler = BucketSampler(bins, max_observations, False)
        self.num_sampling_axes = len(sampling_axes)
        for i in range(self.num_sampling_axes):
            self.sampling_axis[i] = sampling_axes[i]

    cdef int bind(self, dict arrays) except -1:
        self.arrays = arrays
        self.sampler.bind(arrays)
        self.features = <double*>cnp.PyArray_DATA(arrays["features"])
        self.target_ms = <double*>cnp.PyArray_DATA(arrays["target_ms"])
        self.mean = <double*>cnp.PyArray_DATA(arrays["mean"])
        self.scatter = <double*>cnp.PyArray_DATA(arrays["scatter"])
        self.clock = <int64_t*>cnp.PyArray_DATA(arrays["clock"])
        self.fit_intercept_ms = <double*>cnp.PyArray_DATA(arrays["fit_intercept_ms"])
        self.fit_slope_ms = <double*>cnp.PyArray_DATA(arrays["fit_slope_ms"])
        self.fit_mean = <double*>cnp.PyArray_DATA(arrays["fit_mean"])
        self.fit_scale = <double*>cnp.PyArray_DATA(arrays["fit_scale"])
        self.fit_flags = <int64_t*>cnp.PyArray_DATA(arrays["fit_flags"])
        return 0

    cdef LinearFit fit(self) noexcept nogil:
        cdef LinearFit fit
        cdef int a, axes = self.num_axes
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
        cdef int a, axes = self.num_axes
        self.fit_flags[0] = fit.ready
        self.fit_flags[1] = fit.active
        self.fit_intercept_ms[0] = fit.intercept
        for a in range(axes):
            self.fit_slope_ms[a] = fit.slope[a]
            self.fit_mean[a] = fit.mean[a]
            self.fit_scale[a] = fit.scale[a]

    # --- learning -------------------------------------------------------------------------------------------

    cdef int32_t retain(self, const double* projected, double target_ms, int32_t* evicted) noexcept nogil:
        # Keep a row and take it into the statistics; what leaves for it is taken out of them. Returns the slot, as
        # `BucketSampler.insert`.
        cdef double coordinates[MAX_FIT_AXES]
        cdef int i, axes = self.num_axes
        cdef int32_t slot
        for i in range(self.num_sampling_axes):
            coordinates[i] = log1p(projected[self.sampling_axis[i]])
        slot = self.sampler.insert(coordinates, evicted)
        memcpy(&self.features[<int64_t>slot * axes], projected, axes * sizeof(double))
        self.target_ms[slot] = target_ms
        self.add(projected, target_ms)
        if evicted[0] >= 0:
            self.remove(&self.features[<int64_t>evicted[0] * axes], self.target_ms[evicted[0]])
        return slot

    cdef int refit(self, bint clears_all_zero) noexcept nogil:
        cdef LinearFit best
        cdef int outcome = AMBIGUOUS
        if not self.rebuild_required():
            outcome = self.fit_statistics(&best)
        if outcome == AMBIGUOUS:
            self.rebuild_statistics()
            outcome = self.fit_rows(&best)
        if outcome == FITTED:
            self.store_fit(&best)
        elif outcome == UNFIT or clears_all_zero:
            memset(&best, 0, sizeof(LinearFit))
            self.store_fit(&best)
        return outcome  # otherwise ALL_ZERO keeps the fit that serves

    # --- sufficient statistics (section 1.3) ----------------------------------------------------------------

    cdef void add(self, const double* features, double target_ms) noexcept nogil:
        cdef int i, j, axes = self.num_axes, size = axes + 1
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
        cdef int i, j, axes = self.num_axes, size = axes + 1
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
        cdef int i, size = self.num_axes + 1
        if self.clock[DAMAGED]:
            return True
        if not all_finite(self.mean, size) or not all_finite(self.scatter, size * size):
            return True
        for i in range(size):
            if self.scatter[i * size + i] < 0.0:
                return True
        return 0 < self.rebuild_interval <= self.clock[MUTATIONS]

    cdef void rebuild_statistics(self) noexcept nogil:
        cdef int64_t i, slot, total = self.sampler.total()
        self.clock[COUNT] = 0
        self.clock[DAMAGED] = 0
        for i in range(total):
            slot = self.sampler.order[i]
            self.add(&self.features[slot * self.num_axes], self.target_ms[slot])
        self.clock[MUTATIONS] = 0

    # --- fits -----------------------------------------------------------------------------------------------

    cdef int fit_statistics(self, LinearFit* best) noexcept nogil:
        # Section 1.4: the incremental fit.
        cdef int axes = self.num_axes, size = axes + 1
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
        if self.clock[COUNT] < self.min_observations or self.clock[COUNT] == 0:
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
        first_face = 0 if self.non_negative else num_faces - 1
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
            if not solve_or_ridge(matrix, rhs, terms, self.singular_ridge_scale, solution):
                return AMBIGUOUS
            if not all_finite(solution, terms):
                return AMBIGUOUS
            infeasible = False
            for i in range(1, terms):
                if fabs(solution[i]) <= slope_tolerance:
                    return AMBIGUOUS
                infeasible |= solution[i] < 0.0
            if infeasible and self.non_negative:
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
        return judge_candidate(best, num_active, self.clock[COUNT], self.non_negative)

    cdef bint well_conditioned(self, const double* scale, const int* active, int num_active) noexcept nogil:
        # Section 1.4 step 5: correlations far enough from one, in every pair and all together.
        cdef int axes = self.num_axes, size = axes + 1
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
        cdef int axes = self.num_axes
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
        if n < self.min_observations or n == 0:
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
        first_face = 0 if self.non_negative else num_faces - 1
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
            if not solve_or_ridge(normal, rhs, terms, self.singular_ridge_scale, solution):
                continue
            if not all_finite(solution, terms):
                continue
            infeasible = False
            for i in range(1, terms):
                infeasible |= solution[i] < 0.0
            if infeasible and self.non_negative:
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
        return judge_candidate(best, num_active, n, self.non_negative)


# --- restored state (regression-and-learned.md section 6) -----------------------------------------------------


# Beyond so many rows, recomputing a logarithm for each would take longer than reading them does.
cdef int64_t MOST_RECOMPUTED_ROWS = 1 << 16


cdef int check_rows(LinearModel model) except -1:
    cdef int64_t row, total = model.sampler.total()
    cdef int i, axes = model.num_axes
    cdef double expected, found
    for row in range(total):
        if not model.target_ms[row] > 0.0:
            raise wrong_state(f"target_ms[{row}]", "above 0", model.target_ms[row])
    if total > MOST_RECOMPUTED_ROWS:
        return 0
    # Retention coordinates follow from features where the fit has that axis.
    for row in range(total):
        for i in range(model.num_sampling_axes):
            if model.sampling_axis[i] < axes:
                expected = log1p(model.features[row * axes + model.sampling_axis[i]])
                found = model.sampler.coordinates[row * model.num_sampling_axes + i]
                if expected != found:
                    raise wrong_state(f"coordinates[{row}, {i}]", f"{expected!r}, recomputed", repr(found))
    return 0


cdef int check_scatter(LinearModel model) except -1:
    cdef int size = model.num_axes + 1, i, j
    for i in range(size):
        for j in range(i):
            if memcmp(&model.scatter[i * size + j], &model.scatter[j * size + i], sizeof(double)):
                raise wrong_state(
                    f"scatter[{i}, {j}]", f"{model.scatter[j * size + i]!r}, as scatter[{j}, {i}]",
                    repr(model.scatter[i * size + j]),
                )
    return 0


cdef int check_rebuilt(LinearModel model) except -1:
    # Without a mutation since, statistics are those of the rows in their order.
    cdef int size = model.num_axes + 1
    saved = {name: model.arrays[name].copy() for name in ("mean", "scatter")}
    model.rebuild_statistics()
    for name, array in saved.items():
        if array.tobytes() != model.arrays[name].tobytes():
            raise wrong_state(name, f"{model.arrays[name].tolist()}, recomputed", array.tolist())
    return 0


cdef int recomputed_fit(LinearModel model, LinearFit* best) except -1:
    # The fit that the statistics ask for and what became of it; without a mutation since their rebuild, that of the rows.
    if model.clock[MUTATIONS] == 0:
        check_rebuilt(model)
        return model.fit_rows(best)
    outcome = model.fit_statistics(best)
    if outcome == AMBIGUOUS:
        raise wrong_state("clock (mutations)", "0, as the statistics need a rebuild", model.clock[MUTATIONS])
    return outcome


cdef int check_fit_form(LinearModel model) except -1:
    cdef int axes = model.num_axes, a
    if model.fit_flags[0] > 1:
        raise wrong_state("fit_flags[0]", "0 or 1", model.fit_flags[0])
    if model.fit_flags[1] >= 1 << axes:
        raise wrong_state("fit_flags[1]", f"bits of {axes} axes", model.fit_flags[1])
    for a in range(axes):
        if model.fit_flags[1] >> a & 1 and not model.fit_scale[a] > 0.0:
            raise wrong_state(f"fit_scale[{a}]", "above 0 on an active axis", model.fit_scale[a])
    return 0


cdef int require_fit(LinearModel model, const LinearFit* expected) except -1:
    cdef LinearFit kept = model.fit()
    if not same_fit(&kept, expected, model.num_axes):
        raise wrong_state(
            "fit", f"{described_fit(expected, model.num_axes)}, recomputed", described_fit(&kept, model.num_axes)
        )
    return 0


cdef int check_empty_statistics(LinearModel model) except -1:
    for name in ("mean", "scatter"):
        if model.arrays[name].tobytes().strip(b"\0"):
            raise wrong_state(name, "zeros without observations", model.arrays[name].tolist())
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
