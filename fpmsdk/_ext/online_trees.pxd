"""Trees whose leaves learn: rows of the past as bin codes, recent rows, and what a batch moves."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef enum:
    MAX_DEPTH = 1024         # of a tree; walks are recursive


cdef enum WalkOutcome:
    WALK_FINE = 0
    WALK_NOT_FINITE
    WALK_MUST_REBUILD


cdef struct Node:
    int32_t left                     # slot of its tree; -1: a leaf
    int32_t right                    # slot of its tree; of a leaf: its place in `leaves`
    uint8_t feature, bin             # codes up to `bin` go left
    uint8_t missing_left


# Places that no leaf has are all zero.
cdef struct Leaf:
    double value                     # what it adds
    double refreshed_value           # the value that stored derivatives of the past contain
    double history_gradient, recent_gradient
    uint32_t history_rows, recent_rows


cdef inline bint goes_left(const Node* node, int32_t code, int32_t missing) noexcept nogil:
    # `missing`: the code of missing values of the node's feature.
    return node.missing_left if code == missing else code <= node.bin


cdef class OnlineTrees:
    cdef list buffers                # arrays that own the memory below
    cdef readonly int64_t num_groups, num_trees, num_nodes, num_leaves, history_rows
    cdef int num_features, num_columns
    cdef readonly double baseline
    cdef double learning_rate, l2
    cdef double update_step
    cdef int64_t first_mutable
    cdef bint structural
    cdef double history_weight, recent_weight
    cdef const int32_t* num_bins     # [feature] without the code of missing values, which follows them
    cdef const int32_t* column_of    # [feature] column of codes of the past
    # Rows of the past, grouped by equal codes.
    cdef const uint8_t* columns      # [column, group]
    cdef const uint32_t* group_rows
    cdef const double* group_sum
    # Trees: nodes of tree t are the slots from tree_start[t], its leaves those from leaf_start[t].
    cdef const int64_t* tree_start
    cdef const int64_t* leaf_start
    cdef Node* nodes
    cdef Leaf* leaves
    # Recent rows, in a ring of `capacity` slots.
    cdef int64_t capacity
    cdef const uint8_t* codes        # [slot, feature]
    cdef const double* targets       # [slot]
    cdef double* gradients           # [slot, tree], derivatives as stored
    cdef list ring_buffers
    cdef double* recent_prefix       # [slot]
    cdef double* recent_derivative   # [slot] of the tree at hand
    cdef int32_t* recent_slot        # [slot] where in the tree at hand
    cdef int32_t* recent_order
    cdef int32_t* recent_swap
    # Of the batch at hand.
    cdef Leaf* old_leaves
    cdef double* old_gradients
    cdef double* prefix              # [group] what the trees so far say
    cdef int32_t* reached            # [group] place of its leaf in the tree at hand
    cdef uint64_t* masks             # [column, code] leaves of the tree at hand that a row may still reach
    cdef int64_t rebuilt             # nodes that the batch has made

    cdef void* hold(self, array) except NULL
    cdef int read_nodes(self, dict given, tree_nodes) except -1
    cdef void number_leaves(self, int64_t tree, int32_t* places) noexcept nogil
    cdef int bind_ring(self, const uint8_t* codes, const double* targets, double* gradients, int64_t capacity) except -1
    cdef int begin(self, const int32_t* rows, int64_t num_rows) except -1
    cdef void set_weights(self, double history_weight, double recent_weight) noexcept nogil
    @cython.final
    cdef int32_t slot_of(self, int64_t tree, const uint8_t* codes) noexcept nogil
    @cython.final
    cdef Leaf* leaf_of(self, int64_t tree, const uint8_t* codes) noexcept nogil
    @cython.final
    cdef double predict(self, const uint8_t* codes) noexcept nogil
    # The past, tree by tree.
    cdef bint open_history(self) noexcept nogil
    cdef void close_history(self) noexcept nogil
    cdef void find_groups(self, int64_t tree) noexcept nogil
    @cython.final
    cdef uint64_t mask_codes(
        self, const Node* nodes, int32_t slot, int32_t* leaf_at, int32_t* num_leaves, int32_t* used, int* num_used
    ) noexcept nogil
    cdef void count_history(self, int64_t tree) noexcept nogil
    cdef void sum_history(self, int64_t tree) noexcept nogil
    cdef void advance_history(self, int64_t tree) noexcept nogil
    # A batch.
    cdef bint remember(self, bint with_gradients) noexcept nogil
    cdef void take_back(self) noexcept nogil
    cdef void forget(self) noexcept nogil
    @cython.final
    cdef bint update_leaves(self, int64_t tree) noexcept nogil
    cdef bint lazy(self, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added,
                   const int32_t* evicted, int64_t num_evicted, bint* must_rebuild) noexcept nogil
    cdef int run_lazy(self, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added,
                      const int32_t* evicted, int64_t num_evicted) noexcept nogil
    cdef bint eager(self, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef bint run_eager(self, const int32_t* rows, int64_t num_rows) noexcept nogil
    @cython.final
    cdef void find_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil
    @cython.final
    cdef void sum_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil
    # Structure, where it learns too.
    cdef void open_check(self, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef int check_stored(
        self, int64_t tree, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added
    ) noexcept nogil
    cdef bint repair_tree(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil
    # Nodes as arrays.
    cdef void read_growth(self, int64_t node, int32_t* budget, int64_t* generation) noexcept nogil
    cdef int64_t number_nodes(self, const Node* nodes, int32_t slot, int64_t base, int64_t next_slot, int32_t* slots,
                              int32_t* left, int32_t* right) noexcept nogil
