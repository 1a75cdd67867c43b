# Active-set non-negative least squares (regression-and-learned.md section 2.3), and the tests that its result and its
# matrix have to pass. Ties and the order of sums are part of the contract.

from libc.math cimport fabs, isfinite
from libc.string cimport memcpy, memset


cdef double scaled_tolerance(const double* rhs, int size, double factor) noexcept nogil:
    cdef double largest = 1.0
    cdef int i
    for i in range(size):
        largest = max(largest, fabs(rhs[i]))
    return largest * factor


cdef double gradient(const double* gram, const double* rhs, int size, const double* x, int i) noexcept nogil:
    cdef double explained = 0.0
    cdef int j
    for j in range(size):
        explained += gram[i * NNLS_TERMS + j] * x[j]
    return rhs[i] - explained


cdef void solve_passive(const double* gram, const double* rhs, int size, int passive, double* z) noexcept nogil:
    # The unconstrained solution over the terms whose bit is set, zero elsewhere. A column without a pivot stays zero.
    cdef int members[NNLS_TERMS]
    cdef double matrix[NNLS_TERMS * NNLS_TERMS]
    cdef double right[NNLS_TERMS]
    cdef double solution[NNLS_TERMS]
    cdef bint solvable[NNLS_TERMS]
    cdef double largest, factor, swap, known
    cdef int count = 0, i, j, column, row, pivot
    for i in range(size):
        z[i] = 0.0
        if passive >> i & 1:
            members[count] = i
            count += 1
    for i in range(count):
        right[i] = rhs[members[i]]
        for j in range(count):
            matrix[i * NNLS_TERMS + j] = gram[members[i] * NNLS_TERMS + members[j]]
    for column in range(count):
        pivot = column
        largest = -1.0
        for row in range(column, count):
            if fabs(matrix[row * NNLS_TERMS + column]) >= largest:  # the last one wins ties
                largest = fabs(matrix[row * NNLS_TERMS + column])
                pivot = row
        solvable[column] = largest >= 1e-12
        if not solvable[column]:
            continue
        if pivot != column:
            for j in range(count):
                swap = matrix[pivot * NNLS_TERMS + j]
                matrix[pivot * NNLS_TERMS + j] = matrix[column * NNLS_TERMS + j]
                matrix[column * NNLS_TERMS + j] = swap
            swap = right[pivot]
            right[pivot] = right[column]
            right[column] = swap
        for row in range(column + 1, count):
            factor = matrix[row * NNLS_TERMS + column] / matrix[column * NNLS_TERMS + column]
            for j in range(column, count):
                matrix[row * NNLS_TERMS + j] -= factor * matrix[column * NNLS_TERMS + j]
            right[row] -= factor * right[column]
    for column in range(count - 1, -1, -1):
        solution[column] = 0.0
        if solvable[column]:
            known = 0.0
            for j in range(column + 1, count):
                known += matrix[column * NNLS_TERMS + j] * solution[j]
            solution[column] = (right[column] - known) / matrix[column * NNLS_TERMS + column]
        z[members[column]] = solution[column]


cdef bint descend(
    const double* gram, const double* rhs, int size, double tolerance, int* passive, double* x
) noexcept nogil:
    # Move to the solution over the passive terms, dropping those that would turn negative on the way.
    cdef double z[NNLS_TERMS]
    cdef double alpha, step
    cdef int attempt, i
    cdef bint feasible
    for attempt in range(4 * size + 8):
        solve_passive(gram, rhs, size, passive[0], z)
        feasible = True
        alpha = 1.0
        for i in range(size):
            if passive[0] >> i & 1 and not z[i] > 0.0:
                feasible = False
                step = x[i] / (x[i] - z[i]) if x[i] - z[i] > 0.0 else 0.0
                alpha = min(alpha, step)
        if feasible:
            memcpy(x, z, size * sizeof(double))
            return True
        for i in range(size):
            if passive[0] >> i & 1:
                x[i] += alpha * (z[i] - x[i])
                if x[i] <= tolerance * 1e-3:
                    x[i] = 0.0
                    passive[0] &= ~(1 << i)
    return False


cdef void solve_nnls(const double* gram, const double* rhs, int size, double* x) noexcept nogil:
    """Minimise x.G.x - 2 rhs.x over x >= 0."""
    cdef double tolerance = scaled_tolerance(rhs, size, 1e-12), largest, slope
    cdef int passive = 0, attempt, i, entering
    memset(x, 0, size * sizeof(double))
    for attempt in range(4 * size + 8):
        entering = -1
        largest = tolerance
        for i in range(size):
            if passive >> i & 1:
                continue
            slope = gradient(gram, rhs, size, x, i)
            if slope > largest:  # the first one wins ties
                largest = slope
                entering = i
        if entering < 0:
            return
        passive |= 1 << entering
        descend(gram, rhs, size, tolerance, &passive, x)
    solve_by_enumeration(gram, rhs, size, x)


cdef void solve_by_enumeration(const double* gram, const double* rhs, int size, double* x) noexcept nogil:
    # The active set went in circles: try every set of terms.
    cdef double z[NNLS_TERMS]
    cdef double best = 0.0, score, explained
    cdef int mask, i, j
    cdef bint usable
    memset(x, 0, size * sizeof(double))
    for mask in range(1, 1 << size):
        solve_passive(gram, rhs, size, mask, z)
        usable = True
        score = 0.0
        for i in range(size):
            usable &= isfinite(z[i]) and z[i] >= 0.0
            explained = 0.0
            for j in range(size):
                explained += gram[i * NNLS_TERMS + j] * z[j]
            score += z[i] * (explained - 2.0 * rhs[i])
        if usable and score < best:
            best = score
            memcpy(x, z, size * sizeof(double))


cdef bint is_optimal(const double* gram, const double* rhs, int size, const double* x) noexcept nogil:
    """Whether x is finite, non-negative and satisfies the conditions of Karush, Kuhn and Tucker."""
    cdef double tolerance = scaled_tolerance(rhs, size, 1e-8), slope
    cdef int i
    for i in range(size):
        slope = gradient(gram, rhs, size, x, i)
        if not (isfinite(x[i]) and x[i] >= 0.0 and slope <= tolerance):
            return False
        if x[i] > 0.0 and slope < -tolerance:
            return False
    return True


cdef bint has_full_rank(const double* gram, const bint* active, int size) noexcept nogil:
    """Whether pivoted elimination of the active terms finds no pivot below 1e-10."""
    cdef double rest[NNLS_TERMS][NNLS_TERMS]
    cdef bint left[NNLS_TERMS]
    cdef double largest
    cdef int i, j, k, pivot
    for i in range(size):
        left[i] = active[i]
        for j in range(size):
            rest[i][j] = gram[i * NNLS_TERMS + j]
    for k in range(size):
        pivot = -1
        largest = 0.0
        for i in range(size):
            if left[i] and (pivot < 0 or rest[i][i] >= largest):  # the last one wins ties
                pivot = i
                largest = rest[i][i]
        if pivot < 0:
            return True
        if not largest >= 1e-10:
            return False
        left[pivot] = False
        for i in range(size):
            if not left[i]:
                continue
            for j in range(size):
                if left[j]:
                    rest[i][j] -= rest[i][pivot] * rest[pivot][j] / largest
    return True
