# Answers from measured whole passes (fpm-interpolation.md sections 3 and 4): a site holds one measured curve; a query
# is answered by a point, between two points of a curve, between curves, or carried over by the roofline.

from libc.math cimport INFINITY, fabs, isfinite, log2, sqrt
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

cimport numpy as cnp

from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.features cimport FAULT_NONE
from fpmsdk._ext.native cimport FAULT_NATIVE, NativeEngine
from fpmsdk._ext.passroofline cimport PassRoofline, SolPoint
from fpmsdk._ext.search cimport first_not_below

import numpy as np

cdef extern from *:
    """
    #define count_one(at) ((void)__atomic_fetch_add((at), 1, __ATOMIC_RELAXED))
    """
    void count_one(int64_t* at) noexcept nogil

cnp.import_array()

RESOLUTIONS = (
    "exact_lookup",
    "within_curve_interpolation",
    "cross_kv_interpolation",
    "kv_first_interpolation",
    "cross_batch_interpolation",
    "sol_transfer",
)
STATUSES = (
    "ok", "no_support", "outside_batch", "outside_tokens", "outside_kv", "no_bracket", "no_near_site",
    "no_usable_site", "not_positive",
)

cdef double LOG_GATE = 2.0               # log2 units
cdef double SURELY_NEAR = 1.0 / 3.9, SURELY_FAR = 1.0 / 4.1  # ratios on this side and beyond LOG_GATE
cdef double RAW_KV_GATE = 32.0           # KV tokens
cdef double SMALLEST = 1e-12
cdef int TAIL = 3                        # end points whose utilisation is held beyond a curve


cdef class CurveSet:
    """Curves in flat arrays: the fields of `fpmsdk.perfdb.Curves`, in their order.

    `x_knees` and `second_knees` are (knees, whether they are per request) of the two coordinates.
    """

    def __init__(
        self, batch, second, first, x, latency_ms, batches, batch_first, x_knees=((), False), second_knees=((), False)
    ):
        floats = [np.ascontiguousarray(array, np.float64) for array in (batch, second, x, latency_ms, batches)]
        offsets = [np.ascontiguousarray(array, np.int64) for array in (first, batch_first)]
        logs = [np.empty(len(floats[0])) for _ in range(2)]
        knees = [np.array(at, np.float64) for at, _ in (x_knees, second_knees)]
        self.memory = (*floats, *offsets, *logs, *knees)
        self.arrays.x_knees = Knees(len(knees[0]), x_knees[1], <const double*>cnp.PyArray_DATA(knees[0]))
        self.arrays.second_knees = Knees(len(knees[1]), second_knees[1], <const double*>cnp.PyArray_DATA(knees[1]))
        self.arrays.num_sites = len(floats[0])
        self.arrays.num_batches = len(floats[4])
        self.arrays.batch = <const double*>cnp.PyArray_DATA(floats[0])
        self.arrays.second = <const double*>cnp.PyArray_DATA(floats[1])
        self.arrays.x = <const double*>cnp.PyArray_DATA(floats[2])
        self.arrays.latency_ms = <const double*>cnp.PyArray_DATA(floats[3])
        self.arrays.batches = <const double*>cnp.PyArray_DATA(floats[4])
        self.arrays.first = <const int64_t*>cnp.PyArray_DATA(offsets[0])
        self.arrays.batch_first = <const int64_t*>cnp.PyArray_DATA(offsets[1])
        fill_logs(self.arrays.batch, <double*>cnp.PyArray_DATA(logs[0]), self.arrays.num_sites)
        fill_logs(self.arrays.second, <double*>cnp.PyArray_DATA(logs[1]), self.arrays.num_sites)
        self.arrays.log_batch = <const double*>cnp.PyArray_DATA(logs[0])
        self.arrays.log_second = <const double*>cnp.PyArray_DATA(logs[1])


cdef void fill_logs(const double* values, double* logs, int64_t size) noexcept nogil:
    cdef int64_t i
    for i in range(size):
        logs[i] = safe_log2(values[i])


cdef double safe_log2(double value) noexcept nogil:
    return log2(max(value, SMALLEST))


cdef int64_t batch_index(const CurveArrays* curves, double b) noexcept nogil:
    # Place of a collected batch, -1 when it was not collected.
    cdef int64_t at = first_not_below(curves.batches, 0, curves.num_batches, b)
    return at if at < curves.num_batches and curves.batches[at] == b else -1


cdef int64_t site_of(const CurveArrays* curves, double b, double second) noexcept nogil:
    cdef int64_t at = batch_index(curves, b), site, end
    if at < 0:
        return -1
    end = curves.batch_first[at + 1]
    site = first_not_below(curves.second, curves.batch_first[at], end, second)
    return site if site < end and curves.second[site] == second else -1


cdef bint covers(const CurveArrays* curves, int64_t site, double x) noexcept nogil:
    return curves.x[curves.first[site]] <= x <= curves.x[curves.first[site + 1] - 1]


cdef bint locate(const CurveArrays* curves, int64_t site, double x, int64_t hint, Piece* piece) noexcept nogil:
    # The points of a curve around x; false beyond its ends. `hint` is a likely place of the right one, which neighbours
    # on one grid share.
    cdef int64_t low = curves.first[site], high = curves.first[site + 1], right = low + hint
    if not (low < right < high and curves.x[right - 1] < x <= curves.x[right]):
        right = first_not_below(curves.x, low, high, x)
    piece.site = site
    piece.weight = 1.0
    piece.left = piece.right = right
    if right < high and curves.x[right] == x:
        piece.latency_ms = curves.latency_ms[right]
        return True
    if right == low or right == high:
        return False
    piece.left = right - 1
    return True


cdef int64_t first_above(const double* values, int64_t size, double x) noexcept nogil:
    cdef int64_t at = first_not_below(values, 0, size, x)
    return at + (at < size and values[at] == x)


cdef bint is_knee_between(const Knees* knees, double batch, double low, double high) noexcept nogil:
    cdef int64_t i
    cdef double knee
    for i in range(knees.size):
        knee = knees.at[i] * batch if knees.per_request else knees.at[i]
        if low <= knee < high:
            return True
    return False


cdef bint measured_value(const CurveArrays* curves, int64_t site, double x, Piece* piece) noexcept nogil:
    return measured_near(curves, site, x, 0, piece)


cdef bint measured_near(const CurveArrays* curves, int64_t site, double x, int64_t hint, Piece* piece) noexcept nogil:
    # Between two points, multiplied before it is divided.
    cdef double a, c, lo, hi
    if not locate(curves, site, x, hint, piece):
        return False
    if piece.left != piece.right:
        a, c = curves.x[piece.left], curves.x[piece.right]
        if is_knee_between(&curves.x_knees, curves.batch[site], a, c):
            return False
        lo, hi = curves.latency_ms[piece.left], curves.latency_ms[piece.right]
        piece.latency_ms = lo + ((hi - lo) * (x - a)) / (c - a)
    return True


cdef bint is_split(const CurveArrays* curves, int64_t site, double x) noexcept nogil:
    # Whether a knee keeps x between two points of a curve from both of them.
    cdef Piece piece
    if not locate(curves, site, x, 0, &piece) or piece.left == piece.right:
        return False
    return is_knee_between(&curves.x_knees, curves.batch[site], curves.x[piece.left], curves.x[piece.right])


cdef int side_of(const Knees* knees, double batch, double value) noexcept nogil:
    # Number of knees below a value: equal for values that may be blended.
    cdef int64_t i
    cdef int below = 0
    for i in range(knees.size):
        below += value > (knees.at[i] * batch if knees.per_request else knees.at[i])
    return below


cdef bint weighted_value(const CurveArrays* curves, int64_t site, double x, Piece* piece) noexcept nogil:
    # The same with the weight computed first.
    cdef double w, lo, hi
    if not locate(curves, site, x, 0, piece):
        return False
    if piece.left != piece.right:
        if is_knee_between(&curves.x_knees, curves.batch[site], curves.x[piece.left], curves.x[piece.right]):
            return False
        w = (x - curves.x[piece.left]) / (curves.x[piece.right] - curves.x[piece.left])
        lo, hi = curves.latency_ms[piece.left], curves.latency_ms[piece.right]
        piece.latency_ms = lo + (hi - lo) * w
    return True


cdef void answer_one(Lookup* found, const Piece* piece) noexcept nogil:
    found.num_pieces = 1
    found.pieces[0] = piece[0]
    found.pieces[0].weight = 1.0
    found.latency_ms = piece.latency_ms
    found.resolution = EXACT if piece.left == piece.right else WITHIN_CURVE


cdef void answer_between(
    Lookup* found, const Piece* low, const Piece* high, double weight, int resolution
) noexcept nogil:
    found.num_pieces = 2
    found.pieces[0] = low[0]
    found.pieces[1] = high[0]
    found.pieces[0].weight = 1.0 - weight
    found.pieces[1].weight = weight
    found.latency_ms = low.latency_ms + (high.latency_ms - low.latency_ms) * weight
    found.resolution = resolution


cdef void floor_piece(const CurveArrays* curves, int64_t site, Piece* piece) noexcept nogil:
    piece.site = site
    piece.left = piece.right = curves.first[site]
    piece.weight = 1.0
    piece.latency_ms = curves.latency_ms[piece.left]


cdef void start(Lookup* found, double x) noexcept nogil:
    found.x = x
    found.resolution = EXACT
    found.over_kv = found.is_floor = False
    found.num_pieces = 0
    found.scale = 1.0


cdef int checked(const Lookup* found) noexcept nogil:
    return LOOKUP_OK if isfinite(found.latency_ms) and found.latency_ms > 0.0 else NOT_POSITIVE


cdef class AnswerCounts:
    """Counts answered lookups by phase and by how they were answered. Any number of threads may count.

    >>> AnswerCounts().read()["decode"]
    {'measured': 0, 'interpolated': 0}
    """

    def __cinit__(self):
        memset(self.counts, 0, sizeof(self.counts))

    cdef void add(self, Counted lookup, int resolution) noexcept nogil:
        # A blend of floors is no measurement, although each floor is one.
        count_one(&self.counts[2 * lookup + (resolution != EXACT)])

    def read(self):
        """`{phase or "mixed_decode_baseline": {measured, interpolated}}`."""
        return {
            name: {"measured": self.counts[2 * place], "interpolated": self.counts[2 * place + 1]}
            for place, name in enumerate(("prefill", "decode", "mixed_decode_baseline"))
        }


cdef class WholeForwardEngine(NativeEngine):
    """Composes ranks from lookups in measured curves; how a lookup is answered is up to the subclass.

    Parameters
    ----------
    prefill_curves, decode_curves: curves, which engines may share.
    rungs: batches after which the engine's graph changes.
    describe_miss: called with (phase, is_baseline, (batch, tokens or None, kv), status) and optionally with
        (phase, coordinates) of further lookups without an answer, makes the exception of a lookup that has none.
    coverage: counts lookups; or None. Its `answers` (`AnswerCounts`) counts those of passes, and
        `record(phase, is_baseline, coordinates, resolution or None, status)` is called for every other one.
    """

    def __init__(
        self, CurveSet prefill_curves not None, CurveSet decode_curves not None, rungs, describe_miss, coverage=None
    ):
        cdef int64_t i
        self.prefill_curves = prefill_curves
        self.decode_curves = decode_curves
        self.describe_miss = describe_miss
        self.coverage = coverage
        self.counts_queries = coverage is not None
        self.answers = None if coverage is None else coverage.answers
        self.num_rungs = len(rungs)
        self.rungs = <double*>malloc((self.num_rungs + 1) * sizeof(double))
        if self.rungs == NULL:
            raise MemoryError
        for i in range(self.num_rungs):
            self.rungs[i] = rungs[i]

    def __dealloc__(self):
        free(self.rungs)

    cdef int64_t rungs_below(self, double b) noexcept nogil:
        return first_not_below(self.rungs, 0, self.num_rungs, b)

    cdef int prefill(self, double b, double tokens, double kv, Lookup* found) noexcept nogil:
        return NO_SUPPORT

    cdef int decode(self, double b, double kv, Lookup* found) noexcept nogil:
        return NO_SUPPORT

    cdef int baseline(self, double b, double kv, const Lookup* decode, Lookup* found) noexcept nogil:
        return NO_SUPPORT

    cdef const CurveArrays* curves_of(self, bint is_decode, const Lookup* found) noexcept nogil:
        return &self.decode_curves.arrays if is_decode else &self.prefill_curves.arrays

    cdef int resolve(self, const FpmRank* rank, RankParts* parts) noexcept nogil:
        # The lookups of a rank, in order; the first refusal ends them.
        cdef double n = <double>rank.num_prefill_requests, d = <double>rank.num_decode_requests
        cdef double kv = <double>rank.sum_decode_kv_tokens
        cdef int status
        parts.has_prefill = rank.sum_prefill_tokens > 0
        parts.has_decode = rank.num_decode_requests > 0
        parts.has_baseline = False
        if parts.has_prefill:
            status = self.prefill(
                n, <double>rank.sum_prefill_tokens, <double>rank.sum_prefill_kv_tokens, &parts.prefill
            )
            if status != LOOKUP_OK:
                parts.has_decode = False
                return status
        if parts.has_decode:
            status = self.decode(d, kv, &parts.decode)
            if status != LOOKUP_OK:
                return status
        if parts.has_prefill and parts.has_decode:
            parts.has_baseline = True
            return self.baseline(d, kv, &parts.decode, &parts.baseline)
        return LOOKUP_OK

    cdef int rank_ms(self, const FpmRank* rank, double* latency_ms) noexcept nogil:
        cdef RankParts parts
        if self.resolve(rank, &parts) != LOOKUP_OK:
            return FAULT_NATIVE
        latency_ms[0] = composed_ms(&parts)
        return FAULT_NONE

    cdef object explain(self, const FpmRank* ranks, Py_ssize_t num_ranks, Py_ssize_t faulty):
        cdef RankParts parts
        cdef Py_ssize_t r
        status = self.resolve(&ranks[faulty], &parts)
        query = self.last_query(&ranks[faulty], &parts)
        # The first refusal ends an iteration; whoever measures wants to know of all its lookups without an answer.
        points = {(query[0], query[2]): None}
        for r in range(faulty, num_ranks):
            points.update(dict.fromkeys(self.missed(&ranks[r])))
        return self.describe_miss(*query, STATUSES[status], tuple(points)[1:])

    cdef list missed(self, const FpmRank* rank):
        # (phase, coordinates) of the lookups of a rank that have no answer.
        cdef Lookup found, floor
        cdef int status
        points = []
        if rank.sum_prefill_tokens > 0:
            status = self.prefill(
                rank.num_prefill_requests, rank.sum_prefill_tokens, rank.sum_prefill_kv_tokens, &found
            )
            if status != LOOKUP_OK:
                points.append(("prefill", (
                    rank.num_prefill_requests, rank.sum_prefill_tokens, rank.sum_prefill_kv_tokens,
                )))
        if rank.num_decode_requests > 0:
            status = self.decode(rank.num_decode_requests, rank.sum_decode_kv_tokens, &found)
            if status == LOOKUP_OK and rank.sum_prefill_tokens > 0:
                status = self.baseline(rank.num_decode_requests, rank.sum_decode_kv_tokens, &found, &floor)
            if status != LOOKUP_OK:
                points.append(("decode", (rank.num_decode_requests, None, rank.sum_decode_kv_tokens)))
        return points

    cdef object last_query(self, const FpmRank* rank, RankParts* parts):
        # (phase, is_baseline, coordinates) of the lookup that ended a rank.
        if parts.has_decode:
            return "decode", parts.has_baseline, (rank.num_decode_requests, None, rank.sum_decode_kv_tokens)
        return "prefill", False, (
            rank.num_prefill_requests, rank.sum_prefill_tokens, rank.sum_prefill_kv_tokens,
        )

    cdef void count_queries(self, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil:
        # Millions of passes have answers, and threads that price them do not wait for each other.
        cdef RankParts parts
        cdef Py_ssize_t r
        for r in range(num_ranks):
            if self.resolve(&ranks[r], &parts) != LOOKUP_OK:
                with gil:
                    self.record_refused(&ranks[r])
                return
            if parts.has_prefill:
                self.answers.add(COUNTED_PREFILL, parts.prefill.resolution)
            if parts.has_decode:
                self.answers.add(COUNTED_DECODE, parts.decode.resolution)
            if parts.has_baseline:
                self.answers.add(COUNTED_BASELINE, parts.baseline.resolution)

    cdef record_refused(self, const FpmRank* rank):
        # The lookups of a rank of which the last one has no answer.
        cdef RankParts parts
        status = self.resolve(rank, &parts)
        lookups = self.lookups(rank, &parts)
        refused = lookups.pop()
        for phase, is_baseline, coordinates, resolution in lookups:
            self.coverage.record(phase, is_baseline, coordinates, resolution, "ok")
        phase, is_baseline, coordinates, _ = refused
        self.coverage.record(phase, is_baseline, coordinates, None, STATUSES[status])

    cdef list lookups(self, const FpmRank* rank, RankParts* parts):
        # (phase, is_baseline, coordinates, resolution) of every lookup that was tried.
        tried = []
        if parts.has_prefill:
            coordinates = (rank.num_prefill_requests, rank.sum_prefill_tokens, rank.sum_prefill_kv_tokens)
            tried.append(("prefill", False, coordinates, resolution_name(&parts.prefill)))
        coordinates = (rank.num_decode_requests, None, rank.sum_decode_kv_tokens)
        if parts.has_decode:
            tried.append(("decode", False, coordinates, resolution_name(&parts.decode)))
        if parts.has_baseline:
            tried.append(("decode", True, coordinates, resolution_name(&parts.baseline)))
        return tried

    def evidence_of(self, num_prefill, prefill_tokens, prefill_kv, num_decode, decode_kv):
        """Parts of one rank: `(prefill, decode, baseline)`, each None or (latency ms, resolution, support rows).

        A support row is ((batch, prefill tokens or None, KV tokens), latency ms, weight).
        """
        cdef FpmRank rank
        memset(&rank, 0, sizeof(FpmRank))
        rank.num_prefill_requests, rank.sum_prefill_tokens = num_prefill, prefill_tokens
        rank.sum_prefill_kv_tokens = prefill_kv
        rank.num_decode_requests, rank.sum_decode_kv_tokens = num_decode, decode_kv
        return self.parts_of(&rank)

    cdef tuple parts_of(self, const FpmRank* rank):
        cdef RankParts parts
        status = self.resolve(rank, &parts)
        if status != LOOKUP_OK:
            raise self.describe_miss(*self.last_query(rank, &parts), STATUSES[status])
        return (
            self.told(False, &parts.prefill) if parts.has_prefill else None,
            self.told(True, &parts.decode) if parts.has_decode else None,
            self.told(True, &parts.baseline) if parts.has_baseline else None,
        )

    cdef object told(self, bint is_decode, const Lookup* found):
        cdef const CurveArrays* curves = self.curves_of(is_decode, found)
        support = []
        for i in range(found.num_pieces):
            support.extend(piece_support(curves, is_decode, found, &found.pieces[i]))
        return found.latency_ms, resolution_name(found), support

    cdef object evidence(self, const FpmRank* ranks, Py_ssize_t num_ranks):
        # The parts of every rank, with its totals.
        cdef Py_ssize_t r
        told = []
        for r in range(num_ranks):
            totals = (
                ranks[r].num_prefill_requests, ranks[r].sum_prefill_tokens, ranks[r].sum_prefill_kv_tokens,
                ranks[r].num_decode_requests, ranks[r].sum_decode_kv_tokens,
            )
            told.append((totals, self.parts_of(&ranks[r])))
        return told

    def prefill_query(self, double batch, double tokens, double kv):
        """(status, latency ms, resolution, support) of one prefill lookup."""
        cdef Lookup found
        status = self.prefill(batch, tokens, kv, &found)
        if status != LOOKUP_OK:
            return STATUSES[status], None, None, []
        return ("ok", *self.told(False, &found))

    def decode_query(self, double batch, double kv):
        """(status, latency ms, resolution, support) of one decode lookup."""
        cdef Lookup found
        status = self.decode(batch, kv, &found)
        if status != LOOKUP_OK:
            return STATUSES[status], None, None, []
        return ("ok", *self.told(True, &found))

    def baseline_query(self, double batch, double kv):
        """(status, latency ms, resolution, support) of the baseline of one decode lookup."""
        cdef Lookup found, floors
        status = self.decode(batch, kv, &found)
        if status == LOOKUP_OK:
            status = self.baseline(batch, kv, &found, &floors)
        if status != LOOKUP_OK:
            return STATUSES[status], None, None, []
        return ("ok", *self.told(True, &floors))

    def prefill_latency(self, batch, tokens, kv):
        """Latency in ms of one prefill pass, by totals."""
        return self.single("prefill", batch, tokens, kv)

    def decode_latency(self, batch, kv):
        """Latency in ms of one decode pass, by the total of KV tokens."""
        return self.single("decode", batch, None, kv)

    def baseline_latency(self, batch, kv):
        """Latency in ms of the smallest pass that the decode pass of these totals is compared with."""
        cdef Lookup decode, found
        status = self.decode(batch, kv, &decode)
        if status == LOOKUP_OK:
            status = self.baseline(batch, kv, &decode, &found)
        return self.answered("decode", True, (batch, None, kv), status, &found)

    cdef object single(self, phase, batch, tokens, kv):
        cdef Lookup found
        if phase == "prefill":
            status = self.prefill(batch, tokens, kv, &found)
        else:
            status = self.decode(batch, kv, &found)
        return self.answered(phase, False, (batch, tokens, kv), status, &found)

    cdef object answered(self, phase, is_baseline, tuple coordinates, int status, const Lookup* found):
        # The latency of a lookup, counted; raises when it has none.
        if self.coverage is not None:
            resolution = None if status != LOOKUP_OK else resolution_name(found)
            self.coverage.record(phase, is_baseline, coordinates, resolution, STATUSES[status])
        if status != LOOKUP_OK:
            raise self.describe_miss(phase, is_baseline, coordinates, STATUSES[status])
        return found.latency_ms


cdef object resolution_name(const Lookup* found):
    return RESOLUTIONS[found.resolution]


cdef list piece_support(const CurveArrays* curves, bint is_decode, const Lookup* found, const Piece* piece):
    # The points of a piece with their part of the answer.
    cdef double b = curves.batch[piece.site], second = curves.second[piece.site]
    cdef double a, c, x
    if piece.left < 0:  # the utilisation of these points is held beyond the curve
        held = range(-1 - piece.left, piece.right + 1)
        rows = [(point, piece.weight / len(held)) for point in held]
    elif piece.left == piece.right:
        rows = [(piece.left, piece.weight)]
    else:
        a, c = curves.x[piece.left], curves.x[piece.right]
        x = (found.x - a) / (c - a)
        rows = [(piece.left, piece.weight * (1.0 - x)), (piece.right, piece.weight * x)]
    support = []
    for point, weight in rows:
        x = curves.x[point]
        if is_decode:
            coordinates = (b, None, x)
        elif found.over_kv:
            coordinates = (b, second, x)
        else:
            coordinates = (b, x, second)
        support.append((coordinates, curves.latency_ms[point], weight))
    return support


cdef double composed_ms(const RankParts* parts) noexcept nogil:
    # A mixed pass costs its prefill and what its decode adds to the smallest pass of that batch.
    if not parts.has_prefill:
        return parts.decode.latency_ms if parts.has_decode else 0.0
    if not parts.has_decode:
        return parts.prefill.latency_ms
    return parts.prefill.latency_ms + max(parts.decode.latency_ms - parts.baseline.latency_ms, 0.0)


cdef class DirectEngine(WholeForwardEngine):
    """Strict: answers only from measured support on both sides of a query, without a roofline (section 4).

    Parameters as `WholeForwardEngine`; `prefill_over_kv` holds the prefill points as curves over KV tokens. Only genuine
    points are given. A `continuous` engine asks the neighbours of a query alone and refuses where one of them ends, so
    that its answers do not jump there; others step over a neighbour that ends to the next curve.
    """

    def __init__(
        self, prefill_curves, CurveSet prefill_over_kv not None, decode_curves, rungs, describe_miss, coverage=None,
        bint continuous=False,
    ):
        cdef const CurveArrays* curves
        cdef int64_t regime
        super().__init__(prefill_curves, decode_curves, rungs, describe_miss, coverage)
        self.prefill_over_kv = prefill_over_kv
        self.continuous = continuous
        self.regime_rows = <int64_t*>malloc((self.num_rungs + 2) * sizeof(int64_t))
        if self.regime_rows == NULL:
            raise MemoryError
        curves = &self.decode_curves.arrays
        # Batches up to a rung, rows in ascending order of theirs.
        self.regime_rows[0] = 0
        for regime in range(self.num_rungs):
            self.regime_rows[regime + 1] = first_above(curves.batch, curves.num_sites, self.rungs[regime])
        self.regime_rows[self.num_rungs + 1] = curves.num_sites

    def __dealloc__(self):
        free(self.regime_rows)

    cdef const CurveArrays* curves_of(self, bint is_decode, const Lookup* found) noexcept nogil:
        if is_decode:
            return &self.decode_curves.arrays
        return &self.prefill_over_kv.arrays if found.over_kv else &self.prefill_curves.arrays

    cdef int prefill(self, double b, double tokens, double kv, Lookup* found) noexcept nogil:
        cdef const CurveArrays* curves = &self.prefill_curves.arrays
        cdef int64_t at = batch_index(curves, b), begin, end, site
        cdef Piece low, high
        start(found, tokens)
        if at < 0:
            return NO_SUPPORT
        begin, end = curves.batch_first[at], curves.batch_first[at + 1]
        site = first_not_below(curves.second, begin, end, kv)
        if site < end and curves.second[site] == kv and measured_value(curves, site, tokens, &low):
            answer_one(found, &low)
            return checked(found)
        if self.continuous:
            return self.between_neighbours(begin, site, end, b, tokens, kv, found)
        # The rule admits near sites first and all of them where those do not suffice. That finds the nearest ones that
        # cover the query on either side: whatever lies between them and the query would be admitted before them.
        if not nearest_below(curves, begin, site, tokens, 0, &low) or not nearest_above(
            curves, site, end, kv, tokens, low.right - curves.first[low.site], &high
        ) or is_knee_between(&curves.second_knees, b, curves.second[low.site], curves.second[high.site]):
            return kv_first(&self.prefill_over_kv.arrays, at, tokens, kv, found)
        answer_between(
            found, &low, &high,
            (kv - curves.second[low.site]) / (curves.second[high.site] - curves.second[low.site]), CROSS_KV,
        )
        return checked(found)

    cdef int decode(self, double b, double kv, Lookup* found) noexcept nogil:
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        cdef int64_t row = batch_index(curves, b), regime
        cdef Piece low, high
        start(found, kv)
        if row >= 0 and measured_value(curves, row, kv, &low):
            answer_one(found, &low)
            return checked(found)
        regime = self.rungs_below(b)
        if self.continuous:
            return self.between_next_rows(row, b, regime, kv, found)
        if not self.nearest_rows(row, b, regime, kv, &low, &high):
            return NO_SUPPORT
        self.between_rows(b, low, high, found)
        return checked(found)

    cdef bint nearest_rows(
        self, int64_t row, double b, int64_t regime, double kv, Piece* low, Piece* high
    ) noexcept nogil:
        # Rows on either side of the batch that share its captured graph and are among the nearest that hold the query;
        # one site holds one decode row, and rows of one graph are neighbours.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        cdef int64_t begin = self.regime_rows[regime], end = self.regime_rows[regime + 1], other, above
        cdef double[MAX_PIECES] distances
        cdef double distance, log_b
        cdef Lookup nearest
        cdef Piece piece
        cdef bint has_low = False, has_high = False
        cdef int i
        if end - begin <= MAX_PIECES:
            # None is beyond the nearest.
            above = first_not_below(curves.batch, begin, end, b)
            other = above - 1
            while other >= begin and not has_low:
                has_low = self.holds(other, b, kv, low)
                other -= 1
            other = above
            while has_low and other < end and not has_high:
                has_high = other != row and self.holds(other, b, kv, high)
                other += 1
            return has_low and has_high
        log_b = safe_log2(b)
        nearest.num_pieces = 0
        for other in range(begin, end):
            if other == row or not self.holds(other, b, kv, &piece):
                continue
            distance = fabs(curves.log_batch[other] - log_b)
            keep_nearest(&nearest, distances, distance, &piece)
        for i in range(nearest.num_pieces):
            piece = nearest.pieces[i]
            if curves.batch[piece.site] < b:
                if not has_low or piece.site > low.site:
                    low[0] = piece
                has_low = True
            else:
                if not has_high or piece.site < high.site:
                    high[0] = piece
                has_high = True
        return has_low and has_high

    cdef bint holds(self, int64_t row, double b, double kv, Piece* piece) noexcept nogil:
        # Whether a row is near enough and has the KV tokens between two of its points.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        return (
            is_within_gate(curves.batch[row], curves.log_batch[row], b)
            and self.on_one_side(row, b, kv)
            and measured_value(curves, row, kv, piece)
        )

    cdef int between_neighbours(
        self, int64_t begin, int64_t site, int64_t end, double b, double tokens, double kv, Lookup* found
    ) noexcept nogil:
        # Between the curves next to the KV tokens, or nothing.
        cdef const CurveArrays* curves = &self.prefill_curves.arrays
        cdef Piece low, high
        if site == begin or site == end or curves.second[site] == kv:
            return NO_SUPPORT
        if is_knee_between(&curves.second_knees, b, curves.second[site - 1], curves.second[site]):
            return NO_SUPPORT
        if not (measured_value(curves, site - 1, tokens, &low) and measured_value(curves, site, tokens, &high)):
            return NO_SUPPORT
        answer_between(
            found, &low, &high,
            (kv - curves.second[site - 1]) / (curves.second[site] - curves.second[site - 1]), CROSS_KV,
        )
        return checked(found)

    cdef int between_next_rows(self, int64_t row, double b, int64_t regime, double kv, Lookup* found) noexcept nogil:
        # Between the rows next to the batch, which share its captured graph, or nothing.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        cdef int64_t above = first_not_below(curves.batch, 0, curves.num_sites, b)
        cdef Piece low, high
        if row >= 0 or above == 0 or above == curves.num_sites:
            return NO_SUPPORT
        if above - 1 < self.regime_rows[regime] or above >= self.regime_rows[regime + 1]:
            return NO_SUPPORT
        if not (self.on_one_side(above - 1, b, kv) and self.on_one_side(above, b, kv)):
            return NO_SUPPORT
        if not (measured_value(curves, above - 1, kv, &low) and measured_value(curves, above, kv, &high)):
            return NO_SUPPORT
        self.between_rows(b, low, high, found)
        return checked(found)

    cdef bint on_one_side(self, int64_t row, double b, double kv) noexcept nogil:
        # The same KV total may lie before a knee per request in one batch and beyond it in another.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        return side_of(&curves.x_knees, curves.batch[row], kv) == side_of(&curves.x_knees, b, kv)

    cdef void between_rows(self, double b, Piece low, Piece high, Lookup* found) noexcept nogil:
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        answer_between(
            found, &low, &high,
            (b - curves.batch[low.site]) / (curves.batch[high.site] - curves.batch[low.site]), CROSS_BATCH,
        )

    cdef int baseline(self, double b, double kv, const Lookup* decode, Lookup* found) noexcept nogil:
        # The floors of the rows that answered the decode lookup, blended alike.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        cdef Piece low, high
        start(found, kv)
        found.is_floor = True
        floor_piece(curves, decode.pieces[0].site, &low)
        if decode.num_pieces == 1:
            answer_one(found, &low)
        else:
            floor_piece(curves, decode.pieces[1].site, &high)
            self.between_rows(b, low, high, found)
        return checked(found)


cdef bint is_within_gate(double value, double log_value, double other) noexcept nogil:
    # Whether the logarithms are at most LOG_GATE apart; they decide only where the ratio does not.
    cdef double ratio = max(value, SMALLEST) / max(other, SMALLEST)
    if SURELY_NEAR < ratio < 1.0 / SURELY_NEAR:
        return True
    if ratio < SURELY_FAR or ratio > 1.0 / SURELY_FAR:
        return False
    return fabs(log_value - safe_log2(other)) <= LOG_GATE


cdef bint nearest_below(
    const CurveArrays* curves, int64_t begin, int64_t end, double x, int64_t hint, Piece* piece
) noexcept nogil:
    # The last site before `end` that covers x.
    cdef int64_t site = end - 1
    while site >= begin:
        if measured_near(curves, site, x, hint, piece):
            return True
        site -= 1
    return False


cdef bint nearest_above(
    const CurveArrays* curves, int64_t begin, int64_t end, double second, double x, int64_t hint, Piece* piece
) noexcept nogil:
    # The first site from `begin` on, beyond the query itself, that covers x.
    cdef int64_t site
    for site in range(begin, end):
        if curves.second[site] != second and measured_near(curves, site, x, hint, piece):
            return True
    return False


cdef int kv_first(const CurveArrays* curves, int64_t at, double tokens, double kv, Lookup* found) noexcept nogil:
    # Between numbers of prefill tokens, each measured on both sides of the KV tokens.
    cdef int64_t begin = curves.batch_first[at], end = curves.batch_first[at + 1]
    cdef int64_t middle = first_not_below(curves.second, begin, end, tokens)
    cdef Piece low, high
    cdef double a, c
    if not nearest_below(curves, begin, middle, kv, 0, &low):
        return NO_SUPPORT
    if not nearest_above(curves, middle, end, tokens, kv, low.right - curves.first[low.site], &high):
        return NO_SUPPORT
    a, c = curves.second[low.site], curves.second[high.site]
    if is_knee_between(&curves.second_knees, curves.batch[low.site], a, c):
        return NO_SUPPORT
    answer_between(found, &low, &high, (tokens - a) / (c - a), KV_FIRST)
    found.latency_ms = low.latency_ms + ((high.latency_ms - low.latency_ms) * (tokens - a)) / (c - a)
    found.over_kv = True
    found.x = kv
    return checked(found)


cdef void keep_nearest(Lookup* found, double* distances, double distance, const Piece* piece) noexcept nogil:
    # Insert into the pieces in order of (distance, arrival), of which the first MAX_PIECES stay.
    cdef int place = found.num_pieces, i
    while place > 0 and distances[place - 1] > distance:
        place -= 1
    if place == MAX_PIECES:
        return
    if found.num_pieces < MAX_PIECES:
        found.num_pieces += 1
    i = found.num_pieces - 1
    while i > place:
        found.pieces[i] = found.pieces[i - 1]
        distances[i] = distances[i - 1]
        i -= 1
    found.pieces[place] = piece[0]
    distances[place] = distance


cdef enum Gate:
    ANY_COVERAGE = 1         # also sites whose curve does not reach the query
    FRONTIER_BATCH = 2       # beyond the largest batch: only the distance on the other axis counts
    FRONTIER_SECOND = 4


cdef struct Span:
    bint any
    double low[2]
    double high[2]


cdef class SolAssistedEngine(WholeForwardEngine):
    """Carries measured curves to other coordinates by the roofline of the whole model (section 3).

    Parameters as `WholeForwardEngine`; `batch_limit` is the largest collected prefill batch when latency hardly depends
    on the batch, else None; `prefill_sol` and `decode_sol` are rooflines of the two phases. A `continuous` engine takes
    the same curves wherever they end, and holds the utilisation of their end point beyond, so that its answers do not
    jump there; others prefer curves that cover the query.
    """

    def __init__(
        self, prefill_curves, decode_curves, rungs, batch_limit, PassRoofline prefill_sol not None,
        PassRoofline decode_sol not None, describe_miss, coverage=None, bint continuous=False,
    ):
        super().__init__(prefill_curves, decode_curves, rungs, describe_miss, coverage)
        self.continuous = continuous
        self.tail = 1 if continuous else TAIL
        self.batch_limit = 0.0 if batch_limit is None else batch_limit
        self.prefill_sol = prefill_sol
        self.decode_sol = decode_sol
        prefill = self.prefill_curves.memory
        decode = self.decode_curves.memory
        for i, axis in enumerate((prefill[0], prefill[2], prefill[1])):
            self.prefill_low[i], self.prefill_high[i] = extent(axis)
        for i, axis in enumerate((decode[0], decode[2])):
            self.decode_low[i], self.decode_high[i] = extent(axis)

    cdef double sol_ms(self, bint is_decode, double b, double kv, double x) noexcept nogil:
        # Section 3.6: mean lengths per request.
        cdef SolPoint point
        point.batch = b
        if is_decode:
            point.seq_len = max(x / b, 1.0)
            point.prefix = 0.0
            point.tokens = b
            return self.decode_sol.latency_ms(&point)
        point.seq_len = max(x / b, 1.0)
        point.prefix = kv / b
        point.tokens = x
        return self.prefill_sol.latency_ms(&point)

    cdef int prefill(self, double b, double tokens, double kv, Lookup* found) noexcept nogil:
        cdef double here, there, scale = 1.0
        cdef int status
        if self.batch_limit > 0.0 and b > self.batch_limit:
            if kv < 2.0 * tokens:
                b = self.batch_limit
            else:
                here, there = self.sol_ms(False, b, kv, tokens), self.sol_ms(False, self.batch_limit, kv, tokens)
                if isfinite(here) and here > 0.0 and isfinite(there) and there > 0.0:
                    b = self.batch_limit
                    scale = min(here / there, 1.0)
        start(found, tokens)
        if not self.prefill_low[0] <= b <= self.prefill_high[0]:
            return OUTSIDE_BATCH
        if not self.prefill_low[1] <= tokens <= self.prefill_high[1]:
            return OUTSIDE_TOKENS
        if not self.prefill_low[2] <= kv <= self.prefill_high[2]:
            return OUTSIDE_KV
        status = self.scattered(False, b, kv, tokens, found)
        if status != LOOKUP_OK:
            return status
        found.scale = scale
        found.latency_ms *= scale
        return checked(found)

    cdef int decode(self, double b, double kv, Lookup* found) noexcept nogil:
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        cdef Piece low, high
        cdef int64_t low_row, high_row
        cdef bint low_covers, high_covers
        start(found, kv)
        if not self.decode_low[0] <= b <= self.decode_high[0]:
            return OUTSIDE_BATCH
        if not self.decode_low[1] <= kv <= self.decode_high[1]:
            return OUTSIDE_KV
        if not self.bracket(b, &low_row, &high_row):
            return self.scattered(True, b, 0.0, kv, found)
        low_covers = self.row_at(low_row, b, kv, &low)
        high_covers = self.row_at(high_row, b, kv, &high)
        if not (low_covers or high_covers):
            return NO_BRACKET
        self.blend(b, low_covers, &low, high_covers, &high, found)
        return checked(found)

    cdef void blend(
        self, double b, bint low_covers, const Piece* low, bint high_covers, const Piece* high, Lookup* found
    ) noexcept nogil:
        # Between two rows of one captured graph; a row that does not reach the query says nothing.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        if not high_covers or low.site == high.site:
            answer_one(found, low)
        elif not low_covers:
            answer_one(found, high)
        else:
            answer_between(
                found, low, high,
                (b - curves.batch[low.site]) / (curves.batch[high.site] - curves.batch[low.site]), CROSS_BATCH,
            )
        found.resolution = CROSS_BATCH
        if (low_covers and low.left < 0) or (high_covers and high.left < 0):
            found.resolution = TRANSFERRED  # a row that is held beyond its end

    cdef bint row_at(self, int64_t row, double b, double kv, Piece* piece) noexcept nogil:
        # What a row of a bracket says.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        if side_of(&curves.x_knees, curves.batch[row], kv) != side_of(&curves.x_knees, b, kv):
            return False
        if weighted_value(curves, row, kv, piece):
            return True
        return (self.continuous or is_split(curves, row, kv)) and self.curve_at(True, row, kv, piece)

    cdef bint bracket(self, double b, int64_t* low, int64_t* high) noexcept nogil:
        # Rows of the captured graph that a batch off the lattice is padded to.
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        cdef int64_t below = self.rungs_below(b)
        if below == 0 or batch_index(curves, b) >= 0:
            return False
        low[0] = batch_index(curves, self.rungs[below - 1] + 1.0)
        high[0] = curves.num_sites - 1
        if below < self.num_rungs:
            high[0] = batch_index(curves, self.rungs[below])
        return True

    cdef int baseline(self, double b, double kv, const Lookup* decode, Lookup* found) noexcept nogil:
        cdef const CurveArrays* curves = &self.decode_curves.arrays
        cdef Piece low, high
        cdef int64_t low_row, high_row, row = batch_index(curves, b)
        cdef bint low_covers, high_covers
        start(found, kv)
        found.is_floor = True
        if row >= 0:
            floor_piece(curves, row, &low)
            answer_one(found, &low)
            return checked(found)
        if not self.bracket(b, &low_row, &high_row):
            # A table without captured graphs: the smallest pass of this batch.
            return self.decode(b, max(b, self.decode_low[1]), found)
        floor_piece(curves, low_row, &low)
        floor_piece(curves, high_row, &high)
        low_covers, high_covers = covers(curves, low_row, kv), covers(curves, high_row, kv)
        if not (low_covers or high_covers):
            low_covers = high_covers = True
        self.blend(b, low_covers, &low, high_covers, &high, found)
        return checked(found)

    cdef int scattered(self, bint is_decode, double b, double kv, double x, Lookup* found) noexcept nogil:
        # Section 3.5: an own curve that covers the query, else utilisation of the nearest sites.
        cdef const CurveArrays* curves = &self.decode_curves.arrays if is_decode else &self.prefill_curves.arrays
        cdef int64_t own = site_of(curves, b, kv)
        cdef double[MAX_PIECES] distances
        cdef double utilisation = 0.0, total = 0.0, here, weight
        cdef Piece piece
        cdef int i, kept
        if own >= 0 and weighted_value(curves, own, x, &piece):
            answer_one(found, &piece)
            return checked(found)
        if own >= 0 and (self.continuous or is_split(curves, own, x)) and self.curve_at(is_decode, own, x, &piece):
            answer_one(found, &piece)
            found.resolution = TRANSFERRED
            return checked(found)
        nearest_sites(curves, own, is_decode, b, kv, x, self.continuous, found, distances)
        if found.num_pieces == 0:
            return NO_NEAR_SITE
        kept = found.num_pieces
        found.num_pieces = 0
        for i in range(kept):
            piece = found.pieces[i]
            if not self.curve_at(is_decode, piece.site, x, &piece):
                continue
            here = self.sol_ms(is_decode, curves.batch[piece.site], curves.second[piece.site], x)
            if not (isfinite(piece.latency_ms) and piece.latency_ms > 0.0 and isfinite(here) and here > 0.0):
                continue
            weight = 1.0 / (distances[i] * distances[i] + 1e-12)
            utilisation += weight * (here / piece.latency_ms)
            total += weight
            piece.weight = weight
            found.pieces[found.num_pieces] = piece
            found.num_pieces += 1
        here = self.sol_ms(is_decode, b, kv, x)
        if not total > 0.0 or not (isfinite(here) and here > 0.0):
            return NO_USABLE_SITE
        for i in range(found.num_pieces):
            found.pieces[i].weight /= total
        found.latency_ms = here / (utilisation / total)
        found.resolution = TRANSFERRED
        return checked(found)

    cdef int curve_at(self, bint is_decode, int64_t site, double x, Piece* piece) noexcept nogil:
        # A curve at any x: beyond its ends the median utilisation of the last few points is held, at a knee that of the
        # point on the same side.
        cdef const CurveArrays* curves = &self.decode_curves.arrays if is_decode else &self.prefill_curves.arrays
        cdef int64_t low = curves.first[site], high = curves.first[site + 1], point, size = min(high - low, self.tail)
        cdef int64_t anchor, first = -1, last = -1
        cdef double[3] utilisation
        cdef double sol
        cdef int count = 0, i, side
        if weighted_value(curves, site, x, piece):
            return True
        anchor = -1
        if curves.x[low] < x < curves.x[high - 1]:
            size = 1
            anchor = first_not_below(curves.x, low, high, x)
            if side_of(&curves.x_knees, curves.batch[site], x) != side_of(
                &curves.x_knees, curves.batch[site], curves.x[anchor]
            ):
                anchor -= 1
        side = side_of(&curves.x_knees, curves.batch[site], x)
        for i in range(size):
            point = anchor
            if anchor < 0:
                point = low + i if x < curves.x[low] else high - size + i
            if side_of(&curves.x_knees, curves.batch[site], curves.x[point]) != side:
                continue
            sol = self.sol_ms(is_decode, curves.batch[site], curves.second[site], curves.x[point])
            if sol > 0.0 and curves.latency_ms[point] > 0.0:
                utilisation[count] = sol / curves.latency_ms[point]
                count += 1
                first = point if first < 0 else first
                last = point
        if count == 0:
            return False
        piece.site = site
        piece.left, piece.right = -1 - first, last
        sol = self.sol_ms(is_decode, curves.batch[site], curves.second[site], x)
        piece.latency_ms = sol / median_of_few(utilisation, count)
        return True


cdef double median_of_few(double* values, int count) noexcept nogil:
    if count == 1:
        return values[0]
    if count == 2:
        return (values[0] + values[1]) / 2.0
    return max(min(values[0], values[1]), min(max(values[0], values[1]), values[2]))


cdef object extent(values):
    # An axis without points contains nothing.
    return (values.min(), values.max()) if len(values) else (INFINITY, -INFINITY)


cdef void nearest_sites(
    const CurveArrays* curves, int64_t own, bint is_decode, double b, double second, double x, bint continuous,
    Lookup* found, double* distances,
) noexcept nogil:
    # The nearest sites in (log2 batch, log2 KV); none when all are too far.
    cdef Span span
    cdef int gate = ANY_COVERAGE if continuous else 0
    span_of(curves, own, b, second, x, gate, &span)
    if not span.any:
        gate = ANY_COVERAGE
        span_of(curves, own, b, second, x, gate, &span)
    choose_sites(curves, own, is_decode, b, second, x, gate, found, distances)
    if found.num_pieces > 0 or not span.any:
        return
    # Frontier: beyond all sites on exactly one axis, the sites level with the query on the other one.
    if b < span.low[0] or (not is_decode and second < span.low[1]):
        return
    if b > span.high[0]:
        gate |= FRONTIER_BATCH
    if not is_decode and second > span.high[1]:
        gate |= FRONTIER_SECOND
    if ((gate & FRONTIER_BATCH) != 0) != ((gate & FRONTIER_SECOND) != 0):
        choose_sites(curves, own, is_decode, b, second, x, gate, found, distances)


cdef bint is_candidate(
    const CurveArrays* curves, int64_t site, int64_t own, double b, double second, double x, int gate
) noexcept nogil:
    # A site beyond a knee says nothing of a query before it.
    if site == own or not (gate & ANY_COVERAGE or covers(curves, site, x)):
        return False
    return side_of(&curves.x_knees, curves.batch[site], x) == side_of(&curves.x_knees, b, x) and side_of(
        &curves.second_knees, curves.batch[site], curves.second[site]
    ) == side_of(&curves.second_knees, b, second)


cdef void span_of(
    const CurveArrays* curves, int64_t own, double b, double second, double x, int gate, Span* span
) noexcept nogil:
    cdef int64_t site
    span.any = False
    for site in range(curves.num_sites):
        if not is_candidate(curves, site, own, b, second, x, gate):
            continue
        if not span.any:
            span.low[0] = span.high[0] = curves.batch[site]
            span.low[1] = span.high[1] = curves.second[site]
        span.any = True
        span.low[0] = min(span.low[0], curves.batch[site])
        span.high[0] = max(span.high[0], curves.batch[site])
        span.low[1] = min(span.low[1], curves.second[site])
        span.high[1] = max(span.high[1], curves.second[site])


cdef void choose_sites(
    const CurveArrays* curves, int64_t own, bint is_decode, double b, double second, double x, int gate, Lookup* found,
    double* distances,
) noexcept nogil:
    cdef double log_b = safe_log2(b), log_second = safe_log2(second), along, across, distance
    cdef Piece piece
    cdef int64_t site
    cdef bint near
    for site in range(curves.num_sites):
        if not is_candidate(curves, site, own, b, second, x, gate):
            continue
        along = curves.log_batch[site] - log_b
        across = 0.0 if is_decode else curves.log_second[site] - log_second
        distance = sqrt(along * along + across * across)
        if gate & FRONTIER_BATCH:
            near = fabs(across) <= LOG_GATE
        elif gate & FRONTIER_SECOND:
            near = fabs(along) <= LOG_GATE
        else:
            near = distance <= LOG_GATE or (
                not is_decode and fabs(curves.second[site] - second) <= RAW_KV_GATE and fabs(along) <= LOG_GATE
            )
        if near:
            piece.site = site
            keep_nearest(found, distances, distance, &piece)
