# Split search of the online learner (regression-and-learned.md section 4.6). Rows of the past and recent ones have
# histograms of their own, which are prefix-summed apart and weighted when a candidate is judged. Features that divide
# every row alike have equal gains, so one of them is evaluated for all; the first of them wins.

from libc.math cimport INFINITY, isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memset

cimport cython
cimport numpy as cnp

import numpy as np

cnp.import_array()

cdef double RELATIVE_TIE = 1e-12     # equal partitions of two features differ in the last places
cdef double LEAST_HESSIAN = 1e-3

cdef uint64_t PRIME_1 = 0x9E3779B185EBCA87ULL
cdef uint64_t PRIME_2 = 0xC2B2AE3D27D4EB4FULL
cdef uint64_t PRIME_3 = 0x165667B19E3779F9ULL
cdef uint64_t PRIME_4 = 0x85EBCA77C2B2AE63ULL


cdef inline uint64_t rotated(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline uint64_t hash_round(uint64_t lane, uint64_t word) noexcept nogil:
    return rotated(lane + word * PRIME_2, 31) * PRIME_1


cdef uint64_t node_key(uint64_t seed, uint64_t store, uint64_t tree, uint64_t path, uint64_t generation) noexcept nogil:
    # XXH64 of the five numbers, little-endian: 32 bytes through the four lanes, then 8.
    cdef uint64_t one = hash_round(PRIME_1 + PRIME_2, seed)
    cdef uint64_t two = hash_round(PRIME_2, store)
    cdef uint64_t three = hash_round(0, tree)
    cdef uint64_t four = hash_round(0 - PRIME_1, path)
    cdef uint64_t key = rotated(one, 1) + rotated(two, 7) + rotated(three, 12) + rotated(four, 18)
    key = (key ^ hash_round(0, one)) * PRIME_1 + PRIME_4
    key = (key ^ hash_round(0, two)) * PRIME_1 + PRIME_4
    key = (key ^ hash_round(0, three)) * PRIME_1 + PRIME_4
    key = (key ^ hash_round(0, four)) * PRIME_1 + PRIME_4
    key += 40
    key = rotated(key ^ hash_round(0, generation), 27) * PRIME_1 + PRIME_4
    key = (key ^ (key >> 33)) * PRIME_2
    key = (key ^ (key >> 29)) * PRIME_3
    return key ^ (key >> 32)


def key_of_node(seed, store, tree, path, generation):
    """What the draw of a node's candidates starts from: XXH64 of the five unsigned numbers of 64 bits."""
    return node_key(seed, store, tree, path, generation)


cdef inline void add_cell(Totals* totals, const Cell* history, const Cell* recent, int place) noexcept nogil:
    totals.history_gradient += history[place].gradient
    totals.history_rows += history[place].rows
    if recent != NULL:
        totals.recent_gradient += recent[place].gradient
        totals.recent_rows += recent[place].rows


@cython.final
cdef class SplitSearch:
    """The candidates of one store and what they gain at a node.

    Parameters
    ----------
    num_bins: int32, bins of each feature without the one of missing values; 1 to 255.
    column_of: int32, which column of history codes a feature reads; features with equal columns share one.
    l2, min_samples_leaf, sampling_rate: of the learner.
    """

    def __init__(self, num_bins, column_of, double l2, int64_t min_samples_leaf, double sampling_rate):
        cdef int f, column
        cdef int64_t cells = 0, candidates = 0
        self.num_features = len(num_bins)
        self.num_columns = max(column_of) + 1
        self.l2 = l2
        self.min_rows = <double>min_samples_leaf
        self.sampling_rate = sampling_rate
        self.buffers = [np.ascontiguousarray(num_bins, np.int32), np.ascontiguousarray(column_of, np.int32)]
        self.num_bins = <const int32_t*>cnp.PyArray_DATA(self.buffers[0])
        self.column_of = <const int32_t*>cnp.PyArray_DATA(self.buffers[1])
        self.cell_start = <int64_t*>self.own(self.num_columns + 1, np.int64)
        self.candidate_start = <int64_t*>self.own(self.num_features + 1, np.int64)
        self.twin_of = <int32_t*>self.own(self.num_features, np.int32)
        self.gains = <double*>self.own(self.num_features * MAX_BINS, np.float64)
        self.run_bin = <int32_t*>self.own(self.num_features * MAX_BINS + 1, np.int32)
        self.first_run = <int64_t*>self.own(self.num_features, np.int64)
        self.last_run = <int64_t*>self.own(self.num_features, np.int64)
        self.gradient_left = <double*>self.own(MAX_BINS, np.float64)
        self.hessian_left = <double*>self.own(MAX_BINS, np.float64)
        self.rows_left = <double*>self.own(MAX_BINS, np.float64)
        self.missing_goes_left = <uint8_t*>self.own(self.num_features * MAX_BINS, np.uint8)
        self.best_gain = <double*>self.own(self.num_features, np.float64)
        self.recent_cells = <Cell*>self.own(2 * MAX_BINS, np.float64)
        for f in range(self.num_features):
            self.candidate_start[f] = candidates
            candidates += self.num_bins[f] - 1
            self.twin_of[f] = f
        self.candidate_start[self.num_features] = candidates
        self.num_candidates = candidates
        for column in range(self.num_columns):
            self.cell_start[column] = cells
            for f in range(self.num_features):
                if self.column_of[f] == column:
                    cells += self.num_bins[f] + 1
                    break
        self.cell_start[self.num_columns] = cells
        self.num_cells = cells
        self.num_drawn = candidates
        if sampling_rate < 1.0:
            self.num_drawn = min(max(<int64_t>(sampling_rate * <double>candidates), 1), candidates)
        bits = max(2, (candidates - 1).bit_length())
        self.half_bits = bits // 2
        self.place_mask = (<uint64_t>1 << <int>bits) - 1

    cdef void* own(self, length, dtype) except NULL:
        array = np.zeros(length, dtype)
        self.buffers.append(array)
        return cnp.PyArray_DATA(array)

    def drawn(self, key, kept):
        """Candidates of a node, ascending; `kept` is always among them, -1 for none."""
        return [candidate for candidate in range(self.num_candidates) if self.is_drawn(key, candidate, kept)]

    cdef void find_twins(self, const RecentRows* recent) noexcept nogil:
        # Features of one history column are twins as long as no recent row tells them apart.
        cdef int f, other
        cdef int64_t i
        cdef const uint8_t* codes
        cdef bint alike
        for f in range(self.num_features):
            self.twin_of[f] = f
            for other in range(f):
                if self.column_of[other] != self.column_of[f] or self.twin_of[other] != other:
                    continue
                alike = True
                for i in range(recent.first, recent.first + recent.count):
                    codes = recent.codes + <int64_t>recent.order[i] * self.num_features
                    if codes[f] != codes[other]:
                        alike = False
                        break
                if alike:
                    self.twin_of[f] = other
                    break

    cdef void weigh_node(self, const Totals* totals, Weighted* node) noexcept nogil:
        node.gradient = self.history_weight * totals.history_gradient + self.recent_weight * totals.recent_gradient
        node.hessian = self.history_weight * totals.history_rows + self.recent_weight * totals.recent_rows
        node.parent = node.gradient * node.gradient / (node.hessian + self.l2)

    cdef double gain_of_left(self, const Totals* left, const Totals* totals, const Weighted* node) noexcept nogil:
        # -INFINITY when a side is too small.
        cdef double rows_left = left.history_rows + left.recent_rows
        cdef double gradient_left, hessian_left, gradient_right, hessian_right
        if rows_left < self.min_rows or totals.history_rows + totals.recent_rows - rows_left < self.min_rows:
            return -INFINITY
        gradient_left = self.history_weight * left.history_gradient + self.recent_weight * left.recent_gradient
        hessian_left = self.history_weight * left.history_rows + self.recent_weight * left.recent_rows
        gradient_right = node.gradient - gradient_left
        hessian_right = node.hessian - hessian_left
        if hessian_left < LEAST_HESSIAN or hessian_right < LEAST_HESSIAN:
            return -INFINITY
        return (
            gradient_left * gradient_left / (hessian_left + self.l2)
            + gradient_right * gradient_right / (hessian_right + self.l2)
            - node.parent
        )

    cdef const Cell* gather_recent(self, int feature, const RecentRows* recent) noexcept nogil:
        # The recent rows of a node by their codes of one feature; NULL without any.
        cdef int64_t i
        cdef int32_t row
        cdef Cell* cell
        if recent.count == 0:
            return NULL
        memset(self.recent_cells, 0, (self.num_bins[feature] + 1) * sizeof(Cell))
        for i in range(recent.first, recent.first + recent.count):
            row = recent.order[i]
            cell = &self.recent_cells[recent.codes[<int64_t>row * self.num_features + feature]]
            cell.gradient += recent.gradient[row]
            cell.rows += 1.0
        return self.recent_cells

    cdef int evaluate(self, const Cell* cells, const RecentRows* recent, const Totals* totals) noexcept nogil:
        # Gains of every candidate at a node with these history cells and recent rows. Returns a `SplitFault`.
        cdef int f, bins, outcome
        cdef const Cell* recent_cells
        cdef const Cell* column
        cdef Weighted node
        self.weigh_node(totals, &node)
        for f in range(self.num_features):
            if self.twin_of[f] != f:
                continue
            bins = self.num_bins[f]
            column = cells + self.cell_start[self.column_of[f]]
            recent_cells = self.gather_recent(f, recent)
            if column[bins].rows > 0.0 or (recent_cells != NULL and recent_cells[bins].rows > 0.0):
                outcome = self.scan_missing(f, column, recent_cells, totals, &node)
            else:
                outcome = self.scan(f, column, recent_cells, totals, &node)
            if outcome != SPLIT_FINE:
                return outcome
        return SPLIT_FINE

    cdef int scan(
        self, int feature, const Cell* cells, const Cell* recent, const Totals* totals, const Weighted* node
    ) noexcept nogil:
        # A run of candidates that divide alike is one entry: a bin with rows and the empty ones after it.
        cdef int bins = self.num_bins[feature], first = 0, last = bins, b
        cdef int64_t count = 0, low = 0, high, i
        cdef int32_t* run_bin = self.run_bin + feature * MAX_BINS
        cdef double* gains = self.gains + feature * MAX_BINS
        cdef uint8_t* goes_left = self.missing_goes_left + feature * MAX_BINS
        cdef double* gradient_left = self.gradient_left
        cdef double* hessian_left = self.hessian_left
        cdef double* rows_left = self.rows_left
        cdef double history_gradient = 0.0, history_rows = 0.0, recent_gradient = 0.0, recent_rows = 0.0
        cdef double wh = self.history_weight, wr = self.recent_weight, l2 = self.l2, best = -INFINITY
        cdef double gradient = node.gradient, hessian = node.hessian, parent = node.parent, other_gradient
        cdef double rows = totals.history_rows + totals.recent_rows
        cdef bint bad = False
        # Splits above have left a node a part of the bins.
        while first < last and cells[first].rows == 0.0 and (recent == NULL or recent[first].rows == 0.0):
            first += 1
        while last > first and cells[last - 1].rows == 0.0 and (recent == NULL or recent[last - 1].rows == 0.0):
            last -= 1
        # The prefix of a run is written at every bin and kept at those with rows.
        if recent == NULL:
            for b in range(first, last):
                history_gradient += cells[b].gradient
                history_rows += cells[b].rows
                run_bin[count] = b
                rows_left[count] = history_rows
                gradient_left[count] = wh * history_gradient
                hessian_left[count] = wh * history_rows
                count += cells[b].rows != 0.0
        else:
            for b in range(first, last):
                history_gradient += cells[b].gradient
                history_rows += cells[b].rows
                recent_gradient += recent[b].gradient
                recent_rows += recent[b].rows
                run_bin[count] = b
                rows_left[count] = history_rows + recent_rows
                gradient_left[count] = wh * history_gradient + wr * recent_gradient
                hessian_left[count] = wh * history_rows + wr * recent_rows
                count += cells[b].rows + recent[b].rows != 0.0
        run_bin[count] = bins - 1
        # Both sides grow one way, so that the legal runs are a range.
        high = count - 1
        while low < high and (rows_left[low] < self.min_rows or hessian_left[low] < LEAST_HESSIAN):
            low += 1
        while high > low and (
            rows - rows_left[high - 1] < self.min_rows or hessian - hessian_left[high - 1] < LEAST_HESSIAN
        ):
            high -= 1
        for i in range(low, high):
            other_gradient = gradient - gradient_left[i]
            gains[i] = (
                gradient_left[i] * gradient_left[i] / (hessian_left[i] + l2)
                + other_gradient * other_gradient / (hessian - hessian_left[i] + l2)
                - parent
            )
        for i in range(low, high):
            goes_left[i] = 2.0 * rows_left[i] > rows
            bad |= not isfinite(gains[i])
            best = gains[i] if gains[i] > best else best
        self.first_run[feature] = low
        self.last_run[feature] = high
        self.best_gain[feature] = best
        return SPLIT_NOT_FINITE if bad else SPLIT_FINE

    cdef int scan_missing(
        self, int feature, const Cell* cells, const Cell* recent, const Totals* totals, const Weighted* node
    ) noexcept nogil:
        # Where values are missing, every candidate is tried with those on the right, then on the left; the last bin
        # divides values from missing ones.
        cdef int bins = self.num_bins[feature], b
        cdef int32_t* run_bin = self.run_bin + feature * MAX_BINS
        cdef double* gains = self.gains + feature * MAX_BINS
        cdef uint8_t* goes_left = self.missing_goes_left + feature * MAX_BINS
        cdef double gain, other, best = -INFINITY
        cdef Totals left, with_missing
        memset(&left, 0, sizeof(Totals))
        for b in range(bins):
            add_cell(&left, cells, recent, b)
            gain = self.gain_of_left(&left, totals, node)
            run_bin[b] = b
            goes_left[b] = False
            if b < bins - 1:
                with_missing = left
                add_cell(&with_missing, cells, recent, bins)
                other = self.gain_of_left(&with_missing, totals, node)
                if other > gain:
                    gain = other
                    goes_left[b] = True
            if gain != -INFINITY and not isfinite(gain):
                return SPLIT_NOT_FINITE
            gains[b] = gain
            best = gain if gain > best else best
        run_bin[bins] = bins
        self.first_run[feature] = 0
        self.last_run[feature] = bins
        self.best_gain[feature] = best
        return SPLIT_FINE

    cdef int gain_of(
        self, const Split* split, const Cell* cells, const RecentRows* recent, const Totals* totals, double* gain
    ) noexcept nogil:
        # What a split gains at a node, missing values going where it says; -INFINITY when it is not legal.
        cdef int f = split.feature, bins = self.num_bins[f], b
        cdef const Cell* column = cells + self.cell_start[self.column_of[f]]
        cdef const Cell* recent_cells = self.gather_recent(f, recent)
        cdef Totals left
        cdef Weighted node
        memset(&left, 0, sizeof(Totals))
        for b in range(min(split.bin + 1, bins)):
            add_cell(&left, column, recent_cells, b)
        if split.missing_left:
            add_cell(&left, column, recent_cells, bins)
        self.weigh_node(totals, &node)
        gain[0] = self.gain_of_left(&left, totals, &node)
        if gain[0] != -INFINITY and not isfinite(gain[0]):
            return SPLIT_NOT_FINITE
        return SPLIT_FINE

    cdef int64_t place_of(self, uint64_t key, int64_t candidate) noexcept nogil:
        # Place of a candidate in a node's shuffle of them all: a bijection of the smallest fitting number of bits, walked
        # until it lands inside. Whether a candidate is drawn can be asked without drawing them all.
        cdef uint64_t mask = self.place_mask, place = <uint64_t>candidate
        cdef int half = self.half_bits
        while True:
            place = (place + (key >> 40)) & mask
            place = ((place ^ (place >> half)) * (key | 1)) & mask
            place = ((place ^ (place >> half)) * ((key >> 20) | 1)) & mask
            place ^= place >> half
            if place < <uint64_t>self.num_candidates:
                return <int64_t>place

    cdef bint is_drawn(self, uint64_t key, int64_t candidate, int64_t kept) noexcept nogil:
        # Whether a candidate is among those of a node; `kept` always is and takes a place, -1 for none.
        cdef int64_t drawn = self.num_drawn
        if candidate == kept:
            return True
        if kept >= 0 and self.place_of(key, kept) >= drawn:
            drawn -= 1
        return self.place_of(key, candidate) < drawn

    cdef bint best(self, uint64_t key, Split* found) noexcept nogil:
        # The first candidate in order whose gain no other exceeds by more than a tie; false when none gains anything.
        cdef int f, twin
        cdef int64_t i
        cdef int32_t b
        cdef double best = 0.0, limit = 0.0
        cdef double* gains
        cdef bint sampled = self.num_drawn < self.num_candidates
        found.feature = -1
        for f in range(self.num_features):
            twin = self.twin_of[f]
            # A twin with the same candidates can only tie.
            if (twin != f and not sampled) or not self.best_gain[twin] > limit:
                continue
            gains = self.gains + twin * MAX_BINS
            for i in range(self.first_run[twin], self.last_run[twin]):
                if not gains[i] > limit:
                    continue
                b = self.run_bin[twin * MAX_BINS + i]
                if sampled and b < self.num_bins[f] - 1:
                    b = self.first_drawn(key, self.candidate_start[f], b, self.run_bin[twin * MAX_BINS + i + 1])
                    if b < 0:
                        continue
                best = gains[i]
                limit = best + RELATIVE_TIE * best
                found.feature = f
                found.bin = b
                found.missing_left = self.missing_goes_left[twin * MAX_BINS + i]
                found.gain = best
        return found.feature >= 0

    cdef int32_t first_drawn(self, uint64_t key, int64_t start, int32_t first, int32_t end) noexcept nogil:
        cdef int32_t b
        for b in range(first, end):
            if self.is_drawn(key, start + b, -1):
                return b
        return -1

    cdef int64_t better_than(self, const Split* incumbent, uint64_t key, double allowed) noexcept nogil:
        # How many candidates gain more than one of them does, counted until they are more than allowed.
        cdef int f, twin
        cdef int64_t i, better = 0, kept = -1
        cdef int32_t b
        cdef double limit = incumbent.gain + RELATIVE_TIE * (incumbent.gain if incumbent.gain > 0 else -incumbent.gain)
        cdef double* gains
        cdef int32_t* run_bin
        cdef bint sampled = self.num_drawn < self.num_candidates
        if incumbent.bin < self.num_bins[incumbent.feature] - 1:
            kept = self.candidate_start[incumbent.feature] + incumbent.bin
        for f in range(self.num_features):
            twin = self.twin_of[f]
            if not self.best_gain[twin] > limit:
                continue
            gains = self.gains + twin * MAX_BINS
            run_bin = self.run_bin + twin * MAX_BINS
            for i in range(self.first_run[twin], self.last_run[twin]):
                if <double>better > allowed:
                    return better
                if not gains[i] > limit:
                    continue
                if not sampled or run_bin[i] >= self.num_bins[f] - 1:
                    better += run_bin[i + 1] - run_bin[i]
                    continue
                for b in range(run_bin[i], run_bin[i + 1]):
                    better += self.is_drawn(key, self.candidate_start[f] + b, kept)
        return better
