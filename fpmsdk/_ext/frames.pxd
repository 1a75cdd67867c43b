"""Sources of iterations: records read from Python objects, and columnar arrays."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fpmsdk._ext.declarations cimport FpmRank


cdef class IterationSource:
    cdef readonly Py_ssize_t num_iterations
    cdef readonly Py_ssize_t max_ranks       # ranks of the widest iteration

    # The ranks of one iteration; `scratch` has room for max_ranks and is used when they are not contiguous.
    cdef const FpmRank* ranks_of(
        self, Py_ssize_t iteration, FpmRank* scratch, Py_ssize_t* num_ranks
    ) noexcept nogil


cdef struct LengthLists:
    # One rank's per-request lists; a linked list of blocks, so that records may keep pointers into them.
    LengthLists* next
    uint64_t values[1]


cdef class Records(IterationSource):
    cdef FpmRank* ranks
    cdef Py_ssize_t num_ranks, rank_capacity
    cdef Py_ssize_t* offsets                 # iteration i is ranks[offsets[i]:offsets[i + 1]]
    cdef Py_ssize_t iteration_capacity
    cdef LengthLists* lists
    cdef bint any_wall_time                  # accept every number as wall time and leave the judgement to tuning

    cdef int add_rank(self, object source, object decode_frame) except -1
    cdef int end_iteration(self) except -1


cdef class Columns(IterationSource):
    cdef dict arrays                         # keeps the memory below alive
    cdef const double* wall_time_s
    cdef const uint32_t* counts[5]           # the five counts of FpmRank in its order
    cdef const int64_t* num_lengths
    cdef const int64_t* lengths_start
    cdef const uint64_t* extend_lengths
    cdef const uint64_t* past_kv_lengths
    cdef const int64_t* iteration_offsets
    cdef const double* var_prefill_length
    cdef const double* var_decode_kv_tokens


cdef bint is_rank(object source)
cdef int read_rank(
    object source, object decode_frame, bint any_wall_time, FpmRank* rank, LengthLists** lists
) except -1
cdef void free_lists(LengthLists* lists) noexcept
cdef FpmRank* new_scratch(IterationSource source) except NULL
