"""Measured GEMM latencies: curves over m at scattered (n, k) sites."""

from libc.stdint cimport int64_t

from fpmsdk._ext.grid cimport Measurement

cdef enum:
    NUM_NEAR_SITES = 4

cdef struct SiteCurves:
    # Curve of site i: entries [first[i], first[i + 1]) of m and latency.
    int64_t num_sites
    const double* n
    const double* k
    const int64_t* first
    const double* m
    const double* latency_ms
    const double* power_w        # or NULL

cdef struct Roofline:
    # Speed of light of one (n, k) as a function of m: the larger of compute and memory time.
    double compute_ms_per_m
    double memory_ms_per_m
    double memory_ms

cdef struct Tail:
    double utilisation           # 0.0 where the curve has no usable end
    double power_w

cdef struct Site:
    Roofline roofline
    # Held below and above the curve.
    Tail low
    Tail high


cdef class GemmTable:
    cdef SiteCurves curves
    cdef Site* sites
    cdef double flops_per_s, bytes_per_element, mem_bw_bytes_per_s
    cdef tuple memory

    cdef Roofline roofline_of(self, double n, double k) noexcept nogil


# Of each near site in turn; of fewer than four sites the rest has no weight.
ctypedef double[NUM_NEAR_SITES] PerSite

cdef struct Neighbourhood:
    # What answers a range of m: up to four sites with their weights; none: no measurement near enough.
    double first_m               # the range begins here and ends at the next neighbourhood
    int num_sites
    int64_t sites[NUM_NEAR_SITES]
    PerSite weights
    # Where all curves have the same m and no latency is 0, they lie side by side: one search serves all.
    int64_t num_entries          # 0: they do not
    const double* m
    double* latency_ms           # of each entry in turn its four sites
    double* power_w              # or NULL
    PerSite compute_ms_per_m, memory_ms_per_m, memory_ms
    double total_weight


cdef class GemmSite:
    cdef readonly GemmTable table
    cdef Roofline roofline
    cdef int64_t exact           # site with exactly this (n, k), or -1
    cdef int64_t num_neighbourhoods
    cdef Neighbourhood* neighbourhoods

    cdef int lay_side_by_side(self, Neighbourhood* near) except -1
    cdef int64_t neighbourhood_of(self, double m) noexcept nogil
    cdef int query(self, double m, Measurement* answer) noexcept nogil


cdef double sol_ms(const Roofline* roofline, double m) noexcept nogil
