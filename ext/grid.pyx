# Grid resolver (op-level.md section 2.1): exact measurements verbatim, multilinear interpolation inside the measured
# range, and beyond it the utilisation (speed of light / latency) of the nearest measurements held. Curves are grids of
# one axis.

from libc.math cimport INFINITY, NAN, isfinite, log2, sqrt
from libc.stdint cimport int64_t

cimport numpy as cnp

import numpy as np

cnp.import_array()

# How a table answers: a measurement, between measurements, one side of a ragged table carried over by the roofline,
# beyond the measured range by the utilisation of the nearest measurements.
RESOLUTIONS = ("exact_lookup", "grid_interpolation", "ragged_transfer", "sol_transfer")
# More than rounding can add to a squared distance in log2 space.
cdef double ROUNDING = 1e-10

cdef enum:
    ROWS_AHEAD = 64     # on either side, looked at to begin a search


cdef int64_t lower_bound(const double* keys, int64_t low, int64_t high, double key) noexcept nogil:
    # First position in [low, high) whose key is not smaller.
    cdef int64_t middle
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


cdef bint usable(double sol_ms) noexcept nogil:
    return sol_ms > 0.0 and isfinite(sol_ms)


cdef int resolve(
    const Grid* grid, int axis, int64_t low, int64_t high, const double* query, sol_function sol, const void* params,
    Measurement* answer,
) noexcept nogil:
    # Answer from the nodes [low, high) of level `axis`.
    cdef const double* keys = grid.keys[axis]
    cdef double key = query[axis]
    cdef int64_t right
    cdef int lower_status, upper_status
    cdef Measurement lower, upper
    cdef double weight, root
    right = lower_bound(keys, low, high, key)
    if right < high and keys[right] == key:
        return descend(grid, axis, right, query, sol, params, answer)
    if right == low or right == high:
        return GRID_OUT_OF_RANGE
    lower_status = descend(grid, axis, right - 1, query, sol, params, &lower)
    upper_status = descend(grid, axis, right, query, sol, params, &upper)
    if lower_status == GRID_HIT and upper_status == GRID_HIT:
        weight = (key - keys[right - 1]) / (keys[right] - keys[right - 1])
        if axis == grid.sqrt_axis:
            root = sqrt(lower.latency_ms) + (sqrt(upper.latency_ms) - sqrt(lower.latency_ms)) * weight
            answer.latency_ms = root * root
        else:
            answer.latency_ms = lower.latency_ms + (upper.latency_ms - lower.latency_ms) * weight
        answer.power_w = lower.power_w + (upper.power_w - lower.power_w) * weight
        return GRID_HIT
    if lower_status == GRID_HIT:
        return carry_over(&lower, keys[right - 1], axis, grid.num_axes, query, sol, params, answer)
    if upper_status == GRID_HIT:
        return carry_over(&upper, keys[right], axis, grid.num_axes, query, sol, params, answer)
    if lower_status == GRID_OUT_OF_RANGE or upper_status == GRID_OUT_OF_RANGE:
        return GRID_OUT_OF_RANGE
    return GRID_MISS


cdef int descend(
    const Grid* grid, int axis, int64_t node, const double* query, sol_function sol, const void* params,
    Measurement* answer,
) noexcept nogil:
    if axis == grid.num_axes - 1:
        answer.latency_ms = grid.latency_ms[node]
        answer.power_w = grid.power_w[node] if grid.power_w != NULL else 0.0
        return GRID_HIT
    return resolve(
        grid, axis + 1, grid.first[axis][node], grid.first[axis][node + 1], query, sol, params, answer
    )


cdef int carry_over(
    const Measurement* survivor, double key, int axis, int num_axes, const double* query, sol_function sol,
    const void* params, Measurement* answer,
) noexcept nogil:
    # Ragged table: only one side has measurements; scale them by what the roofline says of the difference.
    cdef double moved[MAX_GRID_AXES]
    cdef double here, there
    cdef int i
    for i in range(num_axes):
        moved[i] = query[i]
    moved[axis] = key
    here = sol(params, query)
    there = sol(params, moved)
    answer[0] = survivor[0]
    if usable(here) and usable(there):
        answer.latency_ms = survivor.latency_ms * (here / there)
    return GRID_HIT


cdef inline double squared_gap(double least, double most, double here) noexcept nogil:
    # Squared distance from `here` to an interval.
    cdef double gap = max(least - here, here - most)
    return gap * gap if gap > 0.0 else 0.0


cdef void offer(Search* search, double squared_distance, int64_t leaf) noexcept nogil:
    # Keep the nearest, in order of distance; the earlier measurement on ties.
    cdef int i
    if search.count == NUM_NEIGHBOURS + 1:
        if not before(squared_distance, leaf, &search.nearest[NUM_NEIGHBOURS]):
            return
        search.count -= 1
    i = search.count
    while i > 0 and before(squared_distance, leaf, &search.nearest[i - 1]):
        search.nearest[i] = search.nearest[i - 1]
        i -= 1
    search.nearest[i].squared_distance = squared_distance
    search.nearest[i].leaf = leaf
    search.count += 1
    if search.count == NUM_NEIGHBOURS + 1:
        search.reach = min(search.reach, search.nearest[NUM_NEIGHBOURS].squared_distance)


cdef bint before(double squared_distance, int64_t leaf, const Neighbour* other) noexcept nogil:
    if squared_distance != other.squared_distance:
        return squared_distance < other.squared_distance
    return leaf < other.leaf


cdef void nodes_of(const Grid* grid, int64_t leaf, int64_t* nodes) noexcept nogil:
    # The node of every level on the way down to a measurement.
    cdef int axis
    cdef int64_t low, high, middle
    nodes[grid.num_axes - 1] = leaf
    for axis in range(grid.num_axes - 2, -1, -1):
        low, high = 0, grid.num_nodes[axis]
        while high - low > 1:
            middle = (low + high) >> 1
            if grid.first[axis][middle] <= nodes[axis + 1]:
                low = middle
            else:
                high = middle
        nodes[axis] = low


cdef KnownLeaf know(const Grid* grid, int64_t leaf, sol_function sol, const void* params) noexcept nogil:
    cdef KnownLeaf known
    cdef double coordinates[MAX_GRID_AXES]
    cdef int axis
    known.leaf = leaf
    nodes_of(grid, leaf, known.nodes)
    for axis in range(grid.num_axes):
        coordinates[axis] = grid.keys[axis][known.nodes[axis]]
    known.sol_ms = sol(params, coordinates)
    return known


cdef bint know_neighbours(const Grid* grid, sol_function sol, const void* params, Search* search) noexcept nogil:
    # Fill `known` with the measurements in `nearest`; false if one of them has no positive roofline.
    cdef KnownLeaf known[NUM_NEIGHBOURS + 1]
    cdef bint all_positive = True
    cdef int i, j
    for i in range(search.count):
        if i >= search.num_known or search.known[i].leaf != search.nearest[i].leaf:
            break
        all_positive &= search.known[i].sol_ms > 0.0
    else:
        search.num_known = search.count
        return all_positive
    all_positive = True
    for i in range(search.count):
        for j in range(search.num_known):
            if search.known[j].leaf == search.nearest[i].leaf:
                known[i] = search.known[j]
                break
        else:
            known[i] = know(grid, search.nearest[i].leaf, sol, params)
        all_positive &= known[i].sol_ms > 0.0
    for i in range(search.count):
        search.known[i] = known[i]
    search.num_known = search.count
    return all_positive


cdef bint counts(const Grid* grid, int64_t leaf, sol_function sol, const void* params) noexcept nogil:
    return grid.latency_ms[leaf] > 0.0 and know(grid, leaf, sol, params).sol_ms > 0.0


cdef void search_row(
    const Grid* grid, int64_t low, int64_t high, double squared_distance, double here, sol_function sol,
    const void* params, Search* search,
) noexcept nogil:
    # The measurements of one row, outward from the query on either side until they are too far.
    cdef const double* logs = grid.log2_keys[grid.num_axes - 1]
    cdef int64_t right = high if logs[high - 1] < here else lower_bound(logs, low, high, here)
    cdef int64_t node = right - 1
    cdef double distance
    while node >= low:
        distance = squared_distance + (here - logs[node]) * (here - logs[node])
        if distance > search.reach:
            break
        if not search.check_leaves or counts(grid, node, sol, params):
            offer(search, distance, node)
        node -= 1
    while right < high:
        distance = squared_distance + (logs[right] - here) * (logs[right] - here)
        if distance > search.reach:
            break
        if not search.check_leaves or counts(grid, right, sol, params):
            offer(search, distance, right)
        right += 1


cdef void search_rows(
    const Grid* grid, int64_t low, int64_t high, double squared_distance, const double* log2_query, sol_function sol,
    const void* params, Search* search,
) noexcept nogil:
    # The rows [low, high) of one plane, outward on either side until they are too far.
    cdef int axis = grid.num_axes - 2
    cdef const double* logs = grid.log2_keys[axis]
    cdef const double* least = grid.log2_least[axis]
    cdef const double* most = grid.log2_most[axis]
    cdef const int64_t* first = grid.first[axis]
    cdef double here = log2_query[axis], along = log2_query[axis + 1]
    cdef int64_t right = high if logs[high - 1] < here else lower_bound(logs, low, high, here)
    cdef int64_t node, begun = -1
    cdef double distance, bound, lowest = INFINITY
    if search.reach == INFINITY:
        # Nothing bounds the first search. The row that may hold the nearest measurement bounds the rest closely.
        for node in range(max(low, right - ROWS_AHEAD), min(high, right + ROWS_AHEAD)):
            bound = (here - logs[node]) * (here - logs[node]) + squared_gap(least[node], most[node], along)
            if bound < lowest:
                begun, lowest = node, bound
        distance = squared_distance + (here - logs[begun]) * (here - logs[begun])
        search_row(grid, first[begun], first[begun + 1], distance, along, sol, params, search)
    for node in range(right - 1, low - 1, -1):
        distance = squared_distance + (here - logs[node]) * (here - logs[node])
        if distance > search.reach:
            break
        if node != begun and distance + squared_gap(least[node], most[node], along) <= search.reach:
            search_row(grid, first[node], first[node + 1], distance, along, sol, params, search)
    for node in range(right, high):
        distance = squared_distance + (here - logs[node]) * (here - logs[node])
        if distance > search.reach:
            break
        if node != begun and distance + squared_gap(least[node], most[node], along) <= search.reach:
            search_row(grid, first[node], first[node + 1], distance, along, sol, params, search)


cdef void search_planes(
    const Grid* grid, const double* log2_query, sol_function sol, const void* params, Search* search
) noexcept nogil:
    # The planes of a grid of three axes, the nearest first, until they are too far.
    cdef const double* logs = grid.log2_keys[0]
    cdef double here = log2_query[0], inner_sum = log2_query[1] + log2_query[2]
    cdef int64_t right = lower_bound(logs, 0, grid.num_nodes[0], here), left = right - 1, node
    cdef double to_left, to_right, distance, gap, diagonal
    while left >= 0 or right < grid.num_nodes[0]:
        to_left = here - logs[left] if left >= 0 else INFINITY
        to_right = logs[right] - here if right < grid.num_nodes[0] else INFINITY
        if to_left <= to_right:
            node, distance = left, to_left * to_left
            left -= 1
        else:
            node, distance = right, to_right * to_right
            right += 1
        if distance > search.reach:
            return
        gap = squared_gap(grid.log2_least[0][node], grid.log2_most[0][node], log2_query[1])
        # A point's squared distance from a diagonal is half that of its sum.
        diagonal = squared_gap(grid.diagonal_least[node], grid.diagonal_most[node], inner_sum)
        if distance + max(gap, 0.5 * diagonal - ROUNDING) <= search.reach:
            search_rows(
                grid, grid.first[0][node], grid.first[0][node + 1], distance, log2_query, sol, params, search
            )


cdef void find_nearest(
    const Grid* grid, const double* query, sol_function sol, const void* params, Search* search
) noexcept nogil:
    cdef double log2_query[MAX_GRID_AXES]
    cdef double distance, gap
    cdef int i, axis
    for i in range(grid.num_axes):
        log2_query[i] = log2(max(query[i], 1e-12))
    # The neighbours of the query before bound how far those of this one can be.
    search.reach = INFINITY
    if search.num_known == NUM_NEIGHBOURS + 1:
        search.reach = 0.0
        for i in range(search.num_known):
            distance = 0.0
            for axis in range(grid.num_axes):
                gap = log2_query[axis] - grid.log2_keys[axis][search.known[i].nodes[axis]]
                distance += gap * gap
            search.reach = max(search.reach, distance)
    search.count = 0
    if grid.num_axes == MAX_GRID_AXES:
        search_planes(grid, log2_query, sol, params, search)
    else:
        search_rows(grid, 0, grid.num_nodes[0], 0.0, log2_query, sol, params, search)


cdef int weigh_nearest(
    const Grid* grid, const double* query, sol_function sol, const void* params, Search* search, double* weights
) noexcept nogil:
    # The nearest measurements in joint log2 space with their weights; how many count.
    cdef double radius, distance, total = 0.0
    cdef int i, used
    search.check_leaves = grid.has_zero
    find_nearest(grid, query, sol, params, search)
    # Rooflines are asked for only where they matter: nearly always all of them are positive.
    if not know_neighbours(grid, sol, params, search):
        search.check_leaves = True
        search.num_known = 0
        find_nearest(grid, query, sol, params, search)
        know_neighbours(grid, sol, params, search)
    used = min(search.count, NUM_NEIGHBOURS)
    radius = sqrt(search.nearest[used].squared_distance) if search.count > used else INFINITY
    for i in range(used):
        distance = sqrt(search.nearest[i].squared_distance)
        if radius == INFINITY:
            weights[i] = 1.0 / (distance * distance + 1e-12)
        else:
            weights[i] = max(radius - distance, 0.0) / (radius * distance + 1e-12)
            weights[i] *= weights[i]
        total += weights[i]
    if total == 0.0:
        for i in range(used):
            weights[i] = 1.0
    return used


cdef int hold(
    const Grid* grid, const double* query, sol_function sol, const void* params, Search* search, Measurement* answer
) noexcept nogil:
    # Beyond the measured range: the utilisation of the nearest measurements.
    cdef double weights[NUM_NEIGHBOURS]
    cdef double here = sol(params, query), there, total = 0.0, utilisation = 0.0, power = 0.0
    cdef int64_t leaf
    cdef int i, used
    if not usable(here):
        return GRID_MISS
    used = weigh_nearest(grid, query, sol, params, search, weights)
    if used == 0:
        return GRID_MISS
    for i in range(used):
        total += weights[i]
    for i in range(used):
        leaf = search.nearest[i].leaf
        utilisation += weights[i] * (search.known[i].sol_ms / grid.latency_ms[leaf])
        if grid.power_w != NULL:
            power += weights[i] * grid.power_w[leaf]
    answer.latency_ms = here / (utilisation / total)
    answer.power_w = power / total
    return GRID_HIT


cdef int hold_on_curve(
    const Grid* grid, const double* query, sol_function sol, const void* params, Measurement* answer
) noexcept nogil:
    # One axis: the utilisation of the end point on the query's side.
    cdef int64_t anchor = 0 if query[0] < grid.keys[0][0] else grid.num_nodes[0] - 1
    cdef double here = sol(params, query), there = sol(params, &grid.keys[0][anchor])
    if not usable(here) or not usable(there) or not grid.latency_ms[anchor] > 0.0:
        return GRID_MISS
    answer.latency_ms = here / (there / grid.latency_ms[anchor])
    answer.power_w = grid.power_w[anchor] if grid.power_w != NULL else 0.0
    return GRID_HIT


cdef int grid_query(
    const Grid* grid, const double* query, sol_function sol, const void* params, Measurement* answer
) noexcept nogil:
    cdef Search search
    search.num_known = 0
    return grid_query_near(grid, query, sol, params, &search, answer)


cdef int grid_query_series(
    const Grid* grid, const double* query, const double* last, int count, sol_function sol, const void* params,
    Measurement* answers,
) noexcept nogil:
    # Queries on a grid of three axes that differ on the last one alone, where they ascend: the way down to it is found
    # once, and the search along it goes on from the query before.
    cdef double at[MAX_GRID_AXES]
    cdef Search search
    cdef Measurement lower, upper
    cdef int64_t plane, right = 0, upper_next = -1, lower_next = -1
    cdef double weight = 0.0
    cdef bint exact = False, inside = False
    cdef int i
    at[0], at[1] = query[0], query[1]
    search.num_known = 0
    plane = lower_bound(grid.keys[0], 0, grid.num_nodes[0], at[0])
    if grid.sqrt_axis < 0 and plane < grid.num_nodes[0] and grid.keys[0][plane] == at[0]:
        right = lower_bound(grid.keys[1], grid.first[0][plane], grid.first[0][plane + 1], at[1])
        exact = right < grid.first[0][plane + 1] and grid.keys[1][right] == at[1]
        inside = exact or grid.first[0][plane] < right < grid.first[0][plane + 1]
        if inside and not exact:
            weight = (at[1] - grid.keys[1][right - 1]) / (grid.keys[1][right] - grid.keys[1][right - 1])
    for i in range(count):
        if inside and on_row(grid, right, last[i], &upper_next, &upper):
            if exact:
                answers[i] = upper
                continue
            if on_row(grid, right - 1, last[i], &lower_next, &lower):
                answers[i].latency_ms = lower.latency_ms + (upper.latency_ms - lower.latency_ms) * weight
                answers[i].power_w = lower.power_w + (upper.power_w - lower.power_w) * weight
                continue
        at[2] = last[i]
        if grid_query_near(grid, at, sol, params, &search, &answers[i]) != GRID_HIT:
            return GRID_MISS
    return GRID_HIT


cdef bint on_row(const Grid* grid, int64_t row, double key, int64_t* next, Measurement* answer) noexcept nogil:
    # Exact or interpolated between measurements of one row; false beyond them. `next` is the first measurement not below
    # the key, of a smaller key before the call (-1 for none).
    cdef const double* keys = grid.keys[2]
    cdef int64_t low = grid.first[1][row], high = grid.first[1][row + 1]
    cdef int64_t right = next[0]
    cdef double weight
    if right < 0:
        right = lower_bound(keys, low, high, key)
    while right < high and keys[right] < key:
        right += 1
    next[0] = right
    answer.power_w = 0.0
    if right < high and keys[right] == key:
        answer.latency_ms = grid.latency_ms[right]
        if grid.power_w != NULL:
            answer.power_w = grid.power_w[right]
        return True
    if right == low or right == high:
        return False
    weight = (key - keys[right - 1]) / (keys[right] - keys[right - 1])
    answer.latency_ms = grid.latency_ms[right - 1] + (grid.latency_ms[right] - grid.latency_ms[right - 1]) * weight
    if grid.power_w != NULL:
        answer.power_w = grid.power_w[right - 1] + (grid.power_w[right] - grid.power_w[right - 1]) * weight
    return True


cdef int grid_query_near(
    const Grid* grid, const double* query, sol_function sol, const void* params, Search* search, Measurement* answer
) noexcept nogil:
    cdef int status
    if grid.num_nodes[0] == 0:
        return GRID_MISS
    status = resolve(grid, 0, 0, grid.num_nodes[0], query, sol, params, answer)
    if status != GRID_OUT_OF_RANGE:
        return status
    if grid.num_axes == 1:
        return hold_on_curve(grid, query, sol, params, answer)
    return hold(grid, query, sol, params, search, answer)


cdef int weigh_cell(
    const Grid* grid, int axis, int64_t low, int64_t high, const double* query, dict weights, bint* carried
) except -1:
    # The walk of `resolve` once more, for reports: which measurements answer, and with which weight.
    cdef const double* keys = grid.keys[axis]
    cdef int64_t right = lower_bound(keys, low, high, query[axis])
    cdef int lower_status, upper_status
    cdef bint lower_carried = False, upper_carried = False
    cdef double weight
    if right < high and keys[right] == query[axis]:
        return weigh_below(grid, axis, right, query, weights, carried)
    if right == low or right == high:
        return GRID_OUT_OF_RANGE
    lower, upper = {}, {}
    lower_status = weigh_below(grid, axis, right - 1, query, lower, &lower_carried)
    upper_status = weigh_below(grid, axis, right, query, upper, &upper_carried)
    if lower_status == GRID_HIT and upper_status == GRID_HIT:
        weight = (query[axis] - keys[right - 1]) / (keys[right] - keys[right - 1])
        for part, share in ((lower, 1.0 - weight), (upper, weight)):
            for leaf, within in part.items():
                weights[leaf] = weights.get(leaf, 0.0) + within * share
        carried[0] = carried[0] or lower_carried or upper_carried
        return GRID_HIT
    if lower_status != GRID_HIT and upper_status != GRID_HIT:
        return GRID_OUT_OF_RANGE if GRID_OUT_OF_RANGE in (lower_status, upper_status) else GRID_MISS
    weights.update(lower if lower_status == GRID_HIT else upper)
    carried[0] = True
    return GRID_HIT


cdef int weigh_below(
    const Grid* grid, int axis, int64_t node, const double* query, dict weights, bint* carried
) except -1:
    if axis == grid.num_axes - 1:
        weights[node] = 1.0
        return GRID_HIT
    return weigh_cell(
        grid, axis + 1, grid.first[axis][node], grid.first[axis][node + 1], query, weights, carried
    )


cdef class GridTable:
    """Measurements over up to three integer axes.

    Parameters
    ----------
    axes: arrays of coordinates per row, outer axis first, rows in lexicographic order without repeats.
    latency_ms: latency of each row.
    power_w: power of each row, or None.
    sqrt_axis: axis along which the square root of latency is interpolated; -1 for none.
    """

    def __init__(self, tuple axes, latency_ms, power_w, int sqrt_axis):
        cdef Grid* grid = &self.grid
        cdef int axis
        cdef cnp.ndarray keys, logs, first, least, most
        if not 1 <= len(axes) <= MAX_GRID_AXES:
            raise ValueError(f"a grid has one to {MAX_GRID_AXES} axes, found {len(axes)}")
        rows = len(latency_ms)
        kept = [np.ascontiguousarray(latency_ms, np.float64)]
        grid.num_axes = len(axes)
        grid.sqrt_axis = sqrt_axis
        grid.latency_ms = <const double*>cnp.PyArray_DATA(kept[0])
        grid.has_zero = not np.all(kept[0] > 0.0)
        if power_w is not None:
            kept.append(np.ascontiguousarray(power_w, np.float64))
            grid.power_w = <const double*>cnp.PyArray_DATA(kept[1])
        # A node begins where any coordinate up to its axis differs from the row before.
        begins = np.zeros(rows, bool)
        if rows:
            begins[0] = True
        starts, all_logs, children = [], [], []
        for axis in range(grid.num_axes):
            column = np.asarray(axes[axis])
            begins = begins.copy()
            begins[1:] |= np.diff(column) != 0
            starts.append(np.flatnonzero(begins))
            keys = np.ascontiguousarray(column[starts[axis]], np.float64)
            logs = np.log2(np.maximum(keys, 1e-12))
            kept += [keys, logs]
            all_logs.append(logs)
            grid.num_nodes[axis] = len(keys)
            grid.keys[axis] = <const double*>cnp.PyArray_DATA(keys)
            grid.log2_keys[axis] = <const double*>cnp.PyArray_DATA(logs)
        for axis in range(grid.num_axes - 1):
            first = np.append(np.searchsorted(starts[axis + 1], starts[axis]), len(starts[axis + 1])).astype(np.int64)
            logs = all_logs[axis + 1]
            least, most = logs[first[:-1]], logs[first[1:] - 1]
            kept += [first, least, most]
            children.append(first)
            grid.first[axis] = <const int64_t*>cnp.PyArray_DATA(first)
            grid.log2_least[axis] = <const double*>cnp.PyArray_DATA(least)
            grid.log2_most[axis] = <const double*>cnp.PyArray_DATA(most)
        if grid.num_axes == MAX_GRID_AXES and rows:
            sums = np.repeat(all_logs[1], np.diff(children[1])) + all_logs[2]
            leaves = children[1][children[0][:-1]]
            least, most = np.minimum.reduceat(sums, leaves), np.maximum.reduceat(sums, leaves)
            kept += [least, most]
            grid.diagonal_least = <const double*>cnp.PyArray_DATA(least)
            grid.diagonal_most = <const double*>cnp.PyArray_DATA(most)
        self.memory = tuple(kept)

    def columns(self):
        """Coordinates of every measurement, one array an axis, and the latencies in ms."""
        cdef int axis, level
        found = []
        begin = 1 if self.grid.power_w == NULL else 2
        for axis in range(self.grid.num_axes):
            column = self.memory[begin + 2 * axis]
            for level in range(axis, self.grid.num_axes - 1):
                column = np.repeat(column, np.diff(self.memory[begin + 2 * self.grid.num_axes + 3 * level]))
            found.append(column)
        return tuple(found), self.memory[0]

    def support(self, coordinates, roofline_ms):
        """How the table answers at coordinates: (resolution, {row: weight}), None where nothing answers.

        Weights add up to 1. Parameters as `query`; `RESOLUTIONS` lists the resolutions.
        """
        cdef double[MAX_GRID_AXES] at
        cdef double[NUM_NEIGHBOURS] near
        cdef Search search
        cdef PythonSol sol = self.python_sol(coordinates, roofline_ms, at)
        cdef bint carried = False
        cdef int status, used, i
        if self.query(coordinates, roofline_ms) is None:
            return None
        weights = {}
        status = weigh_cell(&self.grid, 0, 0, self.grid.num_nodes[0], at, weights, &carried)
        if status == GRID_HIT:
            return RESOLUTIONS[2 if carried else 0 if len(weights) == 1 else 1], weights
        if self.grid.num_axes == 1:
            return RESOLUTIONS[3], {0 if at[0] < self.grid.keys[0][0] else self.grid.num_nodes[0] - 1: 1.0}
        search.num_known = 0
        used = weigh_nearest(&self.grid, at, python_sol_at, <void*>sol, &search, near)
        total = sum([near[i] for i in range(used)])
        return RESOLUTIONS[3], {search.nearest[i].leaf: near[i] / total for i in range(used)}

    def without(self, int64_t row, int axis):
        """The table without the measurements that share the coordinates of a row up to an axis, for leave-one-out."""
        cdef int64_t nodes[MAX_GRID_AXES]
        cdef int64_t low, high
        cdef int level
        nodes_of(&self.grid, row, nodes)
        low, high = nodes[axis], nodes[axis] + 1
        for level in range(axis, self.grid.num_axes - 1):
            low, high = self.grid.first[level][low], self.grid.first[level][high]
        axes, latency_ms = self.columns()
        left_out = slice(low, high)
        return GridTable(
            tuple(np.delete(column, left_out) for column in axes), np.delete(latency_ms, left_out), None,
            self.grid.sqrt_axis,
        )

    def query(self, coordinates, roofline_ms):
        """What the table answers at coordinates: (latency in ms, power in W), None where nothing answers.

        Parameters
        ----------
        coordinates: one number per axis.
        roofline_ms: called with coordinates, returns their speed-of-light latency in ms.

        Example
        -------
        >>> table = GridTable((np.array([1, 4]),), np.array([2.0, 8.0]), None, -1)
        >>> table.query((2,), lambda tokens: 0.5 * tokens)
        (4.0, 0.0)
        """
        cdef double[MAX_GRID_AXES] at
        cdef Measurement answer
        cdef PythonSol sol = self.python_sol(coordinates, roofline_ms, at)
        cdef int status
        status = grid_query(&self.grid, at, python_sol_at, <void*>sol, &answer)
        if sol.raised is not None:
            raise sol.raised
        return (answer.latency_ms, answer.power_w) if status == GRID_HIT else None

    cdef PythonSol python_sol(self, coordinates, roofline_ms, double* at):
        cdef PythonSol sol = PythonSol.__new__(PythonSol)
        cdef int axis
        if len(coordinates) != self.grid.num_axes:
            raise ValueError(f"{self.grid.num_axes} coordinates are needed, found {len(coordinates)}")
        for axis in range(self.grid.num_axes):
            at[axis] = coordinates[axis]
        sol.roofline_ms = roofline_ms
        sol.num_axes = self.grid.num_axes
        return sol


cdef class PythonSol:
    pass


cdef double python_sol_at(const void* params, const double* coordinates) noexcept nogil:
    with gil:
        return call_python_sol(<PythonSol>params, coordinates)


cdef double call_python_sol(PythonSol sol, const double* coordinates) noexcept:
    try:
        return sol.roofline_ms(*[coordinates[axis] for axis in range(sol.num_axes)])
    except Exception as raised:
        sol.raised = raised
        return NAN
