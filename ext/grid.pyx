# Grid resolver (op-level.md section 2.1): exact measurements verbatim, multilinear interpolation inside the measured
# range, and beyond it the utilisation (speed of light / latency) of the nearest measurements held. Curves are grids of
# one axis.

from libc.math cimport INFINITY, NAN, isfinite, log2, sqrt
from libc.stdint cimport int64_t

cimport numpy as cnp

import numpy as np

cnp.import_array()


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


cdef struct Neighbour:
    double squared_distance
    int64_t nodes[MAX_GRID_AXES]     # of each level; the last one is the measurement


cdef struct Search:
    # The nearest measurements so far, ascending in distance; one more than are averaged, for the support radius.
    int count
    Neighbour nearest[NUM_NEIGHBOURS + 1]
    bint check_sol                   # leave out measurements without a roofline
    sol_function sol
    const void* params


cdef bint too_far(const Search* search, double squared_distance) noexcept nogil:
    return search.count == NUM_NEIGHBOURS + 1 and squared_distance > search.nearest[NUM_NEIGHBOURS].squared_distance


cdef bint before(const Neighbour* a, const Neighbour* b, int last) noexcept nogil:
    if a.squared_distance != b.squared_distance:
        return a.squared_distance < b.squared_distance
    return a.nodes[last] < b.nodes[last]


cdef void offer(Search* search, const Neighbour* candidate, int last) noexcept nogil:
    cdef int i
    if search.count == NUM_NEIGHBOURS + 1:
        if not before(candidate, &search.nearest[NUM_NEIGHBOURS], last):
            return
        search.count -= 1
    i = search.count
    while i > 0 and before(candidate, &search.nearest[i - 1], last):
        search.nearest[i] = search.nearest[i - 1]
        i -= 1
    search.nearest[i] = candidate[0]
    search.count += 1


cdef double sol_of(const Grid* grid, const Neighbour* neighbour, sol_function sol, const void* params) noexcept nogil:
    cdef double coordinates[MAX_GRID_AXES]
    cdef int axis
    for axis in range(grid.num_axes):
        coordinates[axis] = grid.keys[axis][neighbour.nodes[axis]]
    return sol(params, coordinates)


cdef void search_level(
    const Grid* grid, int axis, int64_t low, int64_t high, double squared_distance, const double* log2_query,
    Neighbour* candidate, Search* search,
) noexcept nogil:
    # Visit the nodes of a level outward from the query and stop once they are too far: the same neighbours as a scan
    # of all measurements, after a few dozen of them.
    cdef const double* logs = grid.log2_keys[axis]
    cdef double here = log2_query[axis]
    cdef int last = grid.num_axes - 1
    cdef int64_t right = high if logs[high - 1] < here else lower_bound(logs, low, high, here)
    cdef int64_t left = right - 1, node
    cdef double to_left, to_right, distance
    while left >= low or right < high:
        to_left = here - logs[left] if left >= low else INFINITY
        to_right = logs[right] - here if right < high else INFINITY
        if to_left <= to_right:
            node, distance = left, to_left
            left -= 1
        else:
            node, distance = right, to_right
            right += 1
        distance = squared_distance + distance * distance
        if too_far(search, distance):
            return
        candidate.nodes[axis] = node
        if axis < last:
            search_level(
                grid, axis + 1, grid.first[axis][node], grid.first[axis][node + 1], distance, log2_query, candidate,
                search,
            )
        elif grid.latency_ms[node] > 0.0:
            candidate.squared_distance = distance
            if not search.check_sol or sol_of(grid, candidate, search.sol, search.params) > 0.0:
                offer(search, candidate, last)


cdef bint find_nearest(const Grid* grid, const double* query, Search* search) noexcept nogil:
    # False when a measurement without a roofline is among them.
    cdef double log2_query[MAX_GRID_AXES]
    cdef Neighbour candidate
    cdef int i
    for i in range(grid.num_axes):
        log2_query[i] = log2(max(query[i], 1e-12))
    search.count = 0
    search_level(grid, 0, 0, grid.num_nodes[0], 0.0, log2_query, &candidate, search)
    if search.check_sol:
        return True
    for i in range(search.count):
        if not sol_of(grid, &search.nearest[i], search.sol, search.params) > 0.0:
            return False
    return True


cdef int hold(
    const Grid* grid, const double* query, sol_function sol, const void* params, Measurement* answer
) noexcept nogil:
    # Beyond the measured range: the utilisation of the nearest measurements in joint log2 space.
    cdef double weights[NUM_NEIGHBOURS]
    cdef double here = sol(params, query), radius, distance, total = 0.0, utilisation = 0.0, power = 0.0
    cdef Search search
    cdef int64_t leaf
    cdef int i, used
    if not usable(here):
        return GRID_MISS
    search.check_sol = False
    search.sol = sol
    search.params = params
    if not find_nearest(grid, query, &search):
        search.check_sol = True
        find_nearest(grid, query, &search)
    if search.count == 0:
        return GRID_MISS
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
        total = <double>used
    for i in range(used):
        leaf = search.nearest[i].nodes[grid.num_axes - 1]
        utilisation += weights[i] * (sol_of(grid, &search.nearest[i], sol, params) / grid.latency_ms[leaf])
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
    if grid.num_nodes[0] == 0:
        return GRID_MISS
    status = resolve(grid, 0, 0, grid.num_nodes[0], query, sol, params, answer)
    if status != GRID_OUT_OF_RANGE:
        return status
    if grid.num_axes == 1:
        return hold_on_curve(grid, query, sol, params, answer)
    return hold(grid, query, sol, params, answer)


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
        cdef cnp.ndarray keys, logs, first
        if not 1 <= len(axes) <= MAX_GRID_AXES:
            raise ValueError(f"a grid has one to {MAX_GRID_AXES} axes, found {len(axes)}")
        rows = len(latency_ms)
        kept = [np.ascontiguousarray(latency_ms, np.float64)]
        grid.num_axes = len(axes)
        grid.sqrt_axis = sqrt_axis
        grid.latency_ms = <const double*>cnp.PyArray_DATA(kept[0])
        if power_w is not None:
            kept.append(np.ascontiguousarray(power_w, np.float64))
            grid.power_w = <const double*>cnp.PyArray_DATA(kept[1])
        # A node begins where any coordinate up to its axis differs from the row before.
        begins = np.zeros(rows, bool)
        if rows:
            begins[0] = True
        starts = []
        for axis in range(grid.num_axes):
            column = np.asarray(axes[axis])
            begins = begins.copy()
            begins[1:] |= np.diff(column) != 0
            starts.append(np.flatnonzero(begins))
            keys = np.ascontiguousarray(column[starts[axis]], np.float64)
            logs = np.log2(np.maximum(keys, 1e-12))
            kept += [keys, logs]
            grid.num_nodes[axis] = len(keys)
            grid.keys[axis] = <const double*>cnp.PyArray_DATA(keys)
            grid.log2_keys[axis] = <const double*>cnp.PyArray_DATA(logs)
        for axis in range(grid.num_axes - 1):
            first = np.append(np.searchsorted(starts[axis + 1], starts[axis]), len(starts[axis + 1])).astype(np.int64)
            kept.append(first)
            grid.first[axis] = <const int64_t*>cnp.PyArray_DATA(first)
        self.memory = tuple(kept)

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
        cdef PythonSol sol = PythonSol.__new__(PythonSol)
        cdef int axis, status
        if len(coordinates) != self.grid.num_axes:
            raise ValueError(f"{self.grid.num_axes} coordinates are needed, found {len(coordinates)}")
        for axis in range(self.grid.num_axes):
            at[axis] = coordinates[axis]
        sol.roofline_ms = roofline_ms
        sol.num_axes = self.grid.num_axes
        status = grid_query(&self.grid, at, python_sol_at, <void*>sol, &answer)
        if sol.raised is not None:
            raise sol.raised
        return (answer.latency_ms, answer.power_w) if status == GRID_HIT else None


cdef class PythonSol:
    cdef object roofline_ms, raised
    cdef int num_axes


cdef double python_sol_at(const void* params, const double* coordinates) noexcept nogil:
    with gil:
        return call_python_sol(<PythonSol>params, coordinates)


cdef double call_python_sol(PythonSol sol, const double* coordinates) noexcept:
    try:
        return sol.roofline_ms(*[coordinates[axis] for axis in range(sol.num_axes)])
    except Exception as raised:
        sol.raised = raised
        return NAN
