# The bucketed sample store of fpm-model.md section 6.1: rows live in numbered slots; `order` lists the slots
# bucket by bucket in ascending key, oldest first inside a bucket, which is the order in which every fit reads
# them. When the store is full, the fullest bucket (the largest key on ties) gives up its oldest row.

from libc.math cimport isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memmove

cimport numpy as cnp

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
