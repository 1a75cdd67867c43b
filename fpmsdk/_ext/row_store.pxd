"""What the stores that keep rows and a linear model have in common: room, saving, restoring."""

from libc.stdint cimport int64_t

from fpmsdk._ext.linear cimport LinearModel
from fpmsdk._ext.monitor cimport ErrorMonitor
from fpmsdk._ext.regression cimport RegressionStore


cdef class RowStore(RegressionStore):
    cdef LinearModel model
    cdef ErrorMonitor monitor
    cdef int monitor_clock               # entry of `clock` where the counts of the monitor begin
    cdef tuple row_fields                # arrays with one entry per row, beside those of the sampler
    cdef int64_t row_capacity, error_capacity
    cdef int64_t* clock                  # owned by `arrays`

    cdef int bind(self) except -1
    # Raises for what tuning under the settings cannot have left behind.
    cdef int check_restored(self) except -1
