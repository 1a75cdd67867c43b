"""Split search of the online learner: which (feature, bin) divides the rows of a node best, and how many divide better."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t


cdef enum:
    MAX_BINS = 256           # codes of a feature: up to 255 bins, and one for missing values after them


cdef enum SplitFault:
    SPLIT_FINE = 0
    SPLIT_NOT_FINITE = 1     # a gain is no number: the batch fails


cdef struct Cell:
    # Rows of one bin: sum of their derivatives, and how many they are.
    double gradient
    double rows


cdef struct Totals:
    double history_gradient, history_rows
    double recent_gradient, recent_rows


cdef struct Weighted:
    # A node as gains see it; `parent` is what is subtracted.
    double gradient, hessian, parent


cdef struct Split:
    int32_t feature          # -1: none
    int32_t bin              # codes up to this one go left
    bint missing_left
    double gain


cdef struct RecentRows:
    # The recent rows of a node: entries of `order` from `first`; each is a row of `codes` and an entry of `gradient`.
    const int32_t* order
    int64_t first, count
    const uint8_t* codes
    const double* gradient


cdef class SplitSearch:
    cdef readonly int num_features, num_columns
    cdef readonly int64_t num_cells, num_candidates
    cdef list buffers                # arrays that own the memory below
    cdef const int32_t* num_bins     # bins of each feature, missing values left out
    cdef const int32_t* column_of    # column of history codes of each feature
    cdef int64_t* cell_start         # first cell of each column; one more entry closes the last
    cdef int64_t* candidate_start    # first candidate of each feature; one more closes the last
    cdef int32_t* twin_of            # an earlier feature that divides every row alike, or the feature itself
    # Runs of candidates that divide alike, of each feature: those from first_run to last_run are legal.
    cdef double* gains               # [feature, run]
    cdef int32_t* run_bin            # [feature, run] first bin of each; one more closes the last
    cdef uint8_t* missing_goes_left  # [feature, run]
    cdef int64_t* first_run
    cdef int64_t* last_run
    cdef double* best_gain           # largest gain of each feature
    cdef double* gradient_left       # [run] of the feature at hand
    cdef double* hessian_left
    cdef double* rows_left
    cdef Cell* recent_cells
    cdef int half_bits               # of the bijection that shuffles candidates
    cdef uint64_t place_mask
    cdef double l2, min_rows, sampling_rate
    cdef int64_t num_drawn           # candidates of a node
    cdef double history_weight, recent_weight

    cdef void* own(self, length, dtype) except NULL
    cdef void find_twins(self, const RecentRows* recent) noexcept nogil
    cdef void weigh_node(self, const Totals* totals, Weighted* node) noexcept nogil
    cdef double gain_of_left(self, const Totals* left, const Totals* totals, const Weighted* node) noexcept nogil
    cdef const Cell* gather_recent(self, int feature, const RecentRows* recent) noexcept nogil
    cdef int evaluate(self, const Cell* cells, const RecentRows* recent, const Totals* totals) noexcept nogil
    cdef int scan(
        self, int feature, const Cell* cells, const Cell* recent, const Totals* totals, const Weighted* node
    ) noexcept nogil
    cdef int scan_missing(
        self, int feature, const Cell* cells, const Cell* recent, const Totals* totals, const Weighted* node
    ) noexcept nogil
    cdef int gain_of(
        self, const Split* split, const Cell* cells, const RecentRows* recent, const Totals* totals, double* gain
    ) noexcept nogil
    cdef int64_t place_of(self, uint64_t key, int64_t candidate) noexcept nogil
    cdef bint is_drawn(self, uint64_t key, int64_t candidate, int64_t kept) noexcept nogil
    cdef int32_t first_drawn(self, uint64_t key, int64_t start, int32_t first, int32_t end) noexcept nogil
    cdef bint best(self, uint64_t key, Split* found) noexcept nogil
    cdef int64_t better_than(self, const Split* incumbent, uint64_t key, double allowed) noexcept nogil


cdef uint64_t node_key(uint64_t seed, uint64_t store, uint64_t tree, uint64_t path, uint64_t generation) noexcept nogil
