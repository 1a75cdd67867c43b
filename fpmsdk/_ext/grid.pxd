"""Measured latencies over a ragged grid of up to three axes, and the one rule that answers between and beyond them."""

from libc.stdint cimport int64_t

cdef enum:
    MAX_GRID_AXES = 3
    NUM_NEIGHBOURS = 4
    MAX_CANDIDATES = 64

cdef enum GridStatus:
    GRID_HIT = 0
    GRID_MISS              # no measurement to answer from
    GRID_OUT_OF_RANGE      # inside the resolver only

# Speed-of-light latency in ms of the operator `params` at table coordinates.
ctypedef double (*sol_function)(const void* params, const double* coordinates) noexcept nogil

cdef struct Measurement:
    double latency_ms
    double power_w

cdef struct Grid:
    # Rows in lexicographic order as a tree: node i of a level spans children [first[i], first[i + 1]) of the next.
    int num_axes
    int sqrt_axis                                # axis along which latency is interpolated in its root; -1: none
    int64_t num_nodes[MAX_GRID_AXES]
    const double* keys[MAX_GRID_AXES]
    const double* log2_keys[MAX_GRID_AXES]
    const double* log2_least[MAX_GRID_AXES - 1]  # extent of the children of each node
    const double* log2_most[MAX_GRID_AXES - 1]
    # Of three axes: extent of the sum of the two inner logarithms below each node of the first. Measured batch times
    # length ends where memory does, and this is the bound that such a grid has.
    const double* diagonal_least
    const double* diagonal_most
    const int64_t* first[MAX_GRID_AXES - 1]
    const double* latency_ms                     # one per node of the last level
    const double* power_w                        # or NULL
    bint has_zero                                # some latency is 0: no neighbour of any query


cdef struct Candidate:
    # A measurement that may be one of the nearest of some query.
    double outer_squared_distance                # without the last axis
    double log2_key                              # on the last axis
    double sol_ms                                # once `is_priced`
    int64_t leaf                                 # position of the measurement
    int64_t outer_nodes[MAX_GRID_AXES - 1]       # on the way down to it
    bint is_priced

cdef struct Neighbour:
    double squared_distance
    int64_t leaf
    int candidate

cdef struct Anchor:
    double to_low, to_high                       # squared distances from both ends of the series

cdef struct Search:
    # For the nearest measurements of queries that differ on the last axis alone.
    double outer[MAX_GRID_AXES - 1]              # the other axes, in log2
    double low, high                             # extent of the queries on the last one, in log2
    bint check_leaves                            # leave out measurements without latency or roofline
    bint one_by_one                              # too many can be near some query: one search for each
    # Those nearest to the middle of the series, ascending. What is further than all of them from both ends is further
    # from every query between: it lies beyond the reach.
    Anchor anchors[NUM_NEIGHBOURS + 1]
    double reach_low, reach_high
    int64_t outer_nodes[MAX_GRID_AXES - 1]       # where the search is
    int num_candidates
    Candidate candidates[MAX_CANDIDATES]
    # Of one query, ascending in distance; one more than are averaged, for the support radius.
    int num_nearest
    Neighbour nearest[NUM_NEIGHBOURS + 1]


cdef class PythonSol:
    # A roofline given as a Python callable, for queries from Python.
    cdef object roofline_ms, raised
    cdef int num_axes


cdef class GridTable:
    cdef Grid grid
    cdef tuple memory

    cdef PythonSol python_sol(self, coordinates, roofline_ms, double* at)

cdef int grid_query(
    const Grid* grid, const double* query, sol_function sol, const void* params, Measurement* answer
) noexcept nogil
# The same for queries that differ on the last of three axes alone, where they ascend.
cdef int grid_query_series(
    const Grid* grid, const double* query, const double* last, int count, sol_function sol, const void* params,
    Measurement* answers,
) noexcept nogil
cdef int64_t lower_bound(const double* keys, int64_t low, int64_t high, double key) noexcept nogil
