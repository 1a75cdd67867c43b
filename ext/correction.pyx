# Online correction of native estimates (fpm-model.md section 6): a store collects observed / native ratios over the
# cells of a workload grid and answers with a factor. `fixed` keeps a grid over a fixed range, `dynamic_local` follows
# the traffic, a hybrid asks the fixed grid inside its range and the dynamic one outside. Factors are computed when an
# observation arrives and published as an immutable table, so a query is one look-up.

from libc.math cimport INFINITY, exp, isfinite, log, log1p
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memmove

cimport numpy as cnp

from fpmsdk._ext.sampler cimport BucketSampler, cell_of, find_key

import numpy as np

from fpmsdk._ext.sampler import check_saved_rows, saved_rows, wrong_state

cnp.import_array()

cdef enum:
    NUM_RECENT = 0
    NUM_ROWS
    NUM_CELLS
    NEXT_SEQUENCE

DYNAMIC_EXTENT_FIELDS = ("num_recent", "num_rows", "num_cells", "next_sequence")

cdef double PRIOR_WEIGHT = 20.0      # rows that the global factor counts for beside a cell's own

cdef int ascending(const void* left, const void* right) noexcept nogil:
    cdef double a = (<const double*>left)[0], b = (<const double*>right)[0]
    return (a > b) - (a < b)


cdef double median(double* values, int64_t count) noexcept nogil:
    # Sorts in place.
    cdef int64_t middle = count // 2
    qsort(values, count, sizeof(double), ascending)
    if count % 2:
        return values[middle]
    return (values[middle - 1] + values[middle]) / 2.0


cdef class CorrectionTable:
    """Published factors of one store; never changes. `retained` counts observations, in a hybrid those of both parts."""

    cdef double factor_at(self, const double* coordinates) noexcept nogil:
        cdef double logs[MAX_CORRECTION_AXES]
        cdef double factor
        cdef int i
        if self.has_fixed and (inside(self.num_axes, coordinates, &self.fixed) or not self.has_dynamic):
            return factor_in(self.num_axes, coordinates, &self.fixed, 1.0)
        if not self.global_ready:
            return 1.0
        for i in range(self.num_axes):
            logs[i] = log1p(coordinates[i])
        return factor_in(self.num_axes, logs, &self.local, self.global_factor)

    @property
    def ready(self):
        """Whether some part has enough observations to answer."""
        return bool(self.fixed.ready or self.global_ready)

    @property
    def ready_cells(self):
        """Populated cells of the parts that answer by cell."""
        return (self.fixed.num_cells if self.fixed.ready else 0) + (
            self.local.num_cells if self.local.ready else 0
        )

    def factors(self):
        """The ready factors: fixed cells, then dynamic cells, each in key order, then the global factor."""
        cdef int64_t cell
        found = []
        if self.fixed.ready:
            found += [self.fixed.factors[cell] for cell in range(self.fixed.num_cells)]
        if self.global_ready:
            if self.local.ready:
                found += [self.local.factors[cell] for cell in range(self.local.num_cells)]
            found.append(self.global_factor)
        return found

    def factor(self, tuple coordinates):
        """Factor by which a native estimate at these coordinates is multiplied; 1.0 when there is nothing to say."""
        cdef double[MAX_CORRECTION_AXES] located
        located_from(coordinates, self.num_axes, located)
        return self.factor_at(located)


cdef bint inside(int num_axes, const double* coordinates, const Cells* cells) noexcept nogil:
    cdef int i
    for i in range(num_axes):
        if not cells.low[i] <= coordinates[i] <= cells.high[i]:
            return False
    return True


cdef double factor_in(int num_axes, const double* coordinates, const Cells* cells, double otherwise) noexcept nogil:
    cdef int64_t key, cell
    if not cells.ready or not inside(num_axes, coordinates, cells):
        return otherwise
    key = cell_of(num_axes, coordinates, cells.low, cells.high, cells.bins)
    cell = find_key(cells.keys, cells.num_cells, key)
    return cells.factors[cell] if cell < cells.num_cells and cells.keys[cell] == key else otherwise


cdef class FixedStore:
    """Ratios in a grid over a fixed range; a cell answers with its median (section 6.3)."""

    # Here and below __cinit__, not __init__: there is no store without its arrays, not even one made by __new__.
    def __cinit__(self, layout, tuple maxima not None, tuple bins not None, max_observations, min_observations):
        self.layout = layout
        self.min_observations = min(min_observations, INT64_MAX)
        self.sampler = BucketSampler(bins, max_observations, True)
        rows = min(max_observations, 63) + 1
        self.arrays = layout.allocate(rows=rows, buckets=rows, sampling_axes=len(bins))
        self.arrays["axis_max"][:] = maxima
        self.bind()

    def __dealloc__(self):
        free(self.scratch)

    cdef int bind(self) except -1:
        self.sampler.bind(self.arrays)
        self.row_capacity = len(self.arrays["order"])
        self.ratio = <double*>cnp.PyArray_DATA(self.arrays["ratio"])
        self.cell_factor = <double*>cnp.PyArray_DATA(self.arrays["cell_factor"])
        free(self.scratch)
        self.scratch = <double*>malloc(self.row_capacity * sizeof(double))
        if self.scratch == NULL:
            raise MemoryError
        return 0

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        cdef int64_t limit = self.sampler.max_observations
        cdef int64_t rows = min(self.sampler.total() + num_observations, limit) + 1
        if rows > self.row_capacity:
            rows = max(rows, min(2 * self.row_capacity, limit + 1))
            self.arrays = self.layout.grow(self.arrays, rows=rows, buckets=rows)
            self.bind()
        return 0

    cdef bint add(self, const double* coordinates, double ratio) noexcept nogil:
        cdef int32_t evicted
        cdef int32_t slot = self.sampler.insert(coordinates, &evicted)
        if slot < 0:
            return False
        self.ratio[slot] = ratio
        refresh_medians(self)
        return True

    def saved(self):
        """What a snapshot holds: the arrays, exactly as long as what they hold, rows in bucket order.

        The next observation changes it: encode it before.
        """
        return self.arrays | saved_rows(self.arrays, "ratio") | {
            "cell_factor": self.arrays["cell_factor"][: self.sampler.extent[1]],
        }

    def restore(self, dict saved, double min_factor, double max_factor):
        """Take over saved arrays of the declared types.

        Raises
        ------
        StateSnapshotError: they are not what tuning under these settings leaves behind; the store is unusable then.
        """
        cdef int64_t row
        total = check_saved_rows(saved, self.sampler.num_axes, self.sampler.max_observations)
        for field in ("axis_min", "axis_max"):
            if saved[field].tobytes() != self.arrays[field].tobytes():
                raise wrong_state(field, f"{self.arrays[field].tolist()}, the fixed range", saved[field].tolist())
        for field, length in (("ratio", total), ("cell_factor", len(saved["bucket_key"]))):
            if len(saved[field]) != length:
                raise wrong_state(field, f"{length} elements", len(saved[field]))
        factors = saved["cell_factor"]
        rows = max(total + 1, self.row_capacity)
        self.arrays = self.layout.grow(saved, rows=rows, buckets=rows)
        self.bind()
        self.sampler.check_restored()
        check_ratios("ratio", self.ratio, total, min_factor, max_factor)
        refresh_medians(self)
        check_factors(factors, self.arrays["cell_factor"])

    @property
    def retained(self):
        """Observations kept."""
        return self.sampler.total()

    @property
    def num_cells(self):
        """Populated cells."""
        return self.sampler.extent[1]


cdef void refresh_medians(FixedStore store) noexcept nogil:
    cdef int64_t b, first, count, i
    for b in range(store.sampler.extent[1]):
        first = store.sampler.bucket_start[b]
        count = store.sampler.bucket_start[b + 1] - first
        for i in range(count):
            store.scratch[i] = store.ratio[store.sampler.order[first + i]]
        store.cell_factor[b] = median(store.scratch, count)


cdef int check_ratios(name, const double* ratios, int64_t count, double low, double high) except -1:
    cdef int64_t i
    for i in range(count):
        if not (low <= ratios[i] <= high and ratios[i] > 0.0):
            raise wrong_state(f"{name}[{i}]", f"a ratio in [{low}, {high}]", ratios[i])
    return 0


cdef int check_factors(saved, recomputed) except -1:
    # Factors are a cache: they must be what the ratios give.
    for i in range(len(saved)):
        if saved[i].tobytes() != recomputed[i].tobytes():
            raise wrong_state(f"cell_factor[{i}]", f"{recomputed[i]!r}, recomputed", repr(saved[i]))
    return 0


cdef class DynamicLocalStore:
    """Recent ratios and a chronological window of located ones over a grid that grows with traffic (section 6.4)."""

    def __cinit__(self, layout, tuple bins not None, max_observations, min_observations):
        cdef int i
        self.layout = layout
        self.num_axes = len(bins)
        for i in range(self.num_axes):
            self.bins[i] = bins[i]
        max_observations = min(max_observations, INT64_MAX // 2)
        self.min_observations = min(min_observations, INT64_MAX)
        self.recent_limit = max(self.min_observations, max_observations // 4)
        self.row_limit = max_observations - self.recent_limit
        self.age_limit = 2 * max_observations
        rows = min(self.row_limit, 63) + 1
        self.arrays = layout.allocate(
            axes=self.num_axes, recent=min(self.recent_limit, 64), rows=rows, cells=rows
        )
        self.arrays["axis_min"].fill(float("inf"))
        self.arrays["axis_max"].fill(float("-inf"))
        self.arrays["global_factor"].fill(1.0)
        self.bind()

    def __dealloc__(self):
        free(self.scratch)
        free(self.row_key)

    cdef int bind(self) except -1:
        self.recent_capacity = len(self.arrays["recent"])
        self.row_capacity = len(self.arrays["ratio"])
        self.axis_min = <double*>cnp.PyArray_DATA(self.arrays["axis_min"])
        self.axis_max = <double*>cnp.PyArray_DATA(self.arrays["axis_max"])
        self.recent = <double*>cnp.PyArray_DATA(self.arrays["recent"])
        self.coordinates = <double*>cnp.PyArray_DATA(self.arrays["coordinates"])
        self.ratio = <double*>cnp.PyArray_DATA(self.arrays["ratio"])
        self.sequence = <int64_t*>cnp.PyArray_DATA(self.arrays["sequence"])
        self.extent = <int64_t*>cnp.PyArray_DATA(self.arrays["extent"])
        self.cell_key = <int64_t*>cnp.PyArray_DATA(self.arrays["cell_key"])
        self.cell_factor = <double*>cnp.PyArray_DATA(self.arrays["cell_factor"])
        self.global_factor = <double*>cnp.PyArray_DATA(self.arrays["global_factor"])
        free(self.scratch)
        free(self.row_key)
        self.scratch = <double*>malloc(max(self.recent_capacity, self.row_capacity) * sizeof(double))
        self.row_key = <int64_t*>malloc(self.row_capacity * sizeof(int64_t))
        if self.scratch == NULL or self.row_key == NULL:
            raise MemoryError
        return 0

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        cdef int64_t recent = min(self.extent[NUM_RECENT] + num_observations, self.recent_limit)
        cdef int64_t rows = min(self.extent[NUM_ROWS] + num_observations, self.row_limit) + 1
        if recent <= self.recent_capacity and rows <= self.row_capacity:
            return 0
        if recent > self.recent_capacity:
            recent = max(recent, min(2 * self.recent_capacity, self.recent_limit))
        if rows > self.row_capacity:
            rows = max(rows, min(2 * self.row_capacity, self.row_limit + 1))
        self.arrays = self.layout.grow(self.arrays, recent=recent, rows=rows, cells=rows)
        self.bind()
        return 0

    cdef bint add(self, const double* coordinates, double ratio) noexcept nogil:
        cdef int64_t row = self.extent[NUM_ROWS], newest = self.extent[NEXT_SEQUENCE]
        cdef double* located = &self.coordinates[row * self.num_axes]
        cdef int i
        for i in range(self.num_axes):
            if not isfinite(coordinates[i]) or coordinates[i] < 0.0:
                return False
        for i in range(self.num_axes):
            located[i] = log1p(coordinates[i])
            self.axis_min[i] = min(self.axis_min[i], located[i])
            self.axis_max[i] = max(self.axis_max[i], located[i])
        if self.extent[NUM_RECENT] == self.recent_limit:
            memmove(self.recent, self.recent + 1, (self.recent_limit - 1) * sizeof(double))
            self.extent[NUM_RECENT] -= 1
        self.recent[self.extent[NUM_RECENT]] = ratio
        self.extent[NUM_RECENT] += 1
        self.ratio[row] = ratio
        self.sequence[row] = newest
        self.extent[NUM_ROWS] += 1
        self.extent[NEXT_SEQUENCE] += 1
        while newest - self.sequence[0] >= self.age_limit:
            self.remove_row(0)
        while self.extent[NUM_ROWS] > self.row_limit:
            self.remove_row(self.row_to_evict())
        self.refresh_factors()
        return True

    cdef void remove_row(self, int64_t row) noexcept nogil:
        cdef int64_t after = self.extent[NUM_ROWS] - row - 1
        memmove(
            &self.coordinates[row * self.num_axes], &self.coordinates[(row + 1) * self.num_axes],
            after * self.num_axes * sizeof(double),
        )
        memmove(&self.ratio[row], &self.ratio[row + 1], after * sizeof(double))
        memmove(&self.sequence[row], &self.sequence[row + 1], after * sizeof(int64_t))
        self.extent[NUM_ROWS] -= 1

    cdef void group_rows(self) noexcept nogil:
        # The cell of every row under the present bounds, and the distinct cells in ascending order.
        cdef int64_t row, cell, cells = 0, key
        for row in range(self.extent[NUM_ROWS]):
            key = cell_of(
                self.num_axes, &self.coordinates[row * self.num_axes], self.axis_min, self.axis_max, self.bins
            )
            self.row_key[row] = key
            cell = find_key(self.cell_key, cells, key)
            if cell == cells or self.cell_key[cell] != key:
                memmove(&self.cell_key[cell + 1], &self.cell_key[cell], (cells - cell) * sizeof(int64_t))
                self.cell_key[cell] = key
                cells += 1
        self.extent[NUM_CELLS] = cells

    cdef int64_t row_to_evict(self) noexcept nogil:
        # The oldest row of the fullest cell; the smallest key wins ties.
        cdef int64_t cell, row, count, most = 0, oldest = 0, first
        self.group_rows()
        for cell in range(self.extent[NUM_CELLS]):
            count = 0
            first = -1
            for row in range(self.extent[NUM_ROWS]):
                if self.row_key[row] == self.cell_key[cell]:
                    count += 1
                    if first < 0:
                        first = row
            if count > most:
                most = count
                oldest = first
        return oldest

    cdef void refresh_factors(self) noexcept nogil:
        cdef int64_t cell, row, count
        cdef double general, local, weight, factor
        for row in range(self.extent[NUM_RECENT]):
            self.scratch[row] = self.recent[row]
        general = median(self.scratch, self.extent[NUM_RECENT])
        self.global_factor[0] = general
        self.group_rows()
        for cell in range(self.extent[NUM_CELLS]):
            count = 0
            for row in range(self.extent[NUM_ROWS]):
                if self.row_key[row] == self.cell_key[cell]:
                    self.scratch[count] = self.ratio[row]
                    count += 1
            local = median(self.scratch, count)
            weight = <double>count / (<double>count + PRIOR_WEIGHT)
            factor = exp(weight * log(local) + (1.0 - weight) * log(general))
            self.cell_factor[cell] = min(max(factor, min(local, general)), max(local, general))

    def saved(self):
        """What a snapshot holds: the arrays, exactly as long as what they hold.

        The next observation changes it: encode it before.
        """
        lengths = {
            "recent": self.extent[NUM_RECENT],
            **dict.fromkeys(("coordinates", "ratio", "sequence"), self.extent[NUM_ROWS]),
            **dict.fromkeys(("cell_key", "cell_factor"), self.extent[NUM_CELLS]),
        }
        return {name: array[: lengths.get(name, len(array))] for name, array in self.arrays.items()}

    def restore(self, dict saved, double min_factor, double max_factor):
        """Take over saved arrays of the declared types.

        Raises
        ------
        StateSnapshotError: they are not what tuning under these settings leaves behind; the store is unusable then.
        """
        recent, rows, cells, observed = (int(value) for value in saved["extent"])
        for field, shape in {
            "axis_min": (self.num_axes,), "recent": (recent,), "coordinates": (rows, self.num_axes), "ratio": (rows,),
            "sequence": (rows,), "cell_key": (cells,), "cell_factor": (cells,),
        }.items():
            if saved[field].shape != shape:
                raise wrong_state(field, f"shape {shape}", saved[field].shape)
        if observed > 1 << 62:  # further counting has to stay far from where numbers wrap
            raise wrong_state("extent (next_sequence)", f"at most {1 << 62}", observed)
        if recent != min(observed, self.recent_limit):
            raise wrong_state("extent (num_recent)", min(observed, self.recent_limit), recent)
        if rows > min(observed, self.row_limit) or (rows < observed and observed <= self.row_limit):
            raise wrong_state("extent (num_rows)", f"at most {min(observed, self.row_limit)}", rows)
        capacity = max(rows + 1, self.row_capacity)
        self.arrays = self.layout.grow(
            saved, recent=max(recent, self.recent_capacity), rows=capacity, cells=capacity
        )
        self.bind()
        self.check_bounds()
        check_ratios("recent", self.recent, recent, min_factor, max_factor)
        check_ratios("ratio", self.ratio, rows, min_factor, max_factor)
        self.check_rows()
        if observed:
            self.refresh_factors()
        elif cells or saved["global_factor"][0] != 1.0:
            raise wrong_state("global_factor", "1.0 and no cells without observations", saved["global_factor"][0])
        if saved["global_factor"].tobytes() != self.arrays["global_factor"].tobytes():
            raise wrong_state(
                "global_factor", f"{self.global_factor[0]!r}, recomputed", repr(saved["global_factor"][0])
            )
        keys = self.arrays["cell_key"][: self.extent[NUM_CELLS]]
        if saved["cell_key"].tobytes() != keys.tobytes():
            raise wrong_state("cell_key", f"{keys.tolist()}, recomputed", saved["cell_key"].tolist())
        check_factors(saved["cell_factor"], self.arrays["cell_factor"])

    def check_bounds(self):
        """Raise unless the bounds are those of log1p coordinates, or open while nothing was observed."""
        cdef int i
        for i in range(self.num_axes):
            low, high = self.axis_min[i], self.axis_max[i]
            if self.extent[NEXT_SEQUENCE] == 0:
                if not (low == INFINITY and high == -INFINITY):
                    raise wrong_state(f"axis_min[{i}], axis_max[{i}]", "inf, -inf without observations", (low, high))
            elif not 0.0 <= low <= high < INFINITY:
                raise wrong_state(f"axis_min[{i}], axis_max[{i}]", "ascending bounds from 0", (low, high))

    def check_rows(self):
        """Raise for the first row out of order, out of age, outside the bounds or at odds with the recent ratios."""
        cdef int64_t observed = self.extent[NEXT_SEQUENCE], first_recent = observed - self.extent[NUM_RECENT]
        cdef int64_t row, number, least = max(observed - self.age_limit, 0)
        cdef int i
        for row in range(self.extent[NUM_ROWS]):
            number = self.sequence[row]
            if not least <= number < observed:
                raise wrong_state(f"sequence[{row}]", f"in {least}..<{observed}", number)
            least = number + 1
            if number >= first_recent and self.ratio[row] != self.recent[number - first_recent]:
                raise wrong_state(f"ratio[{row}]", f"{self.recent[number - first_recent]!r}, as in recent", self.ratio[row])
            for i in range(self.num_axes):
                value = self.coordinates[row * self.num_axes + i]
                if not self.axis_min[i] <= value <= self.axis_max[i]:
                    raise wrong_state(
                        f"coordinates[{row}, {i}]", f"inside [{self.axis_min[i]}, {self.axis_max[i]}]", value
                    )

    @property
    def retained(self):
        """Distinct observations among the recent and the located ones."""
        cdef int64_t first_recent = self.extent[NEXT_SEQUENCE] - self.extent[NUM_RECENT]
        cdef int64_t row, older = 0
        for row in range(self.extent[NUM_ROWS]):
            older += self.sequence[row] < first_recent
        return self.extent[NUM_RECENT] + older


cdef class CorrectionStore:
    """Correction of one workload kind: a fixed store, a dynamic one, or both.

    Parameters
    ----------
    fixed, dynamic: the parts, None for absent.
    num_axes: workload coordinates of a query.
    min_factor, max_factor: bounds of an observed ratio, None for unbounded.
    """

    def __cinit__(self, FixedStore fixed, DynamicLocalStore dynamic, int num_axes, min_factor, max_factor):
        self.fixed = fixed
        self.dynamic = dynamic
        self.num_axes = num_axes
        self.min_factor = 0.0 if min_factor is None else min_factor
        self.max_factor = INFINITY if max_factor is None else max_factor
        self.live = CorrectionTable.__new__(CorrectionTable)
        self.publish()

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        if self.fixed is not None:
            self.fixed.reserve(num_observations)
        if self.dynamic is not None:
            self.dynamic.reserve(num_observations)
        return 0

    cdef bint add(self, const double* coordinates, double observed_ms, double native_ms) noexcept nogil:
        # Ratios are against the uncorrected native estimate, so factors never compound.
        cdef double ratio
        cdef bint taken = False
        if not (isfinite(observed_ms) and isfinite(native_ms) and observed_ms > 0.0 and native_ms > 0.0):
            return False
        ratio = min(max(observed_ms / native_ms, self.min_factor), self.max_factor)
        if not isfinite(ratio) or ratio <= 0.0:
            return False
        if self.fixed is not None:
            taken |= self.fixed.add(coordinates, ratio)
        if self.dynamic is not None:
            taken |= self.dynamic.add(coordinates, ratio)
        return taken

    cdef void describe(self, CorrectionTable table) noexcept nogil:
        # What the parts say, with cells that are those of the parts themselves.
        cdef int i
        table.num_axes = self.num_axes
        if self.fixed is not None:
            table.has_fixed = True
            table.fixed.ready = self.fixed.sampler.total() >= self.fixed.min_observations
            for i in range(self.num_axes):
                table.fixed.low[i] = self.fixed.sampler.axis_min[i]
                table.fixed.high[i] = self.fixed.sampler.axis_max[i]
                table.fixed.bins[i] = self.fixed.sampler.bins[i]
            table.fixed.num_cells = self.fixed.sampler.extent[1]
            table.fixed.keys = self.fixed.sampler.bucket_key
            table.fixed.factors = self.fixed.cell_factor
        if self.dynamic is not None:
            table.has_dynamic = True
            table.global_ready = self.dynamic.extent[NUM_RECENT] >= self.dynamic.min_observations
            table.global_factor = self.dynamic.global_factor[0]
            table.local.ready = self.dynamic.extent[NUM_ROWS] >= self.dynamic.min_observations
            for i in range(self.num_axes):
                table.local.low[i] = self.dynamic.axis_min[i]
                table.local.high[i] = self.dynamic.axis_max[i]
                table.local.bins[i] = self.dynamic.bins[i]
            table.local.num_cells = self.dynamic.extent[NUM_CELLS]
            table.local.keys = self.dynamic.cell_key
            table.local.factors = self.dynamic.cell_factor

    cdef double factor_now(self, const double* coordinates) noexcept nogil:
        # What the table that `publish` would make now answers.
        self.describe(self.live)
        return self.live.factor_at(coordinates)

    cdef int publish(self) except -1:
        cdef CorrectionTable table = CorrectionTable.__new__(CorrectionTable)
        cdef DynamicLocalStore dynamic = self.dynamic
        cdef FixedStore fixed = self.fixed
        self.describe(table)
        table.memory = ()
        table.retained = (0 if fixed is None else fixed.retained) + (0 if dynamic is None else dynamic.retained)
        if fixed is not None:
            keep_cells(table, &table.fixed, fixed.arrays["bucket_key"], fixed.arrays["cell_factor"])
        if dynamic is not None:
            keep_cells(table, &table.local, dynamic.arrays["cell_key"], dynamic.arrays["cell_factor"])
        self.table = table
        return 0

    def restore_fixed(self, saved):
        """Take over the saved arrays of the fixed part; nothing of it is published yet."""
        self.fixed.restore(saved, self.min_factor, self.max_factor)

    def restore_dynamic(self, saved):
        """Take over the saved arrays of the dynamic part; nothing of it is published yet."""
        self.dynamic.restore(saved, self.min_factor, self.max_factor)

    def observe(self, tuple coordinates, double observed_ms, double native_ms):
        """Take one observation; False when it is refused."""
        cdef double[MAX_CORRECTION_AXES] located
        located[1] = 0.0
        self.reserve(1)
        located_from(coordinates, self.num_axes, located)
        taken = self.add(located, observed_ms, native_ms)
        self.publish()
        return taken


cdef int located_from(tuple coordinates, int num_axes, double* located) except -1:
    cdef int i
    if len(coordinates) != num_axes:
        raise ValueError(f"expected {num_axes} workload coordinates, found {len(coordinates)}")
    for i in range(num_axes):
        located[i] = coordinates[i]
    return 0


cdef int keep_cells(CorrectionTable table, Cells* cells, object keys, object factors) except -1:
    # Copies, because tuning goes on.
    keys = keys[: cells.num_cells].copy()
    factors = factors[: cells.num_cells].copy()
    table.memory += (keys, factors)
    cells.keys = <const int64_t*>cnp.PyArray_DATA(keys)
    cells.factors = <const double*>cnp.PyArray_DATA(factors)
    return 0
