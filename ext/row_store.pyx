# The arrays of a store that keeps rows in buckets (regression-and-learned.md sections 1 and 6): how they grow, what of
# them a snapshot holds, and what of it any such store checks before it takes it back.

from libc.stdint cimport int64_t, uint8_t

cimport numpy as cnp

from fpmsdk._ext.linear cimport LinearModel, check_rows
from fpmsdk._ext.monitor cimport ErrorMonitor
from fpmsdk._ext.regression cimport RegressionStore

from fpmsdk._ext.sampler import check_saved_rows, saved_rows, wrong_state

cnp.import_array()


cdef class RowStore(RegressionStore):
    """Rows, a linear model of them and a monitor of recent errors, over arrays described by `layout`."""

    def __init__(self, layout, LinearModel model, ErrorMonitor monitor, int monitor_clock, tuple row_fields):
        self.layout = layout
        self.model = model
        self.monitor = monitor
        self.monitor_clock = monitor_clock
        self.row_fields = row_fields
        rows = min(model.sampler.max_observations, 63) + 1
        self.arrays = layout.allocate(
            rows=rows, buckets=rows, axes=model.num_axes, sampling_axes=model.num_sampling_axes, errors=0,
        )
        self.arrays["axis_min"].fill(float("inf"))
        self.arrays["axis_max"].fill(float("-inf"))
        self.bind()

    cdef int bind(self) except -1:
        self.model.bind(self.arrays)
        self.row_capacity = len(self.arrays["order"])
        self.error_capacity = len(self.arrays["errors"])
        self.clock = <int64_t*>cnp.PyArray_DATA(self.arrays["clock"])
        self.monitor.bind(<uint8_t*>cnp.PyArray_DATA(self.arrays["errors"]), self.clock + self.monitor_clock)
        return 0

    cdef int reserve(self, Py_ssize_t num_observations) except -1:
        # One row more than the store may keep, because an insert precedes the eviction.
        cdef int64_t limit = self.model.sampler.max_observations
        cdef int64_t rows = min(self.model.sampler.total() + num_observations, limit) + 1
        cdef int64_t errors = min(self.clock[self.monitor_clock] + num_observations, self.monitor.window)
        if rows <= self.row_capacity and errors <= self.error_capacity:
            return 0
        # Doubling keeps one-by-one tuning from copying the store at every call.
        if rows > self.row_capacity:
            rows = max(rows, min(2 * self.row_capacity, limit + 1))
        if errors > self.error_capacity:
            errors = max(errors, min(2 * self.error_capacity, self.monitor.window))
        self.arrays = self.layout.grow(self.arrays, rows=rows, buckets=rows, errors=errors)
        self.bind()
        return 0

    def saved(self):
        """What a snapshot holds: the arrays, exactly as long as what they hold, rows in bucket order.

        The next observation changes it: encode it before.
        """
        return self.arrays | saved_rows(self.arrays, *self.row_fields) | {
            "errors": self.arrays["errors"][: self.clock[self.monitor_clock]],
        }

    def restore(self, dict saved):
        """Take over saved arrays of the declared types; they belong to the store from then on.

        Raises
        ------
        StateSnapshotError: they are not what tuning under these settings leaves behind; the store is unusable then.
        """
        cdef int axes = self.model.num_axes
        total = check_saved_rows(saved, self.model.num_sampling_axes, self.model.sampler.max_observations)
        for field, shape in {"mean": (axes + 1,), "features": (total, axes), "target_ms": (total,)}.items():
            if saved[field].shape != shape:
                raise wrong_state(field, f"shape {shape}", saved[field].shape)
        num_errors, counted = len(saved["errors"]), saved["clock"][self.monitor_clock]
        if num_errors != counted or num_errors > self.monitor.window:
            raise wrong_state("errors", f"{counted} verdicts, at most {self.monitor.window}", num_errors)
        # Full arrays are grown before anything is added to them; empty ones would leave nothing to point at.
        self.arrays = saved if total else self.layout.grow(saved, rows=self.row_capacity, buckets=self.row_capacity)
        self.bind()
        self.model.sampler.check_restored()
        check_rows(self.model)
        self.check_restored()

    cdef int check_restored(self) except -1:
        return 0
