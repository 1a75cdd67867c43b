"""Whole-forward engines: the latency of a rank from measured passes of the whole model."""

from libc.stdint cimport int64_t

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.native cimport NativeEngine
from fpmsdk._ext.passroofline cimport PassRoofline, SolPoint

cdef enum:
    MAX_PIECES = 4

# How an answer was found.
cdef enum Resolution:
    EXACT = 0
    WITHIN_CURVE
    CROSS_KV
    KV_FIRST
    CROSS_BATCH
    TRANSFERRED              # carried from other sites by the roofline

cdef enum LookupStatus:
    LOOKUP_OK = 0
    NO_SUPPORT               # no two-sided measured support
    OUTSIDE_BATCH            # beyond the measured domain on that axis
    OUTSIDE_TOKENS
    OUTSIDE_KV
    NO_BRACKET               # neither row of the batch bracket holds the KV tokens
    NO_NEAR_SITE
    NO_USABLE_SITE           # no neighbour, or not the query, has a roofline latency
    NOT_POSITIVE             # the result is no latency

cdef struct Knees:
    # Where latency changes its course: points up to a knee and points beyond it are never blended.
    int64_t size
    bint per_request         # times the batch
    const double* at

cdef struct CurveArrays:
    # Entries first[i]..first[i + 1] of x and latency_ms are the curve of site i, (batch[i], second[i]).
    int64_t num_sites
    int64_t num_batches
    const double* batch
    const double* second
    const double* log_batch
    const double* log_second
    const int64_t* first
    const double* x
    const double* latency_ms
    const double* batches
    const int64_t* batch_first
    Knees x_knees
    Knees second_knees

cdef struct Piece:
    # What one curve contributes: between two of its points, which are the same when one of them is asked for. Beyond its
    # ends, where the utilisation of points `-1 - left` to `right` is held, `left` is negative.
    int64_t site
    int64_t left
    int64_t right
    double weight
    double latency_ms

cdef struct Lookup:
    double latency_ms
    int resolution
    double x                 # where the curves are read
    bint over_kv             # pieces are curves over KV tokens at a number of prefill tokens
    bint is_floor            # pieces are the first points of their curves
    int num_pieces
    Piece pieces[MAX_PIECES]
    double scale             # from the roofline of a batch beyond those measured

cdef struct RankParts:
    bint has_prefill
    bint has_decode
    bint has_baseline
    Lookup prefill
    Lookup decode
    Lookup baseline


cdef class CurveSet:
    cdef CurveArrays arrays
    cdef tuple memory


# What a lookup of a pass is counted as.
cdef enum Counted:
    COUNTED_PREFILL = 0
    COUNTED_DECODE
    COUNTED_BASELINE


cdef class AnswerCounts:
    cdef int64_t counts[6]

    cdef void add(self, Counted lookup, int resolution) noexcept nogil


cdef class WholeForwardEngine(NativeEngine):
    cdef readonly CurveSet prefill_curves
    cdef readonly CurveSet decode_curves
    cdef readonly object describe_miss
    cdef readonly object coverage
    cdef AnswerCounts answers
    cdef double* rungs
    cdef int64_t num_rungs

    cdef list missed(self, const FpmRank* rank)
    cdef object last_query(self, const FpmRank* rank, RankParts* parts)
    cdef record_refused(self, const FpmRank* rank)
    cdef list lookups(self, const FpmRank* rank, RankParts* parts)
    cdef tuple parts_of(self, const FpmRank* rank)
    cdef object told(self, bint is_decode, const Lookup* found)
    cdef object single(self, phase, batch, tokens, kv)
    cdef object answered(self, phase, is_baseline, tuple coordinates, int status, const Lookup* found)
    cdef int prefill(self, double b, double tokens, double kv, Lookup* found) noexcept nogil
    cdef int decode(self, double b, double kv, Lookup* found) noexcept nogil
    cdef int baseline(self, double b, double kv, const Lookup* decode, Lookup* found) noexcept nogil
    cdef int resolve(self, const FpmRank* rank, RankParts* parts) noexcept nogil
    cdef int64_t rungs_below(self, double b) noexcept nogil
    cdef const CurveArrays* curves_of(self, bint is_decode, const Lookup* found) noexcept nogil


cdef class DirectEngine(WholeForwardEngine):
    cdef readonly CurveSet prefill_over_kv
    cdef int64_t* regime_rows        # first decode row of each captured graph, then the number of rows
    cdef bint continuous

    cdef bint nearest_rows(
        self, int64_t row, double b, int64_t regime, double kv, Piece* low, Piece* high
    ) noexcept nogil
    cdef bint holds(self, int64_t row, double b, double kv, Piece* piece) noexcept nogil
    cdef bint on_one_side(self, int64_t row, double b, double kv) noexcept nogil
    cdef int between_neighbours(
        self, int64_t begin, int64_t site, int64_t end, double b, double tokens, double kv, Lookup* found
    ) noexcept nogil
    cdef int between_next_rows(self, int64_t row, double b, int64_t regime, double kv, Lookup* found) noexcept nogil
    cdef void between_rows(self, double b, Piece low, Piece high, Lookup* found) noexcept nogil


cdef class SolAssistedEngine(WholeForwardEngine):
    cdef readonly PassRoofline prefill_sol
    cdef readonly PassRoofline decode_sol
    cdef double batch_limit          # 0: prefill latency depends on the batch
    cdef bint continuous
    cdef int tail                    # end points whose utilisation is held beyond a curve
    cdef double prefill_low[3]
    cdef double prefill_high[3]
    cdef double decode_low[2]
    cdef double decode_high[2]

    cdef double sol_ms(self, bint is_decode, double b, double kv, double x) noexcept nogil
    cdef int scattered(self, bint is_decode, double b, double kv, double x, Lookup* found) noexcept nogil
    cdef void blend(
        self, double b, bint low_covers, const Piece* low, bint high_covers, const Piece* high, Lookup* found
    ) noexcept nogil
    cdef bint row_at(self, int64_t row, double b, double kv, Piece* piece) noexcept nogil
    cdef bint bracket(self, double b, int64_t* low, int64_t* high) noexcept nogil
    cdef int curve_at(self, bint is_decode, int64_t site, double x, Piece* piece) noexcept nogil
