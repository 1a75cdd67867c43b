# The learning forest of one store (regression-and-learned.md section 4.6): trees whose splits learn too. Each tree lists
# the groups of the past leaf by leaf, so that the rows of every node are one range. A histogram is built from codes when
# a node is looked at and forgotten afterwards: leaves from their rows, inner nodes as the sum of their children.
# Derivatives of the past follow from the leaf values of the last full refresh, so only those values are kept.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cimport cython
cimport numpy as cnp

from fpmsdk._ext.online_split cimport SPLIT_FINE, Cell, Split, SplitSearch, Totals, node_key
from fpmsdk._ext.online_trees cimport (
    MAX_DEPTH, WALK_FINE, WALK_MUST_REBUILD, WALK_NOT_FINITE, Leaf, Node, OnlineTrees, goes_left,
)

import numpy as np

from fpmsdk._ext.online_split import SplitSearch as _SplitSearch

cnp.import_array()

cdef extern from *:
    int __builtin_ctzll(unsigned long long) noexcept nogil

# Histograms of a tree's nodes, and of a growing subtree's leaves, are kept up to 8 MB each.
cdef int64_t MOST_BANKED_CELLS = 1 << 19


@cython.final
cdef class OnlineForest(OnlineTrees):
    """Trees whose splits learn, over grouped rows of the past and the recent rows of a store.

    Parameters
    ----------
    As of `OnlineTrees`. A budget of 0 at a root: that every node may have as many leaves as it has. Of controls also
    min_samples_leaf, max_depth, split_sampling_rate, split_rank_tolerance, seed, store; and kept_cells, how many cells the
    histograms of a tree's nodes may have together (by default 2^19) before they are made one after the other.
    """

    def __init__(
        self, columns, column_of, num_bins, group_rows, group_sum, tree_slots, tree_nodes, dict nodes, dict controls
    ):
        cdef int64_t t, slot, widest = 1, entry = 0
        cdef Growth* growth
        OnlineTrees.__init__(
            self, columns, column_of, num_bins, group_rows, group_sum, tree_slots, tree_nodes, nodes, controls
        )
        self.search = _SplitSearch(
            num_bins, column_of, controls["l2_regularization"], controls["min_samples_leaf"],
            controls["split_sampling_rate"],
        )
        self.min_rows = controls["min_samples_leaf"]
        self.max_depth = min(controls["max_depth"] or MAX_DEPTH, MAX_DEPTH)
        self.rank_tolerance = controls["split_rank_tolerance"]
        self.seed = controls["seed"]
        self.store = controls["store"]
        self.row_codes = <const uint8_t*>self.hold(np.ascontiguousarray(np.asarray(columns, np.uint8).T))
        self.growth = <Growth*>self.hold(np.zeros(self.num_nodes * sizeof(Growth), np.uint8))
        self.old_growth = <Growth*>self.hold(np.zeros(self.num_nodes * sizeof(Growth), np.uint8))
        self.old_nodes = <Node*>self.hold(np.zeros(self.num_nodes * sizeof(Node), np.uint8))
        self.order = <int32_t*>self.hold(np.zeros(self.num_trees * self.num_groups, np.int32))
        self.told = <double*>self.hold(np.zeros(self.num_groups))
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
        self.pool_size = widest
        if widest > controls.get("kept_cells", MOST_BANKED_CELLS) // self.search.num_cells:
            # A walk from the leaves up needs one histogram more than it can halve the leaves of a tree.
            self.pool_size = 2
            while (1 << (self.pool_size - 2)) < widest:
                self.pool_size += 1
        self.pool = <Cell*>self.hold(np.zeros(2 * self.pool_size * self.search.num_cells))
        self.bank_size = min((widest + 1) // 2, MOST_BANKED_CELLS // self.search.num_cells)
        self.bank = <Cell*>self.hold(np.zeros(2 * max(1, self.bank_size * self.search.num_cells)))
        cdef cnp.ndarray budgets = np.ascontiguousarray(nodes["budget"], np.int32)
        cdef cnp.ndarray generations = np.ascontiguousarray(nodes["generation"], np.int64)
        cdef const int32_t* budget = <const int32_t*>cnp.PyArray_DATA(budgets)
        cdef const int64_t* generation = <const int64_t*>cnp.PyArray_DATA(generations)
        for t in range(self.num_trees):
            growth = &self.growth[self.tree_start[t]]
            for slot in range(tree_nodes[t]):
                growth[slot].budget, growth[slot].generation = budget[entry], generation[entry]
                entry += 1
            if growth[0].budget == 0:
                self.set_budgets(self.tree_start[t], 0)
        self.route_history()

    def arrays(self):
        """Every array that the trees hold, working memory included."""
        return [*OnlineTrees.arrays(self), *self.search.buffers]

    cdef void set_weights(self, double history_weight, double recent_weight) noexcept nogil:
        self.history_weight = self.search.history_weight = history_weight
        self.recent_weight = self.search.recent_weight = recent_weight

    cdef void clear_slot(self, int64_t start, int32_t slot) noexcept nogil:
        # A leaf without rows, which is what a slot out of use has to be.
        memset(&self.nodes[start + slot], 0, sizeof(Node))
        memset(&self.growth[start + slot], 0, sizeof(Growth))
        self.make_leaf(start, slot)

    cdef void make_leaf(self, int64_t start, int32_t slot) noexcept nogil:
        # Every slot has a place of its own among the leaves.
        self.nodes[start + slot].left = -1
        self.nodes[start + slot].right = <int32_t>(start + slot)
        memset(&self.leaves[start + slot], 0, sizeof(Leaf))

    cdef int32_t set_budgets(self, int64_t start, int32_t slot) noexcept nogil:
        # Every node may grow as many leaves as are under it.
        cdef const Node* node = &self.nodes[start + slot]
        cdef int32_t budget = 1
        if node.left >= 0:
            budget = self.set_budgets(start, node.left) + self.set_budgets(start, node.right)
        self.growth[start + slot].budget = budget
        return budget

    cdef void read_growth(self, int64_t node, int32_t* budget, int64_t* generation) noexcept nogil:
        budget[0] = self.growth[node].budget
        generation[0] = self.growth[node].generation

    # --- the past ---------------------------------------------------------------------------------------------------

    cdef int64_t divide(self, const Node* node, int32_t* order, int64_t first, int64_t count) noexcept nogil:
        # Reorder a range of groups so that those that go left come first, otherwise in their order; returns how many.
        cdef const uint8_t* column = self.columns + <int64_t>self.column_of[node.feature] * self.num_groups
        cdef int64_t i, left = 0, right = 0
        cdef int32_t group, missing = self.num_bins[node.feature]
        for i in range(first, first + count):
            group = order[i]
            if goes_left(node, column[group], missing):
                order[first + left] = group
                left += 1
            else:
                self.swap[right] = group
                right += 1
        memcpy(order + first + left, self.swap, right * sizeof(int32_t))
        return left

    cdef void route(self, int64_t tree, int32_t slot, int64_t first, int64_t count) noexcept nogil:
        # Divide the groups of a node among its descendants.
        cdef int64_t start = self.tree_start[tree], left
        cdef const Node* node = &self.nodes[start + slot]
        self.growth[start + slot].first, self.growth[start + slot].count = first, count
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

    cdef bint open_history(self) noexcept nogil:
        cdef int64_t i
        for i in range(self.num_groups):
            self.told[i] = self.baseline
        return True

    cdef void close_history(self) noexcept nogil:
        pass

    cdef void find_groups(self, int64_t tree) noexcept nogil:
        # They are listed leaf by leaf.
        pass

    cdef void derive_history(self) noexcept nogil:
        cdef int64_t i
        for i in range(self.num_groups):
            self.derivatives[i].rows = <double>self.group_rows[i]
            self.derivatives[i].gradient = self.derivatives[i].rows * self.told[i] - self.group_sum[i]

    cdef void count_history(self, int64_t tree) noexcept nogil:
        # They are counted with every sum.
        pass

    cdef void sum_history(self, int64_t tree) noexcept nogil:
        self.derive_history()
        self.sum_leaves(tree)

    cdef void sum_leaves(self, int64_t tree) noexcept nogil:
        # What the leaves of a tree hold of the past.
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef const Growth* growth
        cdef int64_t s, i
        cdef double gradient
        cdef uint32_t rows
        for s in range(self.tree_start[tree], self.tree_start[tree + 1]):
            if self.nodes[s].left >= 0:
                continue
            growth = &self.growth[s]
            gradient = 0.0
            rows = 0
            for i in range(growth.first, growth.first + growth.count):
                gradient += self.derivatives[order[i]].gradient
                rows += self.group_rows[order[i]]
            self.leaves[s].history_gradient = gradient
            self.leaves[s].history_rows = rows

    cdef void advance_history(self, int64_t tree) noexcept nogil:
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef const Growth* growth
        cdef int64_t s, i
        cdef double refreshed
        for s in range(self.tree_start[tree], self.tree_start[tree + 1]):
            if self.nodes[s].left < 0:
                growth = &self.growth[s]
                refreshed = self.leaves[s].refreshed_value
                for i in range(growth.first, growth.first + growth.count):
                    self.told[order[i]] += refreshed

    # --- a batch ----------------------------------------------------------------------------------------------------

    cdef bint remember(self, bint with_gradients) noexcept nogil:
        # A batch over stored derivatives leaves the structure as it is.
        if not OnlineTrees.remember(self, with_gradients):
            return False
        if with_gradients:
            memcpy(self.old_nodes, self.nodes, self.num_nodes * sizeof(Node))
            memcpy(self.old_growth, self.growth, self.num_nodes * sizeof(Growth))
        self.moved = False
        return True

    cdef void take_back(self) noexcept nogil:
        # When subtrees were rebuilt, groups have to find their leaves again.
        OnlineTrees.take_back(self)
        if self.moved:
            memcpy(self.nodes, self.old_nodes, self.num_nodes * sizeof(Node))
            memcpy(self.growth, self.old_growth, self.num_nodes * sizeof(Growth))
            self.route_history()

    cdef void open_check(self, const int32_t* rows, int64_t num_rows) noexcept nogil:
        self.open_history()
        self.recent.order = rows
        self.recent.codes = self.codes
        self.recent.first = 0
        self.recent.count = num_rows
        self.search.find_twins(&self.recent)

    cdef int check_stored(
        self, int64_t tree, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added
    ) noexcept nogil:
        cdef int64_t i, num_rows = num_kept + num_added
        cdef int32_t row
        self.derive_history()
        for i in range(num_rows):
            row = kept[i] if i < num_kept else added[i - num_kept]
            self.recent_swap[i] = row
            self.recent_slot[row] = self.slot_of(tree, self.codes + <int64_t>row * self.num_features)
            self.recent_derivative[row] = self.gradients[row * self.num_trees + tree]
        self.arrange_recent(tree, self.recent_swap, num_rows)
        return self.walk(tree, True)

    # --- splits -----------------------------------------------------------------------------------------------------

    cdef void arrange_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # List recent rows leaf by leaf, like groups; `recent_slot` tells where each is.
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int64_t slots = self.tree_start[tree + 1] - self.tree_start[tree], i
        cdef int32_t leaf
        memset(self.recent_count, 0, slots * sizeof(int64_t))
        for i in range(num_rows):
            self.recent_count[self.recent_slot[rows[i]]] += 1
        self.place_recent(nodes, 0, 0)
        for i in range(num_rows):
            leaf = self.recent_slot[rows[i]]
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

    cdef int walk(self, int64_t tree, bint stop) noexcept nogil:
        # Check the nodes of a tree into `verdicts`, those below one that has to be rebuilt left out where the pool holds
        # the histograms of all.
        if self.pool_size >= self.tree_start[tree + 1] - self.tree_start[tree]:
            self.sum_cells(tree, 0)
            return self.check_down(tree, 0, 1, stop)
        self.count_needs(&self.nodes[self.tree_start[tree]], 0)
        return self.walk_node(tree, 0, 1, 0, stop)

    cdef void sum_cells(self, int64_t tree, int32_t slot) noexcept nogil:
        # Histograms of a subtree, each in the place of its node.
        cdef const Node* node = &self.nodes[self.tree_start[tree] + slot]
        cdef const Growth* growth = &self.growth[self.tree_start[tree] + slot]
        cdef int64_t i, num_cells = self.search.num_cells
        cdef Cell* cells = self.pool + slot * num_cells
        cdef const Cell* left = self.pool + node.left * num_cells
        cdef const Cell* right = self.pool + node.right * num_cells
        if node.left < 0:
            self.fill_cells(self.order + tree * self.num_groups, growth.first, growth.count, cells)
        else:
            self.sum_cells(tree, node.left)
            self.sum_cells(tree, node.right)
            for i in range(num_cells):
                cells[i].gradient = left[i].gradient + right[i].gradient
                cells[i].rows = left[i].rows + right[i].rows
        self.sum_totals(self.tree_start[tree], slot)

    cdef void sum_totals(self, int64_t start, int32_t slot) noexcept nogil:
        # What a node holds, from its rows or its children.
        cdef const Node* node = &self.nodes[start + slot]
        cdef const Leaf* leaf = &self.leaves[start + slot]
        cdef Totals* totals = &self.totals[slot]
        cdef const Totals* one
        cdef const Totals* two
        if node.left < 0:
            totals.history_gradient, totals.history_rows = leaf.history_gradient, leaf.history_rows
            totals.recent_gradient, totals.recent_rows = leaf.recent_gradient, leaf.recent_rows
            return
        one, two = &self.totals[node.left], &self.totals[node.right]
        totals.history_gradient = one.history_gradient + two.history_gradient
        totals.history_rows = one.history_rows + two.history_rows
        totals.recent_gradient = one.recent_gradient + two.recent_gradient
        totals.recent_rows = one.recent_rows + two.recent_rows

    cdef int check_down(self, int64_t tree, int32_t slot, uint64_t path, bint stop) noexcept nogil:
        cdef const Node* node = &self.nodes[self.tree_start[tree] + slot]
        cdef int outcome = self.check(tree, slot, path, self.pool + slot * self.search.num_cells, &self.totals[slot])
        self.verdicts[slot] = outcome == WALK_MUST_REBUILD
        if outcome == WALK_MUST_REBUILD and not stop:
            return WALK_FINE
        if outcome == WALK_FINE and node.left >= 0:
            outcome = self.check_down(tree, node.left, 2 * path, stop)
            if outcome == WALK_FINE:
                outcome = self.check_down(tree, node.right, 2 * path + 1, stop)
        return outcome

    cdef int walk_node(self, int64_t tree, int32_t slot, uint64_t path, int64_t place, bint stop) noexcept nogil:
        # Check a subtree from its leaves up; its histogram is left at `place` of the pool.
        cdef int64_t start = self.tree_start[tree]
        cdef const Node* node = &self.nodes[start + slot]
        cdef const Growth* growth = &self.growth[start + slot]
        cdef Cell* cells = self.pool + place * self.search.num_cells
        cdef const Cell* others
        cdef int64_t i
        cdef int outcome
        cdef bint left_first
        self.verdicts[slot] = 0
        if node.left < 0:
            self.fill_cells(self.order + tree * self.num_groups, growth.first, growth.count, cells)
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
        self.sum_totals(start, slot)
        outcome = self.check(tree, slot, path, cells, &self.totals[slot])
        if outcome == WALK_MUST_REBUILD and not stop:
            self.verdicts[slot] = 1
            return WALK_FINE
        return outcome

    cdef int check(
        self, int64_t tree, int32_t slot, uint64_t path, const Cell* cells, const Totals* totals
    ) noexcept nogil:
        # Whether the split of a node is still good enough; a leaf that a rebuild left over may split again.
        cdef const Node* node = &self.nodes[self.tree_start[tree] + slot]
        cdef const Growth* growth = &self.growth[self.tree_start[tree] + slot]
        cdef Split split
        cdef uint64_t key
        cdef double allowed
        if node.left < 0 and growth.budget < 2:
            return WALK_FINE
        self.recent.first = self.recent_first[slot]
        self.recent.count = self.recent_count[slot]
        if self.search.evaluate(cells, &self.recent, totals) != SPLIT_FINE:
            return WALK_NOT_FINITE
        key = node_key(self.seed, self.store, tree, path, growth.generation)
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
        cdef int64_t generation = self.growth[self.tree_start[tree] + slot].generation + 1
        self.search.best(node_key(self.seed, self.store, tree, path, generation), &self.fresh[slot])

    cdef bint repair_tree(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        cdef int64_t before = self.rebuilt
        self.arrange_recent(tree, rows, num_rows)
        if self.walk(tree, False) != WALK_FINE:
            return False
        if not self.repair(tree, 0, 1, 0):
            return False
        if self.rebuilt != before:
            self.sum_leaves(tree)
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
        cdef int64_t start = self.tree_start[tree], slots = self.tree_start[tree + 1] - start, i, best
        cdef const Node* nodes = &self.nodes[start]
        cdef Growth* growth = &self.growth[start + top]
        cdef int32_t budget = growth.budget, leaves = 1, free_slot = 0
        cdef int64_t generation = growth.generation + 1, num_frontier = 1, num_banked = 0
        cdef Frontier* chosen
        cdef Frontier* child
        cdef int side
        self.moved = True
        self.sort_groups(self.order + tree * self.num_groups + growth.first, growth.count)
        memset(self.used, 0, slots)
        self.mark_used(nodes, 0, top)
        self.make_leaf(start, top)
        growth.generation = generation
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
            self.split_node(tree, chosen, &free_slot, generation)
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
                self.clear_slot(start, <int32_t>i)
        self.set_budgets(start, top)
        growth.budget = budget
        self.rebuilt += 2 * leaves - 1
        return True

    cdef bint seek_children(
        self, int64_t tree, const Frontier* parent, Frontier* children, bint banked, int64_t* num_banked
    ) noexcept nogil:
        # Find the best splits of two new nodes. Where histograms of the frontier are kept, the larger child's is the
        # parent's without the smaller child's.
        cdef const Growth* growth = &self.growth[self.tree_start[tree]]
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef Frontier* child
        cdef int64_t cells = self.search.num_cells, i
        cdef int smaller = growth[children[1].slot].count < growth[children[0].slot].count, turn
        cdef Cell* into
        cdef const Cell* taken
        for turn in range(2):
            child = &children[smaller if turn == 0 else 1 - smaller]
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
                self.fill_cells(order, growth[child.slot].first, growth[child.slot].count, into)
            if not self.seek(tree, child, into):
                return False
        return True

    cdef bint seek(self, int64_t tree, Frontier* entry, const Cell* cells) noexcept nogil:
        # Find the best split of a node with this histogram into its entry; false when a gain is no number.
        cdef const Growth* growth = &self.growth[self.tree_start[tree] + entry.slot]
        cdef const int32_t* order = self.order + tree * self.num_groups
        cdef Totals totals
        cdef int64_t i
        memset(&totals, 0, sizeof(Totals))
        if entry.depth >= self.max_depth:
            return True
        for i in range(growth.first, growth.first + growth.count):
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
        self.search.best(node_key(self.seed, self.store, tree, entry.path, growth.generation), &entry.split)
        return True

    cdef void split_node(
        self, int64_t tree, const Frontier* entry, int32_t* free_slot, int64_t generation
    ) noexcept nogil:
        cdef int64_t start = self.tree_start[tree], i, left, recent_left = 0, recent_right = 0
        cdef Node* node = &self.nodes[start + entry.slot]
        cdef const Growth* parent = &self.growth[start + entry.slot]
        cdef Growth* growth
        cdef int32_t children[2]
        cdef int side
        cdef int32_t row, missing
        for side in range(2):
            while self.used[free_slot[0]]:
                free_slot[0] += 1
            children[side] = free_slot[0]
            self.used[free_slot[0]] = 1
            self.clear_slot(start, children[side])
            self.growth[start + children[side]].generation = generation
        # Its own place among the leaves is empty since it became one.
        node.left, node.right = children[0], children[1]
        node.feature, node.bin = <uint8_t>entry.split.feature, <uint8_t>entry.split.bin
        node.missing_left = entry.split.missing_left
        missing = self.num_bins[node.feature]
        left = self.divide(node, self.order + tree * self.num_groups, parent.first, parent.count)
        growth = &self.growth[start + node.left]
        growth.first, growth.count = parent.first, left
        growth = &self.growth[start + node.right]
        growth.first, growth.count = parent.first + left, parent.count - left
        for i in range(entry.recent_first, entry.recent_first + entry.recent_count):
            row = self.recent_order[i]
            if goes_left(node, self.codes[<int64_t>row * self.num_features + node.feature], missing):
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
