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
cdef double ROUNDING = 1e-9

cdef enum:
    NODES_AHEAD = 64     # on either side, looked at to begin a search


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


cdef inline double log2_of(double coordinate) noexcept nogil:
    return log2(max(coordinate, 1e-12))


cdef inline double squared_gap(double least, double most, double here) noexcept nogil:
    # Squared distance from `here` to an interval.
    cdef double gap = max(least - here, here - most)
    return gap * gap if gap > 0.0 else 0.0


cdef inline bint before(double squared_distance, int64_t leaf, const Neighbour* other) noexcept nogil:
    if squared_distance != other.squared_distance:
        return squared_distance < other.squared_distance
    return leaf < other.leaf


cdef void select_nearest(double here, Search* search) noexcept nogil:
    # The nearest candidates of one query, in order of distance; the earlier measurement on ties.
    cdef const Candidate* candidate
    cdef double squared_distance
    cdef int i, j, count = 0
    for i in range(search.num_candidates):
        candidate = &search.candidates[i]
        squared_distance = (
            candidate.outer_squared_distance + (candidate.log2_key - here) * (candidate.log2_key - here)
        )
        if count == NUM_NEIGHBOURS + 1:
            if not before(squared_distance, candidate.leaf, &search.nearest[NUM_NEIGHBOURS]):
                continue
            count -= 1
        j = count
        while j > 0 and before(squared_distance, candidate.leaf, &search.nearest[j - 1]):
            search.nearest[j] = search.nearest[j - 1]
            j -= 1
        search.nearest[j] = Neighbour(squared_distance, candidate.leaf, i)
        count += 1
    search.num_nearest = count


cdef inline bint matters(const Search* search, double to_low, double to_high) noexcept nogil:
    # Whether something at these squared distances from both ends of the series can be near a query between them. The
    # difference of two such distances is linear in the query: who is nearer at both ends is nearer all along.
    return to_low <= search.reach_low or to_high <= search.reach_high


cdef void drop_candidates(Search* search) noexcept nogil:
    # Keep those that still matter.
    cdef const Candidate* candidate
    cdef double to_low, to_high
    cdef int i, count = 0
    for i in range(search.num_candidates):
        candidate = &search.candidates[i]
        to_low, to_high = candidate.log2_key - search.low, candidate.log2_key - search.high
        if matters(
            search, candidate.outer_squared_distance + to_low * to_low,
            candidate.outer_squared_distance + to_high * to_high,
        ):
            search.candidates[count] = candidate[0]
            count += 1
    search.num_candidates = count


cdef void make_room(Search* search) noexcept nogil:
    cdef Candidate[NUM_NEIGHBOURS + 1] nearest
    cdef int i
    if search.low != search.high:
        drop_candidates(search)
        if search.num_candidates == MAX_CANDIDATES:
            search.one_by_one = True
            search.reach_low = search.reach_high = -INFINITY
        return
    select_nearest(search.low, search)
    for i in range(search.num_nearest):
        nearest[i] = search.candidates[search.nearest[i].candidate]
    for i in range(search.num_nearest):
        search.candidates[i] = nearest[i]
    search.num_candidates = search.num_nearest


cdef void bound_reach(double to_low, double to_high, Search* search) noexcept nogil:
    # The measurements nearest to the middle of the series, the sum of both distances tells, bound what can matter.
    cdef double total = to_low + to_high
    cdef int i = NUM_NEIGHBOURS
    while i > 0 and total < search.anchors[i - 1].to_low + search.anchors[i - 1].to_high:
        search.anchors[i] = search.anchors[i - 1]
        i -= 1
    search.anchors[i] = Anchor(to_low, to_high)
    to_low = to_high = 0.0
    for i in range(NUM_NEIGHBOURS + 1):
        to_low = max(to_low, search.anchors[i].to_low)
        to_high = max(to_high, search.anchors[i].to_high)
    # Both bounds come from the same measurements: halves of two sets would bound nothing.
    if to_low + to_high < search.reach_low + search.reach_high:
        search.reach_low, search.reach_high = to_low + ROUNDING, to_high + ROUNDING


cdef double sol_of(const Grid* grid, const Candidate* candidate, sol_function sol, const void* params) noexcept nogil:
    cdef double[MAX_GRID_AXES] coordinates
    cdef int axis
    for axis in range(grid.num_axes - 1):
        coordinates[axis] = grid.keys[axis][candidate.outer_nodes[axis]]
    coordinates[grid.num_axes - 1] = grid.keys[grid.num_axes - 1][candidate.leaf]
    return sol(params, coordinates)


cdef void offer(
    const Grid* grid, int64_t leaf, double squared_distance, double to_low, double to_high, sol_function sol,
    const void* params, Search* search,
) noexcept nogil:
    # A measurement, with its squared distances on the outer axes and from both ends of the series.
    cdef Candidate* candidate
    cdef int i
    if search.num_candidates == MAX_CANDIDATES:
        make_room(search)
        if search.one_by_one:
            return
    candidate = &search.candidates[search.num_candidates]
    candidate.outer_squared_distance = squared_distance
    candidate.log2_key = grid.log2_keys[grid.num_axes - 1][leaf]
    candidate.leaf = leaf
    for i in range(MAX_GRID_AXES - 1):
        candidate.outer_nodes[i] = search.outer_nodes[i]
    candidate.is_priced = False
    if search.check_leaves:
        if not grid.latency_ms[leaf] > 0.0 or not sol_of(grid, candidate, sol, params) > 0.0:
            return
    search.num_candidates += 1
    if to_low + to_high < search.anchors[NUM_NEIGHBOURS].to_low + search.anchors[NUM_NEIGHBOURS].to_high:
        bound_reach(to_low, to_high, search)


cdef void search_row(
    const Grid* grid, int64_t row, double squared_distance, sol_function sol, const void* params, Search* search
) noexcept nogil:
    # The measurements of one row, outward from the series on either side until they are too far.
    cdef int axis = grid.num_axes - 1
    cdef const double* logs = grid.log2_keys[axis]
    cdef int64_t begin = grid.first[axis - 1][row], end = grid.first[axis - 1][row + 1]
    cdef int64_t right = end if logs[end - 1] < search.low else lower_bound(logs, begin, end, search.low)
    cdef int64_t node
    cdef double low, high, to_low, to_high
    search.outer_nodes[axis - 1] = row
    for node in range(right - 1, begin - 1, -1):
        low, high = search.low - logs[node], search.high - logs[node]
        to_low, to_high = squared_distance + low * low, squared_distance + high * high
        if not matters(search, to_low, to_high):
            break
        offer(grid, node, squared_distance, to_low, to_high, sol, params, search)
    for node in range(right, end):
        low, high = logs[node] - search.low, logs[node] - search.high
        to_low, to_high = squared_distance + low * low, squared_distance + high * high
        if high > 0.0 and not matters(search, to_low, to_high):
            break
        offer(grid, node, squared_distance, to_low, to_high, sol, params, search)


cdef inline bint row_matters(const Search* search, double distance, double least, double most) noexcept nogil:
    return matters(
        search, distance + squared_gap(least, most, search.low), distance + squared_gap(least, most, search.high)
    )


cdef int64_t best_row(
    const Grid* grid, int64_t begin, int64_t end, int64_t right, const Search* search
) noexcept nogil:
    # Of the rows around `right` the one that may hold the nearest measurement.
    cdef int axis = grid.num_axes - 2
    cdef const double* logs = grid.log2_keys[axis]
    cdef double here = search.outer[axis], bound, lowest = INFINITY
    cdef int64_t row, best = begin
    for row in range(max(begin, right - NODES_AHEAD), min(end, right + NODES_AHEAD)):
        bound = (here - logs[row]) * (here - logs[row])
        bound += squared_gap(grid.log2_least[axis][row], grid.log2_most[axis][row], search.low)
        if bound < lowest:
            best, lowest = row, bound
    return best


cdef void search_rows(
    const Grid* grid, int64_t begin, int64_t end, double squared_distance, sol_function sol, const void* params,
    Search* search,
) noexcept nogil:
    # The rows [begin, end) of one plane, outward on either side until they are too far.
    cdef int axis = grid.num_axes - 2
    cdef const double* logs = grid.log2_keys[axis]
    cdef const double* least = grid.log2_least[axis]
    cdef const double* most = grid.log2_most[axis]
    cdef double here = search.outer[axis]
    cdef int64_t right = end if logs[end - 1] < here else lower_bound(logs, begin, end, here)
    cdef int64_t node, begun = -1
    cdef double distance
    if search.reach_low == INFINITY:
        # Nothing bounds the first search. The row that may hold the nearest measurement bounds the rest closely.
        begun = best_row(grid, begin, end, right, search)
        distance = squared_distance + (here - logs[begun]) * (here - logs[begun])
        search_row(grid, begun, distance, sol, params, search)
    for node in range(right - 1, begin - 1, -1):
        distance = squared_distance + (here - logs[node]) * (here - logs[node])
        if not matters(search, distance, distance):
            break
        if node != begun and row_matters(search, distance, least[node], most[node]):
            search_row(grid, node, distance, sol, params, search)
    for node in range(right, end):
        distance = squared_distance + (here - logs[node]) * (here - logs[node])
        if not matters(search, distance, distance):
            break
        if node != begun and row_matters(search, distance, least[node], most[node]):
            search_row(grid, node, distance, sol, params, search)


cdef inline bint bound_plane(
    const Grid* grid, int64_t plane, double squared_distance, const Search* search, double* to_low, double* to_high
) noexcept nogil:
    # How near its measurements can be to both ends of the series. A point's squared distance from a diagonal is half
    # that of its sum.
    cdef double low = search.outer[1] + search.low, high = search.outer[1] + search.high
    cdef double least = grid.diagonal_least[plane], most = grid.diagonal_most[plane]
    to_low[0] = squared_distance + 0.5 * squared_gap(least, most, low) - ROUNDING
    to_high[0] = squared_distance + 0.5 * squared_gap(least, most, high) - ROUNDING
    return matters(search, to_low[0], to_high[0])


cdef void search_plane(
    const Grid* grid, int64_t plane, double squared_distance, sol_function sol, const void* params, Search* search
) noexcept nogil:
    search.outer_nodes[0] = plane
    search_rows(grid, grid.first[0][plane], grid.first[0][plane + 1], squared_distance, sol, params, search)


cdef void search_planes(const Grid* grid, sol_function sol, const void* params, Search* search) noexcept nogil:
    # The planes of a grid of three axes: first the one that may hold the nearest measurement, then outward on either
    # side until they are too far.
    cdef const double* logs = grid.log2_keys[0]
    cdef double here = search.outer[0], distance, to_low, to_high, lowest = INFINITY
    cdef int64_t right = lower_bound(logs, 0, grid.num_nodes[0], here)
    cdef int64_t plane, begun = 0
    for plane in range(max(0, right - NODES_AHEAD), min(grid.num_nodes[0], right + NODES_AHEAD)):
        bound_plane(grid, plane, (here - logs[plane]) * (here - logs[plane]), search, &to_low, &to_high)
        if to_low + to_high < lowest:
            begun, lowest = plane, to_low + to_high
    search_plane(grid, begun, (here - logs[begun]) * (here - logs[begun]), sol, params, search)
    for plane in range(right - 1, -1, -1):
        distance = (here - logs[plane]) * (here - logs[plane])
        if not matters(search, distance, distance):
            break
        if plane != begun and bound_plane(grid, plane, distance, search, &to_low, &to_high):
            search_plane(grid, plane, distance, sol, params, search)
    for plane in range(right, grid.num_nodes[0]):
        distance = (here - logs[plane]) * (here - logs[plane])
        if not matters(search, distance, distance):
            break
        if plane != begun and bound_plane(grid, plane, distance, search, &to_low, &to_high):
            search_plane(grid, plane, distance, sol, params, search)


cdef void gather(const Grid* grid, sol_function sol, const void* params, Search* search) noexcept nogil:
    # The candidates of the queries between `low` and `high`.
    cdef int i
    search.num_candidates = 0
    search.reach_low = search.reach_high = INFINITY
    for i in range(NUM_NEIGHBOURS + 1):
        search.anchors[i] = Anchor(INFINITY, INFINITY)
    if grid.num_axes == MAX_GRID_AXES:
        search_planes(grid, sol, params, search)
    else:
        search_rows(grid, 0, grid.num_nodes[0], 0.0, sol, params, search)
    drop_candidates(search)


cdef void begin_search(
    const Grid* grid, const double* query, double low, double high, sol_function sol, const void* params,
    Search* search,
) noexcept nogil:
    # For queries that differ on the last axis alone, where they lie between `low` and `high`.
    cdef int axis
    for axis in range(grid.num_axes - 1):
        search.outer[axis] = log2_of(query[axis])
    search.low = log2_of(low)
    search.high = log2_of(high) if high != low else search.low
    search.check_leaves = grid.has_zero
    search.one_by_one = False
    gather(grid, sol, params, search)


cdef bint find_nearest(
    const Grid* grid, double here, sol_function sol, const void* params, Search* search
) noexcept nogil:
    # Select those of one query and price them; false if one has no positive roofline.
    cdef Candidate* candidate
    cdef bint all_positive = True
    cdef int i
    if search.one_by_one:
        search.low = search.high = here
        gather(grid, sol, params, search)
    select_nearest(here, search)
    for i in range(search.num_nearest):
        candidate = &search.candidates[search.nearest[i].candidate]
        if not candidate.is_priced:
            candidate.sol_ms = sol_of(grid, candidate, sol, params)
            candidate.is_priced = True
        all_positive &= candidate.sol_ms > 0.0
    return all_positive


cdef int weigh_nearest(
    const Grid* grid, const double* query, sol_function sol, const void* params, Search* search, double* weights
) noexcept nogil:
    # The nearest measurements in joint log2 space with their weights; how many count.
    cdef double here = log2_of(query[grid.num_axes - 1]), radius, distance, total = 0.0
    cdef int i, used
    # Rooflines are asked for only where they matter: nearly always all of them are positive.
    if not find_nearest(grid, here, sol, params, search):
        search.check_leaves = True
        gather(grid, sol, params, search)
        find_nearest(grid, here, sol, params, search)
    used = min(search.num_nearest, NUM_NEIGHBOURS)
    radius = sqrt(search.nearest[used].squared_distance) if search.num_nearest > used else INFINITY
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
    # Beyond the measured range: the utilisation of the nearest measurements. The search covers the query.
    cdef double[NUM_NEIGHBOURS] weights
    cdef double here = sol(params, query), total = 0.0, utilisation = 0.0, power = 0.0
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
        utilisation += weights[i] * (search.candidates[search.nearest[i].candidate].sol_ms / grid.latency_ms[leaf])
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
    cdef int status
    cdef double last = query[grid.num_axes - 1]
    cdef Search search
    if grid.num_nodes[0] == 0:
        return GRID_MISS
    status = resolve(grid, 0, 0, grid.num_nodes[0], query, sol, params, answer)
    if status != GRID_OUT_OF_RANGE:
        return status
    if grid.num_axes == 1:
        return hold_on_curve(grid, query, sol, params, answer)
    begin_search(grid, query, last, last, sol, params, &search)
    return hold(grid, query, sol, params, &search, answer)


cdef int grid_query_series(
    const Grid* grid, const double* query, const double* last, int count, sol_function sol, const void* params,
    Measurement* answers,
) noexcept nogil:
    # Queries on a grid of three axes that differ on the last one alone, where they ascend: the way down to it is found
    # once, the search along it goes on from the query before, and one search finds the neighbours of all beyond it.
    cdef double[MAX_GRID_AXES] at
    cdef Search search
    cdef Measurement lower, upper
    cdef int64_t plane, right = 0, upper_next = -1, lower_next = -1
    cdef double weight = 0.0
    cdef bint on_plane, exact = False, inside = False, searched = False
    cdef int status, i
    if grid.num_nodes[0] == 0:
        return GRID_MISS
    at[0], at[1] = query[0], query[1]
    plane = lower_bound(grid.keys[0], 0, grid.num_nodes[0], at[0])
    on_plane = grid.sqrt_axis < 0 and plane < grid.num_nodes[0] and grid.keys[0][plane] == at[0]
    if on_plane:
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
        status = GRID_OUT_OF_RANGE
        if not on_plane or (inside and not exact):
            status = resolve(grid, 0, 0, grid.num_nodes[0], at, sol, params, &answers[i])
        if status == GRID_OUT_OF_RANGE:
            if not searched:
                begin_search(grid, at, last[i], last[count - 1], sol, params, &search)
                searched = True
            status = hold(grid, at, sol, params, &search, &answers[i])
        if status != GRID_HIT:
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
        cdef double last
        cdef int status, used, i
        if self.query(coordinates, roofline_ms) is None:
            return None
        weights = {}
        status = weigh_cell(&self.grid, 0, 0, self.grid.num_nodes[0], at, weights, &carried)
        if status == GRID_HIT:
            return RESOLUTIONS[2 if carried else 0 if len(weights) == 1 else 1], weights
        if self.grid.num_axes == 1:
            return RESOLUTIONS[3], {0 if at[0] < self.grid.keys[0][0] else self.grid.num_nodes[0] - 1: 1.0}
        last = at[self.grid.num_axes - 1]
        begin_search(&self.grid, at, last, last, python_sol_at, <void*>sol, &search)
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
    except BaseException as raised:
        sol.raised = raised
        return NAN
