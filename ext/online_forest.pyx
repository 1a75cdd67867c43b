# The learning forest of one store (regression-and-learned.md sections 4.5 and 4.6). Rows of the past are kept as bin
# codes, grouped where equal; each tree lists them leaf by leaf, so that the rows of every node are one range. A
# histogram is built from codes when a node is looked at and forgotten afterwards: leaves from their rows, inner nodes as
# the sum of their children. Derivatives of the past follow from the leaf values of the last full refresh, so only those
# values are kept. A batch changes nodes in place; a copy from before it is taken back when it fails.

from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

cimport cython
cimport numpy as cnp

from fpmsdk._ext.online_split cimport (
    MAX_BINS, SPLIT_FINE, Cell, RecentRows, Split, SplitSearch, Totals, node_key,
)

import numpy as np

from fpmsdk._ext.online_split import SplitSearch as _SplitSearch

cnp.import_array()

cdef extern from *:
    int __builtin_ctzll(unsigned long long) noexcept nogil

cdef enum:
    MAX_DEPTH = 1024         # of a tree; walks are recursive

cdef enum:
    WALK_FINE = 0
    WALK_NOT_FINITE
    WALK_MUST_REBUILD

# Histograms of a growing subtree are kept up to 8 MB.
cdef int64_t MOST_BANKED_CELLS = 1 << 19

DEPTH_LIMIT = MAX_DEPTH

# What a node is made of outside of a batch: arrays of equal length, tree after tree, each in preorder.
NODE_TYPES = {
    "left": np.int32, "right": np.int32, "feature": np.int32, "bin": np.int32, "missing_left": np.int32,
    "budget": np.int32, "generation": np.int64, "value": np.float64, "refreshed_value": np.float64,
    "recent_gradient": np.float64,
}


cdef void clear_node(Node* node) noexcept nogil:
    # A leaf without rows, which is what a slot out of use has to be.
    memset(node, 0, sizeof(Node))
    node.left = node.right = -1


@cython.final
cdef class OnlineForest:
    """Trees that learn, over grouped rows of the past and the recent rows of a store.

    Parameters
    ----------
    columns: uint8 [column, group], codes of the past; features with equal codes share a column.
    column_of: int32 [feature].
    num_bins: int32 [feature], without the code of missing values, which follows them.
    group_rows, group_sum: float64 [group], rows and their summed targets.
    tree_slots, tree_nodes: int64 [tree], nodes that each tree may have, and has.
    nodes: arrays of `NODE_TYPES` by name; children as slots of their tree, -1 for leaves. A budget of 0 at a root: that
        every node may have as many leaves as it has.
    controls: learning_rate, l2_regularization, min_samples_leaf, max_depth, baseline, update_step, update_mode,
        split_sampling_rate, split_rank_tolerance, mutable_tree_tail, seed, store.
    """

    def __init__(
        self, columns, column_of, num_bins, group_rows, group_sum, tree_slots, tree_nodes, dict nodes, dict controls
    ):
        cdef int64_t t, slot, widest = 1, start, entry = 0
        cdef Node* node
        self.search = _SplitSearch(
            num_bins, column_of, controls["l2_regularization"], controls["min_samples_leaf"],
            controls["split_sampling_rate"] if controls["update_mode"] == "structural" else 1.0,
        )
        self.num_features = self.search.num_features
        self.num_groups = len(group_rows)
        self.num_trees = len(tree_slots)
        tree_start = np.zeros(self.num_trees + 1, np.int64)
        np.cumsum(tree_slots, out=tree_start[1:])
        self.num_nodes = int(tree_start[self.num_trees])
        self.history_rows = int(sum(int(rows) for rows in group_rows))
        self.baseline = controls["baseline"]
        self.learning_rate = controls["learning_rate"]
        self.l2 = controls["l2_regularization"]
        self.min_rows = controls["min_samples_leaf"]
        self.max_depth = min(controls["max_depth"] or MAX_DEPTH, MAX_DEPTH)
        self.update_step = controls["update_step"]
        self.structural = controls["update_mode"] == "structural"
        self.rank_tolerance = controls["split_rank_tolerance"]
        self.seed = controls["seed"]
        self.store = controls["store"]
        tail = controls["mutable_tree_tail"]
        self.first_mutable = 0 if tail is None else max(0, self.num_trees - tail)
        self.buffers = []
        self.columns = <const uint8_t*>self.hold(np.ascontiguousarray(columns, np.uint8))
        self.row_codes = <const uint8_t*>self.hold(np.ascontiguousarray(np.asarray(columns, np.uint8).T))
        self.group_rows = <const double*>self.hold(np.ascontiguousarray(group_rows, np.float64))
        self.group_sum = <const double*>self.hold(np.ascontiguousarray(group_sum, np.float64))
        self.tree_start = <const int64_t*>self.hold(np.ascontiguousarray(tree_start, np.int64))
        self.nodes = <Node*>self.hold(np.zeros(self.num_nodes * sizeof(Node), np.uint8))
        self.old_nodes = <Node*>self.hold(np.zeros(self.num_nodes * sizeof(Node), np.uint8))
        self.order = <int32_t*>self.hold(np.zeros(self.num_trees * self.num_groups, np.int32))
        self.prefix = <double*>self.hold(np.zeros(self.num_groups))
        self.derivatives = <Cell*>self.hold(np.zeros(2 * self.num_groups))
        self.marks = <uint64_t*>self.hold(np.zeros((self.num_groups + 63) // 64, np.uint64))
        self.swap = <int32_t*>self.hold(np.zeros(self.num_groups, np.int32))
        for t in range(self.num_trees):
            widest = max(widest, self.tree_start[t + 1] - self.tree_start[t])
        self.needs = <int32_t*>self.hold(np.zeros(widest, np.int32))
        self.verdicts = <uint8_t*>self.hold(np.zeros(widest, np.uint8))
        self.fresh = <Split*>self.hold(np.zeros(widest * sizeof(Split), np.uint8))
        self.used = <uint8_t*>self.hold(np.zeros(widest, np.uint8))
        self.frontier = <Frontier*>self.hold(np.zeros((widest + 2) * sizeof(Frontier), np.uint8))
        self.recent_first = <int64_t*>self.hold(np.zeros(widest, np.int64))
        self.recent_count = <int64_t*>self.hold(np.zeros(widest, np.int64))
        self.totals = <Totals*>self.hold(np.zeros(widest * sizeof(Totals), np.uint8))
        # A walk needs one histogram more than it can halve the leaves of a tree.
        self.pool_size = 2
        while (1 << (self.pool_size - 2)) < widest:
            self.pool_size += 1
        pool_cells = self.pool_size * self.search.num_cells if self.structural else 1
        self.pool = <Cell*>self.hold(np.zeros(2 * pool_cells))
        self.bank_size = min((widest + 1) // 2, MOST_BANKED_CELLS // self.search.num_cells) if self.structural else 0
        self.bank = <Cell*>self.hold(np.zeros(2 * max(1, self.bank_size * self.search.num_cells)))
        nodes = {name: np.ascontiguousarray(nodes[name], dtype) for name, dtype in NODE_TYPES.items()}
        cdef int32_t* left = <int32_t*>cnp.PyArray_DATA(nodes["left"])
        cdef int32_t* right = <int32_t*>cnp.PyArray_DATA(nodes["right"])
        cdef int32_t* feature = <int32_t*>cnp.PyArray_DATA(nodes["feature"])
        cdef int32_t* bin = <int32_t*>cnp.PyArray_DATA(nodes["bin"])
        cdef int32_t* missing = <int32_t*>cnp.PyArray_DATA(nodes["missing_left"])
        cdef int32_t* budget = <int32_t*>cnp.PyArray_DATA(nodes["budget"])
        cdef int64_t* generation = <int64_t*>cnp.PyArray_DATA(nodes["generation"])
        cdef double* value = <double*>cnp.PyArray_DATA(nodes["value"])
        cdef double* refreshed = <double*>cnp.PyArray_DATA(nodes["refreshed_value"])
        cdef double* recent = <double*>cnp.PyArray_DATA(nodes["recent_gradient"])
        for t in range(self.num_trees):
            start = self.tree_start[t]
            for slot in range(self.tree_start[t + 1] - start):
                node = &self.nodes[start + slot]
                clear_node(node)
                if slot >= tree_nodes[t]:
                    continue
                node.left, node.right = left[entry], right[entry]
                node.feature, node.bin, node.missing_left = feature[entry], bin[entry], missing[entry]
                node.budget, node.generation = budget[entry], generation[entry]
                node.value, node.refreshed_value = value[entry], refreshed[entry]
                node.recent_gradient = recent[entry]
                entry += 1
            if self.nodes[start].budget == 0:
                self.set_budgets(&self.nodes[start], 0)
        self.capacity = 0
        self.ring_buffers = []
        self.route_history()
        self.refresh_history()

    cdef void* hold(self, array) except NULL:
        self.buffers.append(array)
        return cnp.PyArray_DATA(array)

    def nbytes(self):
        """Bytes of everything that the forest holds, working memory included."""
        return sum(array.nbytes for array in self.buffers + self.ring_buffers) + self.search.nbytes()

    cdef int bind_ring(self, const uint8_t* codes, const double* targets, double* gradients, double* new_gradients,
                       int64_t capacity) except -1:
        # Recent rows moved; a batch needs as much memory beside them.
        if capacity != self.capacity:
            self.ring_buffers = [
                np.zeros(capacity), np.zeros(capacity), np.zeros(capacity, np.int32), np.zeros(capacity, np.int32),
                np.zeros(capacity, np.int32),
            ]
            self.recent_prefix = <double*>cnp.PyArray_DATA(self.ring_buffers[0])
            self.recent_derivative = <double*>cnp.PyArray_DATA(self.ring_buffers[1])
            self.recent_leaf = <int32_t*>cnp.PyArray_DATA(self.ring_buffers[2])
            self.recent_order = <int32_t*>cnp.PyArray_DATA(self.ring_buffers[3])
            self.recent_swap = <int32_t*>cnp.PyArray_DATA(self.ring_buffers[4])
        self.capacity = capacity
        self.codes, self.targets = codes, targets
        self.gradients, self.new_gradients = gradients, new_gradients
        return 0

    cdef void set_weights(self, double history_weight, double recent_weight) noexcept nogil:
        self.search.history_weight = history_weight
        self.search.recent_weight = recent_weight

    # --- trees ------------------------------------------------------------------------------------------------------

    cdef int32_t set_budgets(self, Node* nodes, int32_t slot) noexcept nogil:
        # Every node may grow as many leaves as are under it.
        cdef Node* node = &nodes[slot]
        node.budget = 1
        if node.left >= 0:
            node.budget = self.set_budgets(nodes, node.left) + self.set_budgets(nodes, node.right)
        return node.budget

    cdef bint goes_left(self, const Node* node, int32_t code) noexcept nogil:
        if code == self.search.num_bins[node.feature]:
            return node.missing_left
        return code <= node.bin

    cdef int32_t leaf_of(self, int64_t tree, const uint8_t* codes) noexcept nogil:
        # Slot of the leaf in its tree.
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int32_t slot = 0
        while nodes[slot].left >= 0:
            slot = nodes[slot].left if self.goes_left(&nodes[slot], codes[nodes[slot].feature]) else nodes[slot].right
        return slot

    cdef double predict(self, const uint8_t* codes) noexcept nogil:
        # Raw value in target space.
        cdef double raw = self.baseline
        cdef int64_t t
        for t in range(self.num_trees):
            raw += self.nodes[self.tree_start[t] + self.leaf_of(t, codes)].value
        return raw

    cdef int64_t divide(
        self, const Node* node, int32_t* order, int64_t first, int64_t count
    ) noexcept nogil:
        # Reorder a range of groups so that those that go left come first, otherwise in their order; returns how many.
        cdef const uint8_t* column = self.columns + <int64_t>self.search.column_of[node.feature] * self.num_groups
        cdef int64_t i, left = 0, right = 0
        cdef int32_t group
        for i in range(first, first + count):
            group = order[i]
            if self.goes_left(node, column[group]):
                order[first + left] = group
                left += 1
            else:
                self.swap[right] = group
                right += 1
        memcpy(order + first + left, self.swap, right * sizeof(int32_t))
        return left

    cdef void route(self, int64_t tree, int32_t slot, int64_t first, int64_t count) noexcept nogil:
        # Divide the groups of a node among its descendants.
        cdef Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef Node* node = &nodes[slot]
        cdef int64_t left
        node.first, node.count = first, count
        if node.left < 0:
            return
        left = self.divide(node, self.order + tree * self.num_groups, first, count)
        self.route(tree, node.left, first, left)
        self.route(tree, node.right, first + left, count - left)

    cdef void route_history(self) noexcept nogil:
        cdef int64_t t, i
        for t in range(self.num_trees):
            for i in range(self.num_groups):
                self.order[t * self.num_groups + i] = <int32_t>i
            self.route(t, 0, 0, self.num_groups)

    # --- derivatives of the past ------------------------------------------------------------------------------------

    cdef void begin_history(self) noexcept nogil:
        cdef int64_t i
        for i in range(self.num_groups):
            self.prefix[i] = self.baseline

    cdef void derive_history(self) noexcept nogil:
        cdef int64_t i
        for i in range(self.num_groups):
            self.derivatives[i].gradient = self.group_rows[i] * self.prefix[i] - self.group_sum[i]
            self.derivatives[i].rows = self.group_rows[i]

    cdef void sum_history(self, int64_t tree) noexcept nogil:
        # What the leaves of a tree hold of the past.
        cdef Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef int64_t slots = self.tree_start[tree + 1] - self.tree_start[tree], s, i
        cdef Node* node
        cdef double gradient, rows
        for s in range(slots):
            node = &nodes[s]
            if node.left >= 0:
                continue
            gradient = 0.0
            rows = 0.0
            for i in range(node.first, node.first + node.count):
                gradient += self.derivatives[order[i]].gradient
                rows += self.derivatives[order[i]].rows
            node.history_gradient = gradient
            node.history_rows = rows

    cdef void advance_history(self, int64_t tree) noexcept nogil:
        # Add what the tree says, as of the last refresh, to the prefix of every group.
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef int64_t slots = self.tree_start[tree + 1] - self.tree_start[tree], s, i
        for s in range(slots):
            if nodes[s].left < 0:
                for i in range(nodes[s].first, nodes[s].first + nodes[s].count):
                    self.prefix[order[i]] += nodes[s].refreshed_value

    cdef void refresh_history(self) noexcept nogil:
        # The past as the leaves hold it, from the values of the last refresh.
        cdef int64_t t
        self.begin_history()
        for t in range(self.num_trees):
            self.derive_history()
            self.sum_history(t)
            self.advance_history(t)

    # --- a batch ----------------------------------------------------------------------------------------------------

    cdef void remember(self) noexcept nogil:
        memcpy(self.old_nodes, self.nodes, self.num_nodes * sizeof(Node))

    cdef void take_back(self, bint rows_moved) noexcept nogil:
        # Undo a batch; when subtrees were rebuilt, groups have to find their leaves again.
        memcpy(self.nodes, self.old_nodes, self.num_nodes * sizeof(Node))
        if rows_moved:
            self.route_history()

    cdef bint update_leaves(self, int64_t tree) noexcept nogil:
        # Move every leaf towards its optimum; false when one is no number.
        cdef double wh = self.search.history_weight, wr = self.search.recent_weight, weight, optimum
        cdef int64_t s
        cdef Node* node
        for s in range(self.tree_start[tree], self.tree_start[tree + 1]):
            node = &self.nodes[s]
            if node.left >= 0:
                continue
            weight = wh * node.history_rows + wr * node.recent_rows
            optimum = 0.0
            if weight != 0.0:
                optimum = (
                    -self.learning_rate * (wh * node.history_gradient + wr * node.recent_gradient) / (weight + self.l2)
                )
            node.value = optimum if self.update_step == 1.0 else node.value + self.update_step * (optimum - node.value)
            if not isfinite(node.value):
                return False
        return True

    cdef void find_twins(self, const int32_t* rows, int64_t num_rows) noexcept nogil:
        self.recent.order = rows
        self.recent.codes = self.codes
        self.recent.first = 0
        self.recent.count = num_rows
        self.search.find_twins(&self.recent)

    cdef bint lazy(self, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added,
                   const int32_t* evicted, int64_t num_evicted, bint* must_rebuild) noexcept nogil:
        # A batch over stored derivatives; false when it fails. Structure is checked and left as it is.
        cdef int64_t t, i, trees = self.num_trees
        cdef int32_t row
        cdef Node* nodes
        cdef Node* leaf
        cdef double gradient
        cdef int outcome
        must_rebuild[0] = False
        self.remember()
        for i in range(num_added):
            self.recent_prefix[added[i]] = self.baseline
        if self.structural:
            self.begin_history()
            # Added rows follow the kept ones in the list, unless those are all gone.
            self.find_twins(kept if num_kept else added, num_kept + num_added)
        for t in range(trees):
            nodes = &self.nodes[self.tree_start[t]]
            if t >= self.first_mutable:
                for i in range(num_evicted):
                    row = evicted[i]
                    leaf = &nodes[self.leaf_of(t, self.codes + <int64_t>row * self.num_features)]
                    leaf.recent_rows -= 1.0
                    leaf.recent_gradient -= self.gradients[row * trees + t]
                    if leaf.recent_rows == 0.0:
                        leaf.recent_gradient = 0.0
                for i in range(num_added):
                    row = added[i]
                    leaf = &nodes[self.leaf_of(t, self.codes + <int64_t>row * self.num_features)]
                    gradient = self.recent_prefix[row] - self.targets[row]
                    self.gradients[row * trees + t] = gradient
                    leaf.recent_rows += 1.0
                    leaf.recent_gradient += gradient
                if self.structural:
                    outcome = self.check_stored(t, kept, num_kept, added, num_added)
                    if outcome != WALK_FINE:
                        must_rebuild[0] = outcome == WALK_MUST_REBUILD
                        return must_rebuild[0]
                if not self.update_leaves(t):
                    return False
            for i in range(num_added):
                row = added[i]
                self.recent_prefix[row] += nodes[self.leaf_of(t, self.codes + <int64_t>row * self.num_features)].value
            if self.structural:
                self.advance_history(t)
        for i in range(num_added):
            if not isfinite(self.recent_prefix[added[i]]):
                return False
        return True

    cdef int check_stored(
        self, int64_t tree, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added
    ) noexcept nogil:
        # Whether every split of a tree still holds, over stored derivatives.
        cdef int64_t i, num_rows = num_kept + num_added
        cdef int32_t row
        self.derive_history()
        for i in range(num_rows):
            row = kept[i] if i < num_kept else added[i - num_kept]
            self.recent_swap[i] = row
            self.recent_leaf[row] = self.leaf_of(tree, self.codes + <int64_t>row * self.num_features)
            self.recent_derivative[row] = self.gradients[row * self.num_trees + tree]
        self.arrange_recent(tree, self.recent_swap, num_rows)
        return self.walk(tree, 0, 1, 0, True)

    cdef bint eager(self, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # A batch with every derivative anew; false when it fails. `rows` are the recent ones, oldest first.
        cdef int64_t t, i, trees = self.num_trees, s
        cdef int32_t row
        cdef Node* nodes
        cdef Node* leaf
        self.remember()
        self.rebuilt = 0
        self.begin_history()
        if self.structural:
            self.find_twins(rows, num_rows)
        for i in range(num_rows):
            self.recent_prefix[rows[i]] = self.baseline
        for t in range(trees):
            nodes = &self.nodes[self.tree_start[t]]
            if t >= self.first_mutable:
                self.derive_history()
                for i in range(num_rows):
                    row = rows[i]
                    self.recent_derivative[row] = self.recent_prefix[row] - self.targets[row]
                    self.new_gradients[row * trees + t] = self.recent_derivative[row]
                self.sum_history(t)
                self.sum_recent(t, rows, num_rows)
                if self.structural and not self.repair_tree(t, rows, num_rows):
                    return False
                if not self.update_leaves(t):
                    return False
                for s in range(self.tree_start[t], self.tree_start[t + 1]):
                    self.nodes[s].refreshed_value = self.nodes[s].value
            for i in range(num_rows):
                row = rows[i]
                leaf = &nodes[self.leaf_of(t, self.codes + <int64_t>row * self.num_features)]
                self.recent_prefix[row] += leaf.value
            self.advance_history(t)
        for i in range(num_rows):
            if not isfinite(self.recent_prefix[rows[i]]):
                return False
        return True

    cdef void sum_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        cdef Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int64_t slots = self.tree_start[tree + 1] - self.tree_start[tree], s, i
        cdef int32_t row
        for s in range(slots):
            nodes[s].recent_gradient = 0.0
            nodes[s].recent_rows = 0.0
        for i in range(num_rows):
            row = rows[i]
            self.recent_leaf[row] = self.leaf_of(tree, self.codes + <int64_t>row * self.num_features)
            nodes[self.recent_leaf[row]].recent_gradient += self.recent_derivative[row]
            nodes[self.recent_leaf[row]].recent_rows += 1.0

    cdef void count_recent(self, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # How many recent rows each leaf holds, which a saved state does not tell.
        cdef int64_t t, i
        cdef Node* leaf
        for t in range(self.num_trees):
            for i in range(num_rows):
                leaf = &self.nodes[self.tree_start[t] + self.leaf_of(t, self.codes + <int64_t>rows[i] * self.num_features)]
                leaf.recent_rows += 1.0

    # --- structure --------------------------------------------------------------------------------------------------

    cdef void arrange_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # List recent rows leaf by leaf, like groups; `recent_leaf` tells where each is.
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int64_t slots = self.tree_start[tree + 1] - self.tree_start[tree], i
        cdef int32_t leaf
        memset(self.recent_count, 0, slots * sizeof(int64_t))
        for i in range(num_rows):
            self.recent_count[self.recent_leaf[rows[i]]] += 1
        self.place_recent(nodes, 0, 0)
        for i in range(num_rows):
            leaf = self.recent_leaf[rows[i]]
            self.recent_order[self.recent_first[leaf]] = rows[i]
            self.recent_first[leaf] += 1
        for i in range(slots):
            if nodes[i].left < 0:
                self.recent_first[i] -= self.recent_count[i]
        self.recent.order = self.recent_order
        self.recent.codes = self.codes
        self.recent.gradient = self.recent_derivative
        self.recent.first = 0
        self.recent.count = num_rows

    cdef int64_t place_recent(self, const Node* nodes, int32_t slot, int64_t first) noexcept nogil:
        self.recent_first[slot] = first
        if nodes[slot].left >= 0:
            first = self.place_recent(nodes, nodes[slot].left, first)
            first = self.place_recent(nodes, nodes[slot].right, first)
            self.recent_count[slot] = first - self.recent_first[slot]
            return first
        return first + self.recent_count[slot]

    cdef void fill_cells(self, const int32_t* order, int64_t first, int64_t count, Cell* cells) noexcept nogil:
        # The histogram of a range of groups.
        cdef int column, columns = self.search.num_columns
        cdef int64_t i
        cdef const uint8_t* codes
        cdef const int64_t* start = self.search.cell_start
        cdef Cell* cell
        cdef const Cell* derivative
        memset(cells, 0, self.search.num_cells * sizeof(Cell))
        for i in range(first, first + count):
            derivative = &self.derivatives[order[i]]
            codes = self.row_codes + <int64_t>order[i] * columns
            for column in range(columns):
                cell = &cells[start[column] + codes[column]]
                cell.gradient += derivative.gradient
                cell.rows += derivative.rows

    cdef int32_t count_needs(self, const Node* nodes, int32_t slot) noexcept nogil:
        # How many histograms a walk over a subtree needs at once, the needier child first.
        cdef int32_t left, right
        self.needs[slot] = 1
        if nodes[slot].left >= 0:
            left = self.count_needs(nodes, nodes[slot].left)
            right = self.count_needs(nodes, nodes[slot].right)
            self.needs[slot] = left + 1 if left == right else max(left, right)
        return self.needs[slot]

    cdef int walk(self, int64_t tree, int32_t slot, uint64_t path, int64_t place, bint stop) noexcept nogil:
        # Check every node of a subtree into `verdicts`; its histogram is left at `place` of the pool.
        if slot == 0:
            self.count_needs(&self.nodes[self.tree_start[tree]], 0)
        return self.walk_node(tree, slot, path, place, stop)

    cdef int walk_node(self, int64_t tree, int32_t slot, uint64_t path, int64_t place, bint stop) noexcept nogil:
        cdef Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef Node* node = &nodes[slot]
        cdef Cell* cells = self.pool + place * self.search.num_cells
        cdef const Cell* others
        cdef Totals* totals = &self.totals[slot]
        cdef Totals* one
        cdef Totals* two
        cdef int64_t i
        cdef int outcome
        cdef bint left_first
        self.verdicts[slot] = 0
        if node.left < 0:
            self.fill_cells(self.order + tree * self.num_groups, node.first, node.count, cells)
            totals.history_gradient, totals.history_rows = node.history_gradient, node.history_rows
            totals.recent_gradient, totals.recent_rows = node.recent_gradient, node.recent_rows
        else:
            left_first = self.needs[node.left] >= self.needs[node.right]
            outcome = self.walk_node(
                tree, node.left if left_first else node.right, 2 * path + (0 if left_first else 1), place, stop
            )
            if outcome != WALK_FINE:
                return outcome
            outcome = self.walk_node(
                tree, node.right if left_first else node.left, 2 * path + (1 if left_first else 0), place + 1, stop
            )
            if outcome != WALK_FINE:
                return outcome
            others = self.pool + (place + 1) * self.search.num_cells
            for i in range(self.search.num_cells):
                cells[i].gradient += others[i].gradient
                cells[i].rows += others[i].rows
            one, two = &self.totals[node.left], &self.totals[node.right]
            totals.history_gradient = one.history_gradient + two.history_gradient
            totals.history_rows = one.history_rows + two.history_rows
            totals.recent_gradient = one.recent_gradient + two.recent_gradient
            totals.recent_rows = one.recent_rows + two.recent_rows
        outcome = self.check(tree, slot, path, cells, totals)
        if outcome == WALK_MUST_REBUILD and not stop:
            self.verdicts[slot] = 1
            return WALK_FINE
        return outcome

    cdef int check(
        self, int64_t tree, int32_t slot, uint64_t path, const Cell* cells, const Totals* totals
    ) noexcept nogil:
        # Whether the split of a node is still good enough; a leaf that a rebuild left over may split again.
        cdef const Node* node = &self.nodes[self.tree_start[tree] + slot]
        cdef Split split
        cdef uint64_t key
        cdef double allowed
        if node.left < 0 and node.budget < 2:
            return WALK_FINE
        self.recent.first = self.recent_first[slot]
        self.recent.count = self.recent_count[slot]
        if self.search.evaluate(cells, &self.recent, totals) != SPLIT_FINE:
            return WALK_NOT_FINITE
        key = node_key(self.seed, self.store, tree, path, node.generation)
        if node.left < 0:
            if not self.search.best(key, &split):
                return WALK_FINE
            self.note_fresh(tree, slot, path)
            return WALK_MUST_REBUILD
        split.feature, split.bin, split.missing_left = node.feature, node.bin, node.missing_left
        if self.search.gain_of(&split, cells, &self.recent, totals, &split.gain) != SPLIT_FINE:
            return WALK_NOT_FINITE
        allowed = self.rank_tolerance * <double>self.search.num_drawn
        if split.gain > 0.0 and <double>self.search.better_than(&split, key, allowed) <= allowed:
            return WALK_FINE
        self.note_fresh(tree, slot, path)
        return WALK_MUST_REBUILD

    cdef void note_fresh(self, int64_t tree, int32_t slot, uint64_t path) noexcept nogil:
        # What a rebuild would split a node by, while its gains are at hand.
        cdef int64_t generation = self.nodes[self.tree_start[tree] + slot].generation + 1
        self.search.best(node_key(self.seed, self.store, tree, path, generation), &self.fresh[slot])

    cdef bint repair_tree(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # Rebuild where a split no longer holds; false when a number is none.
        cdef int64_t before = self.rebuilt
        self.arrange_recent(tree, rows, num_rows)
        if self.walk(tree, 0, 1, 0, False) != WALK_FINE:
            return False
        if not self.repair(tree, 0, 1, 0):
            return False
        if self.rebuilt != before:
            self.sum_history(tree)
            self.sum_recent(tree, rows, num_rows)
        return True

    cdef bint repair(self, int64_t tree, int32_t slot, uint64_t path, int depth) noexcept nogil:
        cdef const Node* node = &self.nodes[self.tree_start[tree] + slot]
        if self.verdicts[slot]:
            return self.rebuild(tree, slot, path, depth)
        return node.left < 0 or (
            self.repair(tree, node.left, 2 * path, depth + 1) and self.repair(tree, node.right, 2 * path + 1, depth + 1)
        )

    cdef void sort_groups(self, int32_t* groups, int64_t count) noexcept nogil:
        # In ascending order, as routing them from the root leaves them: sums do not depend on how a tree came to be.
        cdef int64_t i, word, place = 0, words = (self.num_groups + 63) // 64
        cdef uint64_t bits
        memset(self.marks, 0, words * sizeof(uint64_t))
        for i in range(count):
            self.marks[groups[i] >> 6] |= <uint64_t>1 << (groups[i] & 63)
        for word in range(words):
            bits = self.marks[word]
            while bits:
                groups[place] = <int32_t>(64 * word + __builtin_ctzll(bits))
                place += 1
                bits &= bits - 1

    cdef void mark_used(self, const Node* nodes, int32_t slot, int32_t cut) noexcept nogil:
        self.used[slot] = 1
        if slot != cut and nodes[slot].left >= 0:
            self.mark_used(nodes, nodes[slot].left, cut)
            self.mark_used(nodes, nodes[slot].right, cut)

    cdef bint rebuild(self, int64_t tree, int32_t top, uint64_t path, int depth) noexcept nogil:
        # Grow the subtree at a node anew, best gain first, up to its budget of leaves.
        cdef Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int64_t slots = self.tree_start[tree + 1] - self.tree_start[tree], i, best
        cdef int32_t budget = nodes[top].budget, leaves = 1, free_slot = 0
        cdef int64_t generation = nodes[top].generation + 1, num_frontier = 1
        cdef Frontier* chosen
        cdef Frontier* child
        cdef int64_t num_banked = 0
        cdef int side
        self.sort_groups(self.order + tree * self.num_groups + nodes[top].first, nodes[top].count)
        memset(self.used, 0, slots)
        self.mark_used(nodes, 0, top)
        nodes[top].left = nodes[top].right = -1
        nodes[top].generation = generation
        child = &self.frontier[0]
        child.slot, child.depth, child.path = top, depth, path
        child.recent_first, child.recent_count = self.recent_first[top], self.recent_count[top]
        child.bank = -1
        child.split = self.fresh[top]
        if depth >= self.max_depth:
            child.split.feature = -1
        while leaves < budget:
            best = -1
            for i in range(num_frontier):
                if self.frontier[i].split.feature >= 0 and (
                    best < 0 or self.frontier[i].split.gain > self.frontier[best].split.gain
                ):
                    best = i
            if best < 0:
                break
            chosen = &self.frontier[best]
            self.split_node(nodes, tree, chosen, &free_slot, generation)
            chosen.split.feature = -1
            leaves += 1
            for side in range(2):
                child = &self.frontier[num_frontier + side]
                child.slot = nodes[chosen.slot].right if side else nodes[chosen.slot].left
                child.depth = chosen.depth + 1
                child.path = 2 * chosen.path + side
                child.recent_first = self.recent_first[child.slot]
                child.recent_count = self.recent_count[child.slot]
                child.split.feature = -1
                child.bank = -1
            if leaves < budget and not self.seek_children(
                tree, chosen, &self.frontier[num_frontier], budget <= self.bank_size, &num_banked
            ):
                return False
            num_frontier += 2
        for i in range(slots):
            if not self.used[i]:
                clear_node(&nodes[i])
        self.set_budgets(nodes, top)
        nodes[top].budget = budget
        self.rebuilt += 2 * leaves - 1
        return True

    cdef bint seek_children(
        self, int64_t tree, const Frontier* parent, Frontier* children, bint banked, int64_t* num_banked
    ) noexcept nogil:
        # Find the best splits of two new nodes. Where histograms of the frontier are kept, the larger child's is the
        # parent's without the smaller child's.
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef const Node* node
        cdef Frontier* child
        cdef int64_t cells = self.search.num_cells, i
        cdef int smaller = nodes[children[1].slot].count < nodes[children[0].slot].count, turn
        cdef Cell* into
        cdef const Cell* taken
        for turn in range(2):
            child = &children[smaller if turn == 0 else 1 - smaller]
            node = &nodes[child.slot]
            if not banked:
                into = self.pool
            elif turn == 1 and parent.bank >= 0:
                child.bank = parent.bank
                into = self.bank + child.bank * cells
                taken = self.bank + children[smaller].bank * cells
                for i in range(cells):
                    into[i].rows -= taken[i].rows
                    # No rows, no derivatives: rounding must not leave any.
                    into[i].gradient = into[i].gradient - taken[i].gradient if into[i].rows != 0.0 else 0.0
            else:
                child.bank = <int32_t>num_banked[0]
                num_banked[0] += 1
                into = self.bank + child.bank * cells
            if not (banked and turn == 1 and parent.bank >= 0):
                self.fill_cells(order, node.first, node.count, into)
            if not self.seek(tree, child, into):
                return False
        return True

    cdef bint seek(self, int64_t tree, Frontier* entry, const Cell* cells) noexcept nogil:
        # Find the best split of a node with this histogram into its entry; false when a gain is no number.
        cdef const Node* node = &self.nodes[self.tree_start[tree] + entry.slot]
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef Totals totals
        cdef int64_t i
        memset(&totals, 0, sizeof(Totals))
        if entry.depth >= self.max_depth:
            return True
        for i in range(node.first, node.first + node.count):
            totals.history_gradient += self.derivatives[order[i]].gradient
            totals.history_rows += self.derivatives[order[i]].rows
        for i in range(entry.recent_first, entry.recent_first + entry.recent_count):
            totals.recent_gradient += self.recent_derivative[self.recent_order[i]]
            totals.recent_rows += 1.0
        if totals.history_rows + totals.recent_rows < 2.0 * <double>self.min_rows:
            return True
        self.recent.first = entry.recent_first
        self.recent.count = entry.recent_count
        if self.search.evaluate(cells, &self.recent, &totals) != SPLIT_FINE:
            return False
        self.search.best(node_key(self.seed, self.store, tree, entry.path, node.generation), &entry.split)
        return True

    cdef void split_node(
        self, Node* nodes, int64_t tree, const Frontier* entry, int32_t* free_slot, int64_t generation
    ) noexcept nogil:
        cdef Node* node = &nodes[entry.slot]
        cdef int32_t children[2]
        cdef int side
        cdef int64_t i, left, recent_left = 0, recent_right = 0
        cdef int32_t row
        for side in range(2):
            while self.used[free_slot[0]]:
                free_slot[0] += 1
            children[side] = free_slot[0]
            self.used[free_slot[0]] = 1
            clear_node(&nodes[children[side]])
            nodes[children[side]].generation = generation
        node.left, node.right = children[0], children[1]
        node.feature, node.bin = entry.split.feature, entry.split.bin
        node.missing_left = entry.split.missing_left
        node.value = 0.0
        left = self.divide(node, self.order + tree * self.num_groups, node.first, node.count)
        nodes[node.left].first, nodes[node.left].count = node.first, left
        nodes[node.right].first, nodes[node.right].count = node.first + left, node.count - left
        for i in range(entry.recent_first, entry.recent_first + entry.recent_count):
            row = self.recent_order[i]
            if self.goes_left(node, self.codes[<int64_t>row * self.num_features + node.feature]):
                self.recent_order[entry.recent_first + recent_left] = row
                recent_left += 1
            else:
                self.recent_swap[recent_right] = row
                recent_right += 1
        memcpy(
            self.recent_order + entry.recent_first + recent_left, self.recent_swap, recent_right * sizeof(int32_t)
        )
        self.recent_first[node.left], self.recent_count[node.left] = entry.recent_first, recent_left
        self.recent_first[node.right] = entry.recent_first + recent_left
        self.recent_count[node.right] = recent_right

    # --- nodes as arrays --------------------------------------------------------------------------------------------

    cdef int64_t number_nodes(self, const Node* nodes, int32_t slot, int64_t base, int64_t next_slot, int32_t* slots,
                              int32_t* left, int32_t* right) noexcept nogil:
        # Preorder places of a subtree, from `next_slot` of its tree; returns the one after it.
        cdef int64_t mine = next_slot
        slots[base + mine] = slot
        left[base + mine] = right[base + mine] = -1
        next_slot += 1
        if nodes[slot].left >= 0:
            left[base + mine] = <int32_t>next_slot
            next_slot = self.number_nodes(nodes, nodes[slot].left, base, next_slot, slots, left, right)
            right[base + mine] = <int32_t>next_slot
            next_slot = self.number_nodes(nodes, nodes[slot].right, base, next_slot, slots, left, right)
        return next_slot

    def leaf_rows(self):
        """(tree of each leaf, rows of the past in it)."""
        cdef int64_t t, slot
        trees, rows = [], []
        for t in range(self.num_trees):
            for slot in range(self.tree_start[t], self.tree_start[t + 1]):
                if self.nodes[slot].left < 0 and self.nodes[slot].budget > 0:
                    trees.append(t)
                    rows.append(self.nodes[slot].history_rows)
        return np.array(trees, np.int64), np.array(rows)

    def node_arrays(self):
        """(nodes in use of each tree, arrays of every used node by name), tree after tree, each in preorder."""
        cdef int64_t t, total = 0, i, tree_end
        cdef cnp.ndarray counts = np.zeros(self.num_trees, np.int64)
        cdef cnp.ndarray slots = np.zeros(self.num_nodes, np.int32)
        cdef cnp.ndarray left = np.zeros(self.num_nodes, np.int32)
        cdef cnp.ndarray right = np.zeros(self.num_nodes, np.int32)
        cdef int32_t* slot_data = <int32_t*>cnp.PyArray_DATA(slots)
        cdef const Node* nodes
        for t in range(self.num_trees):
            tree_end = self.number_nodes(
                &self.nodes[self.tree_start[t]], 0, total, 0, slot_data, <int32_t*>cnp.PyArray_DATA(left),
                <int32_t*>cnp.PyArray_DATA(right),
            )
            counts[t] = tree_end
            total += tree_end
        arrays = {name: np.zeros(total, dtype) for name, dtype in NODE_TYPES.items()}
        arrays["left"][:] = left[:total]
        arrays["right"][:] = right[:total]
        cdef int32_t* feature = <int32_t*>cnp.PyArray_DATA(arrays["feature"])
        cdef int32_t* bin = <int32_t*>cnp.PyArray_DATA(arrays["bin"])
        cdef int32_t* missing = <int32_t*>cnp.PyArray_DATA(arrays["missing_left"])
        cdef int32_t* budget = <int32_t*>cnp.PyArray_DATA(arrays["budget"])
        cdef int64_t* generation = <int64_t*>cnp.PyArray_DATA(arrays["generation"])
        cdef double* value = <double*>cnp.PyArray_DATA(arrays["value"])
        cdef double* refreshed = <double*>cnp.PyArray_DATA(arrays["refreshed_value"])
        cdef double* gradient = <double*>cnp.PyArray_DATA(arrays["recent_gradient"])
        i = 0
        for t in range(self.num_trees):
            nodes = &self.nodes[self.tree_start[t]]
            tree_end = i + <int64_t>counts[t]
            while i < tree_end:
                budget[i] = nodes[slot_data[i]].budget
                generation[i] = nodes[slot_data[i]].generation
                if nodes[slot_data[i]].left < 0:
                    value[i] = nodes[slot_data[i]].value
                    refreshed[i] = nodes[slot_data[i]].refreshed_value
                    gradient[i] = nodes[slot_data[i]].recent_gradient
                else:
                    feature[i] = nodes[slot_data[i]].feature
                    bin[i] = nodes[slot_data[i]].bin
                    missing[i] = nodes[slot_data[i]].missing_left
                i += 1
        return counts, arrays
