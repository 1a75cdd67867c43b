"""What a run leaves behind, in growing tables of C structures that numpy reads in place.

Not the report: metrics are computed from these arrays. Source: engine-and-replay.md 2.7, 5.6, 5.7.
"""

cimport numpy as np
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t
from libc.stdlib cimport free

from fpmsdk._ext.pages cimport resized
from fpmsdk._ext.scheduler cimport PassRecord, Preemption

import numpy as np

np.import_array()

cdef PassRecord _no_pass
cdef Preemption _no_preemption
cdef Gauges _no_gauges

# The same fields in the same order as the structures in recorder.pxd; every field has eight bytes.
_PASS_ROW = np.dtype(
    [
        ("start_ms", "f8"),
        ("end_ms", "f8"),
        ("prefill_ms", "f8"),
        ("decode_ms", "f8"),
        ("role", "i8"),
        ("worker", "i8"),
        ("iteration", "i8"),
        ("composed", "i8"),
        ("emitted_tokens", "i8"),
        ("priced_num_prefill", "i8"),
        ("priced_sum_prefill_end_tokens", "i8"),
        ("priced_sum_prefill_past_tokens", "i8"),
        ("priced_num_decode", "i8"),
        ("priced_sum_decode_tokens", "i8"),
        *((name, "f8" if name.startswith("var_") else "i8") for name in <object>_no_pass),
    ]
)
_GAP_ROW = np.dtype([("gap_ms", "f8"), ("count", "i8")])
_ADMISSION_ROW = np.dtype([("request", "i8"), ("at_ms", "f8"), ("reused_tokens", "i8"), ("role", "i8")])
_PREEMPTION_ROW = np.dtype(
    [("at_ms", "f8"), ("role", "i8"), ("worker", "i8"), *((name, "i8") for name in <object>_no_preemption)]
)

_SAMPLE_ROW = np.dtype(
    [
        ("sample", "i8"),
        ("sampled_at_ms", "f8"),
        ("role", "i8"),
        ("worker", "i8"),
        *((name, "i8") for name in <object>_no_gauges),
    ]
)

# Counts of a request that did nothing yet; times are NaN.
_EMPTY = {
    "reused_tokens": 0,
    "first_reused_tokens": 0,
    "decode_reused_tokens": 0,
    "num_admissions": 0,
    "worker": -1,
    "prefill_worker": -1,
}


cdef class Rows:
    """A growing table of C structures, read as a numpy structured array."""

    def __cinit__(self, dtype):
        self.dtype = dtype
        self.row_bytes = dtype.itemsize

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.memory, self.length * self.row_bytes, True, flags)
        self.num_exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.num_exports -= 1

    cdef void* append(self) except NULL nogil:
        """A new uninitialised row."""
        if self.length == self.capacity:
            if self.num_exports > 0:
                with gil:
                    raise BufferError("rows that are being read cannot grow")
            self.capacity = max(1024, 2 * self.capacity)
            self.memory = <char*>resized(self.memory, self.capacity * self.row_bytes)
        self.length += 1
        return &self.memory[(self.length - 1) * self.row_bytes]

    def taken(self):
        """Return a copy of the rows and start with none again."""
        rows = np.array(self.array())
        self.length = 0
        return rows

    def array(self):
        """Return the rows, not a copy: read-only, and the table cannot grow while it is in use."""
        return np.frombuffer(self, self.dtype) if self.length else np.empty(0, self.dtype)


cdef class Recorder:
    """What a run leaves behind: one entry per request, per pass, per distinct token gap and per admission.

    With `keeps_samples` also one per sample of a rank's gauges. Without `keeps_events` none per admission and none per
    preemption.
    """

    def __cinit__(
        self, int64_t num_requests, bint keeps_passes, bint keeps_samples=False, *, bint keeps_events=True
    ):
        self.columns = {
            name: np.full(num_requests, np.nan)
            for name in (
                "arrival_ms", "first_admit_ms", "first_token_ms", "second_token_ms", "last_token_ms", "end_ms",
                "source_held_ms", "destination_reserved_ms", "destination_activated_ms", "decode_admit_ms",
                "source_released_ms",
            )
        }
        for name, empty in _EMPTY.items():
            self.columns[name] = np.full(num_requests, empty, np.int64)
        self._point()
        assert _PASS_ROW.itemsize == sizeof(PassRow)
        self.passes = Rows(_PASS_ROW)
        self.gaps = Rows(_GAP_ROW)
        self.admissions = Rows(_ADMISSION_ROW)
        self.preemptions = Rows(_PREEMPTION_ROW)
        self.samples = Rows(_SAMPLE_ROW)
        self.keeps_passes = keeps_passes
        self.keeps_samples = keeps_samples
        self.keeps_events = keeps_events
        self.num_requests = num_requests

    cdef _point(self):
        """Take the addresses of the arrays."""
        self.requests.arrival_ms = <double*>np.PyArray_DATA(self.columns["arrival_ms"])
        self.requests.first_admit_ms = <double*>np.PyArray_DATA(self.columns["first_admit_ms"])
        self.requests.first_token_ms = <double*>np.PyArray_DATA(self.columns["first_token_ms"])
        self.requests.second_token_ms = <double*>np.PyArray_DATA(self.columns["second_token_ms"])
        self.requests.last_token_ms = <double*>np.PyArray_DATA(self.columns["last_token_ms"])
        self.requests.end_ms = <double*>np.PyArray_DATA(self.columns["end_ms"])
        self.requests.reused_tokens = <int64_t*>np.PyArray_DATA(self.columns["reused_tokens"])
        self.requests.first_reused_tokens = <int64_t*>np.PyArray_DATA(self.columns["first_reused_tokens"])
        self.requests.num_admissions = <int64_t*>np.PyArray_DATA(self.columns["num_admissions"])
        self.requests.worker = <int64_t*>np.PyArray_DATA(self.columns["worker"])
        self.requests.prefill_worker = <int64_t*>np.PyArray_DATA(self.columns["prefill_worker"])
        self.requests.decode_reused_tokens = <int64_t*>np.PyArray_DATA(self.columns["decode_reused_tokens"])
        self.requests.source_held_ms = <double*>np.PyArray_DATA(self.columns["source_held_ms"])
        self.requests.destination_reserved_ms = <double*>np.PyArray_DATA(self.columns["destination_reserved_ms"])
        self.requests.destination_activated_ms = <double*>np.PyArray_DATA(self.columns["destination_activated_ms"])
        self.requests.decode_admit_ms = <double*>np.PyArray_DATA(self.columns["decode_admit_ms"])
        self.requests.source_released_ms = <double*>np.PyArray_DATA(self.columns["source_released_ms"])

    cdef grow(self, int64_t num_requests):
        """Have room for so many requests; only between passes."""
        more = num_requests - self.num_requests
        for name, column in self.columns.items():
            empty = np.nan if column.dtype == np.float64 else _EMPTY[name]
            self.columns[name] = np.concatenate([column, np.full(more, empty, column.dtype)])
        self.num_requests = num_requests
        self._point()

    def clear(self, slots):
        """Forget what became of some requests, whose indices others may have now."""
        for name, column in self.columns.items():
            column[slots] = np.nan if column.dtype == np.float64 else _EMPTY[name]

    def taken_gaps(self):
        """Return a copy of `gaps` and start with none again; only between passes."""
        return self.gaps.taken()

    cdef int count_gap(self, double gap_ms, int64_t first_entry) except -1 nogil:
        """Count one token gap of the pass whose entries start at `first_entry`."""
        # Continuing requests share their gap, so the search from the back ends at once but for the rare mixture.
        cdef GapRow* rows = <GapRow*>self.gaps.memory
        cdef int64_t entry = self.gaps.length - 1
        while entry >= first_entry and rows[entry].gap_ms != gap_ms:
            entry -= 1
        if entry >= first_entry:
            rows[entry].count += 1
            return 0
        rows = <GapRow*>self.gaps.append()
        rows.gap_ms = gap_ms
        rows.count = 1
        return 0

    cdef int count_gaps(self, double gap_ms, int64_t tokens) except -1 nogil:
        """Count the gap that all tokens of a pass share."""
        cdef GapRow* row = <GapRow*>self.gaps.append()
        row.gap_ms = gap_ms
        row.count = tokens
        return 0

    def column(self, str name):
        """Return one array of the requests, e.g. `first_token_ms`; NaN and -1 mean it never happened."""
        return self.columns[name]
