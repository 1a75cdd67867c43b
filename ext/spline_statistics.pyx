# Recursive statistics of a spline whose knots stand still (regression-and-learned.md section 2.6): one row in and one
# out cost the same whatever the number of rows. Sums are compensated, because they live through many thousand rows.

cimport cython
from libc.math cimport fabs, isfinite, sqrt
from libc.stdint cimport INT64_MAX, int64_t
from libc.string cimport memset

cimport numpy as cnp

from fpmsdk._ext.nnls cimport NNLS_TERMS, has_full_rank, is_optimal, solve_nnls
from fpmsdk._ext.spline cimport SplineModel, SplineRows, finish_model

cnp.import_array()


cdef inline void accumulate(double* total, double* rest, double increment) noexcept nogil:
    cdef double adjusted = increment - rest[0]
    cdef double after = total[0] + adjusted
    rest[0] = (after - total[0]) - adjusted
    total[0] = after


@cython.final
cdef class SplineStatistics:

    def __cinit__(self, rebuild_interval):
        self.rebuild_interval = min(rebuild_interval or 0, INT64_MAX)

    cdef int bind(self, dict arrays, int64_t* clock) except -1:
        self.mean = <double*>cnp.PyArray_DATA(arrays["basis_mean"])
        self.mean_rest = <double*>cnp.PyArray_DATA(arrays["basis_mean_rest"])
        self.scatter = <double*>cnp.PyArray_DATA(arrays["basis_scatter"])
        self.scatter_rest = <double*>cnp.PyArray_DATA(arrays["basis_scatter_rest"])
        self.clock = clock
        return 0

    cdef void load(self, SplineRows rows) noexcept nogil:
        """Two passes over the rows, whose terms are those of the knots."""
        cdef int size = self.num_terms + 1, i, j
        cdef double n = <double>rows.count
        cdef double first[STATISTICS_SIZE]
        cdef double centred[STATISTICS_SIZE]
        cdef bint constant[STATISTICS_SIZE]
        cdef double value
        cdef int64_t row
        memset(self.mean, 0, STATISTICS_SIZE * sizeof(double))
        memset(self.mean_rest, 0, STATISTICS_SIZE * sizeof(double))
        memset(self.scatter, 0, STATISTICS_SIZE * STATISTICS_SIZE * sizeof(double))
        memset(self.scatter_rest, 0, STATISTICS_SIZE * STATISTICS_SIZE * sizeof(double))
        for i in range(size):
            first[i] = rows.terms[i] if i < self.num_terms else rows.target_ms[0]
            constant[i] = True
        for row in range(rows.count):
            for i in range(size):
                value = rows.terms[row * NNLS_TERMS + i] if i < self.num_terms else rows.target_ms[row]
                accumulate(&self.mean[i], &self.mean_rest[i], value / n)
                constant[i] &= value == first[i]
        for i in range(size):
            if constant[i]:
                self.mean[i] = first[i]
                self.mean_rest[i] = 0.0
        for row in range(rows.count):
            for i in range(size):
                value = rows.terms[row * NNLS_TERMS + i] if i < self.num_terms else rows.target_ms[row]
                centred[i] = value - self.mean[i]
            for i in range(size):
                for j in range(i, size):
                    accumulate(
                        &self.scatter[i * STATISTICS_SIZE + j], &self.scatter_rest[i * STATISTICS_SIZE + j],
                        centred[i] * centred[j],
                    )
        self.clock[BASIS_COUNT] = rows.count
        self.clock[BASIS_MUTATIONS] = 0
        self.clock[BASIS_DAMAGED] = 0

    cdef void add(self, const double* terms, double target_ms) noexcept nogil:
        # Never the first row: a load has at least as many as the smallest store keeps.
        self.clock[BASIS_COUNT] += 1
        self.change(terms, target_ms, 1.0)

    cdef void remove(self, const double* terms, double target_ms) noexcept nogil:
        # Never the last row: one was added just before.
        self.clock[BASIS_COUNT] -= 1
        self.change(terms, target_ms, -1.0)

    cdef void change(self, const double* terms, double target_ms, double sign) noexcept nogil:
        # A row comes (sign 1) or goes (sign -1); the count is that afterwards.
        cdef int size = self.num_terms + 1, i, j, entry
        cdef double count = <double>self.clock[BASIS_COUNT]
        cdef double before[STATISTICS_SIZE]
        cdef double after[STATISTICS_SIZE]
        cdef double value, increment, previous
        if self.clock[BASIS_MUTATIONS] < INT64_MAX:
            self.clock[BASIS_MUTATIONS] += 1
        for i in range(size):
            value = terms[i] if i < self.num_terms else target_ms
            before[i] = value - self.mean[i]
            accumulate(&self.mean[i], &self.mean_rest[i], sign * (before[i] / count))
            after[i] = value - self.mean[i]
        for i in range(size):
            for j in range(i, size):
                if i == j:
                    increment = before[i] * after[i]
                else:
                    increment = 0.5 * before[i] * after[j] + 0.5 * before[j] * after[i]
                entry = i * STATISTICS_SIZE + j
                previous = self.scatter[entry]
                accumulate(&self.scatter[entry], &self.scatter_rest[entry], sign * increment)
                if sign < 0.0 and i == j and (
                    self.scatter[entry] < 0.0 or (previous > 0.0 and self.scatter[entry] < previous * 1e-8)
                ):
                    self.clock[BASIS_DAMAGED] = 1

    cdef bint rebuild_required(self) noexcept nogil:
        cdef int size = self.num_terms + 1, i, j
        if self.clock[BASIS_DAMAGED] or 0 < self.rebuild_interval <= self.clock[BASIS_MUTATIONS]:
            return True
        for i in range(size):
            if not isfinite(self.mean[i]) or self.scatter[i * STATISTICS_SIZE + i] < 0.0:
                return True
            for j in range(i, size):
                if not isfinite(self.scatter[i * STATISTICS_SIZE + j]):
                    return True
        return False

    cdef bint fit(self, SplineModel* model) noexcept nogil:
        cdef int size = self.num_terms, i, j, y = self.num_terms
        cdef double count = <double>self.clock[BASIS_COUNT]
        cdef double norm[NNLS_TERMS]
        cdef bint active[NNLS_TERMS]
        cdef double gram[NNLS_TERMS * NNLS_TERMS]
        cdef double rhs[NNLS_TERMS]
        cdef double coefficient[NNLS_TERMS]
        cdef double spread, cross = 0.0, quadratic = 0.0, total
        memset(gram, 0, sizeof(gram))
        memset(rhs, 0, sizeof(rhs))
        for i in range(size):
            norm[i] = sqrt(self.scatter[i * STATISTICS_SIZE + i])
            active[i] = norm[i] > 1e-12 * sqrt(count)
            spread = norm[i] / sqrt(count)
            if 0.0 < spread <= 1e-8 * max(fabs(self.mean[i]), 1.0):
                return False
        for i in range(size):
            if not active[i]:
                continue
            rhs[i] = self.scatter[i * STATISTICS_SIZE + y] / norm[i]
            for j in range(size):  # dividing by one norm after the other is not symmetric in its last bit
                if active[j]:
                    total = self.scatter[min(i, j) * STATISTICS_SIZE + max(i, j)]
                    gram[i * NNLS_TERMS + j] = (total / norm[i]) / norm[j]
        if not has_full_rank(gram, active, size):
            return False
        solve_nnls(gram, rhs, size, coefficient)
        if not is_optimal(gram, rhs, size, coefficient):
            return False
        if not finish_model(model, coefficient, norm, active, self.mean, self.mean[y], size):
            return False
        for i in range(size):
            cross += coefficient[i] * rhs[i]
            for j in range(size):
                quadratic += coefficient[i] * gram[i * NNLS_TERMS + j] * coefficient[j]
        total = self.scatter[y * STATISTICS_SIZE + y]
        model.sse = total - 2.0 * cross + quadratic
        if not isfinite(model.sse) or model.sse < -1e-10 * max(1.0, fabs(total) + 2.0 * fabs(cross) + fabs(quadratic)):
            return False
        model.sse = max(model.sse, 0.0)
        model.exists = True
        return True
