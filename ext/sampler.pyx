# The bucketed sample store of fpm-model.md section 6.1: rows live in numbered slots; `order` lists the slots
# bucket by bucket in ascending key, oldest first inside a bucket, which is the order in which every fit reads
# them. When the store is full, the fullest bucket (the largest key on ties) gives up its oldest row.

from libc.math cimport INFINITY, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memmove

cimport numpy as cnp

import numpy as np

from fpmsdk._ext.snapshot_codec import SlotRows
from fpmsdk.errors import StateSnapshotError

cnp.import_array()

cdef enum:
    TOTAL = 0
    NUM_BUCKETS = 1
    NEXT_SLOT = 2

cdef int by_key_then_position(const void* left, const void* right) noexcept nogil:
    cdef const KeyedSlot* a = <const KeyedSlot*>left
    cdef const KeyedSlot* b = <const KeyedSlot*>right
    if a.key != b.key:
        return -1 if a.key < b.key else 1
    return -1 if a.position < b.position else 1


cdef int64_t bin_of(double value, double low, double high, int64_t bins) noexcept nogil:
    cdef double position
    if high <= low:
        return 0
    position = (value - low) / (high - low) * <double>bins
    if position >= <double>bins:
        return bins - 1
    return <int64_t>position if position > 0.0 else 0


cdef int64_t cell_of(
    int num_axes, const double* coordinates, const double* low, const double* high, const int64_t* bins
) noexcept nogil:
    # Row-major over the axes, so that ascending keys are in lexicographic order.
    cdef int64_t key = 0
    cdef int i
    for i in range(num_axes):
        key = key * bins[i] + bin_of(coordinates[i], low[i], high[i], bins[i])
    return key


cdef int64_t find_key(const int64_t* keys, int64_t count, int64_t key) noexcept nogil:
    # Position of the first of the ascending keys that is not smaller.
    cdef int64_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


def wrong_state(field, expected, found):
    """The error for a saved field that no run of tuning leaves behind."""
    return StateSnapshotError(f"field {field}: expected {expected}, found {found}")


def check_shapes(dict saved, dict arrays):
    """Raise `StateSnapshotError` unless saved arrays have the shapes of those of a fresh store."""
    for name, array in arrays.items():
        if saved[name].shape != array.shape:
            raise wrong_state(name, f"shape {array.shape}", saved[name].shape)


def saved_rows(dict arrays, *fields):
    """What a store saves of its rows: those of a sampler and of some more `fields`, in bucket order.

    Slots are numbered anew, so that the bytes of a state depend on nothing but the state. Most of it is what the next
    insert changes.
    """
    total, buckets = int(arrays["extent"][TOTAL]), int(arrays["extent"][NUM_BUCKETS])
    slots = arrays["order"][:total]
    return {field: SlotRows(arrays[field], slots) for field in ("coordinates", *fields)} | {
        "extent": np.array([total, buckets, total], np.int64),
        "order": np.arange(total, dtype=np.int32),
        "bucket_key": arrays["bucket_key"][:buckets],
        "bucket_start": arrays["bucket_start"][: buckets + 1],
    }


def check_saved_rows(dict saved, num_axes, max_observations):
    """Check the lengths of a saved sampler, before anything is made as long; returns its number of rows."""
    total, buckets, next_slot = (int(value) for value in saved["extent"])
    lengths = {"coordinates": (total, num_axes), "order": (total,), "bucket_key": (buckets,), "axis_min": (num_axes,)}
    for field, shape in lengths.items():
        if saved[field].shape != shape:
            raise wrong_state(field, f"shape {shape}", saved[field].shape)
    if total > max_observations:
        raise wrong_state("extent[0]", f"at most {max_observations} rows", total)
    if next_slot != total:
        raise wrong_state("extent[2]", total, next_slot)
    return total


cdef class BucketSampler:
    """Bucketed retention of rows, over arrays that the store owns."""

    def __cinit__(self, tuple bins, object max_observations, bint fixed_bounds):
        cdef int i
        self.num_axes = len(bins)
        for i in range(self.num_axes):
            self.bins[i] = bins[i]
        self.max_observations = min(max_observations, INT64_MAX)
        self.fixed_bounds = fixed_bounds

    def __dealloc__(self):
        free(self.scratch)

    cdef int bind(self, dict arrays) except -1:
        cdef size_t rows = len(arrays["order"])
        free(self.scratch)
        self.scratch = <KeyedSlot*>malloc(rows * sizeof(KeyedSlot))
        if self.scratch == NULL:
            raise MemoryError
        self.axis_min = <double*>cnp.PyArray_DATA(arrays["axis_min"])
        self.axis_max = <double*>cnp.PyArray_DATA(arrays["axis_max"])
        self.coordinates = <double*>cnp.PyArray_DATA(arrays["coordinates"])
        self.order = <int32_t*>cnp.PyArray_DATA(arrays["order"])
        self.bucket_key = <int64_t*>cnp.PyArray_DATA(arrays["bucket_key"])
        self.bucket_start = <int32_t*>cnp.PyArray_DATA(arrays["bucket_start"])
        self.extent = <int64_t*>cnp.PyArray_DATA(arrays["extent"])
        return 0

    cdef int64_t total(self) noexcept nogil:
        return self.extent[TOTAL]

    cdef int64_t bucket_of(self, const double* coordinates) noexcept nogil:
        return cell_of(self.num_axes, coordinates, self.axis_min, self.axis_max, self.bins)

    cdef int32_t insert(self, const double* coordinates, int32_t* evicted) noexcept nogil:
        # Returns the slot of the new row, or -1 when it is refused. `evicted` is the slot that left, or -1; its
        # contents stay readable until the next insert, and it may be the new row itself.
        cdef int i
        cdef bint widened = False
        cdef int32_t slot
        evicted[0] = -1
        for i in range(self.num_axes):
            if not isfinite(coordinates[i]):
                return -1
            if self.fixed_bounds and not self.axis_min[i] <= coordinates[i] <= self.axis_max[i]:
                return -1
        if not self.fixed_bounds:
            for i in range(self.num_axes):
                if coordinates[i] < self.axis_min[i]:
                    self.axis_min[i] = coordinates[i]
                    widened = True
                if coordinates[i] > self.axis_max[i]:
                    self.axis_max[i] = coordinates[i]
                    widened = True
            if widened and self.extent[TOTAL] > 0:
                self.rebucket()
        slot = <int32_t>self.extent[NEXT_SLOT]
        for i in range(self.num_axes):
            self.coordinates[slot * self.num_axes + i] = coordinates[i]
        self.append(slot, self.bucket_of(coordinates))
        if self.extent[TOTAL] > self.max_observations:
            evicted[0] = self.evict()
            self.extent[NEXT_SLOT] = evicted[0]
        else:
            self.extent[NEXT_SLOT] = self.extent[TOTAL]
        return slot

    cdef void append(self, int32_t slot, int64_t key) noexcept nogil:
        cdef int64_t buckets = self.extent[NUM_BUCKETS], total = self.extent[TOTAL]
        cdef int64_t b = find_key(self.bucket_key, buckets, key), position, i
        if b == buckets or self.bucket_key[b] != key:
            memmove(&self.bucket_key[b + 1], &self.bucket_key[b], (buckets - b) * sizeof(int64_t))
            memmove(&self.bucket_start[b + 1], &self.bucket_start[b], (buckets + 1 - b) * sizeof(int32_t))
            self.bucket_key[b] = key
            buckets += 1
            self.extent[NUM_BUCKETS] = buckets
        position = self.bucket_start[b + 1]
        memmove(&self.order[position + 1], &self.order[position], (total - position) * sizeof(int32_t))
        self.order[position] = slot
        for i in range(b + 1, buckets + 1):
            self.bucket_start[i] += 1
        self.extent[TOTAL] = total + 1

    cdef int32_t evict(self) noexcept nogil:
        cdef int64_t buckets = self.extent[NUM_BUCKETS], total = self.extent[TOTAL]
        cdef int64_t fullest = 0, b, i
        cdef int32_t size, most = 0, position, slot
        for b in range(buckets):
            size = self.bucket_start[b + 1] - self.bucket_start[b]
            if size >= most:  # the largest key wins ties
                most = size
                fullest = b
        position = self.bucket_start[fullest]
        slot = self.order[position]
        memmove(&self.order[position], &self.order[position + 1], (total - position - 1) * sizeof(int32_t))
        for i in range(fullest + 1, buckets + 1):
            self.bucket_start[i] -= 1
        if most == 1:
            memmove(
                &self.bucket_key[fullest], &self.bucket_key[fullest + 1],
                (buckets - fullest - 1) * sizeof(int64_t),
            )
            memmove(
                &self.bucket_start[fullest], &self.bucket_start[fullest + 1],
                (buckets - fullest) * sizeof(int32_t),
            )
            self.extent[NUM_BUCKETS] = buckets - 1
        self.extent[TOTAL] = total - 1
        return slot

    def check_restored(self):
        """Raise for the first entry of saved rows that inserting cannot have left behind.

        Source: regression-and-learned.md section 6.
        """
        cdef int64_t total = self.extent[TOTAL], buckets = self.extent[NUM_BUCKETS], cells = 1, b, row, key
        cdef double value
        cdef int i
        for i in range(self.num_axes):
            cells *= self.bins[i]
            if self.fixed_bounds:
                continue  # the store knows them
            if total == 0:
                if not (self.axis_min[i] == INFINITY and self.axis_max[i] == -INFINITY):
                    raise wrong_state(
                        f"axis_min[{i}], axis_max[{i}]", "inf, -inf without rows", (self.axis_min[i], self.axis_max[i])
                    )
            elif not (
                isfinite(self.axis_min[i]) and isfinite(self.axis_max[i]) and self.axis_min[i] <= self.axis_max[i]
            ):
                raise wrong_state(
                    f"axis_min[{i}], axis_max[{i}]", "ascending finite bounds", (self.axis_min[i], self.axis_max[i])
                )
        for row in range(total):
            if self.order[row] != row:
                raise wrong_state(f"order[{row}]", row, self.order[row])
            for i in range(self.num_axes):
                value = self.coordinates[row * self.num_axes + i]
                if not self.axis_min[i] <= value <= self.axis_max[i]:
                    raise wrong_state(
                        f"coordinates[{row}, {i}]", f"inside [{self.axis_min[i]}, {self.axis_max[i]}]", value
                    )
        if self.bucket_start[0] != 0 or self.bucket_start[buckets] != total:
            raise wrong_state(
                "bucket_start", f"from 0 to {total}", f"from {self.bucket_start[0]} to {self.bucket_start[buckets]}"
            )
        for b in range(buckets):
            if not self.bucket_start[b] < self.bucket_start[b + 1] <= total:
                raise wrong_state(
                    f"bucket_start[{b + 1}]", f"in {self.bucket_start[b] + 1}..={total}", self.bucket_start[b + 1]
                )
            if self.bucket_key[b] >= cells:
                raise wrong_state(f"bucket_key[{b}]", f"below {cells}", self.bucket_key[b])
            if b > 0 and self.bucket_key[b] <= self.bucket_key[b - 1]:
                raise wrong_state(f"bucket_key[{b}]", f"above {self.bucket_key[b - 1]}", self.bucket_key[b])
            for row in range(self.bucket_start[b], self.bucket_start[b + 1]):
                key = self.bucket_of(&self.coordinates[row * self.num_axes])
                if key != self.bucket_key[b]:
                    raise wrong_state(f"bucket_key[{b}]", f"{key}, the bucket of row {row}", self.bucket_key[b])

    cdef void rebucket(self) noexcept nogil:
        # Bounds moved: every row gets its key anew. Rows that meet in one bucket keep the order in which they
        # were listed, so the order inside a bucket is no longer chronological.
        cdef int64_t total = self.extent[TOTAL], i
        cdef int64_t buckets = 0
        cdef KeyedSlot* rows = self.scratch
        for i in range(total):
            rows[i].slot = self.order[i]
            rows[i].position = <int32_t>i
            rows[i].key = self.bucket_of(&self.coordinates[<int64_t>self.order[i] * self.num_axes])
        qsort(rows, total, sizeof(KeyedSlot), by_key_then_position)
        for i in range(total):
            self.order[i] = rows[i].slot
            if buckets == 0 or self.bucket_key[buckets - 1] != rows[i].key:
                self.bucket_key[buckets] = rows[i].key
                self.bucket_start[buckets] = <int32_t>i
                buckets += 1
        self.bucket_start[buckets] = <int32_t>total
        self.extent[NUM_BUCKETS] = buckets
