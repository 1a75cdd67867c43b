# The operators of op-level.md section 3. Each class is one row of that table: `measure` is its silicon latency,
# `sol` its speed of light. Everything that does not depend on the query (table slices, neighbours, byte counts, rates)
# is settled by the constructor.

from libc.math cimport floor, isfinite
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

cimport numpy as cnp

from fpmsdk._ext.grid cimport GRID_HIT, Grid, GridTable, Measurement, grid_query, grid_query_series, sol_function
from fpmsdk._ext.sites cimport GemmSite

import numpy as np

cnp.import_array()

MISSING_FLOPS = OP_NO_FLOPS
UNEVEN_BATCH = OP_UNEVEN_BATCH
NOT_FINITE = OP_NOT_FINITE
SOURCES = {FROM_SILICON: "silicon", FROM_FORMULA: "empirical", FROM_SOL: "sol", FROM_ESTIMATE: "estimated"}


# Divisors are mostly 1, and a 64-bit division costs as much as a whole look-up.
cdef inline int64_t ceil_div(int64_t a, int64_t b) noexcept nogil:
    return a if b == 1 else (a + b - 1) // b


cdef inline int64_t floor_div(int64_t a, int64_t b) noexcept nogil:
    return a if b == 1 else a // b


cdef double memory_op_ms(const Hardware* hardware, double num_bytes) noexcept nogil:
    # A kernel that only moves bytes.
    return (
        num_bytes / (hardware.mem_bw_bytes_per_s * hardware.mem_bw_scaling_factor) + hardware.mem_latency_s
    ) * 1000.0


cdef double transfer_ms(const Hardware* hardware, double num_bytes) noexcept nogil:
    # The same at the speed of light.
    return num_bytes / hardware.mem_bw_bytes_per_s * 1000.0


cdef void take(const Measurement* found, OpAnswer* answer) noexcept nogil:
    answer.latency_ms = found.latency_ms
    answer.energy_wms = found.power_w * found.latency_ms
    answer.sources = FROM_SILICON


cdef void roofline(double math_ms, double memory_ms, OpSol* sol) noexcept nogil:
    sol.latency_ms = max(math_ms, memory_ms)
    sol.math_ms = math_ms
    sol.memory_ms = memory_ms


cdef void add_memory(double memory_ms, OpSol* sol) noexcept nogil:
    # A kernel that runs after the others and only moves bytes.
    sol.latency_ms += memory_ms
    sol.memory_ms += memory_ms


cdef class Operator:
    """One operator of a pass; `scale_factor` counts its repetitions over the layers.

    Parameters
    ----------
    name: operator name of the graph.
    scale_factor: repetitions.
    hardware: keys are the fields of `Hardware`.
    """

    def __cinit__(self, name, scale_factor, hardware, *parameters, **named):
        self.parameters = (hardware, parameters, named)

    def __init__(self, str name, double scale_factor, dict hardware):
        self.name = name
        self.scale_factor = scale_factor
        self.hardware = hardware

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        return OP_MISS

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        return OP_MISS

    cdef int price(self, const OpQuery* query, bint at_sol, OpAnswer* answer) noexcept nogil:
        cdef OpSol sol
        cdef int status
        answer.energy_wms = 0.0
        if at_sol:
            status = self.sol(query, &sol)
            answer.latency_ms = sol.latency_ms
            answer.sources = FROM_SOL
        else:
            status = self.measure(query, answer)
        if status == OP_OK and not isfinite(answer.latency_ms):
            return OP_NOT_FINITE
        if status == OP_OK:
            answer.latency_ms = max(answer.latency_ms, 0.0) * self.scale_factor
            answer.energy_wms = max(answer.energy_wms, 0.0) * self.scale_factor
        return status

    def answers_as(self, Operator other not None):
        """Whether the other one has the same answer to every query, before `scale_factor`."""
        return type(self) is type(other) and self.parameters == other.parameters

    def ask(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens, bint at_sol=False):
        """(status, latency ms, energy W ms, source, (SOL, math, memory) ms), scaled, of one query.

        With `at_sol` the latency is that of the speed of light. All but the status are None when it is not OK.
        """
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        cdef OpAnswer answer
        cdef OpSol sol
        status = self.price(&query, at_sol, &answer)
        if status != OP_OK:
            return status, None, None, None, None
        limits = None
        if self.sol(&query, &sol) == OP_OK:
            limits = (
                sol.latency_ms * self.scale_factor,
                sol.math_ms * self.scale_factor,
                sol.memory_ms * self.scale_factor,
            )
        return status, answer.latency_ms, answer.energy_wms, SOURCES.get(answer.sources, "mixed"), limits

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """(table, coordinates by name) of every lookup behind a query; empty when a formula answers it.

        The table is a `GridTable`, or a `GemmSite` for the coordinates `m`, `n` and `k`.
        """
        return []

    def table_sol_ms(self, *coordinates):
        """Speed-of-light latency in ms at coordinates of the operator's table."""
        raise TypeError(f"{self.name} is not priced from a table")

    def parts(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """(operator, whether it hides behind others) that a query of a composite rests on; empty for others."""
        return []

    def missing(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens, bint at_sol=False):
        """The innermost operator that cannot answer a query and its status; None when all can."""
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        cdef OpAnswer answer
        status = self.price(&query, at_sol, &answer)
        return None if status == OP_OK else (self, status)


cdef class MemoryOp(Operator):
    """Embedding look-ups, norms and activations: bytes per token through memory."""

    cdef double bytes_per_token
    cdef int64_t scale_num_tokens, seq_split

    def __init__(self, name, scale_factor, hardware, bytes_per_token, scale_num_tokens, seq_split):
        super().__init__(name, scale_factor, hardware)
        self.bytes_per_token = bytes_per_token
        self.scale_num_tokens = scale_num_tokens
        self.seq_split = seq_split

    cdef double num_bytes(self, const OpQuery* query) noexcept nogil:
        return self.bytes_per_token * <double>ceil_div(floor_div(query.tokens, self.scale_num_tokens), self.seq_split)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        answer.latency_ms = memory_op_ms(&self.hardware, self.num_bytes(query))
        answer.sources = FROM_FORMULA
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        roofline(0.0, transfer_ms(&self.hardware, self.num_bytes(query)), sol)
        return OP_OK


cdef struct ScaleSol:
    double factor                # bytes per element of (m, k)
    double mem_bw_bytes_per_s


cdef double scale_sol_at(const void* params, const double* coordinates) noexcept nogil:
    cdef const ScaleSol* sol = <const ScaleSol*>params
    return sol.factor * coordinates[0] * coordinates[1] / sol.mem_bw_bytes_per_s * 1000.0


cdef class ScaleTable:
    """Latency of quantisation kernels over (m, k), held beyond the measured rectangle (section 3.1)."""

    cdef GridTable table
    cdef ScaleSol params
    cdef bint scale_beyond
    cdef double low_m, high_m, low_k, high_k

    def __init__(self, GridTable table not None, bounds, double factor, double mem_bw_bytes_per_s, bint scale_beyond):
        self.table = table
        self.low_m, self.high_m, self.low_k, self.high_k = bounds
        self.params = ScaleSol(factor, mem_bw_bytes_per_s)
        self.scale_beyond = scale_beyond

    cdef int query(self, double m, double k, double* latency_ms) noexcept nogil:
        cdef double[2] at, asked
        cdef Measurement found
        cdef double here, there
        asked[0], asked[1] = m, k
        at[0] = min(max(m, self.low_m), self.high_m)
        at[1] = min(max(k, self.low_k), self.high_k)
        if grid_query(&self.table.grid, at, scale_sol_at, &self.params, &found) != GRID_HIT:
            return OP_MISS
        latency_ms[0] = found.latency_ms
        if self.scale_beyond:
            here, there = scale_sol_at(&self.params, asked), scale_sol_at(&self.params, at)
            if here > 0.0 and there > 0.0:
                latency_ms[0] *= here / there
        return OP_OK


cdef class Gemm(Operator):
    """A matrix product (section 3.1).

    Parameters
    ----------
    site: the (n, k) of the product in its table, None when the dtype has no table.
    compute_scale, scale_matrix: quantisation kernels that an fp8_static product leaves out, or None.
    """

    cdef GemmSite site
    cdef ScaleTable compute_scale, scale_matrix
    cdef bint estimated, below_grid_sol
    cdef double n, k
    cdef double flops_per_s, bytes_per_element
    cdef int64_t scale_num_tokens, seq_split
    cdef readonly bint is_logits

    def __init__(
        self, name, scale_factor, hardware, GemmSite site, double n, double k, double flops_per_s,
        double bytes_per_element, int64_t scale_num_tokens, int64_t seq_split, bint below_grid_sol, bint estimated,
        ScaleTable compute_scale, ScaleTable scale_matrix,
    ):
        super().__init__(name, scale_factor, hardware)
        self.site = site
        self.n = n
        self.k = k
        self.flops_per_s = flops_per_s
        self.bytes_per_element = bytes_per_element
        self.scale_num_tokens = scale_num_tokens
        self.seq_split = seq_split
        self.below_grid_sol = below_grid_sol
        self.estimated = estimated
        self.compute_scale = compute_scale
        self.scale_matrix = scale_matrix
        self.is_logits = "logits_gemm" in name

    cdef double rows(self, const OpQuery* query) noexcept nogil:
        return <double>ceil_div(floor_div(query.tokens, self.scale_num_tokens), self.seq_split)

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """The product's place in its table."""
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        return [] if self.site is None else [(self.site, {"m": self.rows(&query), "n": self.n, "k": self.k})]

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef double m = self.rows(query), removed
        cdef Measurement found
        cdef OpSol sol
        if not self.flops_per_s > 0.0:
            return OP_NO_FLOPS
        if self.site is None or self.site.query(m, &found) != GRID_HIT:
            if self.site is None or not self.below_grid_sol:
                return OP_MISS
            self.sol(query, &sol)
            answer.latency_ms = sol.latency_ms
            answer.sources = FROM_SOL
            return OP_OK
        take(&found, answer)
        if not self.estimated:
            return OP_OK
        # Measured with on-the-fly quantisation; static scales leave these kernels out.
        answer.sources = FROM_ESTIMATE
        if self.compute_scale is None:
            return OP_MISS
        if self.compute_scale.query(m, self.k, &removed) != OP_OK:
            return OP_MISS
        answer.latency_ms -= removed
        if self.scale_matrix is not None:
            if self.scale_matrix.query(m, self.k, &removed) != OP_OK:
                return OP_MISS
            answer.latency_ms -= removed
        self.sol(query, &sol)
        answer.latency_ms = max(answer.latency_ms, sol.latency_ms)
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        cdef double m = self.rows(query)
        if not self.flops_per_s > 0.0:
            return OP_NO_FLOPS
        roofline(
            2.0 * m * self.n * self.k / self.flops_per_s * 1000.0,
            transfer_ms(&self.hardware, self.bytes_per_element * (m * self.n + m * self.k + self.n * self.k)),
            sol,
        )
        return OP_OK


cdef struct AttentionShape:
    double num_kv_heads          # 0: as many as query heads
    double head_size
    double window                # 0: none
    double kv_bytes_per_element
    double flops_per_s
    double mem_bw_bytes_per_s


cdef void context_attention_sol(
    const AttentionShape* shape, double n, double full, double b, OpSol* sol
) noexcept nogil:
    cdef double kv_heads = shape.num_kv_heads if shape.num_kv_heads > 0.0 else n
    cdef double ops, num_bytes
    if 0.0 < shape.window < full:
        ops = 2.0 * b * full * shape.window * n * shape.head_size * 2.0
    else:
        ops = 2.0 * b * full * full * n * shape.head_size * 2.0 / 2.0
    num_bytes = 2.0 * b * (2.0 * n * full * shape.head_size)
    num_bytes += shape.kv_bytes_per_element * b * 2.0 * kv_heads * full * shape.head_size
    roofline(ops / shape.flops_per_s * 1000.0, num_bytes / shape.mem_bw_bytes_per_s * 1000.0, sol)


cdef double context_attention_sol_at(const void* params, const double* coordinates) noexcept nogil:
    cdef OpSol sol
    context_attention_sol(
        <const AttentionShape*>params, coordinates[0], coordinates[1], coordinates[2], &sol
    )
    return sol.latency_ms


cdef void generation_attention_sol(
    const AttentionShape* shape, double n, double b, double position, OpSol* sol
) noexcept nogil:
    cdef double kv_heads = shape.num_kv_heads if shape.num_kv_heads > 0.0 else n
    cdef double kv_len = position - 1.0, ops, num_bytes
    if shape.window > 0.0:
        kv_len = min(kv_len, shape.window)
    ops = 4.0 * b * n * shape.head_size * kv_len
    num_bytes = b * (
        2.0 * n * shape.head_size
        + 2.0 * kv_heads * kv_len * shape.head_size * shape.kv_bytes_per_element
        + 2.0 * n * shape.head_size
    )
    roofline(ops / shape.flops_per_s * 1000.0, num_bytes / shape.mem_bw_bytes_per_s * 1000.0, sol)


cdef double generation_attention_sol_at(const void* params, const double* coordinates) noexcept nogil:
    cdef OpSol sol
    generation_attention_sol(
        <const AttentionShape*>params, coordinates[0], coordinates[1], coordinates[2], &sol
    )
    return sol.latency_ms


cdef double computed_share(double full, double prefix) noexcept nogil:
    # Part of the attention triangle that a prefix leaves to be computed.
    if full == 0.0:
        return 0.0
    return (full * full - prefix * prefix) / (full * full)


cdef class PrefillAttention(Operator):
    """Attention over new tokens and their prefix; the base of both kinds.

    Context-parallel ranks take one chunk from each end of the sequence, so that their work is even.
    """

    cdef GridTable table
    cdef double num_heads
    cdef int64_t cp_size
    # Speed of light of a whole sequence at coordinates of the table; the shape belongs to the subclass.
    cdef sol_function sequence_sol
    cdef const void* sequence_shape

    def __init__(self, name, scale_factor, hardware, GridTable table, double num_heads, int64_t cp_size):
        super().__init__(name, scale_factor, hardware)
        self.table = table
        self.num_heads = num_heads
        self.cp_size = cp_size

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """The sequence, or the two chunks of it that one rank computes."""
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        cdef int64_t length
        pieces = [(seq_len, prefix)]
        if self.cp_size > 1:
            length = self.chunk_length(&query)
            pieces = [(length, prefix), (length, prefix + seq_len - length)]
        return [] if self.table is None else [
            (self.table, {"num_heads": self.num_heads, "total_tokens": new + cached, "batch_size": batch})
            for new, cached in pieces
        ]

    def table_sol_ms(self, *coordinates):
        """Speed of light of whole sequences."""
        cdef double[3] at = coordinates
        return self.sequence_sol(self.sequence_shape, at)

    cdef void chunk_sol(self, int64_t b, int64_t s, int64_t prefix, OpSol* sol) noexcept nogil:
        roofline(0.0, 0.0, sol)

    cdef int chunk(self, int64_t b, int64_t s, int64_t prefix, OpAnswer* answer) noexcept nogil:
        cdef double[3] at
        cdef Measurement found
        cdef double full = <double>(s + prefix)
        at[0] = self.num_heads
        at[1] = full
        at[2] = <double>b
        if grid_query(&self.table.grid, at, self.sequence_sol, self.sequence_shape, &found) != GRID_HIT:
            return OP_MISS
        found.latency_ms *= computed_share(full, <double>prefix)
        answer.latency_ms += found.latency_ms
        answer.energy_wms += found.power_w * found.latency_ms
        return OP_OK

    cdef int chunks(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef int64_t length
        cdef int status
        if self.table is None:
            return OP_MISS
        answer.latency_ms = answer.energy_wms = 0.0
        answer.sources = FROM_SILICON
        if self.cp_size <= 1:
            return self.chunk(query.batch, query.seq_len, query.prefix, answer)
        length = self.chunk_length(query)
        status = self.chunk(query.batch, length, query.prefix, answer)
        if status == OP_OK:
            status = self.chunk(query.batch, length, query.prefix + query.seq_len - length, answer)
        return status

    cdef void chunks_sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        cdef int64_t length
        cdef OpSol last
        if self.cp_size <= 1:
            self.chunk_sol(query.batch, query.seq_len, query.prefix, sol)
            return
        length = self.chunk_length(query)
        self.chunk_sol(query.batch, length, query.prefix, sol)
        self.chunk_sol(query.batch, length, query.prefix + query.seq_len - length, &last)
        sol.latency_ms += last.latency_ms
        sol.math_ms += last.math_ms
        sol.memory_ms += last.memory_ms

    cdef int64_t chunk_length(self, const OpQuery* query) noexcept nogil:
        return max(ceil_div(query.seq_len, 2 * self.cp_size), 1)


cdef class ContextAttention(PrefillAttention):
    """Prefill attention (section 3.2). `table` is the slice of its lane and key, None when no lane has it.

    `extra_bytes` lists the byte counts of the small kernels around it, each with its multiplicity: they are priced for
    one token whatever the batch, as measured systems do.
    """

    cdef AttentionShape shape
    cdef double extra_ms, extra_sol_ms
    cdef bint has_extras

    def __init__(
        self, name, scale_factor, hardware, GridTable table, num_heads, tuple shape, int64_t cp_size, extra_bytes,
    ):
        super().__init__(name, scale_factor, hardware, table, num_heads, cp_size)
        self.shape = attention_shape(shape, self.hardware.mem_bw_bytes_per_s)
        self.sequence_sol = context_attention_sol_at
        self.sequence_shape = &self.shape
        for count, num_bytes in extra_bytes:
            self.extra_ms += count * memory_op_ms(&self.hardware, num_bytes)
            self.extra_sol_ms += count * transfer_ms(&self.hardware, num_bytes)
        self.has_extras = bool(extra_bytes)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef int status
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        status = self.chunks(query, answer)
        answer.latency_ms += self.extra_ms
        answer.sources = FROM_SILICON | (FROM_FORMULA if self.has_extras else 0)
        return status

    cdef void chunk_sol(self, int64_t b, int64_t s, int64_t prefix, OpSol* sol) noexcept nogil:
        cdef double full = <double>(s + prefix), batch = <double>b
        cdef double kv_heads, num_bytes, share
        # Only new tokens are read and written as queries; the cache is read whole.
        kv_heads = self.shape.num_kv_heads if self.shape.num_kv_heads > 0.0 else self.num_heads
        context_attention_sol(&self.shape, self.num_heads, full, batch, sol)
        num_bytes = 2.0 * batch * (2.0 * self.num_heads * <double>s * self.shape.head_size)
        num_bytes += self.shape.kv_bytes_per_element * batch * 2.0 * kv_heads * full * self.shape.head_size
        # A window bounds what each new token sees; without one, attention is the rest of the triangle.
        if 0.0 < self.shape.window < full:
            share = <double>s / full
        else:
            share = computed_share(full, <double>prefix)
        roofline(sol.math_ms * share, transfer_ms(&self.hardware, num_bytes), sol)

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        self.chunks_sol(query, sol)
        add_memory(self.extra_sol_ms, sol)
        return OP_OK


cdef AttentionShape attention_shape(tuple shape, double mem_bw_bytes_per_s) except *:
    cdef AttentionShape result
    (
        result.num_kv_heads, result.head_size, result.window, result.kv_bytes_per_element, result.flops_per_s
    ) = shape
    result.mem_bw_bytes_per_s = mem_bw_bytes_per_s
    return result


cdef enum:
    NUM_POSITIONS = 5            # that decode attention is averaged over


cdef class GenerationAttention(Operator):
    """Decode attention (section 3.3): the mean over five positions around the asked one."""

    cdef GridTable table
    cdef AttentionShape shape
    cdef double num_heads
    cdef int64_t scale_num_tokens, verify_query_tokens
    cdef double extra_ms, extra_sol_ms
    cdef bint has_extras

    def __init__(
        self, name, scale_factor, hardware, GridTable table, num_heads, tuple shape, int64_t scale_num_tokens,
        int64_t verify_query_tokens, extra_bytes,
    ):
        super().__init__(name, scale_factor, hardware)
        self.table = table
        self.num_heads = num_heads
        self.shape = attention_shape(shape, self.hardware.mem_bw_bytes_per_s)
        self.scale_num_tokens = scale_num_tokens
        self.verify_query_tokens = verify_query_tokens
        for count, num_bytes in extra_bytes:
            self.extra_ms += count * memory_op_ms(&self.hardware, num_bytes)
            self.extra_sol_ms += count * transfer_ms(&self.hardware, num_bytes)
        self.has_extras = bool(extra_bytes)

    cdef void positions(self, const OpQuery* query, double* positions) noexcept nogil:
        cdef double position = <double>query.seq_len
        cdef int64_t low = max(<int64_t>(0.9 * position), 1)
        cdef int64_t high = max(<int64_t>(1.1 * position), low)
        cdef int i
        for i in range(NUM_POSITIONS):
            positions[i] = <double>(low + (high - low) * i // (NUM_POSITIONS - 1))

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """One lookup for each of the positions that are averaged."""
        cdef double[NUM_POSITIONS] positions
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        self.positions(&query, positions)
        return [] if self.table is None else [
            (
                self.table,
                {"num_heads": self.num_heads, "batch_size": batch // self.scale_num_tokens, "position": position},
            )
            for position in positions
        ]

    def table_sol_ms(self, *coordinates):
        """Speed of light of one position."""
        cdef double[3] at = coordinates
        return generation_attention_sol_at(&self.shape, at)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef double[3] at
        cdef double[NUM_POSITIONS] positions
        cdef Measurement[NUM_POSITIONS] found
        cdef OpSol sol
        cdef double position = <double>query.seq_len, verified
        cdef int i
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        if self.scale_num_tokens != 1 and query.batch % self.scale_num_tokens != 0:
            return OP_UNEVEN_BATCH
        if self.table is None:
            return OP_MISS
        at[0] = self.num_heads
        at[1] = <double>floor_div(query.batch, self.scale_num_tokens)
        self.positions(query, positions)
        if grid_query_series(
            &self.table.grid, at, positions, NUM_POSITIONS, generation_attention_sol_at, &self.shape, found
        ) != GRID_HIT:
            return OP_MISS
        answer.latency_ms = answer.energy_wms = 0.0
        for i in range(NUM_POSITIONS):
            answer.latency_ms += found[i].latency_ms
            answer.energy_wms += found[i].power_w * found[i].latency_ms
        answer.latency_ms /= <double>NUM_POSITIONS
        answer.energy_wms /= <double>NUM_POSITIONS
        if self.verify_query_tokens > 1:
            generation_attention_sol(&self.shape, self.num_heads, at[1], position, &sol)
            verified = <double>self.verify_query_tokens * sol.math_ms
            answer.latency_ms = max(answer.latency_ms, verified)
        answer.latency_ms += self.extra_ms
        answer.sources = FROM_SILICON | (FROM_FORMULA if self.has_extras else 0)
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        if self.scale_num_tokens != 1 and query.batch % self.scale_num_tokens != 0:
            return OP_UNEVEN_BATCH
        generation_attention_sol(
            &self.shape, self.num_heads, <double>floor_div(query.batch, self.scale_num_tokens),
            <double>query.seq_len, sol,
        )
        add_memory(self.extra_sol_ms, sol)
        return OP_OK


cdef double proportional_sol_at(const void* params, const double* coordinates) noexcept nogil:
    # Collectives scale with their size beyond the measured range.
    return coordinates[0]


cdef class Collective(Operator):
    """One collective (section 3.4): a curve over elements, or nothing when the group has one member.

    Parameters
    ----------
    table: curve of the measured group size; None when it was not measured.
    elements_per_token: elements that one token contributes.
    beyond_factor: ratio of the real group to the measured one.
    sol_ms_per_element: speed-of-light time of one element.
    is_alone: the group has one member.
    is_library: a library moves the data through memory, which its speed of light counts.
    """

    cdef GridTable table
    cdef double elements_per_token, beyond_factor, sol_ms_per_element
    cdef int64_t seq_split
    cdef bint is_alone, is_library

    def __init__(
        self, name, scale_factor, hardware, GridTable table, double elements_per_token, int64_t seq_split,
        double beyond_factor, double sol_ms_per_element, bint is_alone, bint is_library=False,
    ):
        super().__init__(name, scale_factor, hardware)
        self.table = table
        self.elements_per_token = elements_per_token
        self.seq_split = seq_split
        self.beyond_factor = beyond_factor
        self.sol_ms_per_element = sol_ms_per_element
        self.is_alone = is_alone
        self.is_library = is_library

    cdef double elements(self, const OpQuery* query) noexcept nogil:
        return <double>ceil_div(query.tokens, self.seq_split) * self.elements_per_token

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """The message's place on the curve."""
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        if self.is_alone or self.table is None:
            return []
        return [(self.table, {"elements": self.elements(&query)})]

    def table_sol_ms(self, *coordinates):
        """Proportional to the elements."""
        cdef double[1] at = coordinates
        return proportional_sol_at(NULL, at)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef double size
        cdef Measurement found
        answer.latency_ms = answer.energy_wms = 0.0
        answer.sources = FROM_FORMULA
        if self.is_alone:
            return OP_OK
        if self.table is None:
            return OP_MISS
        size = self.elements(query)
        if grid_query(&self.table.grid, &size, proportional_sol_at, NULL, &found) != GRID_HIT:
            return OP_MISS
        found.latency_ms *= self.beyond_factor
        take(&found, answer)
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        roofline(0.0, 0.0, sol)
        if not self.is_alone:
            sol.latency_ms = self.elements(query) * self.sol_ms_per_element
        if self.is_library:
            sol.memory_ms = sol.latency_ms
        return OP_OK


cdef class PipelineTransfer(Operator):
    """Activations sent to the next pipeline stage; `scale_factor` counts the transfers."""

    cdef double bytes_per_token
    cdef int64_t pp_size, seq_split

    def __init__(self, name, scale_factor, hardware, int64_t pp_size, double hidden_size, int64_t seq_split):
        super().__init__(name, scale_factor, hardware)
        self.pp_size = pp_size
        self.bytes_per_token = hidden_size * 2.0
        self.seq_split = seq_split

    cdef double bytes_s(self, const OpQuery* query) noexcept nogil:
        cdef double num_bytes = <double>ceil_div(query.tokens, self.seq_split) * self.bytes_per_token
        return num_bytes / self.hardware.inter_node_bw_bytes_per_s

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        answer.latency_ms = answer.energy_wms = 0.0
        answer.sources = FROM_SILICON
        if self.pp_size > 1:
            answer.sources = FROM_FORMULA
            answer.latency_ms = (self.bytes_s(query) + self.hardware.p2p_latency_s) * 1000.0
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        roofline(0.0, self.bytes_s(query) * 1000.0 if self.pp_size > 1 else 0.0, sol)
        return OP_OK


cdef struct MoeShape:
    double topk, num_experts, hidden_size, inter_size, tp_size, ep_size
    double projections           # 3 when gated, else 2
    double flops_per_s, bytes_per_element, mem_bw_bytes_per_s


cdef void moe_sol(const MoeShape* shape, double tokens, OpSol* sol) noexcept nogil:
    # Whole tokens and elements, divided in this order.
    cdef double routed = tokens * shape.topk
    cdef double local_routed = floor(routed / shape.ep_size)
    cdef double weights = shape.hidden_size * shape.inter_size * shape.projections
    cdef double ops = floor(floor(routed * weights * 2.0 / shape.ep_size) / shape.tp_size)
    cdef double elements = local_routed * shape.hidden_size * 2.0
    elements += floor(local_routed * shape.inter_size * shape.projections / shape.tp_size)
    elements += floor(weights / shape.tp_size) * min(floor(shape.num_experts / shape.ep_size), local_routed)
    roofline(
        ops / shape.flops_per_s * 1000.0,
        elements * shape.bytes_per_element / shape.mem_bw_bytes_per_s * 1000.0,
        sol,
    )


cdef double moe_sol_at(const void* params, const double* coordinates) noexcept nogil:
    cdef OpSol sol
    moe_sol(<const MoeShape*>params, coordinates[0], &sol)
    return sol.latency_ms


cdef class Moe(Operator):
    """The experts of a mixture-of-experts layer (section 3.5).

    Parameters
    ----------
    table: curve over tokens of the shape and distribution, None when it was not measured.
    low_latency_table: curve that serves up to `low_latency_tokens`, or None.
    shape: fields of `MoeShape` but the memory bandwidth.
    attention_dp_size: ranks whose tokens meet in the experts.
    """

    cdef GridTable table, low_latency_table
    cdef int64_t low_latency_tokens, attention_dp_size
    cdef MoeShape shape

    def __init__(
        self, name, scale_factor, hardware, GridTable table, GridTable low_latency_table, int64_t low_latency_tokens,
        dict shape, int64_t attention_dp_size,
    ):
        super().__init__(name, scale_factor, hardware)
        self.table = table
        self.low_latency_table = low_latency_table
        self.low_latency_tokens = low_latency_tokens
        self.shape = shape | {"mem_bw_bytes_per_s": self.hardware.mem_bw_bytes_per_s}
        self.attention_dp_size = attention_dp_size

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """The batch's place on the curve that serves it."""
        cdef int64_t whole = tokens * self.attention_dp_size
        cdef Measurement found
        table = self.table
        if self.low_latency_table is not None and whole <= self.low_latency_tokens:
            if moe_curve(&self.low_latency_table.grid, <double>whole, &self.shape, &found) == GRID_HIT:
                table = self.low_latency_table
        return [] if table is None else [(table, {"tokens": whole})]

    def table_sol_ms(self, *coordinates):
        """Speed of light of a number of tokens."""
        cdef double[1] at = coordinates
        return moe_sol_at(&self.shape, at)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef int64_t whole = query.tokens * self.attention_dp_size
        cdef double tokens = <double>whole
        cdef Measurement found
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        if self.low_latency_table is not None and whole <= self.low_latency_tokens:
            if moe_curve(&self.low_latency_table.grid, tokens, &self.shape, &found) == GRID_HIT:
                take(&found, answer)
                return OP_OK
        if self.table is None or moe_curve(&self.table.grid, tokens, &self.shape, &found) != GRID_HIT:
            return OP_MISS
        take(&found, answer)
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        moe_sol(&self.shape, <double>(query.tokens * self.attention_dp_size), sol)
        return OP_OK


cdef int moe_curve(const Grid* grid, double tokens, const MoeShape* shape, Measurement* found) noexcept nogil:
    if grid.num_nodes[0] == 1 and tokens < grid.keys[0][0]:
        return OP_MISS  # one point says nothing of smaller batches
    return grid_query(grid, &tokens, moe_sol_at, shape, found)


cdef struct MlaShape:
    double kv_bytes_per_element
    double flops_per_s
    double mem_bw_bytes_per_s
    # The projections that a module measures together with attention; 0 for attention alone.
    double gemm_flops_per_s
    double gemm_bytes_per_element


cdef void context_mla_sol(
    const MlaShape* shape, double n, double full, double prefix, double b, OpSol* sol
) noexcept nogil:
    cdef double ops = b * n * 320.0 * (full * full - prefix * prefix)
    cdef double num_bytes = b * n * (shape.kv_bytes_per_element * full * 320.0 + 2.0 * (full - prefix) * 320.0)
    roofline(ops / shape.flops_per_s * 1000.0, num_bytes / shape.mem_bw_bytes_per_s * 1000.0, sol)


cdef double context_mla_sol_at(const void* params, const double* coordinates) noexcept nogil:
    cdef OpSol sol
    context_mla_sol(<const MlaShape*>params, coordinates[0], coordinates[1], 0.0, coordinates[2], &sol)
    return sol.latency_ms


cdef void generation_mla_sol(const MlaShape* shape, double n, double b, double position, OpSol* sol) noexcept nogil:
    cdef double math_ms = 2.0 * b * n * 1088.0 * position / shape.flops_per_s * 1000.0
    cdef double memory_ms = (
        b * (2.0 * 1088.0 * n + (position - 1.0) * 576.0 * shape.kv_bytes_per_element)
        / shape.mem_bw_bytes_per_s * 1000.0
    )
    if shape.gemm_flops_per_s > 0.0:
        math_ms += 4.0 * b * n * 65536.0 / shape.gemm_flops_per_s * 1000.0
        memory_ms += (
            2.0 * n * (640.0 * b + 65536.0) * shape.gemm_bytes_per_element / shape.mem_bw_bytes_per_s * 1000.0
        )
    roofline(math_ms, memory_ms, sol)


cdef double generation_mla_sol_at(const void* params, const double* coordinates) noexcept nogil:
    cdef OpSol sol
    generation_mla_sol(<const MlaShape*>params, coordinates[0], coordinates[1], coordinates[2], &sol)
    return sol.latency_ms


cdef MlaShape mla_shape(tuple shape, double mem_bw_bytes_per_s) except *:
    cdef MlaShape result
    (
        result.kv_bytes_per_element, result.flops_per_s, result.gemm_flops_per_s, result.gemm_bytes_per_element
    ) = shape
    result.mem_bw_bytes_per_s = mem_bw_bytes_per_s
    return result


cdef class ContextMla(PrefillAttention):
    """Multi-head latent attention in prefill, alone or as a measured module (section 3.7)."""

    cdef MlaShape shape

    def __init__(self, name, scale_factor, hardware, GridTable table, num_heads, tuple shape, int64_t cp_size):
        super().__init__(name, scale_factor, hardware, table, num_heads, cp_size)
        self.shape = mla_shape(shape, self.hardware.mem_bw_bytes_per_s)
        self.sequence_sol = context_mla_sol_at
        self.sequence_shape = &self.shape

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        return self.chunks(query, answer)

    cdef void chunk_sol(self, int64_t b, int64_t s, int64_t prefix, OpSol* sol) noexcept nogil:
        context_mla_sol(&self.shape, self.num_heads, <double>(s + prefix), <double>prefix, <double>b, sol)

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        self.chunks_sol(query, sol)
        return OP_OK


cdef class GenerationMla(Operator):
    """Multi-head latent attention in decode, alone or as a measured module (section 3.7)."""

    cdef GridTable table
    cdef MlaShape shape
    cdef double num_heads

    def __init__(self, name, scale_factor, hardware, GridTable table, num_heads, tuple shape):
        super().__init__(name, scale_factor, hardware)
        self.table = table
        self.num_heads = num_heads
        self.shape = mla_shape(shape, self.hardware.mem_bw_bytes_per_s)

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """The step's place in the table."""
        return [] if self.table is None else [
            (self.table, {"num_heads": self.num_heads, "batch_size": batch, "position": seq_len})
        ]

    def table_sol_ms(self, *coordinates):
        """Speed of light of one position."""
        cdef double[3] at = coordinates
        return generation_mla_sol_at(&self.shape, at)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef double[3] at
        cdef Measurement found
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        if self.table is None:
            return OP_MISS
        at[0] = self.num_heads
        at[1] = <double>query.batch
        at[2] = <double>query.seq_len
        if grid_query(&self.table.grid, at, generation_mla_sol_at, &self.shape, &found) != GRID_HIT:
            return OP_MISS
        take(&found, answer)
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        generation_mla_sol(&self.shape, self.num_heads, <double>query.batch, <double>query.seq_len, sol)
        return OP_OK


cdef struct BmmShape:
    double num_heads, flops_per_s, bytes_per_element, mem_bw_bytes_per_s


cdef void bmm_sol(const BmmShape* shape, double tokens, OpSol* sol) noexcept nogil:
    roofline(
        2.0 * tokens * shape.num_heads * 65536.0 / shape.flops_per_s * 1000.0,
        shape.num_heads * (640.0 * tokens + 65536.0) * shape.bytes_per_element / shape.mem_bw_bytes_per_s * 1000.0,
        sol,
    )


cdef double bmm_sol_at(const void* params, const double* coordinates) noexcept nogil:
    cdef OpSol sol
    bmm_sol(<const BmmShape*>params, coordinates[0], &sol)
    return sol.latency_ms


cdef class MlaBmm(Operator):
    """Batched products around latent attention in decode; `head_factor` scales from the heads that were measured."""

    cdef GridTable table
    cdef BmmShape shape
    cdef double head_factor

    def __init__(
        self, name, scale_factor, hardware, GridTable table, double num_heads, double flops_per_s,
        double bytes_per_element, double head_factor,
    ):
        super().__init__(name, scale_factor, hardware)
        self.table = table
        self.shape = BmmShape(num_heads, flops_per_s, bytes_per_element, self.hardware.mem_bw_bytes_per_s)
        self.head_factor = head_factor

    def lookups(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """The batch's place on the curve."""
        return [] if self.table is None else [(self.table, {"tokens": batch})]

    def table_sol_ms(self, *coordinates):
        """Speed of light of a number of tokens."""
        cdef double[1] at = coordinates
        return bmm_sol_at(&self.shape, at)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef double tokens = <double>query.batch
        cdef Measurement found
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        if self.table is None:
            return OP_MISS
        if grid_query(&self.table.grid, &tokens, bmm_sol_at, &self.shape, &found) != GRID_HIT:
            return OP_MISS
        found.latency_ms *= self.head_factor
        take(&found, answer)
        return OP_OK

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        if not self.shape.flops_per_s > 0.0:
            return OP_NO_FLOPS
        bmm_sol(&self.shape, <double>query.batch, sol)
        return OP_OK


cdef class OpList:
    """Operators in graph order, summed."""

    def __init__(self, operators):
        cdef Py_ssize_t i
        self.operators = tuple(operators)
        self.size = len(self.operators)
        self.pointers = <void**>malloc((self.size + 1) * sizeof(void*))
        if self.pointers == NULL:
            raise MemoryError
        for i in range(self.size):
            self.pointers[i] = <void*>(<Operator?>self.operators[i])

    def __dealloc__(self):
        free(self.pointers)

    cdef int sum_prices(self, const OpQuery* query, OpAnswer* total) noexcept nogil:
        cdef Py_ssize_t i
        cdef int status
        cdef OpAnswer answer
        total.latency_ms = total.energy_wms = 0.0
        total.sources = 0
        for i in range(self.size):
            status = (<Operator>self.pointers[i]).price(query, False, &answer)
            if status != OP_OK:
                return status
            total.latency_ms += answer.latency_ms
            total.energy_wms += answer.energy_wms
            if answer.latency_ms != 0.0:  # what takes no time does not colour the source
                total.sources |= answer.sources
        return OP_OK

    cdef int sum_sols(self, const OpQuery* query, OpSol* total) noexcept nogil:
        cdef Py_ssize_t i
        cdef int status
        cdef OpSol part
        roofline(0.0, 0.0, total)
        for i in range(self.size):
            status = (<Operator>self.pointers[i]).sol(query, &part)
            if status != OP_OK:
                return status
            total.latency_ms += part.latency_ms * (<Operator>self.pointers[i]).scale_factor
            total.math_ms += part.math_ms * (<Operator>self.pointers[i]).scale_factor
            total.memory_ms += part.memory_ms * (<Operator>self.pointers[i]).scale_factor
        return OP_OK


cdef object first_missing(tuple operators, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens, bint at_sol):
    for operator in operators:
        found = operator.missing(batch, seq_len, prefix, tokens, at_sol)
        if found is not None:
            return found
    return None


cdef class Sum(Operator):
    """Operators that run one after the other under one name, such as the collectives of an expert dispatch."""

    cdef OpList members

    def __init__(self, name, scale_factor, hardware, parts):
        super().__init__(name, scale_factor, hardware)
        self.members = OpList(parts)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef int status = self.members.sum_prices(query, answer)
        answer.sources = FROM_SILICON
        return status

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        return self.members.sum_sols(query, sol)

    def parts(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """All of them."""
        return [(part, False) for part in self.members.operators]

    def missing(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens, bint at_sol=False):
        """The first part that cannot answer."""
        return first_missing(self.members.operators, batch, seq_len, prefix, tokens, at_sol)


cdef class Overlap(Operator):
    """Two groups that run at the same time."""

    cdef OpList first, second

    def __init__(self, name, scale_factor, hardware, first, second):
        super().__init__(name, scale_factor, hardware)
        self.first = OpList(first)
        self.second = OpList(second)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef OpAnswer other
        cdef int status = self.first.sum_prices(query, answer)
        if status != OP_OK:
            return status
        status = self.second.sum_prices(query, &other)
        answer.latency_ms = max(answer.latency_ms, other.latency_ms)
        answer.energy_wms += other.energy_wms
        answer.sources |= other.sources
        return status

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        cdef OpSol other
        cdef int status = self.first.sum_sols(query, sol)
        if status != OP_OK:
            return status
        status = self.second.sum_sols(query, &other)
        if other.latency_ms > sol.latency_ms:
            sol[0] = other
        return status

    def parts(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """Both groups; the shorter one hides behind the other."""
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        cdef OpAnswer first, second
        self.first.sum_prices(&query, &first)
        self.second.sum_prices(&query, &second)
        is_first_longer = first.latency_ms >= second.latency_ms
        return [
            *((part, not is_first_longer) for part in self.first.operators),
            *((part, is_first_longer) for part in self.second.operators),
        ]

    def missing(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens, bint at_sol=False):
        """The first operator of either group that cannot answer."""
        operators = self.first.operators + self.second.operators
        return first_missing(operators, batch, seq_len, prefix, tokens, at_sol)


cdef class Fallback(Operator):
    """A measured module, or the sum of its parts where the module was not measured."""

    cdef OpList primary, stand_ins

    def __init__(self, name, scale_factor, hardware, primary, parts):
        super().__init__(name, scale_factor, hardware)
        self.primary = OpList((primary,))
        self.stand_ins = OpList(parts)

    cdef int measure(self, const OpQuery* query, OpAnswer* answer) noexcept nogil:
        cdef int status = self.primary.sum_prices(query, answer)
        if status == OP_MISS:
            status = self.stand_ins.sum_prices(query, answer)
        return status

    cdef int sol(self, const OpQuery* query, OpSol* sol) noexcept nogil:
        return self.primary.sum_sols(query, sol)

    def parts(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens):
        """The module, or what stands in for it."""
        cdef OpQuery query = OpQuery(batch, seq_len, prefix, tokens)
        cdef OpAnswer answer
        measured = self.primary.sum_prices(&query, &answer) == OP_OK
        return [(part, False) for part in (self.primary if measured else self.stand_ins).operators]

    def missing(self, int64_t batch, int64_t seq_len, int64_t prefix, int64_t tokens, bint at_sol=False):
        """The module when something but its data is missing, else the first part that cannot answer."""
        found = first_missing(self.primary.operators, batch, seq_len, prefix, tokens, at_sol)
        if found is None or found[1] != OP_MISS or at_sol:
            return found
        return first_missing(self.stand_ins.operators, batch, seq_len, prefix, tokens, at_sol)


def generation_attention_floor(axes, tuple shape, double mem_bw_bytes_per_s):
    """Speed-of-light latency in ms of every row of a decode attention slice: no measurement can be faster.

    Parameters
    ----------
    axes: arrays of heads, batch and position per row.
    shape: KV heads (0: as many as heads), head size, window, KV bytes per element, FLOPS.
    """
    cdef AttentionShape attention = attention_shape(shape, mem_bw_bytes_per_s)
    cdef cnp.ndarray heads = np.ascontiguousarray(axes[0], np.float64)
    cdef cnp.ndarray batch = np.ascontiguousarray(axes[1], np.float64)
    cdef cnp.ndarray position = np.ascontiguousarray(axes[2], np.float64)
    cdef cnp.ndarray floors = np.empty(len(heads))
    cdef const double* n = <const double*>cnp.PyArray_DATA(heads)
    cdef const double* b = <const double*>cnp.PyArray_DATA(batch)
    cdef const double* at = <const double*>cnp.PyArray_DATA(position)
    cdef double* floor_ms = <double*>cnp.PyArray_DATA(floors)
    cdef OpSol sol
    cdef Py_ssize_t i
    for i in range(len(heads)):
        generation_attention_sol(&attention, n[i], b[i], at[i], &sol)
        floor_ms[i] = sol.latency_ms
    return floors
