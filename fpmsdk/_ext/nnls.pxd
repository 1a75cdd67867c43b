"""Non-negative least squares on normal equations of up to eight terms."""

cdef enum:
    NNLS_TERMS = 8        # row length of every matrix

cdef void solve_nnls(const double* gram, const double* rhs, int size, double* x) noexcept nogil
cdef bint is_optimal(const double* gram, const double* rhs, int size, const double* x) noexcept nogil
cdef bint has_full_rank(const double* gram, const bint* active, int size) noexcept nogil
