"""Linear timing of a pass."""

from fpmsdk._ext.pricing cimport TimingModel

cdef enum:
    NUM_FEATURES = 6


cdef class LinearPassTiming(TimingModel):
    cdef double coefficients[NUM_FEATURES]
