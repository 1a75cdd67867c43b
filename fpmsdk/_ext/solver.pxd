"""Small dense linear systems, inlined where they are solved (regression-and-learned.md section 1.7)."""

from libc.math cimport fabs, isfinite
from libc.string cimport memcpy

cdef enum:
    LINEAR_SYSTEM = 7     # row length of every matrix: an intercept and up to six slopes


cdef inline bint solve(double* matrix, double* rhs, int size) noexcept nogil:
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


cdef inline bint solve_or_ridge(
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


cdef inline bint all_finite(const double* values, int size) noexcept nogil:
    cdef int k
    for k in range(size):
        if not isfinite(values[k]):
            return False
    return True
