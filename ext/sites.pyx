# GEMM latencies (op-level.md sections 2.2 and 3.1). A query has a fixed (n, k) and varies in m, so everything that
# depends on (n, k) alone is settled once: which sites are near, at which weights, for which range of m.

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

cimport numpy as cnp

from fpmsdk._ext.grid cimport GRID_HIT, GRID_MISS, Measurement, lower_bound

import numpy as np

from fpmsdk._ext.grid import RESOLUTIONS

cnp.import_array()

cdef double DISTANCE_GATE = 2.0      # log2 units
cdef int TAIL = 3                    # end points whose utilisation is held beyond a curve


cdef double sol_ms(const Roofline* roofline, double m) noexcept nogil:
    return max(m * roofline.compute_ms_per_m, m * roofline.memory_ms_per_m + roofline.memory_ms)


cdef int curve_at(
    const SiteCurves* curves, const Site* sites, int64_t site, double m, Measurement* answer
) noexcept nogil:
    cdef int64_t low = curves.first[site], high = curves.first[site + 1]
    cdef int64_t right = lower_bound(curves.m, low, high, m)
    cdef const Tail* tail
    if right < high and curves.m[right] == m:
        answer.latency_ms = curves.latency_ms[right]
        answer.power_w = curves.power_w[right] if curves.power_w != NULL else 0.0
        return GRID_HIT
    if low < right < high:
        between(curves, right, (m - curves.m[right - 1]) / (curves.m[right] - curves.m[right - 1]), answer)
        return GRID_HIT
    # Beyond the curve: hold the utilisation of its end.
    tail = &sites[site].low if right == low else &sites[site].high
    answer.latency_ms = sol_ms(&sites[site].roofline, m)
    if not tail.utilisation > 0.0 or not answer.latency_ms > 0.0:
        return GRID_MISS
    answer.latency_ms /= tail.utilisation
    answer.power_w = tail.power_w
    return GRID_HIT


cdef Tail tail_of(const SiteCurves* curves, const Site* site, int64_t index, bint below) noexcept nogil:
    # Medians over the last few points of a curve on one side; zeros when none is usable.
    cdef int64_t low = curves.first[index], high = curves.first[index + 1], point
    cdef double[3] utilisation, power
    cdef double value
    cdef int count = 0, i
    for i in range(TAIL):
        point = low + i if below else high - 1 - i
        if not low <= point < high or not curves.latency_ms[point] > 0.0:
            continue
        value = sol_ms(&site.roofline, curves.m[point]) / curves.latency_ms[point]
        if value > 0.0:
            utilisation[count] = value
            power[count] = curves.power_w[point] if curves.power_w != NULL else 0.0
            count += 1
    return Tail(median_of_few(utilisation, count), median_of_few(power, count))


cdef void between(const SiteCurves* curves, int64_t right, double weight, Measurement* answer) noexcept nogil:
    answer.latency_ms = (
        curves.latency_ms[right - 1] + (curves.latency_ms[right] - curves.latency_ms[right - 1]) * weight
    )
    answer.power_w = 0.0
    if curves.power_w != NULL:
        answer.power_w = curves.power_w[right - 1] + (curves.power_w[right] - curves.power_w[right - 1]) * weight


cdef double median_of_few(const double* values, int count) noexcept nogil:
    if count == 0:
        return 0.0
    if count == 1:
        return values[0]
    if count == 2:
        return (values[0] + values[1]) / 2.0
    return max(min(values[0], values[1]), min(max(values[0], values[1]), values[2]))


cdef class GemmTable:
    """Curves of one GEMM dtype.

    Parameters
    ----------
    n, k: shape of each site, in first-seen order.
    first: first entry of each site's curve, one more entry than sites.
    m, latency_ms, power_w: curve entries, ascending in m inside a site; `power_w` may be None.
    flops_per_s, bytes_per_element, mem_bw_bytes_per_s: roofline of the dtype.
    """

    def __init__(
        self, n, k, first, m, latency_ms, power_w, double flops_per_s, double bytes_per_element,
        double mem_bw_bytes_per_s,
    ):
        cdef Site* site
        cdef int64_t i, point
        cdef double* latency
        cdef double* power = NULL
        cdef double least_ms
        floats = [np.array(array, np.float64) for array in (n, k, m, latency_ms)]
        starts = np.ascontiguousarray(first, np.int64)
        self.memory = (*floats, starts)
        self.curves.num_sites = len(floats[0])
        self.curves.n = <const double*>cnp.PyArray_DATA(floats[0])
        self.curves.k = <const double*>cnp.PyArray_DATA(floats[1])
        self.curves.m = <const double*>cnp.PyArray_DATA(floats[2])
        latency = <double*>cnp.PyArray_DATA(floats[3])
        self.curves.latency_ms = latency
        self.curves.first = <const int64_t*>cnp.PyArray_DATA(starts)
        if power_w is not None:
            watts = np.array(power_w, np.float64)
            self.memory += (watts,)
            power = <double*>cnp.PyArray_DATA(watts)
            self.curves.power_w = power
        self.flops_per_s = flops_per_s
        self.bytes_per_element = bytes_per_element
        self.mem_bw_bytes_per_s = mem_bw_bytes_per_s
        self.sites = <Site*>malloc((self.curves.num_sites + 1) * sizeof(Site))
        if self.sites == NULL:
            raise MemoryError
        for i in range(self.curves.num_sites):
            site = &self.sites[i]
            site.roofline = self.roofline_of(self.curves.n[i], self.curves.k[i])
            # No measurement is faster than the roofline allows; one that is keeps its energy.
            for point in range(self.curves.first[i], self.curves.first[i + 1]):
                least_ms = sol_ms(&site.roofline, self.curves.m[point])
                if latency[point] < least_ms:
                    if power != NULL:
                        power[point] *= latency[point] / least_ms
                    latency[point] = least_ms
            site.low = tail_of(&self.curves, site, i, True)
            site.high = tail_of(&self.curves, site, i, False)

    def __dealloc__(self):
        free(self.sites)

    def point(self, int64_t entry):
        """(m, n, k) of a curve entry and its latency in ms."""
        n, k, m, latency_ms, first = self.memory[:5]
        site = np.searchsorted(first, entry, side="right") - 1
        return (float(m[entry]), float(n[site]), float(k[site])), float(latency_ms[entry])

    def without(self, int64_t entry, bint whole_site):
        """The curves without one entry, or without the whole curve that it is of, for leave-one-out."""
        n, k, m, latency_ms, first = self.memory[:5]
        site = np.searchsorted(first, entry, side="right") - 1
        left_out = slice(first[site], first[site + 1]) if whole_site else slice(entry, entry + 1)
        counts = np.diff(first)
        counts[site] -= left_out.stop - left_out.start
        kept = counts > 0
        return GemmTable(
            n[kept], k[kept], np.concatenate([[0], np.cumsum(counts[kept])]), np.delete(m, left_out),
            np.delete(latency_ms, left_out), None, self.flops_per_s, self.bytes_per_element, self.mem_bw_bytes_per_s,
        )

    cdef Roofline roofline_of(self, double n, double k) noexcept nogil:
        # max(2 m n k / flops, bytes (m n + m k + n k) / bandwidth), section 3.1.
        cdef Roofline roofline
        cdef double ms_per_byte = self.bytes_per_element / self.mem_bw_bytes_per_s * 1000.0
        roofline.compute_ms_per_m = 2.0 * n * k / self.flops_per_s * 1000.0
        roofline.memory_ms_per_m = ms_per_byte * (n + k)
        roofline.memory_ms = ms_per_byte * (n * k)
        return roofline


cdef class GemmSite:
    """One (n, k) of a table, ready to be asked for any m."""

    def __init__(self, GemmTable table not None, double n, double k):
        self.table = table
        self.roofline = table.roofline_of(n, k)
        site_n, site_k, m, _, first = table.memory[:5]
        found = np.flatnonzero((site_n == n) & (site_k == k))
        self.exact = found[0] if len(found) else -1
        if self.exact >= 0 or not len(site_n):
            return
        distance_n, distance_k = np.log2(site_n) - np.log2(n), np.log2(site_k) - np.log2(k)
        distance = np.sqrt(distance_n * distance_n + distance_k * distance_k)
        begin, end = first[:len(first) - 1], first[1:]
        low, high = m[begin], m[end - 1]
        # Which sites cover m changes only at the ends of their curves. Not `np.unique`: it loads masked arrays.
        rows = []
        for first_m in sorted({-np.inf, *low, *np.nextafter(high, np.inf)}):
            covering = (low <= first_m) & (first_m <= high)
            candidates = np.flatnonzero(covering) if covering.any() else np.arange(len(site_n))
            chosen = nearest_sites(candidates, distance, distance_n, distance_k)
            if not rows or not np.array_equal(chosen, rows[len(rows) - 1][1]):
                rows.append((first_m, chosen))
        self.neighbourhoods = <Neighbourhood*>malloc(len(rows) * sizeof(Neighbourhood))
        if self.neighbourhoods == NULL:
            raise MemoryError
        memset(self.neighbourhoods, 0, len(rows) * sizeof(Neighbourhood))
        self.num_neighbourhoods = len(rows)
        for i, (first_m, chosen) in enumerate(rows):
            set_neighbourhood(&self.neighbourhoods[i], first_m, chosen, distance)
            self.lay_side_by_side(&self.neighbourhoods[i])

    def __dealloc__(self):
        cdef int64_t i
        for i in range(self.num_neighbourhoods):
            free(self.neighbourhoods[i].latency_ms)
            free(self.neighbourhoods[i].power_w)
        free(self.neighbourhoods)

    cdef int lay_side_by_side(self, Neighbourhood* near) except -1:
        cdef const SiteCurves* curves = &self.table.curves
        cdef const Roofline* roofline
        cdef int64_t begin, entry, count
        cdef int i
        if near.num_sites == 0:
            return 0
        count = curves.first[near.sites[0] + 1] - curves.first[near.sites[0]]
        near.m = &curves.m[curves.first[near.sites[0]]]
        for i in range(near.num_sites):
            begin = curves.first[near.sites[i]]
            if curves.first[near.sites[i] + 1] - begin != count:
                return 0
            for entry in range(count):
                if curves.m[begin + entry] != near.m[entry] or not curves.latency_ms[begin + entry] > 0.0:
                    return 0
        near.latency_ms = side_by_side(near, curves.first, curves.latency_ms, count, 1.0)
        if curves.power_w != NULL:
            near.power_w = side_by_side(near, curves.first, curves.power_w, count, 0.0)
        for i in range(near.num_sites):
            roofline = &self.table.sites[near.sites[i]].roofline
            near.compute_ms_per_m[i] = roofline.compute_ms_per_m
            near.memory_ms_per_m[i] = roofline.memory_ms_per_m
            near.memory_ms[i] = roofline.memory_ms
            near.total_weight += near.weights[i]
        near.num_entries = count
        return 0

    cdef int64_t neighbourhood_of(self, double m) noexcept nogil:
        # The last one that begins at or before m.
        cdef int64_t low = 0, high = self.num_neighbourhoods, middle
        while high - low > 1:
            middle = (low + high) >> 1
            if self.neighbourhoods[middle].first_m <= m:
                low = middle
            else:
                high = middle
        return low

    def ask(self, double m):
        """(latency in ms, power in W) of `m` rows, None where no measurement is near enough."""
        cdef Measurement answer
        return (answer.latency_ms, answer.power_w) if self.query(m, &answer) == GRID_HIT else None

    def support(self, double m):
        """How `m` rows are answered: (resolution, {curve entry: weight}); None where nothing answers.

        Weights of a transfer are those of the utilisations. Resolutions as those of a grid.
        """
        cdef const Neighbourhood* near
        cdef int i
        if self.ask(m) is None:
            return None
        if self.exact >= 0:
            weights = {}
            beyond = curve_weights(&self.table.curves, self.exact, m, 1.0, weights)
            return RESOLUTIONS[3 if beyond else 0 if len(weights) == 1 else 1], weights
        near = &self.neighbourhoods[self.neighbourhood_of(m)]
        weights = {}
        total = sum([near.weights[i] for i in range(near.num_sites)])
        for i in range(near.num_sites):
            curve_weights(&self.table.curves, near.sites[i], m, near.weights[i] / total, weights)
        return RESOLUTIONS[3], weights

    def neighbours(self, double m, int count):
        """The entries of the site's own curve nearest to `m` in doublings."""
        first, entries = self.table.memory[4], self.table.memory[2]
        low, high = first[self.exact], first[self.exact + 1]
        distance = np.abs(np.log2(np.maximum(entries[low:high], 1.0)) - np.log2(max(m, 1.0)))
        return (low + np.argsort(distance, kind="stable")[:count]).tolist()

    cdef int query(self, double m, Measurement* answer) noexcept nogil:
        cdef const SiteCurves* curves = &self.table.curves
        cdef const Site* sites = self.table.sites
        cdef const Neighbourhood* near
        cdef Measurement there
        cdef double utilisation = 0.0, power = 0.0, total = 0.0, weight, here
        cdef int64_t right = 0, site
        cdef int i
        if self.exact >= 0:
            return curve_at(curves, sites, self.exact, m, answer)
        if self.num_neighbourhoods == 0:
            return GRID_MISS
        near = &self.neighbourhoods[self.neighbourhood_of(m)]
        if near.num_entries > 0:
            right = lower_bound(near.m, 0, near.num_entries, m)
        if 0 < right < near.num_entries:
            utilisation = hold_between(near, right, m, &power)
            total = near.total_weight
        else:
            for i in range(near.num_sites):
                site = near.sites[i]
                if curve_at(curves, sites, site, m, &there) != GRID_HIT or not there.latency_ms > 0.0:
                    continue
                weight = near.weights[i]
                utilisation += weight * (sol_ms(&sites[site].roofline, m) / there.latency_ms)
                power += weight * there.power_w
                total += weight
        here = sol_ms(&self.roofline, m)
        if total == 0.0 or not utilisation > 0.0 or not here > 0.0:
            return GRID_MISS
        answer.latency_ms = here / (utilisation / total)
        answer.power_w = power / total
        return GRID_HIT


cdef bint curve_weights(const SiteCurves* curves, int64_t site, double m, double share, dict weights) except -1:
    # The entries of a curve around m with their part of `share`; whether m lies beyond the curve.
    cdef int64_t low = curves.first[site], high = curves.first[site + 1]
    cdef int64_t right = lower_bound(curves.m, low, high, m)
    cdef double weight
    if right < high and curves.m[right] == m:
        weights[right] = share
        return False
    if low < right < high:
        weight = (m - curves.m[right - 1]) / (curves.m[right] - curves.m[right - 1])
        weights[right - 1] = share * (1.0 - weight)
        weights[right] = share * weight
        return False
    weights[low if right == low else high - 1] = share
    return True


cdef object nearest_sites(candidates, distance, distance_n, distance_k):
    # The sites that answer, nearest first, ties in first-seen order; none when the query is too far from all.
    near = candidates[distance[candidates] <= DISTANCE_GATE]
    if not len(near):
        # Frontier: a query beyond the largest n or the largest k, but not both, keeps the sites level with it.
        along, across = distance_n[candidates], distance_k[candidates]
        if along.min() > 0.0 or across.min() > 0.0:
            return near
        beyond_n, beyond_k = along.max() < 0.0, across.max() < 0.0
        if beyond_n == beyond_k:
            return near
        level = across if beyond_n else along
        near = candidates[np.abs(level) <= DISTANCE_GATE]
    return near[np.argsort(distance[near], kind="stable")][:NUM_NEAR_SITES]


cdef void set_neighbourhood(Neighbourhood* near, double first_m, chosen, distance):
    cdef int i
    near.first_m = first_m
    near.num_sites = len(chosen)
    for i in range(near.num_sites):
        near.sites[i] = chosen[i]
        near.weights[i] = 1.0 / (distance[chosen[i]] * distance[chosen[i]] + 1e-12)


cdef double* side_by_side(
    const Neighbourhood* near, const int64_t* first, const double* values, int64_t count, double filling
) except NULL:
    cdef double* rows = <double*>malloc(count * NUM_NEAR_SITES * sizeof(double))
    cdef int64_t entry
    cdef int i
    if rows == NULL:
        raise MemoryError
    for entry in range(count):
        for i in range(NUM_NEAR_SITES):
            rows[entry * NUM_NEAR_SITES + i] = filling
            if i < near.num_sites:
                rows[entry * NUM_NEAR_SITES + i] = values[first[near.sites[i]] + entry]
    return rows


cdef double hold_between(const Neighbourhood* near, int64_t right, double m, double* power) noexcept nogil:
    # The weighted utilisations and powers of curves that lie side by side, summed; loops that a compiler can vectorise.
    cdef PerSite part
    cdef const double* lower = near.latency_ms + (right - 1) * NUM_NEAR_SITES
    cdef const double* upper = lower + NUM_NEAR_SITES
    cdef double fraction = (m - near.m[right - 1]) / (near.m[right] - near.m[right - 1])
    cdef double utilisation = 0.0, compute_ms, memory_ms
    cdef int i
    for i in range(NUM_NEAR_SITES):
        compute_ms = m * near.compute_ms_per_m[i]
        memory_ms = m * near.memory_ms_per_m[i] + near.memory_ms[i]
        part[i] = near.weights[i] * (
            (memory_ms if memory_ms > compute_ms else compute_ms) / (lower[i] + (upper[i] - lower[i]) * fraction)
        )
    for i in range(NUM_NEAR_SITES):
        utilisation += part[i]
    if near.power_w != NULL:
        lower = near.power_w + (right - 1) * NUM_NEAR_SITES
        upper = lower + NUM_NEAR_SITES
        for i in range(NUM_NEAR_SITES):
            power[0] += near.weights[i] * (lower[i] + (upper[i] - lower[i]) * fraction)
    return utilisation
