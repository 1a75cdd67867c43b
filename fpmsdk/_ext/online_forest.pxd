"""The learning forest of one store: trees whose leaves and splits learn, over rows of the past and recent ones."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from fpmsdk._ext.online_split cimport Cell, RecentRows, Split, SplitSearch, Totals
from fpmsdk._ext.online_trees cimport Node, OnlineTrees


# What a node has that may be rebuilt.
cdef struct Growth:
    int64_t generation               # rebuilds that it has come through
    int64_t first, count             # its groups in the tree's order
    int32_t budget                   # leaves that a rebuild at it may grow; 0: the slot is out of use


# A node that a rebuild may still divide, or has made a leaf.
cdef struct Frontier:
    int32_t slot, depth
    int64_t recent_first, recent_count
    uint64_t path
    int32_t bank                     # its histogram among those kept, -1: none
    Split split


cdef class OnlineForest(OnlineTrees):
    cdef readonly SplitSearch search
    cdef int64_t min_rows
    cdef int max_depth
    cdef double rank_tolerance
    cdef uint64_t seed, store
    cdef const uint8_t* row_codes    # codes of the past, [group, column]
    cdef Growth* growth              # [node]
    cdef int32_t* order              # [tree, group] groups leaf by leaf
    # Working memory of a batch.
    cdef Node* old_nodes
    cdef Growth* old_growth
    cdef double* told                # [group] what the trees so far say
    cdef Cell* derivatives           # [group]
    cdef Cell* pool                  # histograms: of all nodes of a tree, or as many as a walk over the deepest needs
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
    cdef Totals* totals              # [slot of a tree]
    cdef RecentRows recent
    cdef bint moved                  # groups have been listed anew by the batch at hand

    cdef void clear_slot(self, int64_t start, int32_t slot) noexcept nogil
    cdef void make_leaf(self, int64_t start, int32_t slot) noexcept nogil
    cdef int32_t set_budgets(self, int64_t start, int32_t slot) noexcept nogil
    cdef int64_t divide(self, const Node* node, int32_t* order, int64_t first, int64_t count) noexcept nogil
    cdef void route(self, int64_t tree, int32_t slot, int64_t first, int64_t count) noexcept nogil
    cdef void route_history(self) noexcept nogil
    cdef void derive_history(self) noexcept nogil
    cdef void sum_leaves(self, int64_t tree) noexcept nogil
    cdef void arrange_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil
    cdef int64_t place_recent(self, const Node* nodes, int32_t slot, int64_t first) noexcept nogil
    cdef void fill_cells(self, const int32_t* order, int64_t first, int64_t count, Cell* cells) noexcept nogil
    cdef int32_t count_needs(self, const Node* nodes, int32_t slot) noexcept nogil
    cdef int walk(self, int64_t tree, bint stop) noexcept nogil
    cdef void sum_cells(self, int64_t tree, int32_t slot) noexcept nogil
    cdef void sum_totals(self, int64_t start, int32_t slot) noexcept nogil
    cdef int check_down(self, int64_t tree, int32_t slot, uint64_t path, bint stop) noexcept nogil
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
        self, int64_t tree, const Frontier* entry, int32_t* free_slot, int64_t generation
    ) noexcept nogil
