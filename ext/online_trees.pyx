# Trees of one store whose leaves learn (regression-and-learned.md section 4.5); those whose splits learn too build on
# them in `online_forest.pyx`. Rows of the past are kept as bin codes, grouped where equal. Which leaf a group reaches and
# its derivative follow from codes and leaf values, so they are found anew when they are needed; what a batch works with
# beside its leaves is there for as long as it runs. A batch changes leaves in place; a copy from before it is taken back
# when it fails.

from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport numpy as cnp

from fpmsdk._ext.online_split cimport MAX_BINS

import numpy as np

cnp.import_array()

cdef extern from *:
    int __builtin_ctzll(unsigned long long) noexcept nogil

cdef enum:
    MAX_MASKED = 64          # leaves that a mask has bits for
    GROUPS_AT_ONCE = 256     # whose masks are combined column by column

DEPTH_LIMIT = MAX_DEPTH

# What a node is made of outside of a batch: arrays of equal length, tree after tree, each in preorder.
NODE_TYPES = {
    "left": np.int32, "right": np.int32, "feature": np.int32, "bin": np.int32, "missing_left": np.int32,
    "budget": np.int32, "generation": np.int64, "value": np.float64, "refreshed_value": np.float64,
    "recent_gradient": np.float64,
}


cdef class OnlineTrees:
    """Trees with fixed splits over grouped rows of the past and the recent rows of a store; `begin` makes them usable.

    Parameters
    ----------
    columns: uint8 [column, group], codes of the past; features with equal codes share a column.
    column_of: int32 [feature].
    num_bins: int32 [feature], without the code of missing values, which follows them.
    group_rows: uint32 [group], fewer than 2^32 in all.
    group_sum: float64 [group], summed targets of their rows.
    tree_slots, tree_nodes: int64 [tree], nodes that each tree may have, and has.
    nodes: arrays of `NODE_TYPES` by name; children as slots of their tree, -1 for leaves. Budgets and generations are
        those of trees that never were rebuilt.
    controls: learning_rate, l2_regularization, baseline, update_step, update_mode, mutable_tree_tail.
    """

    def __init__(
        self, columns, column_of, num_bins, group_rows, group_sum, tree_slots, tree_nodes, dict nodes, dict controls
    ):
        self.num_features = len(num_bins)
        self.num_columns = len(columns)
        self.num_groups = len(group_rows)
        self.num_trees = len(tree_slots)
        self.history_rows = int(sum(int(rows) for rows in group_rows))
        self.baseline = controls["baseline"]
        self.learning_rate = controls["learning_rate"]
        self.l2 = controls["l2_regularization"]
        self.update_step = controls["update_step"]
        self.structural = controls["update_mode"] == "structural"
        tail = controls["mutable_tree_tail"]
        self.first_mutable = 0 if tail is None else max(0, self.num_trees - tail)
        self.history_weight = self.recent_weight = 1.0
        tree_start = np.zeros(self.num_trees + 1, np.int64)
        np.cumsum(tree_slots, out=tree_start[1:])
        self.num_nodes = int(tree_start[self.num_trees])
        self.buffers = []
        self.num_bins = <const int32_t*>self.hold(np.ascontiguousarray(num_bins, np.int32))
        self.column_of = <const int32_t*>self.hold(np.ascontiguousarray(column_of, np.int32))
        self.columns = <const uint8_t*>self.hold(np.ascontiguousarray(columns, np.uint8))
        self.group_rows = <const uint32_t*>self.hold(np.ascontiguousarray(group_rows, np.uint32))
        self.group_sum = <const double*>self.hold(np.ascontiguousarray(group_sum, np.float64))
        self.tree_start = <const int64_t*>self.hold(tree_start)
        self.nodes = <Node*>self.hold(np.zeros(self.num_nodes * sizeof(Node), np.uint8))
        leaf_start = tree_start
        if not self.structural:
            # No tree ever has other leaves, so that none needs more places than it has leaves.
            leaf_start = np.zeros(self.num_trees + 1, np.int64)
            np.cumsum((np.asarray(tree_slots) + 1) // 2, out=leaf_start[1:])
        self.leaf_start = <const int64_t*>self.hold(leaf_start)
        self.num_leaves = int(leaf_start[self.num_trees])
        self.leaves = <Leaf*>self.hold(np.zeros(self.num_leaves * sizeof(Leaf), np.uint8))
        self.read_nodes(nodes, tree_nodes)
        self.capacity = 0
        self.ring_buffers = []

    def __dealloc__(self):
        self.forget()
        free(self.reached)
        free(self.masks)

    cdef void* hold(self, array) except NULL:
        self.buffers.append(array)
        return cnp.PyArray_DATA(array)

    def arrays(self):
        """Every array that the trees hold, working memory included."""
        return [*self.buffers, *self.ring_buffers]

    cdef int read_nodes(self, dict given, tree_nodes) except -1:
        cdef int64_t t, slot, start, entry = 0, used
        cdef Node* node
        cdef Leaf* leaf
        cdef cnp.ndarray waiting = np.zeros(self.num_nodes + 1, np.int32)
        cdef int32_t* places = <int32_t*>cnp.PyArray_DATA(waiting)
        nodes = {name: np.ascontiguousarray(given[name], dtype) for name, dtype in NODE_TYPES.items()}
        cdef const int32_t* left = <const int32_t*>cnp.PyArray_DATA(nodes["left"])
        cdef const int32_t* right = <const int32_t*>cnp.PyArray_DATA(nodes["right"])
        cdef const int32_t* feature = <const int32_t*>cnp.PyArray_DATA(nodes["feature"])
        cdef const int32_t* bin = <const int32_t*>cnp.PyArray_DATA(nodes["bin"])
        cdef const int32_t* missing = <const int32_t*>cnp.PyArray_DATA(nodes["missing_left"])
        cdef const double* value = <const double*>cnp.PyArray_DATA(nodes["value"])
        cdef const double* refreshed = <const double*>cnp.PyArray_DATA(nodes["refreshed_value"])
        cdef const double* gradient = <const double*>cnp.PyArray_DATA(nodes["recent_gradient"])
        for t in range(self.num_trees):
            start = self.tree_start[t]
            used = tree_nodes[t]
            for slot in range(self.tree_start[t + 1] - start):
                node = &self.nodes[start + slot]
                node.left = -1
                if slot < used and left[entry] >= 0:
                    node.left, node.right = left[entry], right[entry]
                    node.feature, node.bin = <uint8_t>feature[entry], <uint8_t>bin[entry]
                    node.missing_left = missing[entry] != 0
                else:
                    node.right = <int32_t>(start + slot)
                entry += slot < used
            if not self.structural:
                self.number_leaves(t, places)
            for slot in range(used):
                node = &self.nodes[start + slot]
                if node.left < 0:
                    leaf = &self.leaves[node.right]
                    leaf.value = value[entry - used + slot]
                    leaf.refreshed_value = refreshed[entry - used + slot]
                    leaf.recent_gradient = gradient[entry - used + slot]
        return 0

    cdef void number_leaves(self, int64_t tree, int32_t* places) noexcept nogil:
        # Give the leaves of a tree their places level by level, as a published forest lists its nodes.
        cdef Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int64_t at = 0, end = 1, leaf = self.leaf_start[tree]
        places[0] = 0
        while at < end:
            if nodes[places[at]].left < 0:
                nodes[places[at]].right = <int32_t>leaf
                leaf += 1
            else:
                places[end] = nodes[places[at]].left
                places[end + 1] = nodes[places[at]].right
                end += 2
            at += 1

    cdef int bind_ring(self, const uint8_t* codes, const double* targets, double* gradients, int64_t capacity) except -1:
        # Recent rows moved; a batch needs as much memory beside them.
        if capacity != self.capacity:
            self.ring_buffers = [
                np.zeros(capacity), np.zeros(capacity), np.zeros(capacity, np.int32), np.zeros(capacity, np.int32),
                np.zeros(capacity, np.int32),
            ]
            self.recent_prefix = <double*>cnp.PyArray_DATA(self.ring_buffers[0])
            self.recent_derivative = <double*>cnp.PyArray_DATA(self.ring_buffers[1])
            self.recent_slot = <int32_t*>cnp.PyArray_DATA(self.ring_buffers[2])
            self.recent_order = <int32_t*>cnp.PyArray_DATA(self.ring_buffers[3])
            self.recent_swap = <int32_t*>cnp.PyArray_DATA(self.ring_buffers[4])
        self.capacity = capacity
        self.codes, self.targets, self.gradients = codes, targets, gradients
        return 0

    cdef int begin(self, const int32_t* rows, int64_t num_rows) except -1:
        # What the leaves hold of the past, from the values of the last refresh, and how many recent rows, neither of
        # which a saved state tells.
        cdef int64_t t, i
        if not self.open_history():
            raise MemoryError
        for t in range(self.num_trees):
            self.find_groups(t)
            self.count_history(t)
            self.sum_history(t)
            self.advance_history(t)
            for i in range(num_rows):
                self.leaf_of(t, self.codes + <int64_t>rows[i] * self.num_features).recent_rows += 1
        self.close_history()
        return 0

    cdef void set_weights(self, double history_weight, double recent_weight) noexcept nogil:
        self.history_weight = history_weight
        self.recent_weight = recent_weight

    # --- trees ------------------------------------------------------------------------------------------------------

    cdef int32_t slot_of(self, int64_t tree, const uint8_t* codes) noexcept nogil:
        # Slot of the leaf in its tree.
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef const Node* node = nodes
        cdef int32_t slot = 0
        while node.left >= 0:
            slot = node.left if goes_left(node, codes[node.feature], self.num_bins[node.feature]) else node.right
            node = &nodes[slot]
        return slot

    cdef Leaf* leaf_of(self, int64_t tree, const uint8_t* codes) noexcept nogil:
        return &self.leaves[self.nodes[self.tree_start[tree] + self.slot_of(tree, codes)].right]

    cdef double predict(self, const uint8_t* codes) noexcept nogil:
        # Raw value in target space.
        cdef double raw = self.baseline
        cdef int64_t t
        for t in range(self.num_trees):
            raw += self.leaf_of(t, codes).value
        return raw

    # --- the past ---------------------------------------------------------------------------------------------------

    cdef bint open_history(self) noexcept nogil:
        # Memory for the past, and nothing said yet; false without memory.
        cdef int64_t i
        self.prefix = <double*>malloc((self.num_groups + 1) * sizeof(double))
        self.reached = <int32_t*>malloc((self.num_groups + 1) * sizeof(int32_t))
        self.masks = <uint64_t*>malloc((self.num_columns + 1) * MAX_BINS * sizeof(uint64_t))
        if self.prefix == NULL or self.reached == NULL or self.masks == NULL:
            self.close_history()
            return False
        for i in range(self.num_groups):
            self.prefix[i] = self.baseline
        return True

    cdef void close_history(self) noexcept nogil:
        free(self.prefix)
        free(self.reached)
        free(self.masks)
        self.prefix = NULL
        self.reached = NULL
        self.masks = NULL

    cdef void find_groups(self, int64_t tree) noexcept nogil:
        # The leaf that every group reaches. A node that sends a code to the right clears the leaves below its left
        # child; the lowest bit that stays is the leaf reached (the idea is QuickScorer's).
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int32_t leaf_at[MAX_MASKED]
        cdef int32_t used[MAX_MASKED]
        cdef int32_t num_leaves = 0
        cdef int num_used = 0, u
        cdef int64_t i, first = 0, count
        cdef const Node* node
        cdef uint64_t bits[GROUPS_AT_ONCE]
        cdef const uint64_t* masks
        cdef const uint8_t* codes
        if self.leaf_start[tree + 1] - self.leaf_start[tree] <= MAX_MASKED:
            self.mask_codes(nodes, 0, leaf_at, &num_leaves, used, &num_used)
            while first < self.num_groups:
                count = min(self.num_groups - first, GROUPS_AT_ONCE)
                for i in range(count):
                    bits[i] = ~<uint64_t>0
                for u in range(num_used):
                    masks = self.masks + used[u] * MAX_BINS
                    codes = self.columns + used[u] * self.num_groups + first
                    for i in range(count):
                        bits[i] &= masks[codes[i]]
                for i in range(count):
                    self.reached[first + i] = leaf_at[__builtin_ctzll(bits[i])]
                first += count
            return
        for i in range(self.num_groups):
            node = nodes
            while node.left >= 0:
                u = self.columns[self.column_of[node.feature] * self.num_groups + i]
                node = &nodes[node.left if goes_left(node, u, self.num_bins[node.feature]) else node.right]
            self.reached[i] = node.right

    cdef uint64_t mask_codes(
        self, const Node* nodes, int32_t slot, int32_t* leaf_at, int32_t* num_leaves, int32_t* used, int* num_used
    ) noexcept nogil:
        # Fill the masks of the columns that a subtree asks for; returns its leaves, numbered from left to right.
        cdef const Node* node = &nodes[slot]
        cdef uint64_t left, below
        cdef uint64_t* masks
        cdef int32_t column, code
        cdef int u
        if node.left < 0:
            leaf_at[num_leaves[0]] = node.right
            num_leaves[0] += 1
            return <uint64_t>1 << (num_leaves[0] - 1)
        left = self.mask_codes(nodes, node.left, leaf_at, num_leaves, used, num_used)
        below = left | self.mask_codes(nodes, node.right, leaf_at, num_leaves, used, num_used)
        column = self.column_of[node.feature]
        masks = self.masks + column * MAX_BINS
        for u in range(num_used[0]):
            if used[u] == column:
                break
        else:
            memset(masks, 0xFF, MAX_BINS * sizeof(uint64_t))
            used[num_used[0]] = column
            num_used[0] += 1
        for code in range(node.bin + 1, self.num_bins[node.feature]):
            masks[code] &= ~left
        if not node.missing_left:
            masks[self.num_bins[node.feature]] &= ~left
        return below

    cdef void count_history(self, int64_t tree) noexcept nogil:
        # Rows of the past in the leaves of a tree, which stay where they are.
        cdef int64_t i
        for i in range(self.num_groups):
            self.leaves[self.reached[i]].history_rows += self.group_rows[i]

    cdef void sum_history(self, int64_t tree) noexcept nogil:
        # Derivatives of the past in the leaves of a tree.
        cdef int64_t i, s
        cdef const int32_t* reached = self.reached
        cdef const uint32_t* rows = self.group_rows
        cdef const double* sums = self.group_sum
        cdef const double* prefix = self.prefix
        cdef Leaf* leaves = self.leaves
        for s in range(self.leaf_start[tree], self.leaf_start[tree + 1]):
            leaves[s].history_gradient = 0.0
        for i in range(self.num_groups):
            leaves[reached[i]].history_gradient += <double>rows[i] * prefix[i] - sums[i]

    cdef void advance_history(self, int64_t tree) noexcept nogil:
        # Add what the tree says, as of the last refresh, to the prefix of every group.
        cdef int64_t i
        for i in range(self.num_groups):
            self.prefix[i] += self.leaves[self.reached[i]].refreshed_value

    # --- a batch ----------------------------------------------------------------------------------------------------

    cdef bint remember(self, bint with_gradients) noexcept nogil:
        # Copy what a batch changes; false without memory.
        cdef int64_t size = self.capacity * self.num_trees * sizeof(double)
        self.old_leaves = <Leaf*>malloc((self.num_leaves + 1) * sizeof(Leaf))
        self.old_gradients = <double*>malloc(size + 1) if with_gradients else NULL
        if self.old_leaves == NULL or (with_gradients and self.old_gradients == NULL):
            self.forget()
            return False
        memcpy(self.old_leaves, self.leaves, self.num_leaves * sizeof(Leaf))
        if with_gradients:
            memcpy(self.old_gradients, self.gradients, size)
        return True

    cdef void take_back(self) noexcept nogil:
        memcpy(self.leaves, self.old_leaves, self.num_leaves * sizeof(Leaf))
        if self.old_gradients != NULL:
            memcpy(self.gradients, self.old_gradients, self.capacity * self.num_trees * sizeof(double))

    cdef void forget(self) noexcept nogil:
        free(self.old_leaves)
        free(self.old_gradients)
        self.old_leaves = NULL
        self.old_gradients = NULL

    cdef bint update_leaves(self, int64_t tree) noexcept nogil:
        # Move every leaf towards its optimum; false when one is no number.
        cdef double wh = self.history_weight, wr = self.recent_weight, weight, optimum
        cdef int64_t s
        cdef bint fine = True
        cdef Leaf* leaf
        for s in range(self.leaf_start[tree], self.leaf_start[tree + 1]):
            leaf = &self.leaves[s]
            weight = wh * <double>leaf.history_rows + wr * <double>leaf.recent_rows
            optimum = 0.0
            if weight != 0.0:
                optimum = (
                    -self.learning_rate * (wh * leaf.history_gradient + wr * leaf.recent_gradient) / (weight + self.l2)
                )
            leaf.value = optimum if self.update_step == 1.0 else leaf.value + self.update_step * (optimum - leaf.value)
            fine &= isfinite(leaf.value) != 0
        return fine

    cdef bint lazy(self, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added,
                   const int32_t* evicted, int64_t num_evicted, bint* must_rebuild) noexcept nogil:
        # A batch over stored derivatives; false, with everything as before, when it fails or a split no longer holds.
        cdef int outcome
        must_rebuild[0] = False
        if not self.remember(False):
            return False
        outcome = self.run_lazy(kept, num_kept, added, num_added, evicted, num_evicted)
        if outcome != WALK_FINE:
            self.take_back()
        self.forget()
        must_rebuild[0] = outcome == WALK_MUST_REBUILD
        return outcome == WALK_FINE

    cdef int run_lazy(self, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added,
                      const int32_t* evicted, int64_t num_evicted) noexcept nogil:
        cdef int64_t t, i, trees = self.num_trees
        cdef int32_t row
        cdef Leaf* leaf
        cdef double gradient
        cdef int outcome
        for i in range(num_added):
            self.recent_prefix[added[i]] = self.baseline
        if self.structural:
            # Added rows follow the kept ones in the list, unless those are all gone.
            self.open_check(kept if num_kept else added, num_kept + num_added)
        for t in range(trees):
            if t >= self.first_mutable:
                for i in range(num_evicted):
                    row = evicted[i]
                    leaf = self.leaf_of(t, self.codes + <int64_t>row * self.num_features)
                    leaf.recent_rows -= 1
                    leaf.recent_gradient -= self.gradients[row * trees + t]
                    if leaf.recent_rows == 0:
                        leaf.recent_gradient = 0.0
                for i in range(num_added):
                    row = added[i]
                    leaf = self.leaf_of(t, self.codes + <int64_t>row * self.num_features)
                    gradient = self.recent_prefix[row] - self.targets[row]
                    self.gradients[row * trees + t] = gradient
                    leaf.recent_rows += 1
                    leaf.recent_gradient += gradient
                if self.structural:
                    outcome = self.check_stored(t, kept, num_kept, added, num_added)
                    if outcome != WALK_FINE:
                        return outcome
                if not self.update_leaves(t):
                    return WALK_NOT_FINITE
            for i in range(num_added):
                row = added[i]
                self.recent_prefix[row] += self.leaf_of(t, self.codes + <int64_t>row * self.num_features).value
            if self.structural:
                self.advance_history(t)
        for i in range(num_added):
            if not isfinite(self.recent_prefix[added[i]]):
                return WALK_NOT_FINITE
        return WALK_FINE

    cdef bint eager(self, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # A batch with every derivative anew; false, with everything as before, when it fails. `rows` are the recent
        # ones, oldest first.
        cdef bint done
        self.rebuilt = 0
        if not self.remember(True):
            return False
        done = self.open_history() and self.run_eager(rows, num_rows)
        self.close_history()
        if not done:
            self.take_back()
        self.forget()
        return done

    cdef bint run_eager(self, const int32_t* rows, int64_t num_rows) noexcept nogil:
        cdef int64_t t, i, trees = self.num_trees, s
        cdef int32_t row
        cdef const Node* nodes
        if self.structural:
            self.open_check(rows, num_rows)
        for i in range(num_rows):
            self.recent_prefix[rows[i]] = self.baseline
        for t in range(trees):
            self.find_groups(t)
            if t >= self.first_mutable:
                for i in range(num_rows):
                    row = rows[i]
                    self.recent_derivative[row] = self.recent_prefix[row] - self.targets[row]
                    self.gradients[row * trees + t] = self.recent_derivative[row]
                self.sum_history(t)
                self.sum_recent(t, rows, num_rows)
                if self.structural and not self.repair_tree(t, rows, num_rows):
                    return False
                if not self.update_leaves(t):
                    return False
                for s in range(self.leaf_start[t], self.leaf_start[t + 1]):
                    self.leaves[s].refreshed_value = self.leaves[s].value
            else:
                self.find_recent(t, rows, num_rows)
            nodes = &self.nodes[self.tree_start[t]]
            for i in range(num_rows):
                row = rows[i]
                self.recent_prefix[row] += self.leaves[nodes[self.recent_slot[row]].right].value
            self.advance_history(t)
        for i in range(num_rows):
            if not isfinite(self.recent_prefix[rows[i]]):
                return False
        return True

    cdef void find_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # Where each row is in the tree.
        cdef int64_t i
        for i in range(num_rows):
            self.recent_slot[rows[i]] = self.slot_of(tree, self.codes + <int64_t>rows[i] * self.num_features)

    cdef void sum_recent(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        cdef const Node* nodes = &self.nodes[self.tree_start[tree]]
        cdef int64_t s, i
        cdef int32_t row
        cdef Leaf* leaf
        for s in range(self.leaf_start[tree], self.leaf_start[tree + 1]):
            self.leaves[s].recent_gradient = 0.0
            self.leaves[s].recent_rows = 0
        self.find_recent(tree, rows, num_rows)
        for i in range(num_rows):
            row = rows[i]
            leaf = &self.leaves[nodes[self.recent_slot[row]].right]
            leaf.recent_gradient += self.recent_derivative[row]
            leaf.recent_rows += 1

    # --- structure, which is fixed here -----------------------------------------------------------------------------

    cdef void open_check(self, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # A batch begins, which these rows will be the recent ones of.
        pass

    cdef int check_stored(
        self, int64_t tree, const int32_t* kept, int64_t num_kept, const int32_t* added, int64_t num_added
    ) noexcept nogil:
        # Whether every split of a tree still holds, over stored derivatives.
        return WALK_FINE

    cdef bint repair_tree(self, int64_t tree, const int32_t* rows, int64_t num_rows) noexcept nogil:
        # Rebuild where a split no longer holds; false when a number is none.
        return True

    # --- nodes as arrays --------------------------------------------------------------------------------------------

    cdef void read_growth(self, int64_t node, int32_t* budget, int64_t* generation) noexcept nogil:
        # Budget and generation of a node, where they are other than those of a tree that was never rebuilt.
        pass

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
            waiting = [0]
            while waiting:
                slot = self.tree_start[t] + <int64_t>waiting.pop()
                if self.nodes[slot].left >= 0:
                    waiting += [self.nodes[slot].right, self.nodes[slot].left]
                else:
                    trees.append(t)
                    rows.append(self.leaves[self.nodes[slot].right].history_rows)
        return np.array(trees, np.int64), np.array(rows)

    def node_arrays(self):
        """(nodes in use of each tree, arrays of every used node by name), tree after tree, each in preorder."""
        cdef int64_t t, total = 0, i, tree_end, tree_first
        cdef cnp.ndarray counts = np.zeros(self.num_trees, np.int64)
        cdef cnp.ndarray slots = np.zeros(self.num_nodes, np.int32)
        cdef cnp.ndarray lefts = np.zeros(self.num_nodes, np.int32)
        cdef cnp.ndarray rights = np.zeros(self.num_nodes, np.int32)
        cdef int32_t* slot_data = <int32_t*>cnp.PyArray_DATA(slots)
        cdef int32_t* left = <int32_t*>cnp.PyArray_DATA(lefts)
        cdef int32_t* right = <int32_t*>cnp.PyArray_DATA(rights)
        cdef const Node* nodes
        cdef const Node* node
        cdef const Leaf* leaf
        for t in range(self.num_trees):
            tree_end = self.number_nodes(&self.nodes[self.tree_start[t]], 0, total, 0, slot_data, left, right)
            counts[t] = tree_end
            total += tree_end
        arrays = {name: np.zeros(total, dtype) for name, dtype in NODE_TYPES.items()}
        arrays["left"][:] = lefts[:total]
        arrays["right"][:] = rights[:total]
        cdef int32_t* feature = <int32_t*>cnp.PyArray_DATA(arrays["feature"])
        cdef int32_t* bin = <int32_t*>cnp.PyArray_DATA(arrays["bin"])
        cdef int32_t* missing = <int32_t*>cnp.PyArray_DATA(arrays["missing_left"])
        cdef int32_t* budget = <int32_t*>cnp.PyArray_DATA(arrays["budget"])
        cdef int64_t* generation = <int64_t*>cnp.PyArray_DATA(arrays["generation"])
        cdef double* value = <double*>cnp.PyArray_DATA(arrays["value"])
        cdef double* refreshed = <double*>cnp.PyArray_DATA(arrays["refreshed_value"])
        cdef double* gradient = <double*>cnp.PyArray_DATA(arrays["recent_gradient"])
        tree_first = 0
        for t in range(self.num_trees):
            nodes = &self.nodes[self.tree_start[t]]
            tree_end = tree_first + <int64_t>counts[t]
            # Children follow their parents.
            for i in range(tree_end - 1, tree_first - 1, -1):
                node = &nodes[slot_data[i]]
                if node.left < 0:
                    leaf = &self.leaves[node.right]
                    value[i], refreshed[i], gradient[i] = leaf.value, leaf.refreshed_value, leaf.recent_gradient
                    budget[i] = 1
                else:
                    feature[i], bin[i], missing[i] = node.feature, node.bin, node.missing_left
                    budget[i] = budget[tree_first + left[i]] + budget[tree_first + right[i]]
            for i in range(tree_first, tree_end):
                self.read_growth(self.tree_start[t] + slot_data[i], &budget[i], &generation[i])
            tree_first = tree_end
        return counts, arrays
