"""The learning forest of one store: rows of the past, trees over them, and the two ways in which a batch moves them."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from fpmsdk._ext.online_split cimport Cell, RecentRows, Split, SplitSearch, Totals


cdef struct Node:
    int32_t left, right              # slots of the tree; -1: a leaf
    int32_t feature, bin             # codes up to `bin` go left
    int32_t missing_left
    int32_t budget                   # leaves that a rebuild at this node may grow
    int64_t generation               # rebuilds that this node has come through
    int64_t first, count             # its groups in the tree's order
    double value                     # of a leaf: what it adds
    double refreshed_value           # of a leaf: the value that stored derivatives of the past contain
    double history_gradient, history_rows
    double recent_gradient, recent_rows


# A node that a rebuild may still divide, or has made a leaf.
cdef struct Frontier:
    int32_t slot, depth
    int64_t recent_first, recent_count
    uint64_t path
    int32_t bank                     # its histogram among those kept, -1: none
    Split split


cdef class OnlineForest:
    cdef readonly SplitSearch search
    cdef list buffers                # arrays that own the memory below
    cdef readonly int64_t num_groups, num_trees, num_nodes, history_rows
    cdef int num_features
    cdef readonly double baseline
    cdef double learning_rate, l2
    cdef int64_t min_rows
    cdef int max_depth
    cdef int64_t first_mutable
    cdef double update_step
    cdef bint structural
    cdef double rank_tolerance
    cdef uint64_t seed, store
    # Rows of the past, grouped by equal codes.
    cdef const uint8_t* columns      # [column, group]
    cdef const uint8_t* row_codes    # the same, [group, column]
    cdef const double* group_rows
    cdef const double* group_sum
    # Trees: nodes of tree t are the slots from tree_start[t]; order[t] lists groups leaf by leaf.
    cdef const int64_t* tree_start
    cdef Node* nodes
    cdef Node* old_nodes
    cdef int32_t* order
    # Recent rows, in a ring of `capacity` slots.
    cdef int64_t capacity
    cdef const uint8_t* codes        # [slot, feature]
    cdef const double* targets       # [slot]
    cdef double* gradients           # [slot, tree], derivatives as stored
    cdef double* new_gradients       # the same, of a batch in the making
    # Working memory of a batch.
    cdef double* prefix              # [group]
    cdef Cell* derivatives           # [group]
    cdef Cell* pool                  # histograms: as many as a walk over the deepest tree needs
    cdef int64_t pool_size
    cdef Cell* bank                  # histograms of a growing subtree's leaves
    cdef int64_t bank_size
    cdef int32_t* needs              # [slot of a tree] histograms that its subtree needs
    cdef uint8_t* verdicts           # [slot of a tree] 1: rebuild here
    cdef Split* fresh                # [slot of a tree] what a rebuild there would begin with
    cdef uint8_t* used               # [slot of a tree]
    cdef int32_t* swap               # [group]
    cdef uint64_t* marks             # a bit for each group
    cdef Frontier* frontier
    cdef int64_t* recent_first       # [slot of a tree] recent rows of a node in `recent_order`
    cdef int64_t* recent_count
    cdef list ring_buffers
    cdef double* recent_prefix       # [slot]
    cdef double* recent_derivative   # [slot] of the tree at hand
    cdef int32_t* recent_leaf        # [slot]
    cdef int32_t* recent_order
    cdef int32_t* recent_swap
    cdef Totals* totals              # [slot of a tree]
    cdef int64_t rebuilt             # nodes that the batch has made
    cdef RecentRows recent

    cdef void* hold(self, array) except NULL
    cdef int bind_ring(self, const uint8_t* codes, const double* targets, double* gradients, double* new_gradients,
                       int64_t capacity) except -1
    cdef void set_weights(self, double history_weight, double recent_weight) noexcept nogil
    cdef int32_t set_budgets(self, Node* nodes, int32_t slot) noexcept nogil
    cdef bint goes_left(self, const Node* node, int32_t code) noexcept nogil
    cdef int32_t leaf_of(self, int64_t tree, const uint8_t* codes) noexcept nogil
    cdef double predict(self, const uint8_t* codes) noexcept nogil
    cdef int64_t divide(self, const Node* node, int32_t* order, int64_t first, int64_t count) noexcept nogil
    cdef void route(self, int64_t tree, int32_t slot, int64_t first, int64_t count) noexcept nogil
    cdef void route_history(self) noexcept nogil
    cdef void begin_history(self) noexcept nogil
    cdef void derive_history(self) noexcept nogil
    cdef void sum_history(self, int64_t tree) noexcept nogil
    cdef void advance_history(self, int64_t tree) noexcept nogil
    cdef void refresh_history(self) noexcept nogil
    cdef void remember(self) noexcept nogil
    cdef void take_back(self, bint rows_moved) noexcept nogil
    cdef bint update_leaves(self, int64_t tree) noexcept nogil
    cdef void find_twins(self, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef bint lazy(self, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added,
                   const int32_t* evicted, int64_t num_evicted, bint* must_rebuild) noexcept nogil
    cdef int check_stored(
        self, int64_t tree, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added
    ) noexcept nogil
    cdef bint eager(self, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef void sum_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef void count_recent(self, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef void arrange_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef int64_t place_recent(self, const Node* nodes, int32_t slot, int64_t first) noexcept nogil
    cdef void fill_cells(self, const int32_t* order, int64_t first, int64_t count, Cell* cells) noexcept nogil
    cdef int32_t count_needs(self, const Node* nodes, int32_t slot) noexcept nogil
    cdef int walk(self, int64_t tree, int32_t slot, uint64_t path, int64_t place, bint stop) noexcept nogil
    cdef int walk_node(self, int64_t tree, int32_t slot, uint64_t path, int64_t place, bint stop) noexcept nogil
    cdef int check(
        self, int64_t tree, int32_t slot, uint64_t path, const Cell* cells, const Totals* totals
    ) noexcept nogil
    cdef void note_fresh(self, int64_t tree, int32_t slot, uint64_t path) noexcept nogil
    cdef bint repair_tree(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef bint repair(self, int64_t tree, int32_t slot, uint64_t path, int depth) noexcept nogil
    cdef void sort_groups(self, int32_t* groups, int64_t count) noexcept nogil
    cdef void mark_used(self, const Node* nodes, int32_t slot, int32_t cut) noexcept nogil
    cdef bint rebuild(self, int64_t tree, int32_t top, uint64_t path, int depth) noexcept nogil
    cdef bint seek_children(
        self, int64_t tree, const Frontier* parent, Frontier* children, bint banked, int64_t* num_banked
    ) noexcept nogil
    cdef bint seek(self, int64_t tree, Frontier* entry, const Cell* cells) noexcept nogil
    cdef void split_node(
        self, Node* nodes, int64_t tree, const Frontier* entry, int32_t* free_slot, int64_t generation
    ) noexcept nogil
    cdef int64_t number_nodes(self, const Node* nodes, int32_t slot, int64_t base, int64_t next_slot, int32_t* slots,
                              int32_t* left, int32_t* right) noexcept nogil
