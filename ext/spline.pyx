# Spline fits over retained rows (regression-and-learned.md sections 2.1, 2.2 and 2.4). Every sum runs over rows in
# chronological order and belongs to one entry, so that entries of segments that did not move can be kept.

cimport cython
from libc.math cimport INFINITY, exp, isfinite, log, sqrt
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memset

from fpmsdk._ext.nnls cimport NNLS_TERMS, is_optimal, solve_nnls
from fpmsdk._ext.sampler cimport KeyedSlot

cdef enum:
    NUM_QUANTILES = 19
    NUM_GEOMETRIC = 17
    MAX_CANDIDATES = NUM_QUANTILES + NUM_GEOMETRIC


cdef int ascending(const void* left, const void* right) noexcept nogil:
    cdef double a = (<const double*>left)[0], b = (<const double*>right)[0]
    return (a > b) - (a < b)


cdef int by_sequence(const void* left, const void* right) noexcept nogil:
    cdef int64_t a = (<const KeyedSlot*>left).key, b = (<const KeyedSlot*>right).key
    return (a > b) - (a < b)


cdef int64_t sort_distinct(double* values, int64_t count) noexcept nogil:
    # Sort in place and keep each value once; returns how many there are.
    cdef int64_t i, kept = 0
    qsort(values, count, sizeof(double), ascending)
    for i in range(count):
        if kept == 0 or values[i] != values[kept - 1]:
            values[kept] = values[i]
            kept += 1
    return kept


cdef double quantile(const double* values, int64_t count, double q) noexcept nogil:
    # Linear between the two values around the position.
    cdef double position = <double>(count - 1) * q
    cdef int64_t low = <int64_t>position
    cdef int64_t high = low if <double>low == position else low + 1
    return values[low] + (values[high] - values[low]) * (position - <double>low)


cdef bint finish_model(
    SplineModel* model, const double* coefficient, const double* norm, const bint* active, const double* mean,
    double target_mean, int size
) noexcept nogil:
    # Slopes and intercept from coefficients of normalised terms; false unless all are finite and no slope is negative.
    cdef double explained = 0.0
    cdef int j
    memset(model.slope, 0, sizeof(model.slope))
    for j in range(size):
        if active[j]:
            model.slope[j] = coefficient[j] / norm[j]
        explained += model.slope[j] * mean[j]
        if not (isfinite(model.slope[j]) and model.slope[j] >= 0.0):
            return False
    model.intercept = target_mean - explained
    return isfinite(model.intercept)


@cython.final
cdef class SplineRows:
    """Rows in chronological order, and what fits of them at changing knots have in common."""

    def __dealloc__(self):
        free(self.points)
        free(self.chronology)

    cdef int reserve(self, int64_t rows) except -1:
        # One block: points, targets, terms, normalised terms and the distinct values of both axes.
        cdef size_t doubles = 2 + 1 + 2 * NNLS_TERMS + 2
        cdef double* block
        if rows <= self.capacity:
            return 0
        block = <double*>malloc(rows * doubles * sizeof(double))
        if block == NULL:
            raise MemoryError
        free(self.points)
        self.points = block
        self.capacity = 0
        free(self.chronology)
        self.chronology = <KeyedSlot*>malloc(rows * sizeof(KeyedSlot))
        if self.chronology == NULL:
            raise MemoryError
        self.capacity = rows
        self.target_ms = self.points + 2 * rows
        self.terms = self.target_ms + rows
        self.normalized = self.terms + NNLS_TERMS * rows
        self.values[0] = self.normalized + NNLS_TERMS * rows
        self.values[1] = self.values[0] + rows
        return 0

    cdef void take(
        self, int64_t count, const int32_t* slots, const int64_t* sequence, const double* features,
        const double* target_ms, const double* scale,
    ) noexcept nogil:
        cdef double n = <double>count
        cdef int64_t row, slot
        cdef bint constant = True
        cdef int axis
        for row in range(count):
            self.chronology[row].slot = slots[row]
            self.chronology[row].key = sequence[slots[row]]
        qsort(self.chronology, count, sizeof(KeyedSlot), by_sequence)
        for row in range(count):
            slot = self.chronology[row].slot
            self.target_ms[row] = target_ms[slot]
            for axis in range(SPLINE_AXES):
                self.points[2 * row + axis] = features[slot * SPLINE_AXES + axis] / scale[axis]
        self.count = count
        self.num_columns = 0
        memset(self.terms, 0, self.count * NNLS_TERMS * sizeof(double))
        memset(self.normalized, 0, self.count * NNLS_TERMS * sizeof(double))
        memset(self.gram, 0, sizeof(self.gram))
        memset(self.rhs, 0, sizeof(self.rhs))
        self.target_mean = 0.0
        for row in range(self.count):
            self.target_mean += self.target_ms[row] / n
            constant &= self.target_ms[row] == self.target_ms[0]
        if constant:
            self.target_mean = self.target_ms[0]

    cdef void set_column(self, int column, int axis, double low, double high) noexcept nogil:
        # Basis values of one segment, centred and normalised, and its products with every other column.
        cdef double n = <double>self.count
        cdef double value, mean = 0.0, squares = 0.0, norm
        cdef double products[NNLS_TERMS]
        cdef double explained = 0.0, own = 0.0
        cdef double* terms = self.terms + column
        cdef double* normalized = self.normalized + column
        cdef const double* row_of
        cdef int64_t row
        cdef bint constant = True
        cdef int j
        for row in range(self.count):
            value = segment(self.points[2 * row + axis], low, high)
            terms[row * NNLS_TERMS] = value
            mean += value / n
            constant &= value == terms[0]
        if constant:
            mean = terms[0]
        for row in range(self.count):
            value = terms[row * NNLS_TERMS] - mean
            normalized[row * NNLS_TERMS] = value
            squares += value * value
        norm = sqrt(squares)
        self.mean[column] = mean
        self.norm[column] = norm
        self.active[column] = norm > 1e-12 * sqrt(n)
        memset(products, 0, sizeof(products))
        for row in range(self.count):
            # Read the whole row before its new entry is written: a wide load right behind a narrow store waits.
            row_of = self.normalized + row * NNLS_TERMS
            value = row_of[column] / norm if self.active[column] else 0.0
            for j in range(NNLS_TERMS):
                products[j] += value * row_of[j]
            own += value * value
            explained += value * (self.target_ms[row] - self.target_mean)
            normalized[row * NNLS_TERMS] = value
        products[column] = own
        for j in range(NNLS_TERMS):
            self.gram[column * NNLS_TERMS + j] = products[j]
            self.gram[j * NNLS_TERMS + column] = products[j]
        self.rhs[column] = explained

    cdef void fit(self, const Knots* knots, SplineModel* model) noexcept nogil:
        """Non-negative least squares at fixed knots."""
        cdef int size = num_terms(knots), column = 0, axis, k, j
        cdef double low, high, residual
        cdef double coefficient[NNLS_TERMS]
        cdef int64_t row
        model.exists = False
        if self.count == 0:
            return
        for axis in range(SPLINE_AXES):
            low = 0.0
            for k in range(knots.count[axis] + 1):
                high = knots.at[axis][k] if k < knots.count[axis] else INFINITY
                if column >= self.num_columns or not (
                    self.axis_of[column] == axis and self.low[column] == low and self.high[column] == high
                ):
                    self.axis_of[column] = axis
                    self.low[column] = low
                    self.high[column] = high
                    self.set_column(column, axis, low, high)
                low = high
                column += 1
        self.num_columns = size
        if not isfinite(self.target_mean):
            return
        for column in range(size):
            if not isfinite(self.rhs[column]):
                return
            for j in range(size):
                if not isfinite(self.gram[column * NNLS_TERMS + j]):
                    return
        solve_nnls(self.gram, self.rhs, size, coefficient)
        if not is_optimal(self.gram, self.rhs, size, coefficient):
            return
        if not finish_model(model, coefficient, self.norm, self.active, self.mean, self.target_mean, size):
            return
        model.sse = 0.0
        for row in range(self.count):
            residual = spline_value(model, self.terms + row * NNLS_TERMS, size) - self.target_ms[row]
            model.sse += residual * residual
        model.exists = isfinite(model.sse)

    cdef void search(
        self, int knots_per_axis, const Knots* previous, Knots* knots, SplineModel* model
    ) noexcept nogil:
        cdef double candidates[SPLINE_AXES][MAX_CANDIDATES]
        cdef int num_candidates[SPLINE_AXES]
        cdef Knots moved
        cdef SplineModel trial
        cdef double left, right
        cdef int sweep, axis, k, i
        cdef int64_t row
        for axis in range(SPLINE_AXES):
            for row in range(self.count):
                self.values[axis][row] = self.points[2 * row + axis]
            self.num_values[axis] = sort_distinct(self.values[axis], self.count)
            start_knots(self.values[axis], self.num_values[axis], knots_per_axis, axis, knots)
            num_candidates[axis] = list_candidates(self.values[axis], self.num_values[axis], candidates[axis])
        self.fit(knots, model)
        if not model.exists:
            return
        if previous != NULL and (
            previous.count[0] == knots.count[0] and previous.count[1] == knots.count[1]
        ):
            self.fit(previous, &trial)
            if trial.exists and trial.sse < model.sse:
                knots[0] = previous[0]
                model[0] = trial
        for sweep in range(2):
            for axis in range(SPLINE_AXES):
                for k in range(knots.count[axis]):
                    left = knots.at[axis][k - 1] if k > 0 else 0.0
                    if k + 1 < knots.count[axis]:
                        right = knots.at[axis][k + 1]
                    else:
                        right = max(self.values[axis][self.num_values[axis] - 1], 0.0)
                    moved = knots[0]
                    for i in range(num_candidates[axis]):
                        moved.at[axis][k] = candidates[axis][i]
                        if not left + 1e-10 < moved.at[axis][k] < right - 1e-10:
                            continue
                        self.fit(&moved, &trial)
                        if trial.exists and trial.sse < model.sse - 1e-12:
                            knots.at[axis][k] = moved.at[axis][k]
                            model[0] = trial


cdef void start_knots(const double* values, int64_t count, int knots_per_axis, int axis, Knots* knots) noexcept nogil:
    # Evenly spaced quantiles of the distinct values.
    cdef int64_t wanted = min(<int64_t>knots_per_axis, count - 1), j
    cdef int kept = 0
    cdef double knot
    memset(knots.at[axis], 0, sizeof(knots.at[axis]))
    for j in range(1, wanted + 1):
        knot = quantile(values, count, <double>j / <double>(wanted + 1))
        if kept == 0 or knot != knots.at[axis][kept - 1]:
            knots.at[axis][kept] = knot
            kept += 1
    knots.count[axis] = kept


cdef int list_candidates(const double* values, int64_t count, double* candidates) noexcept nogil:
    # Where a knot may move to: quantiles of the distinct values and points in geometric progression.
    cdef int found = 0, j
    cdef int64_t i
    cdef double low, high
    for j in range(NUM_QUANTILES):
        candidates[found] = quantile(values, count, 0.05 + 0.05 * <double>j)
        found += 1
    for i in range(count):
        if values[i] > 0.0:
            low = log(max(values[i], 1e-8))
            high = log(values[count - 1])
            for j in range(1, NUM_GEOMETRIC + 1):
                candidates[found] = exp(low + (<double>j * (high - low)) / 18.0)
                found += 1
            break
    return <int>sort_distinct(candidates, found)
