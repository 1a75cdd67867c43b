# Native estimators (fpm-model.md sections 5.2 to 5.4 and 6, op-level.md section 5): an engine prices every rank from
# data, the slowest rank ends the iteration, and a factor learned from observed / native ratios corrects the result.

from libc.math cimport isfinite
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from fpmsdk._ext.correction cimport CorrectionStore, CorrectionTable
from fpmsdk._ext.declarations cimport FpmRank
from fpmsdk._ext.estimator cimport Estimator, ServingView
from fpmsdk._ext.features cimport FAULT_NONE, FaultSite, check_ranks, fault_error
from fpmsdk._ext.frames cimport Records, is_rank
from fpmsdk._ext.operators cimport OP_NOT_FINITE, OP_OK, OpAnswer, OpQuery, OpSol, Operator

from fpmsdk._ext.frames import read_iterations

NATIVE_KINDS = ("prefill", "decode", "mixed")


cdef int native_kind(const FpmRank* rank, double* coordinates) noexcept nogil:
    # Workload of one rank with the coordinates of its correction store.
    cdef bint prefill = rank.sum_prefill_tokens > 0
    cdef bint decode = rank.num_decode_requests > 0
    coordinates[1] = 0.0
    if prefill:
        coordinates[0] = <double>rank.sum_prefill_tokens
        if not decode:
            return NATIVE_PREFILL
        coordinates[1] = <double>rank.sum_decode_kv_tokens
        return NATIVE_MIXED
    if not decode:
        return NATIVE_IDLE
    coordinates[0] = <double>rank.num_decode_requests
    coordinates[1] = <double>rank.sum_decode_kv_tokens
    return NATIVE_DECODE


cdef int iteration_kind(const FpmRank* ranks, Py_ssize_t num_ranks, double* coordinates) noexcept nogil:
    # The rank with the largest sum of coordinates stands for the iteration; the last one on ties.
    cdef double here[2]
    cdef int kind = NATIVE_IDLE, rank_kind
    cdef Py_ssize_t r
    for r in range(num_ranks):
        rank_kind = native_kind(&ranks[r], here)
        if rank_kind == NATIVE_IDLE:
            continue
        if kind == NATIVE_IDLE or here[0] + here[1] >= coordinates[0] + coordinates[1]:
            kind = rank_kind
            coordinates[0] = here[0]
            coordinates[1] = here[1]
    return kind


cdef class NativeEngine:
    """Prices one rank from data, without correction. Immutable, shared by any number of threads and models."""

    cdef int rank_ms(self, const FpmRank* rank, double* latency_ms) noexcept nogil:
        return FAULT_NATIVE

    cdef object explain(self, const FpmRank* ranks, Py_ssize_t num_ranks, Py_ssize_t faulty):
        return RuntimeError("this engine prices nothing")

    cdef void count_queries(self, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil:
        pass

    cdef object evidence(self, const FpmRank* ranks, Py_ssize_t num_ranks):
        return []


# How the mixed composition treats an operator.
cdef enum:
    TOKEN_WISE = 0
    LOGITS
    CONTEXT_ATTENTION
    GENERATION_ATTENTION
    NUM_ROLES


cdef void mixed_queries(const FpmRank* rank, OpQuery* queries) noexcept nogil:
    # What a mixed pass asks of the operators of each role.
    cdef int64_t n = rank.num_prefill_requests, d = rank.num_decode_requests
    cdef int64_t prefill_tokens = rank.sum_prefill_tokens, kv_tokens = rank.sum_prefill_kv_tokens
    cdef int64_t tokens = prefill_tokens + d
    cdef int64_t isl = max(prefill_tokens // n, 1)
    queries[TOKEN_WISE] = OpQuery(1, tokens, kv_tokens, tokens)
    queries[LOGITS] = OpQuery(1, tokens, kv_tokens, 1)
    queries[CONTEXT_ATTENTION] = OpQuery((prefill_tokens + isl - 1) // isl, isl, kv_tokens // n, prefill_tokens)
    queries[GENERATION_ATTENTION] = OpQuery(d, max(rank.sum_decode_kv_tokens // d, 1), 0, d)


cdef class PassOps:
    """The operators of one kind of pass in graph order.

    Those that have one answer, such as the two norms of a layer, are asked once a pass. Operators of different roles
    are not: they may be asked different queries.
    """

    def __init__(self, operators):
        cdef Operator operator
        cdef PassOp* item
        cdef Py_ssize_t i, j
        cdef int num_slots = 0
        self.operators = tuple(operators)
        self.size = len(self.operators)
        self.items = <PassOp*>malloc((self.size + 1) * sizeof(PassOp))
        if self.items == NULL:
            raise MemoryError
        for i in range(self.size):
            operator = self.operators[i]
            item = &self.items[i]
            item[0] = PassOp(<void*>operator, operator.scale_factor, role_of(operator), -1, False)
            for j in range(i):
                if self.items[j].is_repeat or self.items[j].role != item.role:
                    continue
                if not operator.answers_as(self.operators[j]):
                    continue
                if self.items[j].slot < 0 and num_slots < MAX_SHARED:
                    self.items[j].slot = num_slots
                    num_slots += 1
                item.slot = self.items[j].slot
                item.is_repeat = item.slot >= 0
                break

    def __dealloc__(self):
        free(self.items)


cdef int role_of(Operator operator):
    if getattr(operator, "is_logits", False):
        return LOGITS
    if operator.name == "context_attention":
        return CONTEXT_ATTENTION
    if operator.name == "generation_attention":
        return GENERATION_ATTENTION
    return TOKEN_WISE


cdef tuple query_values(OpQuery query):
    return query.batch, query.seq_len, query.prefix, query.tokens


cdef inline int add_price(
    const PassOp* item, const OpQuery* query, bint at_sol, double* shared_ms, double* latency_ms, Miss* miss
) noexcept nogil:
    # `shared_ms` is MAX_SHARED latencies of the pass.
    cdef OpAnswer answer
    cdef OpSol sol
    cdef double once_ms
    cdef int status
    if item.is_repeat:
        once_ms = shared_ms[item.slot]
    else:
        if at_sol:
            status = (<Operator>item.operator).sol(query, &sol)
            once_ms = sol.latency_ms
        else:
            status = (<Operator>item.operator).measure(query, &answer)
            once_ms = answer.latency_ms
        if status == OP_OK and not isfinite(once_ms):
            status = OP_NOT_FINITE
        if status != OP_OK:
            miss.operator = item.operator
            miss.query = query[0]
            return status
        once_ms = max(once_ms, 0.0)
        if item.slot >= 0:
            shared_ms[item.slot] = once_ms
    latency_ms[0] += once_ms * item.scale_factor
    return OP_OK


cdef inline OpQuery context_query(const PassOp* item, int64_t batch, int64_t seq_len, int64_t prefix) noexcept nogil:
    # Only the last token of each request reaches the logits.
    return OpQuery(batch, seq_len, prefix, batch if item.role == LOGITS else batch * seq_len)


cdef class OpLevelEngine(NativeEngine):
    """Prices a pass operator by operator.

    Parameters
    ----------
    context_ops, generation_ops: compiled operators in graph order.
    describe_miss: called with (operator, status, query) to make the exception of a pass that cannot be priced.
    speed_of_light: price from the roofline alone instead of measurements.
    """

    def __init__(self, context_ops, generation_ops, describe_miss, bint speed_of_light=False):
        self.context_ops = PassOps(context_ops)
        self.generation_ops = PassOps(generation_ops)
        self.describe_miss = describe_miss
        self.speed_of_light = speed_of_light
        self.counts_known_tokens = True

    cdef int context_pass(
        self, int64_t batch, int64_t seq_len, int64_t prefix, double* latency_ms, Miss* miss
    ) noexcept nogil:
        # Section 5.1.
        cdef double[MAX_SHARED] shared_ms
        cdef OpQuery query
        cdef const PassOp* item
        cdef Py_ssize_t i
        cdef int status
        for i in range(self.context_ops.size):
            item = &self.context_ops.items[i]
            query = context_query(item, batch, seq_len, prefix)
            status = add_price(item, &query, self.speed_of_light, shared_ms, latency_ms, miss)
            if status != OP_OK:
                return status
        return OP_OK

    cdef int generation_step(
        self, int64_t batch, int64_t position, double* latency_ms, Miss* miss
    ) noexcept nogil:
        # Section 5.2.
        cdef double[MAX_SHARED] shared_ms
        cdef OpQuery query = OpQuery(batch, position, 0, batch)
        cdef Py_ssize_t i
        cdef int status
        for i in range(self.generation_ops.size):
            status = add_price(
                &self.generation_ops.items[i], &query, self.speed_of_light, shared_ms, latency_ms, miss
            )
            if status != OP_OK:
                return status
        return OP_OK

    cdef int mixed_pass(self, const FpmRank* rank, double* latency_ms, Miss* miss) noexcept nogil:
        # Section 5.3 step 3: token-wise operators see all tokens of the pass at once, the two kinds of attention their
        # own requests.
        cdef double[MAX_SHARED] shared_ms
        cdef OpQuery[NUM_ROLES] queries
        cdef double attention_ms = 0.0
        cdef const PassOp* item
        cdef Py_ssize_t i
        cdef int status
        mixed_queries(rank, queries)
        for i in range(self.context_ops.size):
            item = &self.context_ops.items[i]
            status = add_price(
                item, &queries[item.role], self.speed_of_light, shared_ms,
                &attention_ms if item.role == CONTEXT_ATTENTION else latency_ms, miss,
            )
            if status != OP_OK:
                return status
        latency_ms[0] += attention_ms
        for i in range(self.generation_ops.size):
            item = &self.generation_ops.items[i]
            if item.role != GENERATION_ATTENTION:
                continue
            status = add_price(item, &queries[item.role], self.speed_of_light, shared_ms, latency_ms, miss)
            if status != OP_OK:
                return status
        return OP_OK

    cdef int price_rank(self, const FpmRank* rank, double* latency_ms, Miss* miss) noexcept nogil:
        cdef int64_t n
        latency_ms[0] = 0.0
        if rank.sum_prefill_tokens > 0 and rank.num_decode_requests > 0:
            return self.mixed_pass(rank, latency_ms, miss)
        if rank.sum_prefill_tokens > 0:
            n = rank.num_prefill_requests
            return self.context_pass(
                n, <int64_t>rank.sum_prefill_tokens // n, <int64_t>rank.sum_prefill_kv_tokens // n, latency_ms, miss
            )
        if rank.num_decode_requests > 0:
            n = rank.num_decode_requests
            return self.generation_step(n, <int64_t>rank.sum_decode_kv_tokens // n, latency_ms, miss)
        return OP_OK

    cdef int rank_ms(self, const FpmRank* rank, double* latency_ms) noexcept nogil:
        cdef Miss miss
        return FAULT_NONE if self.price_rank(rank, latency_ms, &miss) == OP_OK else FAULT_NATIVE

    cdef object explain(self, const FpmRank* ranks, Py_ssize_t num_ranks, Py_ssize_t faulty):
        cdef Miss miss
        cdef double latency_ms
        self.price_rank(&ranks[faulty], &latency_ms, &miss)
        return self.error(&miss)

    cdef object evidence(self, const FpmRank* ranks, Py_ssize_t num_ranks):
        # Of every rank the operators of its pass, each with its query.
        return [self.queries_of(&ranks[r]) for r in range(num_ranks)]

    cdef list queries_of(self, const FpmRank* rank):
        cdef OpQuery[NUM_ROLES] queries
        cdef int64_t n = rank.num_prefill_requests, d = rank.num_decode_requests
        cdef Py_ssize_t i
        asked = []
        if rank.sum_prefill_tokens > 0 and d > 0:
            mixed_queries(rank, queries)
            for i, operator in enumerate(self.context_ops.operators):
                asked.append((operator, query_values(queries[self.context_ops.items[i].role])))
            for i, operator in enumerate(self.generation_ops.operators):
                if self.generation_ops.items[i].role == GENERATION_ATTENTION:
                    asked.append((operator, query_values(queries[GENERATION_ATTENTION])))
        elif rank.sum_prefill_tokens > 0:
            tokens, kv_tokens = <int64_t>rank.sum_prefill_tokens // n, <int64_t>rank.sum_prefill_kv_tokens // n
            for i, operator in enumerate(self.context_ops.operators):
                asked.append((operator, query_values(context_query(&self.context_ops.items[i], n, tokens, kv_tokens))))
        elif d > 0:
            at = (d, <int64_t>rank.sum_decode_kv_tokens // d, 0, d)
            asked = [(operator, at) for operator in self.generation_ops.operators]
        return asked

    cdef object error(self, const Miss* miss):
        query = query_values(miss.query)
        operator, status = (<Operator>miss.operator).missing(*query, self.speed_of_light)
        return self.describe_miss(operator, status, query)

    def context_latency(self, int64_t batch, int64_t seq_len, int64_t prefix):
        """Uncorrected latency in ms of a prefill pass of `seq_len` new tokens after `prefix` cached ones."""
        cdef double latency_ms = 0.0
        cdef Miss miss
        if self.context_pass(batch, seq_len, prefix, &latency_ms, &miss) != OP_OK:
            raise self.error(&miss)
        return latency_ms

    def generation_latency(self, int64_t batch, int64_t position):
        """Uncorrected latency in ms of one decode step at a KV position."""
        cdef double latency_ms = 0.0
        cdef Miss miss
        if self.generation_step(batch, position, &latency_ms, &miss) != OP_OK:
            raise self.error(&miss)
        return latency_ms

    def context_breakdown(self, int64_t batch, int64_t seq_len, int64_t prefix):
        """(operator, answer of `Operator.ask`) for each operator of a prefill pass that can be priced."""
        cdef OpQuery query
        self.context_latency(batch, seq_len, prefix)  # raises what explains a missing operator
        rows = []
        for i, operator in enumerate(self.context_ops.operators):
            query = context_query(&self.context_ops.items[i], batch, seq_len, prefix)
            rows.append((operator, operator.ask(batch, seq_len, prefix, query.tokens, self.speed_of_light)))
        return rows

    def generation_breakdown(self, int64_t batch, int64_t position):
        """(operator, answer of `Operator.ask`) for each operator of a decode step that can be priced."""
        self.generation_latency(batch, position)
        return [
            (operator, operator.ask(batch, position, 0, batch, self.speed_of_light))
            for operator in self.generation_ops.operators
        ]


cdef class NativeView(ServingView):
    """An engine with published correction factors."""

    cdef int counted_ms(
        self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms, Py_ssize_t* slowest
    ) noexcept nogil:
        if self.engine.counts_queries:
            self.engine.count_queries(ranks, num_ranks)
        return self.native_ms(ranks, num_ranks, latency_ms, slowest)

    cdef int native_ms(
        self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms, Py_ssize_t* slowest
    ) noexcept nogil:
        cdef double rank_ms
        cdef Py_ssize_t r
        cdef int fault
        latency_ms[0] = 0.0
        slowest[0] = -1
        for r in range(num_ranks):
            fault = self.engine.rank_ms(&ranks[r], &rank_ms)
            if fault != FAULT_NONE:
                slowest[0] = r
                return fault
            if rank_ms > latency_ms[0]:
                latency_ms[0] = rank_ms
                slowest[0] = r
        return FAULT_NONE

    cdef double correction(self, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil:
        cdef double coordinates[2]
        cdef int kind
        if self.prefill is None:
            return 1.0
        kind = iteration_kind(ranks, num_ranks, coordinates)
        if kind == NATIVE_PREFILL:
            return self.prefill.factor_at(coordinates)
        if kind == NATIVE_DECODE:
            return self.decode.factor_at(coordinates)
        if kind == NATIVE_MIXED:
            return self.mixed.factor_at(coordinates)
        return 1.0

    cdef int evaluate(self, const FpmRank* ranks, Py_ssize_t num_ranks, double* latency_ms) noexcept nogil:
        cdef Py_ssize_t slowest
        cdef int fault = self.counted_ms(ranks, num_ranks, latency_ms, &slowest)
        if fault == FAULT_NONE:
            latency_ms[0] *= self.correction(ranks, num_ranks)
        return fault

    cdef object error(self, const FaultSite* site, const FpmRank* ranks, Py_ssize_t num_ranks):
        cdef double latency_ms
        cdef Py_ssize_t faulty
        if site.fault != FAULT_NATIVE:
            return fault_error(site)
        self.native_ms(ranks, num_ranks, &latency_ms, &faulty)
        return self.engine.explain(ranks, num_ranks, faulty)

    def tables(self):
        """Published factors of the prefill, decode and mixed stores; empty when correction is disabled."""
        return () if self.prefill is None else (self.prefill, self.decode, self.mixed)

    def estimate_parts(self, metrics, decode_frame):
        """(native latency ms, correction factor, slowest rank or None, evidence of the engine) of one iteration."""
        cdef Records records = read_iterations([metrics] if not is_rank(metrics) else metrics, decode_frame)
        cdef FaultSite site
        cdef double native_ms
        cdef Py_ssize_t slowest
        site.iteration = -1
        site.fault = check_ranks(records.ranks, records.num_ranks, &site.rank)
        if site.fault == FAULT_NONE:
            site.fault = self.counted_ms(records.ranks, records.num_ranks, &native_ms, &slowest)
        if site.fault != FAULT_NONE:
            raise self.error(&site, records.ranks, records.num_ranks)
        return (
            native_ms,
            self.correction(records.ranks, records.num_ranks),
            slowest if slowest >= 0 else None,
            self.engine.evidence(records.ranks, records.num_ranks),
        )


cdef class NativeEstimator(Estimator):
    """A native engine with its correction stores.

    Parameters
    ----------
    engine: prices ranks.
    stores: correction stores by kind (``prefill``, ``decode``, ``mixed``), or None when correction is disabled.
    """

    def __init__(self, NativeEngine engine not None, stores):
        self.engine = engine
        if stores is not None:
            self.prefill, self.decode, self.mixed = (stores[kind] for kind in NATIVE_KINDS)
        self.publish()

    def stores(self):
        """Correction stores by kind; empty when correction is disabled."""
        if self.prefill is None:
            return {}
        return dict(zip(NATIVE_KINDS, (self.prefill, self.decode, self.mixed)))

    cdef int reserve(self, Py_ssize_t num_iterations) except -1:
        if self.prefill is not None:
            self.prefill.reserve(num_iterations)
            self.decode.reserve(num_iterations)
            self.mixed.reserve(num_iterations)
        return 0

    cdef int classify(self, const FpmRank* ranks, Py_ssize_t num_ranks, int* kind) noexcept nogil:
        cdef double coordinates[2]
        kind[0] = iteration_kind(ranks, num_ranks, coordinates)
        return FAULT_NONE

    cdef int learn(self, const FpmRank* ranks, Py_ssize_t num_ranks, int kind, double target_ms) noexcept nogil:
        cdef double coordinates[2]
        cdef double native_ms
        cdef Py_ssize_t slowest
        cdef int fault
        if self.prefill is None:
            return FAULT_NONE
        fault = (<NativeView>self.serving).counted_ms(ranks, num_ranks, &native_ms, &slowest)
        if fault != FAULT_NONE:
            return fault
        iteration_kind(ranks, num_ranks, coordinates)
        if kind == NATIVE_PREFILL:
            self.prefill.add(coordinates, target_ms, native_ms)
        elif kind == NATIVE_DECODE:
            self.decode.add(coordinates, target_ms, native_ms)
        else:
            self.mixed.add(coordinates, target_ms, native_ms)
        return FAULT_NONE

    cdef int publish_factors(self, NativeView view) except -1:
        # What the correction stores say by now, into a view that nobody has seen yet.
        if self.prefill is not None:
            self.prefill.publish()
            self.decode.publish()
            self.mixed.publish()
            view.prefill = self.prefill.table
            view.decode = self.decode.table
            view.mixed = self.mixed.table
        return 0

    cdef int publish(self) except -1:
        cdef NativeView view = NativeView.__new__(NativeView)
        view.engine = self.engine
        view.counts_known_tokens = self.engine.counts_known_tokens
        self.publish_factors(view)
        self.serving = view
        return 0
